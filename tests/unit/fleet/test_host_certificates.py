"""Certificates of servers, made by the real ssh-keygen: which prove that a server is a host, and why others do not."""

import base64
import functools
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gpuprov.fleet.host_certificates import certificate_fault

NOW = 1_800_000_000.0
HOST = ("-h", "-n", "gpu1,gpu2.example.org")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@functools.cache
def key(folder: Path, name: str, kind: str, bits: str = "") -> Path:
    words = ("ssh-keygen", "-q", "-t", kind, *(("-b", bits) if bits else ()), "-N", "", "-f", str(folder / name))
    subprocess.run(words, check=True)
    return folder / name


def content(path: Path) -> tuple[str, bytes]:
    kind, text = path.read_text().split()[:2]
    return kind, base64.b64decode(text)


def signed(folder: Path, authority: Path, words: tuple[str, ...], host: Path) -> tuple[str, bytes, bytes]:
    """Return kind and content of a certificate, and the key that it is for."""
    argv = ("ssh-keygen", "-q", "-s", str(authority), "-I", "x", *words, f"{host}.pub")
    subprocess.run(argv, check=True, stderr=subprocess.DEVNULL)
    return *content(Path(f"{host}-cert.pub")), content(Path(f"{host}.pub"))[1]


@pytest.mark.parametrize(
    "of_host", [("ed25519",), ("ecdsa", "256"), ("ecdsa", "384"), ("ecdsa", "521"), ("rsa", "2048")]
)
@pytest.mark.parametrize("of_authority", [("ed25519",), ("ecdsa", "384"), ("rsa", "2048"), ("rsa", "3071")])
def test_keys_of_each_kind(folder: Path, of_host: tuple[str, ...], of_authority: tuple[str, ...]) -> None:
    authority = key(folder, f"ca-{'-'.join(of_authority)}", *of_authority)
    found = signed(folder, authority, HOST, key(folder, f"host-{'-'.join(of_host)}", *of_host))
    trusted = {content(authority.with_name(f"{authority.name}.pub"))[1]}
    assert certificate_fault(*found, "GPU2.example.org", trusted, NOW) == ""
    assert "no authority" in certificate_fault(*found, "gpu1", set(), NOW)
    # One bit of the signature, one of the names.
    for place in (-1, found[1].index(b"gpu1")):
        changed = bytearray(found[1])
        changed[place] ^= 1
        assert certificate_fault(found[0], bytes(changed), found[2], "gpu1", trusted, NOW).startswith("is invalid")
    assert certificate_fault(*found[:2], b"another", "gpu1", trusted, NOW) == "is for another key"


@pytest.mark.parametrize(
    ("words", "host", "fault"),
    [
        (HOST, "GPU1", ""),
        (("-h", "-n", "gpu*"), "gpu17", "is for gpu*"),
        (HOST, "gpu3", "is for gpu1, gpu2.example.org"),
        (("-h",), "gpu1", "is for no host by name"),
        (HOST[1:], "gpu1", "is a user's"),
        ((*HOST, "-V", "20200101Z:20200102Z"), "gpu1", "has expired"),
        ((*HOST, "-V", "20990101Z:20990102Z"), "gpu1", "is not valid yet"),
        ((*HOST, "-O", "critical:who@example.org=1"), "gpu1", "has conditions that nobody knows here"),
    ],
)
def test_what_a_certificate_says(folder: Path, words: tuple[str, ...], host: str, fault: str) -> None:
    authority = key(folder, "ca", "ed25519")
    found = signed(folder, authority, words, key(folder, "host", "ed25519"))
    assert certificate_fault(*found, host, {content(folder / "ca.pub")[1]}, NOW) == fault


def string(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


@pytest.mark.parametrize(
    ("identity", "principals", "kind", "fault"),
    [
        (b"x", (b"gpu1",), b"ssh-ed25519", ""),
        (b"x", (b"gpu1", *[b"x"] * 255), b"ssh-ed25519", ""),
        (b"x", (b"gpu1", *[b"x"] * 256), b"ssh-ed25519", "has more than 256 names, which ssh does not read"),
        (b"x", (b"gpu1\0.example.org",), b"ssh-ed25519", "has a NUL in a name"),
        (b"x", (b"gpu1", b"gpu2\0"), b"ssh-ed25519", "has a NUL in a name"),
        (b"x\0y", (b"gpu1",), b"ssh-ed25519", "has a NUL in a name"),
        # The library takes such an authority for the plain key in it.
        (b"x", (b"gpu1",), b"sk-ssh-ed25519@openssh.com", "is signed by no authority that known_hosts trusts for it"),
    ],
)
def test_what_ssh_keygen_does_not_sign(identity: bytes, principals: tuple[bytes, ...], kind: bytes, fault: str) -> None:
    authority = Ed25519PrivateKey.generate()
    public = authority.public_key().public_bytes_raw()
    signer = string(kind, public, *([b"ssh:"] if kind.startswith(b"sk-") else ()))
    of_host = string(b"\1" * 32)
    body = (
        string(b"ssh-ed25519-cert-v01@openssh.com", b"nonce") + of_host + bytes(11) + b"\2"
        + string(identity, string(*principals)) + bytes(8) + b"\xff" * 8 + string(b"", b"", b"", signer)
    )  # fmt: skip
    made = body + string(string(kind, authority.sign(body)))
    own, trusted = string(b"ssh-ed25519") + of_host, {string(b"ssh-ed25519", public)}
    assert certificate_fault("ssh-ed25519-cert-v01@openssh.com", made, own, "gpu1", trusted, NOW) == fault


def test_one_signed_with_sha1_proves_nothing(folder: Path) -> None:
    authority, host = key(folder, "ca-rsa-3071", "rsa", "3071"), key(folder, "old", "ed25519")
    trusted = {content(folder / "ca-rsa-3071.pub")[1]}
    old = signed(folder, authority, (*HOST, "-t", "ssh-rsa"), host)
    assert certificate_fault(*old, "gpu1", trusted, NOW) == "is signed with SHA-1"
    new = signed(folder, authority, (*HOST, "-t", "rsa-sha2-256"), host)
    assert certificate_fault(*new, "gpu1", trusted, NOW) == ""


@pytest.mark.parametrize("cut", [0, 1, 40, 100, 200, -1])
def test_what_is_no_certificate_proves_nothing(folder: Path, cut: int) -> None:
    authority = key(folder, "ca", "ed25519")
    kind, found, own = signed(folder, authority, HOST, key(folder, "host", "ed25519"))
    trusted = {content(folder / "ca.pub")[1]}
    assert certificate_fault(kind, found[:cut], own, "gpu1", trusted, NOW).startswith("is invalid")
    assert certificate_fault("ssh-ed25519", found, own, "gpu1", trusted, NOW).startswith("is ")
    assert certificate_fault(*content(folder / "ca.pub"), own, "gpu1", trusted, NOW) == "is a plain key"
