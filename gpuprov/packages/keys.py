"""Repository keys: fingerprints of OpenPGP public keys, so that each is known before anything trusts it; installation.

RFC 9580 (and RFC 4880, whose keys it keeps): armor section 6, packet headers 4.2, version 4 fingerprints 5.5.4.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Callable, ClassVar

from gpuprov.core.changes import Change, Json, PathChange, Tell, capture_path, parent_of, restore_path
from gpuprov.core.download import fetch_small, proxy_evidence
from gpuprov.core.places import FOLDER, KEYS
from gpuprov.core.system import System
from gpuprov.protocol.dataclass import astuple, dataclass
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.secrets import masked
from gpuprov.protocol.words import counted

_PUBLIC_KEY, _PUBLIC_SUBKEY, _SECRET_KEY, _SECRET_SUBKEY = 6, 14, 5, 7
# Below FOLDER: a bundle's own key, and where a key lies while rpm imports it.
BUNDLE_KEY = f"{FOLDER}/key.asc"
RPM_KEYS = "/etc/pki/rpm-gpg"
_TAKEN = f"{FOLDER}/trusted"
_KEY_QUERY = "%{NAME}-%{VERSION}-%{RELEASE}\\n%{DESCRIPTION}\\n"
_ARMOR = re.compile(
    r"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(?:[^\r\n:]+:[^\r\n]*\r?\n)*[ \t]*\r?\n(?P<body>[A-Za-z0-9+/=\s]+?)"
    r"(?:\r?\n=[A-Za-z0-9+/]{4})?\r?\n-----END PGP PUBLIC KEY BLOCK-----"
)


def dearmored(key: bytes) -> bytes:
    """Return a key's packets, whether it comes armored (several blocks too) or not. Raises GpuprovError for no key."""
    if re.match(rb"\s*<(!doctype|html|\?xml)", key, re.IGNORECASE):
        seen = key.strip()[:80].decode("utf-8", "replace")
        raise GpuprovError("this is a web page, not a key", seen, "check the URL")
    if not key.lstrip().startswith(b"-----BEGIN"):
        return key
    blocks = [match["body"] for match in _ARMOR.finditer(key.decode("ascii", "replace"))]
    if not blocks:
        seen = key.strip()[:40].decode("utf-8", "replace")
        raise GpuprovError("this is no armored public key", seen, "check the URL")
    try:
        return b"".join(base64.b64decode("".join(block.split()), validate=True) for block in blocks)
    except binascii.Error as error:
        raise GpuprovError("this armored key is damaged", str(error), "get it again") from None


def armored(key: bytes) -> bytes:
    """Return a key in one armored block, which is the form that rpm imports (with its checksum: old ones want it)."""
    packets = dearmored(key)
    lines = re.findall(".{1,64}", base64.b64encode(packets).decode("ascii"))
    checksum = base64.b64encode(_crc24(packets).to_bytes(3, "big")).decode("ascii")
    head, tail = (f"-----{word} PGP PUBLIC KEY BLOCK-----" for word in ("BEGIN", "END"))
    return "".join(f"{line}\n" for line in (head, "", *lines, f"={checksum}", tail)).encode("ascii")


def _crc24(data: bytes) -> int:
    """RFC 4880, 6.1."""
    crc = 0xB704CE
    for byte in data:
        crc ^= byte << 16
        for _ in range(8):
            crc = (crc << 1) ^ 0x1864CFB if crc & 0x800000 else crc << 1
    return crc & 0xFFFFFF


def fingerprints(key: bytes) -> tuple[str, ...]:
    """Return the fingerprints (hexadecimal, capitals) of all primary keys in a key file.

    All of them: a file that holds a second key would make a package manager trust that one too. Raises GpuprovError
    for secret keys, damaged packets, key versions other than 4, or no key at all.
    """
    found = []
    for tag, body, _ in _packets(dearmored(key)):
        if tag in (_SECRET_KEY, _SECRET_SUBKEY):
            raise GpuprovError("this is a secret key; a repository needs the public one", "", "export the public key")
        if tag == _PUBLIC_KEY:
            found.append(_fingerprint(body))
    if not found:
        raise GpuprovError("there is no public key in this file", counted(len(key), "byte"), "check the URL")
    return tuple(found)


def without_key(keyring: bytes, fingerprint: str) -> bytes:
    """Return the packets of a keyring without one primary key and all that belongs to it. Raises GpuprovError."""
    kept, is_gone = b"", False
    for tag, body, packet in _packets(dearmored(keyring)):
        if tag == _PUBLIC_KEY:
            is_gone = _fingerprint(body) == fingerprint
        kept += b"" if is_gone else packet
    return armored(kept) if keyring.lstrip().startswith(b"-----BEGIN") else kept


