"""Check server keys against OpenSSH's known_hosts files (sshd(8)), and handle unknown ones.

By default Fabric and paramiko accept every unknown key, and paramiko ignores patterns and markers in known_hosts. Here
an unknown key is refused unless the user allows it, and a changed one always.
"""

import base64
import collections
import contextlib
import fnmatch
import functools
import hashlib
import hmac
import os
import re
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuprov.core.files import expanded, make_user_folder
from gpuprov.fleet.host_certificates import certificate_fault, signature_by
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import ExitCode, GpuprovError

SYSTEM_FILES = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
USER_FILES = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
ACCEPT_OPTION = "--accept-new-host-keys"
_MARKERS = ("@revoked", "@cert-authority")
_WRITING = threading.Lock()


@dataclass(frozen=True)
class KnownKey:
    """One key that a known_hosts file holds for a host. A revoked one must never be accepted.

    One of an authority is no host's: it signs hosts' certificates.
    """

    key_type: str
    key: bytes
    place: str
    revoked: bool = False
    authority: bool = False


def known_hosts_name(host: str, port: int) -> str:
    """Return the name under which known_hosts keeps a server: `host`, or `[host]:port` off port 22."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


# Keys by name, so that a thousand hosts need not search a thousand lines each; those with patterns or hashed names.
_File = tuple[Mapping[str, list[KnownKey]], list[tuple[str, KnownKey]]]


@functools.lru_cache(maxsize=16)
def _read(path: Path, name: str, _changed: int, _size: int) -> _File:
    """Return a file with the given modification time and size, which serve to detect a change; `name`: for places.

    Invalid lines are skipped.
    """
    by_name: dict[str, list[KnownKey]] = collections.defaultdict(list)
    others: list[tuple[str, KnownKey]] = []
    # As for ssh(1), nothing else ends a line or a word: a comment, which may be a host's, must not become a line.
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").split("\n"), 1):
        words = re.split("[ \t]+", line.strip(" \t\r"))
        marker = words.pop(0) if words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or marker not in ("", *_MARKERS):
            continue
        try:
            kinds = (marker == one for one in _MARKERS)
            key = KnownKey(words[1], base64.b64decode(words[2], validate=True), f"{name}:{number}", *kinds)
        except ValueError:
            continue
        if words[0].startswith("|") or set(words[0]) & set("*?!"):
            others.append((words[0], key))
            continue
        for one in set(words[0].lower().split(",")):
            by_name[one].append(key)
    return by_name, others


# One connection asks several times, and each hashed line costs a digest: ten thousand of them 50 ms.
@functools.lru_cache(maxsize=8192)
def _listed(path: Path, name: str, changed: int, size: int, host: str) -> tuple[KnownKey, ...]:
    by_name, others = _read(path, name, changed, size)
    found = (*by_name.get(host.lower(), ()), *(key for patterns, key in others if _names(patterns, host)))
    return tuple(sorted(found, key=lambda key: int(key.place.rpartition(":")[2])))


def _names(patterns: str, name: str) -> bool:
    """Say whether the first field of a known_hosts line matches this name."""
    if patterns.startswith("|1|"):
        salt, _, digest = patterns[3:].partition("|")
        try:
            made = hmac.digest(base64.b64decode(salt), name.encode(), "sha1")
            return hmac.compare_digest(made, base64.b64decode(digest))
        except ValueError:
            return False
    # In OpenSSH's patterns a bracket is literal (`[host]:port`), in fnmatch it begins a class. Case never counts.
    name, parts = name.lower(), patterns.lower().replace("[", "[[]").split(",")
    if any(part.startswith("!") and fnmatch.fnmatchcase(name, part[1:]) for part in parts):
        return False
    return any(fnmatch.fnmatchcase(name, part) for part in parts)


def fingerprint(key: bytes) -> str:
    """Return the fingerprint as ssh-keygen -l shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


