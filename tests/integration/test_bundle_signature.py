"""Signatures of bundles by the real gpg and gpgv: the pinned key's, and every other kind."""

import dataclasses
import io
import os
import subprocess
from pathlib import Path

import pytest

from gpuprov.bundle.format import write_bundle
from gpuprov.bundle.manifest import SIGNING_KEY, Manifest
from gpuprov.bundle.open import checked, parse_fingerprint
from gpuprov.bundle_create.create import export_key, sign
from gpuprov.core.system import System
from gpuprov.packages.keys import fingerprints
from gpuprov.protocol.errors import GpuprovError, UsageError
from tests.bundles import FILES, MANIFEST, listed
from tests.gpg import gpg_home, signing_key


class Signer:
    """A gpg with two keys; `pinned` is the one that users trust."""

    def __init__(self, home: Path) -> None:
        self.environment = {"GNUPGHOME": str(home)}
        self.home = home
        self.pinned = signing_key(home, "ops@example.org")
        self.other = signing_key(home, "mallory@example.org")

    def key(self, name: str) -> bytes:
        return export_key(System(), name, self.environment)

    def sign(self, content: bytes, name: str) -> bytes:
        return sign(System(), content, name, self.environment)


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer(tmp_path_factory.mktemp("gnupg"))


def write(path: Path, key: bytes, signature: bytes, manifest: Manifest = MANIFEST) -> str:
    """Write a bundle that brings this key and this signature."""
    files = {**FILES, SIGNING_KEY: key}
    with path.open("wb") as target:
        write_bundle(target, listed(manifest, files), lambda name: io.BytesIO(files[name]), signature)
    return str(path)


def manifest_with(key: bytes, manifest: Manifest = MANIFEST) -> bytes:
    return listed(manifest, {**FILES, SIGNING_KEY: key}).to_bytes()


def refusal(path: str, fingerprint: str) -> str:
    with pytest.raises(GpuprovError) as caught:
        checked(path, fingerprint)
    assert caught.value.problems[0].next_step
    return str(caught.value)


def test_the_pinned_keys_signature_is_good(signer: Signer, tmp_path: Path) -> None:
    key = signer.key("ops@example.org")
    path = write(tmp_path / "b.tar", key, signer.sign(manifest_with(key), "ops@example.org"))
    spaced = " ".join(signer.pinned[at : at + 4] for at in range(0, 40, 4)).lower()
    assert checked(path, spaced).manifest.distribution == "debian"
    assert checked(path).signature


def test_an_unsigned_bundle_is_refused_if_a_key_is_pinned(signer: Signer, tmp_path: Path) -> None:
    assert "the bundle is not signed" in refusal(write(tmp_path / "b.tar", b"", b""), signer.pinned)


@pytest.mark.parametrize(
    ("keys", "signed_by", "says"),
    [
        (("mallory",), "mallory", "another key than the one that is pinned"),
        (("ops",), "mallory", "the signature of the bundle's manifest is wrong"),
        (("ops", "mallory"), "mallory", "another key than the one that is pinned"),
        (("ops",), "", "the signature of the bundle's manifest is wrong"),
    ],
    ids=["another key", "the pinned key, signed by another", "both keys", "rubbish for a signature"],
)
def test_pinned_key_must_sign(signer: Signer, tmp_path: Path, keys: tuple[str, ...], signed_by: str, says: str) -> None:
    key = b"".join(signer.key(f"{name}@example.org") for name in keys)
    signature = signer.sign(manifest_with(key), f"{signed_by}@example.org") if signed_by else os.urandom(200)
    said = refusal(write(tmp_path / "b.tar", key, signature), signer.pinned)
    assert says in said
    assert keys != ("mallory",) or (signer.other in said and signer.pinned in said)


def test_a_manifest_changed_after_the_signature_is_refused(signer: Signer, tmp_path: Path) -> None:
    """Digests and all: the change is consistent, and only the signature tells."""
    key = signer.key("ops@example.org")
    signature = signer.sign(manifest_with(key), "ops@example.org")
    path = write(tmp_path / "b.tar", key, signature, dataclasses.replace(MANIFEST, gpuprov="6.6"))
    assert checked(path).manifest.gpuprov == "6.6"
    assert "BADSIG" in refusal(path, signer.pinned)


def test_an_expired_signature_is_refused(signer: Signer, tmp_path: Path) -> None:
    """By a key of a year that is long over, and signed in it for a second."""
    with gpg_home(tmp_path / "gnupg") as home:
        at = ("--faked-system-time", "20200101T000000")
        pinned = signing_key(home, "ops@example.org", *at)
        key = export_key(System(), "ops@example.org", {"GNUPGHOME": str(home)})
        command = ("gpg", "--homedir", home, "--batch", *at, "--default-sig-expire", "seconds=1", "--detach-sign")
        signature = subprocess.run(command, check=True, capture_output=True, input=manifest_with(key)).stdout
        assert "EXPSIG" in refusal(write(tmp_path / "b.tar", key, signature), pinned)


@pytest.mark.parametrize(
    ("year", "expires", "says"),
    [("2020", "1d", "EXPKEYSIG"), ("2040", "0", "in the future (time warp or clock problem)")],
    ids=["an expired key", "a clock that is behind"],
)
def test_a_time_that_is_wrong_is_told_with_what_helps(tmp_path: Path, year: str, expires: str, says: str) -> None:
    with gpg_home(tmp_path / "gnupg") as home:
        gpg = ("gpg", "--homedir", home, "--batch", "--faked-system-time", f"{year}0101T000000")
        words = ("--passphrase", "", "--quick-gen-key", "ops@example.org", "rsa2048", "sign", expires)
        subprocess.run((*gpg, *words), check=True, capture_output=True)
        key = subprocess.run((*gpg, "--export"), check=True, capture_output=True).stdout
        pinned = fingerprints(key)[0]
        command = (*gpg, "-u", "ops@example.org", "--detach-sign")
        signature = subprocess.run(command, check=True, capture_output=True, input=manifest_with(key)).stdout
        with pytest.raises(GpuprovError) as caught:
            checked(write(tmp_path / "b.tar", key, signature), pinned)
    (problem,) = caught.value.problems
    assert says in problem.evidence
    assert problem.next_step.startswith("date  # if the clock is right")
    assert f"gpg --quick-set-expire {pinned} 1y" in problem.next_step


@pytest.mark.parametrize("text", ["", "ops@example.org", "ABCD1234", "A" * 41, "0x" + "A" * 40])
def test_only_a_full_fingerprint_pins(text: str) -> None:
    with pytest.raises(UsageError):
        parse_fingerprint(text)


def test_a_key_that_gpg_does_not_have_is_told(signer: Signer) -> None:
    with pytest.raises(GpuprovError, match="gpg has no key nobody"):
        signer.key("nobody@example.org")