def key_ids(key: bytes) -> frozenset[str]:
    """Return the ids (16 hexadecimal digits, small) of a key and its subkeys, by which signatures name their maker."""
    keys = (body for tag, body, _ in _packets(dearmored(key)) if tag in (_PUBLIC_KEY, _PUBLIC_SUBKEY))
    return frozenset(_fingerprint(body)[-16:].lower() for body in keys)


def _fingerprint(body: bytes) -> str:
    if body[:1] != b"\x04":
        version = body[0] if body else 0
        what = f"keys of version {version} are not supported"
        raise GpuprovError(what, "", "get the version 4 key of this repository")
    if len(body) > 0xFFFF:
        raise GpuprovError("this key is too long to be one", counted(len(body), "byte"), "check the URL")
    return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()


def _packets(data: bytes) -> list[tuple[int, bytes, bytes]]:
    """Return (tag, body, packet) of each packet. Raises GpuprovError if the data is not made of whole packets."""
    packets = []
    place = 0
    while place < len(data):
        try:
            tag, start, length = _header(data, place)
            end = start + length
            if end > len(data):
                raise ValueError("cut off")
        except (LookupError, ValueError):
            what = "this is no OpenPGP key, or a damaged one"
            raise GpuprovError(what, f"at byte {place}", "check the URL") from None
        packets.append((tag, data[start:end], data[place:end]))
        place = end
    return packets


def _header(data: bytes, place: int) -> tuple[int, int, int]:
    """Return a packet's tag, where its body starts, and how long that is. Raises LookupError, ValueError for none."""
    first = data[place]
    if not first & 0x80:
        raise ValueError("no packet")
    if not first & 0x40:
        # Legacy format: the low two bits tell how many octets the length has; 3, indeterminate, is not for keys.
        octets = (1, 2, 4)[first & 3]
        length = int.from_bytes(data[place + 1 : place + 1 + octets], "big")
        return (first >> 2) & 0x0F, place + 1 + octets, length
    second = data[place + 1]
    if second < 192:
        return first & 0x3F, place + 2, second
    if second < 224:
        return first & 0x3F, place + 3, ((second - 192) << 8) + data[place + 2] + 192
    if second == 255:
        return first & 0x3F, place + 6, int.from_bytes(data[place + 2 : place + 6], "big")
    raise ValueError("partial lengths are for data packets, never for keys")


@dataclass(frozen=True)
class InstallKey(PathChange):
    """Install the key at a URL, if it is the pinned one and nothing else."""

    url: str
    fingerprint: str

    # The form in which the key is written.
    form = staticmethod(dearmored)

    def summary(self) -> str:
        return f"install key {self.fingerprint} to {self.path}"

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,)

    def apply(self, system: System, tell: Tell) -> None:
        key = fetch_pinned_key(system, self.url, self.fingerprint)
        system.make_directory(parent_of(self.path))
        system.write(self.path, self.form(key))


@dataclass(frozen=True)
class InstallRpmKey(InstallKey):
    """Make rpm trust the key at a URL, if it is the pinned one and nothing else."""

    uses_package_manager: ClassVar[bool] = True
    bundle_part: ClassVar[str] = "packages"
    form = staticmethod(armored)

    def summary(self) -> str:
        return f"{super().summary()}, trusted by rpm"

    def capture(self, system: System) -> Json:
        image = capture_path(system, self.path)
        return {"file": image, "fingerprint": self.fingerprint, "trusted": self.fingerprint in gather_keys(system)}

    def apply(self, system: System, tell: Tell) -> None:
        super().apply(system, tell)
        system.require(("rpm", "--import", self.path), f"rpm can't import the key {self.fingerprint}")
        if self.fingerprint not in gather_keys(system):
            what = f"rpm took the key {self.fingerprint}, but does not list it"
            raise GpuprovError(what, "rpm -q gpg-pubkey", "rpm -qi gpg-pubkey")

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if not before["trusted"]:
            _distrust(system, before["fingerprint"])
        restore_path(system, before["file"])


