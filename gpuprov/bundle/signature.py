"""The manifest's signature: made by the user's gpg, checked with the bundle's key against a pinned fingerprint.

The key in a bundle proves nothing by itself; the user pins the fingerprint of the right key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import BinaryIO

from gpuprov.bundle.format import Contents, chunks
from gpuprov.bundle.manifest import SIGNING_KEY
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.packages.keys import dearmored, fingerprints
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.words import counted

_SECONDS = 300  # a person may have to type a passphrase
_LARGEST_KEY = 1 << 20
_FINGERPRINT = re.compile(r"[0-9A-F]{40}|[0-9A-F]{64}")


def parse_fingerprint(text: str) -> str:
    """Return a full fingerprint, as gpg prints it or without blanks. Raises GpuprovError (exit code 2) otherwise."""
    found = "".join(text.split()).upper()
    if not _FINGERPRINT.fullmatch(found):
        raise GpuprovError(
            "--bundle-key takes a full fingerprint",
            f"{text!r} is not 40 (or 64) hexadecimal digits",
            "gpg --fingerprint NAME shows it",
            exit_code=ExitCode.USAGE,
        )
    return found


def export_key(system: System, key: str, environment: Mapping[str, str]) -> bytes:
    """Return the public half of a key in the user's keyring."""
    done = system.run(("gpg", "--batch", "--armor", "--export-options", "export-minimal", "--export", "--", key),
                      env=environment)  # fmt: skip
    if not done.ok or not done.stdout.strip():
        raise GpuprovError(f"gpg has no key {key}", done.evidence(4), "gpg --list-secret-keys shows what it has")
    content = dearmored(done.stdout.encode())
    if len(found := fingerprints(content)) != 1:
        raise GpuprovError(f"{key} names several keys", ", ".join(found), "give one fingerprint")
    return content


def sign(system: System, content: bytes, key: str, environment: Mapping[str, str]) -> bytes:
    """Return a detached, armored signature by the user's gpg and its agent."""
    command = ("gpg", "--yes", "--local-user", key, "--armor", "--detach-sign", "--output", "-")
    done = system.run(command, stdin=content, env=environment, timeout=_SECONDS)
    if not done.ok:
        raise GpuprovError(f"gpg could not sign with {key}", done.evidence(6), "try: gpg --local-user KEY --sign FILE")
    return done.stdout.encode()


def require_signed(system: System, file: BinaryIO, contents: Contents, fingerprint: str) -> None:
    """Raise GpuprovError if the manifest is not signed by the key of this fingerprint."""
    if not contents.signature:
        raise GpuprovError(
            "the bundle is not signed",
            f"it holds no signature, and --bundle-key asks for one by {fingerprint}",
            "gpuprov bundle create --sign KEYID …",
        )
    key = _key_in(file, contents)
    if fingerprints(key) != (fingerprint,):
        raise GpuprovError(
            "the bundle is signed by another key than the one that is pinned",
            f"its key is {', '.join(fingerprints(key))}; pinned is {fingerprint}",
            "get the bundle from where the pinned key signs, or pin the right key",
        )
    done = _checked(system, contents, key)
    status = done.stdout
    valid = re.search(r"^\[GNUPG:\] VALIDSIG (?:.* )?([0-9A-F]+)$", status, re.MULTILINE)
    # GOODSIG, and not EXPKEYSIG, EXPSIG or REVKEYSIG (gnupg, doc/DETAILS); VALIDSIG ends with the primary key.
    if valid is None or valid[1] != fingerprint or "\n[GNUPG:] GOODSIG " not in f"\n{status}":
        said = [line for line in status.splitlines() if re.search(r"SIG|NO_PUBKEY|ERROR", line)]
        raise GpuprovError(
            "the signature of the bundle's manifest is wrong",
            "\n".join(said[-3:]) or done.evidence(4),
            "get the bundle again from where it was made",
        )


def _key_in(file: BinaryIO, contents: Contents) -> bytes:
    """Return the signing key that the bundle brings."""
    if SIGNING_KEY not in contents.offsets:
        raise GpuprovError("the bundle is signed but lacks the key", f"no {SIGNING_KEY} in it", "make it again")
    one = contents.manifest.file(SIGNING_KEY)
    if one.size > _LARGEST_KEY:
        raise GpuprovError("the bundle's key is too long to be one", counted(one.size, "byte"), "make it again")
    return b"".join(chunks(file, contents.offsets[SIGNING_KEY], one.size))


def _checked(system: System, contents: Contents, key: bytes) -> Completed:
    """Return gpgv's status lines for the manifest's signature."""
    verifier = system.which("gpgv")
    if verifier is None:
        raise GpuprovError("there is no gpgv on this machine, and it checks the signature", "", "install gpgv")
    folder = system.temporary_directory()
    try:
        names = ("key.gpg", "manifest.asc", "manifest")
        paths = [f"{folder}/{name}" for name in names]
        for path, content in zip(paths, (key, contents.signature, contents.manifest_bytes)):
            system.write(path, content)
        command = (verifier, "--homedir", folder, "--keyring", paths[0], "--status-fd", "1", paths[1], paths[2])
        return system.run(command, timeout=_SECONDS)
    finally:
        system.remove_tree(folder)
