"""Keys from a real gpg, and everything that people put where a key belongs."""

import hashlib
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprov.packages.keys import armored, dearmored, fingerprints, key_ids
from gpuprov.protocol.errors import GpuprovError
from tests.examples import examples
from tests.unit.refused import refused


@dataclass(frozen=True)
class Keys:
    """A gpg with keys of its own; `prints` maps algorithm → fingerprint, as gpg itself tells it."""

    home: Path
    prints: dict[str, str]

    def export(self, *algorithms: str, armored: bool = False, secret: bool = False) -> bytes:
        verb = "--export-secret-keys" if secret else "--export"
        armor = ("--armor",) if armored else ()
        return gpg(self.home, *armor, verb, *(self.prints[name] for name in algorithms))


def gpg(home: Path, *words: str) -> bytes:
    argv = ("gpg", "--homedir", str(home), "--batch", "--passphrase", "", *words)
    return subprocess.run(argv, capture_output=True, check=True, timeout=60).stdout


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    home = tmp_path_factory.mktemp("gnupg")
    home.chmod(0o700)
    prints = {}
    for algorithm in ("rsa2048", "ed25519", "nistp256"):
        gpg(home, "--quick-gen-key", f"{algorithm} <{algorithm}@example.org>", algorithm, "sign", "never")
        listed = gpg(home, "--with-colons", "--list-keys", f"{algorithm}@example.org").decode()
        found = re.search(r"^fpr:+([0-9A-F]{40}):", listed, re.MULTILINE)
        assert found is not None
        prints[algorithm] = found[1]
    # A subkey has a fingerprint too; it is not the key's.
    gpg(home, "--quick-add-key", prints["rsa2048"], "rsa2048", "sign", "never")
    yield Keys(home, prints)
    subprocess.run(("gpgconf", "--homedir", str(home), "--kill", "all"), check=True)


@pytest.mark.parametrize("armored", [False, True])
@pytest.mark.parametrize(
    "algorithms",
    [("rsa2048",), ("ed25519",), ("nistp256",), ("rsa2048", "ed25519"), ("rsa2048", "ed25519", "nistp256")],
)
def test_fingerprints_are_those_that_gpg_tells(keys: Keys, algorithms: tuple[str, ...], armored: bool) -> None:
    exported = keys.export(*algorithms, armored=armored)
    assert sorted(fingerprints(exported)) == sorted(keys.prints[name] for name in algorithms)
    assert dearmored(exported) == keys.export(*algorithms)


def test_signatures_name_a_key_or_one_of_its_subkeys(keys: Keys) -> None:
    words = ("--with-colons", "--with-subkey-fingerprints", "--list-keys", keys.prints["rsa2048"])
    listed = gpg(keys.home, *words).decode()
    ids = {found[-16:].lower() for found in re.findall(r"^fpr:+([0-9A-F]{40}):", listed, re.MULTILINE)}
    assert key_ids(keys.export("rsa2048", armored=True)) == ids
    assert len(ids) == 2


def test_several_armored_blocks_in_one_file_all_count(keys: Keys) -> None:
    both = keys.export("rsa2048", armored=True) + b"\n" + keys.export("ed25519", armored=True)
    assert fingerprints(both) == (keys.prints["rsa2048"], keys.prints["ed25519"])


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b"\n", b"\r\n"), lambda text: b"\n\n" + text,
        lambda text: text.replace(b"BLOCK-----\n", b"BLOCK-----\nVersion: GnuPG v2\nComment: a: b\n", 1),
        lambda text: text.replace(b"BLOCK-----\n\n", b"BLOCK-----\n \t\n", 1),
        lambda text: re.sub(rb"\n=[A-Za-z0-9+/]{4}\n", b"\n", text),
        lambda text: text.rstrip(b"\n"),
        lambda text: text.replace(b"BLOCK-----\n", b"BLOCK-----\nComment: M\xfcller\n", 1),
    ],
    ids=["windows", "blank lines", "headers", "blanks", "no checksum", "no last line end", "no ASCII"],
)  # fmt: skip
def test_armor_as_others_write_it(keys: Keys, change: object) -> None:
    assert callable(change)
    assert fingerprints(change(keys.export("rsa2048", armored=True))) == (keys.prints["rsa2048"],)