@dataclass(frozen=True)
class KnownHosts:
    """The known_hosts files for one connection. New keys go into the first of `user_files`."""

    user_files: tuple[str, ...] = USER_FILES
    system_files: tuple[str, ...] = SYSTEM_FILES

    def keys(self, name: str, *, authorities: bool = False) -> tuple[KnownKey, ...]:
        """Return every key known for `name`, or those of its authorities, in the order of files and lines."""
        found: list[KnownKey] = []
        for path in (*self.user_files, *self.system_files):
            place = expanded(path)
            with contextlib.suppress(OSError):
                status = place.stat()
                found += _listed(place, path, status.st_mtime_ns, status.st_size, name)
        return tuple(key for key in found if key.authority == authorities)

    def store(self, name: str, key_type: str, key: bytes) -> None:
        """Append a key to the user's file. Raises OSError."""
        path = expanded(self.user_files[0])
        line = f"{name} {key_type} {base64.b64encode(key).decode()}\n".encode()
        with _WRITING:
            make_user_folder(path.parent)
            handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(handle, "r+b") as file:
                content = file.read() if path.is_file() else b""
                file.write(line if not content or content.endswith(b"\n") else b"\n" + line)


def revoked_by(path: str, key: bytes, certificate: bytes) -> tuple[KnownKey, ...]:
    """Return what a file of RevokedHostKeys, a list of keys or a KRL, has against a server's key and certificate.

    Raises GpuprovError (exit code 4) if it can't be read: then ssh(1) trusts no host, either.
    """
    place = expanded(path)
    try:
        content = place.read_bytes()
        if not content.startswith(b"SSHKRL\n"):
            parts = [line.split() for line in content.split(b"\n") if line.strip()[:1] not in (b"", b"#")]
            listed = [KnownKey(one[0].decode(), base64.b64decode(one[1], validate=True), path, True) for one in parts]
            return tuple(one for one in listed if one.key == key or signature_by(certificate, one.key))
        asked = certificate or key
        kind = asked[4:].partition(b"\0")[0]
        argv = ("ssh-keygen", "-Q", "-f", str(place), "/dev/stdin")
        done = subprocess.run(argv, input=kind + b" " + base64.b64encode(asked), capture_output=True, check=False)
        if done.returncode == 0 or b"REVOKED" in done.stdout:
            return (KnownKey(kind.decode(), key, path, revoked=True),) if done.returncode else ()
        fault = done.stderr.decode("utf-8", "replace")
    except (ValueError, IndexError):
        fault = "a line in it is no public key, and it is no KRL (ssh-keygen -k)"
    except OSError as error:
        fault = error.strerror or str(error)
    what = "RevokedHostKeys can't be read, so no host is trusted"
    raise GpuprovError(what, f"{path}: {fault}", f"ls -l '{place}'", exit_code=ExitCode.UNREACHABLE)