@dataclass(frozen=True)
class RemoveRpmKey(Change):
    """Make rpm stop trusting this key."""

    fingerprint: str

    uses_package_manager: ClassVar[bool] = True

    def summary(self) -> str:
        return f"remove key {self.fingerprint} of NVIDIA's retired repositories from rpm's keys"

    def capture(self, system: System) -> Json:
        package = gather_keys(system).get(self.fingerprint)
        if package is None:
            return {"fingerprint": self.fingerprint, "key": ""}
        words = ("rpm", "--query", "--queryformat", "%{DESCRIPTION}", package)
        text = system.require(words, "rpm does not show a key that it has").stdout
        return {"fingerprint": self.fingerprint, "key": base64.b64encode(text.encode()).decode("ascii")}

    def apply(self, system: System, tell: Tell) -> None:
        _distrust(system, self.fingerprint)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if not before["key"] or before["fingerprint"] in gather_keys(system):
            return
        what = f"rpm can't import the key {before['fingerprint']} again"
        with system.temporary_directory("/var/tmp") as work:
            system.write(f"{work}/key", base64.b64decode(before["key"]))
            system.require(("rpm", "--import", f"{work}/key"), what, "rpm -qa gpg-pubkey")


def _distrust(system: System, fingerprint: str) -> None:
    if package := gather_keys(system).get(fingerprint):
        system.require(("rpm", "--erase", package), f"rpm can't remove the key {fingerprint}")


def gather_keys(system: System) -> Mapping[str, str]:
    """Return the keys that rpm trusts: fingerprint → the name of the package that rpm keeps each as.

    Raises GpuprovError if rpm can't list them: an undo would remove those that it left out.
    """
    done = system.run(("rpm", "-q", "gpg-pubkey", "--queryformat", _KEY_QUERY))
    if not done.ok and "not installed" not in done.stdout:
        raise GpuprovError("rpm does not tell which keys it trusts", done.evidence(4), "rpm -qa gpg-pubkey")
    return parse_keys(done.stdout)


def parse_keys(text: str) -> Mapping[str, str]:
    """Return fingerprint → package name. The names alone tell a key's last eight digits, which anybody can make."""
    found = {}
    for name, key in re.findall(r"(?ms)^(gpg-pubkey-\S+)\n(-----BEGIN PGP.*?-----END [^\n]*\n)", text):
        # A key of an unknown kind is not a pinned key: skip it.
        with contextlib.suppress(GpuprovError):
            found.update(dict.fromkeys(fingerprints(key.encode()), name))
    return found


def fetch_pinned_key(system: System, url: str, fingerprint: str) -> bytes:
    """Return the key at a URL. Raises GpuprovError if it is another one, or not the only one there."""
    key = fetch_small(system, url)
    try:
        found = fingerprints(key)
    except GpuprovError as error:
        what, seen, step = astuple(error.problems[0])
        raise GpuprovError(what, f"{masked(url)}{proxy_evidence(system, url)}\n{seen}", step) from None
    if found != (fingerprint,):
        seen = f"{masked(url)} holds {', '.join(found)}; pinned is {fingerprint}"
        step = "if the repository announced a new key, set its fingerprint; else somebody put another key there"
        raise GpuprovError("the repository's key is not the one that is pinned", seen, step)
    return key


def place_keys(
    system: System, folder: str, keys: Collection[InstallKey], convert: Callable[[bytes], bytes]
) -> Mapping[str, str]:
    """Write keys that are yet to be installed to `folder`, converted; return the path each will have → where it is.

    Raises GpuprovError if one is not the pinned key.
    """
    places = {key.path: f"{folder}/{key.path.rpartition('/')[2]}" for key in keys}
    for key in keys:
        system.write(places[key.path], convert(fetch_pinned_key(system, key.url, key.fingerprint)))
    return places


def with_placed_keys(source: bytes, places: Mapping[str, str]) -> bytes:
    """Return a source that names its keys where `place_keys` wrote them."""
    for path, place in places.items():
        source = source.replace(path.encode(), place.encode())
    return source


def plan_bundle_keys(vendor_keys: Iterable[str], trusted: frozenset[str]) -> tuple[Change, ...]:
    """Return the change that makes rpm trust the vendor keys of the bundle's packages."""
    new = (one for one in vendor_keys if one not in trusted)
    return tuple(InstallRpmKey(f"{_TAKEN}/{one}.asc", f"file://{FOLDER}/{KEYS}/{one}.asc", one) for one in new)


def forget_bundle(system: System) -> None:
    """Remove a bundle's key from rpm again, if present, including the key of a killed run."""
    key = system.read_bytes(BUNDLE_KEY)
    package = gather_keys(system).get(fingerprints(key)[0]) if key else None
    if package is not None:
        system.run(("rpm", "-e", package))