def test_secret_keys_are_refused(keys: Keys) -> None:
    secret = keys.export("rsa2048", secret=True)
    assert "secret key" in refused(fingerprints, secret).what
    assert "secret key" in refused(fingerprints, keys.export("ed25519") + secret).what
    assert "no armored public key" in refused(fingerprints, keys.export("rsa2048", secret=True, armored=True)).what


# The lengths of packet bodies as RFC 9580 has them, 4.2.1 (new format) and 4.2.2 (legacy), at each form's edges.
HEADERS = {
    "one octet, 191": ("c6 bf", 191),
    "two octets, 192": ("c6 c0 00", 192),
    "two octets, 448": ("c6 c1 00", 448),
    "two octets, 1723": ("c6 c5 fb", 1723),
    "two octets, 8383": ("c6 df ff", 8383),
    "four octets, 1": ("c6 ff 00 00 00 01", 1),
    "four octets, 8384": ("c6 ff 00 00 20 c0", 8384),
    "four octets, 65535": ("c6 ff 00 00 ff ff", 0xFFFF),
    "legacy, one octet, 255": ("98 ff", 255),
    "legacy, two octets, 256": ("99 01 00", 256),
    "legacy, two octets, 65535": ("99 ff ff", 0xFFFF),
    "legacy, four octets, 513": ("9a 00 00 02 01", 513),
}


@pytest.mark.parametrize("name", HEADERS)
def test_lengths_at_the_edges_of_their_forms(name: str) -> None:
    header, length = HEADERS[name]
    body = b"\x04" + bytes(index % 251 for index in range(length - 1))
    expected = hashlib.sha1(b"\x99" + length.to_bytes(2, "big") + body).hexdigest().upper()
    packet = bytes.fromhex(header) + body
    assert fingerprints(packet) == (expected,)
    # What follows begins right behind it, in either format; and nothing may lack.
    assert fingerprints(packet + b"\xb4\x01u" + packet + b"\xcd\x01u") == (expected, expected)
    assert key_ids(packet) == {expected[-16:].lower()}
    for damaged in (packet[:-1], packet + b"\x00"):
        assert "no OpenPGP key" in refused(fingerprints, damaged).what


@pytest.mark.parametrize("first", [224, 225, 254])
def test_a_partial_length_is_for_no_key(first: int) -> None:
    """Taken for a length in two octets, it would have a whole body behind it."""
    length = ((first - 192) << 8) + 4 + 192
    assert "no OpenPGP key" in refused(fingerprints, bytes((0xC6, first, 4, 4)) + bytes(length - 1)).what


@pytest.mark.parametrize("algorithms", [("rsa2048",), ("ed25519", "nistp256")])
def test_a_real_key_with_headers_of_the_other_format_is_the_same_key(keys: Keys, algorithms: tuple[str, ...]) -> None:
    """gpg writes legacy headers for keys; Sequoia and others write new ones."""
    assert fingerprints(reframed(keys.export(*algorithms))) == tuple(keys.prints[name] for name in algorithms)


def reframed(key: bytes) -> bytes:
    """Return gpg's packets with headers of the new format, their lengths in as few octets as they need."""
    found, place = b"", 0
    while place < len(key):
        octets = 1 << (key[place] & 3)
        start = place + 1 + octets
        length = int.from_bytes(key[place + 1 : start], "big")
        size = bytes((length,)) if length < 192 else bytes(((length - 192 >> 8) + 192, length - 192 & 0xFF))
        found += bytes((0xC0 | key[place] >> 2 & 0x0F,)) + size + key[start : start + length]
        place = start + length
    return found


def test_one_armored_block_has_the_checksum_that_gpg_computes(keys: Keys) -> None:
    """gpg refuses a key whose checksum is wrong, and says so."""
    for name in keys.prints:
        key = keys.export(name)
        text = armored(key)
        assert text == armored(keys.export(name, armored=True))
        lines = text.decode().splitlines()
        assert (lines[0], lines[1]) == ("-----BEGIN PGP PUBLIC KEY BLOCK-----", "")
        assert lines[-1] == "-----END PGP PUBLIC KEY BLOCK-----" and text.endswith(b"-----\n")
        assert {len(line) for line in lines[2:-3]} == {64} and 0 < len(lines[-3]) <= 64
        assert re.fullmatch("=[A-Za-z0-9+/]{4}", lines[-2])
        assert lines[-2] in keys.export(name, armored=True).decode().splitlines()
        assert dearmored(text) == key