@dataclass(frozen=True)
class KeyCheck:
    """paramiko's policy for a server that it has no key for, which we make every server: the check is all ours."""

    known: KnownHosts
    host: str
    accept_new: bool
    port: int = 22
    revoked_file: str = "none"  # RevokedHostKeys of ssh_config(5)

    @property
    def name(self) -> str:
        return known_hosts_name(self.host, self.port)

    def missing_host_key(self, _client: Any, _hostname: str, key: Any) -> None:
        """Return if the server may be trusted; raises GpuprovError (exit code 4) otherwise."""
        offered, key_type = key.asbytes(), key.get_name()
        certificate = key.public_blob.key_blob if key.public_blob else b""
        known, bare = map(self.known.keys, (self.name, known_hosts_name(self.host, 22)))
        if self.revoked_file != "none":
            known += revoked_by(self.revoked_file, offered, certificate)
        revoked = {entry.key for entry in (*known, *bare) if entry.revoked}
        # Then ssh(1) does not go by the key either, which may be known.
        unsigned = any(signature_by(certificate, one) for one in revoked)
        is_revoked = offered in revoked or unsigned
        others = [entry for entry in known if not entry.revoked]
        # If there are none, ssh(1), too, goes by what stands there without a port.
        is_known = any(entry.key == offered for entry in others or bare)
        signers = self.authorities()
        fault = self._certificate_fault(key, signers, revoked) if signers else "is not asked for"
        if not is_revoked and (is_known or not fault):
            return
        offers = f"it offers {key_type} {fingerprint(offered)}" + (f"\nits certificate {fault}" if signers else "")
        if is_revoked or others:
            places = (*known, *(entry for entry in bare if entry.revoked))
            raise self._refusal(offers, places, others, revoked=is_revoked, unsigned=unsigned)
        self._accept(key_type, offered, offers)

    def _refusal(
        self, offers: str, entries: Sequence[KnownKey], others: Sequence[KnownKey], *, revoked: bool, unsigned: bool
    ) -> GpuprovError:
        """Return the error for a key that is revoked, signed by a revoked authority, or not the one that is known."""
        what = "revoked: do not trust this host until it has new ones"
        step = "on the host, as root: rm /etc/ssh/ssh_host_*_key*; ssh-keygen -A; then restart sshd"
        if unsigned:
            what = "signed by an authority that is revoked: do not trust its certificate"
            step = "have another authority sign the host's key, or remove HostCertificate from its sshd_config"
        elif not revoked:
            what = "changed: the host was reinstalled, or someone is intercepting the connection"
            step = (f"if the host was reinstalled: ssh-keygen -R '{self.name}' -f "
                    f"{others[0].place.rpartition(':')[0]}, then run again with {ACCEPT_OPTION}")  # fmt: skip
        places = (f"{one.place} has {one.key_type} {fingerprint(one.key)}" for one in dict.fromkeys(entries))
        seen = "\n".join((offers, *places))
        return GpuprovError(f"{self.name}: host key {what}", seen, step, exit_code=ExitCode.UNREACHABLE)

    def _accept(self, key_type: str, offered: bytes, offers: str) -> None:
        """Store an unknown key if the user allows it. Raises GpuprovError otherwise."""
        files = self.known.user_files
        if not self.accept_new:
            raise GpuprovError(
                f"the host key of {self.name} is unknown",
                f"{offers}\nlooked in {', '.join((*files, *self.known.system_files))}",
                f"compare it with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the host, then run again with "
                f"{ACCEPT_OPTION}, which stores it in {files[0]}", exit_code=ExitCode.UNREACHABLE,
            )  # fmt: skip
        try:
            self.known.store(self.name, key_type, offered)
        except OSError as error:
            raise GpuprovError(
                f"the host key of {self.name} can't be stored", str(error),
                "name a file that can be written, by UserKnownHostsFile in ansible_ssh_common_args",
                exit_code=ExitCode.UNREACHABLE,
            ) from None  # fmt: skip

    def authorities(self) -> tuple[KnownKey, ...]:
        """Return those that may sign the server's certificate; as with ssh(1), a line without a port serves all."""
        names = dict.fromkeys((self.name, known_hosts_name(self.host, 22)))
        return tuple(key for name in names for key in self.known.keys(name, authorities=True))

    def _certificate_fault(self, key: Any, signers: Sequence[KnownKey], revoked: set[bytes]) -> str:
        """Return why the server's certificate does not prove who it is; "" if it does."""
        if (blob := key.public_blob) is None:
            return f"is missing: {signers[0].place} names who may sign it"
        trusted = {one.key for one in signers} - revoked
        return certificate_fault(blob.key_type, blob.key_blob, key.asbytes(), self.host, trusted, time.time())


def preferred_key_types(known: Sequence[KnownKey], supported: Sequence[str]) -> tuple[str, ...]:
    """Return the key algorithms in order of preference: those of known keys first, as ssh(1) does.

    Otherwise a server with several keys would offer one that is not known.
    """
    types = {entry.key_type for entry in known if not entry.revoked}
    signing = {*types, *(("rsa-sha2-512", "rsa-sha2-256") if "ssh-rsa" in types else ())}
    return tuple(sorted(supported, key=lambda algorithm: algorithm not in signing))