DAMAGED = ("this is no OpenPGP key, or a damaged one", "at byte 3", "the URL")
ARMORED = b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n"


@pytest.mark.parametrize(
    ("content", "what", "evidence", "next_step"),
    [
        (b" \n<!doctype HTML>" + b"x" * 100, "this is a web page, not a key", "<!doctype HTML>" + "x" * 65, "URL"),
        (b"\n-----BEGIN NOTHING-----\xfc" + b"y" * 99, "this is no armored public key",
         "-----BEGIN NOTHING-----\ufffd" + "y" * 16, "URL"),
        (ARMORED + b"\nmQ=\n-----END PGP PUBLIC KEY BLOCK-----\n", "this armored key is damaged", "Incorrect padding",
         "again"),
        (b"\x98\x01\x03", "keys of version 3 are not supported", "", "the version 4 key"),
        (b"\x98\x00", "keys of version 0 are not supported", "", "the version 4 key"),
        (b"\x9a\x00\x01\x00\x00" + b"\x04" * 0x10000, "this key is too long to be one", "65536 bytes", "URL"),
        (b"\xb4\x00\xb4\x01\x04", "there is no public key in this file", "5 bytes", "URL"),
        (b"\x94\x01\x04", "this is a secret key; a repository needs the public one", "", "the public key"),
        (b"\x9c\x01\x04", "this is a secret key; a repository needs the public one", "", "the public key"),
        (b"\xb4\x01\x04\x01", *DAMAGED), (b"\xb4\x01\x04\x98\x02\x04", *DAMAGED), (b"\xb4\x01\x04\xc6\xc0", *DAMAGED),
        (b"\xb4\x01\x04\xc6\xe0\x04", *DAMAGED), (b"\xb4\x01\x04\x9b\x04", *DAMAGED),
        (b"", "there is no public key in this file", "0 bytes", "URL"),
        (b"\n  <HTML><body>log in</body>", "this is a web page, not a key", "<HTML><body>log in</body>", "URL"),
        (b"<?xml version='1.0'?>", "this is a web page, not a key", "<?xml version='1.0'?>", "URL"),
        (ARMORED + b"\nmQINBF\n", "this is no armored public key", "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nmQ", "URL"),
        (b"\xc6\x01\x06", "keys of version 6 are not supported", "", "the version 4 key"),
        *((start, DAMAGED[0], "at byte 0", "URL") for start in (
            b"Not Found\n", b"\x99\x01", b"\xc6\xff\x00\x00", b"\xc6",
        )),
    ],
)  # fmt: skip
def test_what_is_no_key_says_where_and_what_to_do(content: bytes, what: str, evidence: str, next_step: str) -> None:
    problem = refused(fingerprints, content)
    assert (problem.what, problem.evidence) == (what, evidence)
    assert next_step in problem.next_step


def test_a_truncated_key_is_refused_wherever_it_ends(keys: Keys) -> None:
    whole = keys.export("rsa2048")
    first_packet = 3 + int.from_bytes(whole[1:3], "big")
    for end in range(first_packet):
        with pytest.raises(GpuprovError):
            fingerprints(whole[:end])
    for end in range(first_packet + 1, len(whole)):
        try:
            found = fingerprints(whole[:end])
        except GpuprovError:
            continue
        # Cut between two packets: what is left is the same key.
        assert found == (keys.prints["rsa2048"],)


@settings(deadline=None, max_examples=examples(300))
@given(
    st.binary()
    | st.binary().map(lambda tail: b"\x99" + tail)
    | st.binary().map(lambda tail: b"\xc6" + tail)
    | st.text().map(lambda text: f"-----BEGIN PGP PUBLIC KEY BLOCK-----\n{text}".encode())
    | st.text().map(
        lambda text: f"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n{text}\n-----END PGP PUBLIC KEY BLOCK-----".encode()
    )
)
def test_random_bytes_give_fingerprints_or_a_plain_error(content: bytes) -> None:
    try:
        found = fingerprints(content)
    except GpuprovError as error:
        assert error.problems[0].what
    else:
        assert all(re.fullmatch("[0-9A-F]{40}", one) for one in found) and found
