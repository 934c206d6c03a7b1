"""Open a bundle and check it: its layout, every digest, and the signature of the manifest if a key is pinned.

On a host every digest is checked before any content is used. The key in a bundle proves nothing by itself; the user
pins the fingerprint of the right key.
"""

import contextlib
import fcntl
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gpuprov.bundle.format import Contents, Progress, chunks, read_contents, verify_files
from gpuprov.bundle.manifest import FINGERPRINT, SIGNING_KEY, Manifest
from gpuprov.core.commands import Completed
from gpuprov.core.places import CACHE_DIRECTORY, REPOSITORY_KEY
from gpuprov.core.system import System
from gpuprov.packages.keys import fingerprints
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError, UsageError, os_errors
from gpuprov.protocol.words import counted

_SECONDS = 300
_LARGEST_KEY = 1 << 20


@dataclass(frozen=True)
class OpenBundle:
    """A bundle and its open file, so it can't be exchanged after its digests were checked."""

    file: BinaryIO
    contents: Contents

    @property
    def manifest(self) -> Manifest:
        return self.contents.manifest

    def content(self, path: str) -> bytes:
        """Return a small file of the bundle, empty if the bundle does not contain it."""
        found = next((one for one in self.manifest.files if one.path == path), None)
        return b"".join(chunks(self.file, self.contents.offsets[path], found.size)) if found is not None else b""


@contextlib.contextmanager
def opened(
    system: System, path: str, digest: str = "", progress: Progress = lambda done, total: None
) -> Iterator[OpenBundle]:
    """Yield a fully checked bundle; `digest` is the one that its manifest must have, empty for any.

    Raises GpuprovError if anything is wrong with it.
    """
    with os_errors(f"the bundle {path} can't be read", "check the path"):
        file = system.open(path)
    with file:
        try:
            bundle = OpenBundle(file, read_contents(file))
            if digest not in ("", bundle.contents.digest):
                what = "this is not the bundle that was asked for"
                seen = f"{path}: the manifest's SHA-256 is {bundle.contents.digest}, expected {digest}"
                raise GpuprovError(what, seen, "run the same command again: the bundle is uploaded again")
            verify_files(file, bundle.contents, progress)
            named = bundle.manifest.repository_key
            found = fingerprints(bundle.content(REPOSITORY_KEY)) if bundle.manifest.packages else (named,)
            if found != (named,):
                what = "the key of the bundle's repository is not the one that its manifest names"
                seen = f"{REPOSITORY_KEY} holds {', '.join(found)}; the manifest says {named}"
                raise GpuprovError(what, seen, "make the bundle again: gpuprov bundle create")
        except GpuprovError:
            # Remove a bundle that an upload damaged: otherwise the next run would find it again and fail.
            if path.startswith(f"{CACHE_DIRECTORY}/"):
                system.remove(path)
            raise
        yield bundle


def checked(path: str, key: str = "", progress: Progress = lambda done, total: None) -> Contents:
    """Return the content of a bundle. Raises GpuprovError if anything is wrong, with exit code 2 for a wrong `key`."""
    system = System()
    fingerprint = parse_fingerprint(key) if key else ""
    with opened(system, path, progress=progress) as bundle:
        if fingerprint:
            require_signed(system, bundle, fingerprint)
        return bundle.contents


def digest_once(path: str, key: str, folder: Path) -> str:
    """Return the digest of a bundle. The first process checks it; the others read the result from `folder`.

    `folder` belongs to one run only. Raises GpuprovError as `checked` does.
    """
    with os_errors(f"the bundle {path} can't be read", "check the path"):
        found = Path(path).stat()
    name = hashlib.sha256(repr((path, found.st_mtime_ns, found.st_size, key)).encode()).hexdigest()[:16]
    with (folder / f"bundle-{name}").open("a+") as known:
        fcntl.flock(known, fcntl.LOCK_EX)
        known.seek(0)
        digest = known.read()
        if not digest:
            digest = checked(path, key).digest
            known.write(digest)
        return digest


def parse_fingerprint(text: str) -> str:
    """Return a full fingerprint, as gpg prints it or without blanks. Raises GpuprovError (exit code 2) otherwise."""
    found = "".join(text.split()).upper()
    if not FINGERPRINT.fullmatch(found):
        what = "the key of a bundle must be given by its full fingerprint"
        raise UsageError(what, f"{text!r} is not 40 (or 64) hexadecimal digits", "gpg --fingerprint NAME shows it")
    return found


def require_signed(system: System, bundle: OpenBundle, fingerprint: str) -> None:
    """Raise GpuprovError if the manifest is not signed by the key of this fingerprint."""
    if not bundle.contents.signature:
        seen = f"it holds no signature, and one by {fingerprint} is asked for"
        raise GpuprovError("the bundle is not signed", seen, "gpuprov bundle create --sign KEYID …")
    if SIGNING_KEY not in bundle.contents.offsets:
        raise GpuprovError("the bundle is signed but lacks the key", f"no {SIGNING_KEY} in it", "make it again")
    if (size := bundle.manifest.file(SIGNING_KEY).size) > _LARGEST_KEY:
        raise GpuprovError("the bundle's key is too long to be one", counted(size, "byte"), "make it again")
    key = bundle.content(SIGNING_KEY)
    if fingerprints(key) != (fingerprint,):
        what = "the bundle is signed by another key than the one that is pinned"
        seen = f"its key is {', '.join(fingerprints(key))}; pinned is {fingerprint}"
        raise GpuprovError(what, seen, "get the bundle from where the pinned key signs, or pin the right key")
    done = _gpgv(system, bundle.contents, key)
    status = done.stdout
    valid = re.search(r"^\[GNUPG:\] VALIDSIG (?:.* )?([0-9A-F]+)$", status, re.MULTILINE)
    # GOODSIG, and not EXPKEYSIG, EXPSIG or REVKEYSIG (gnupg, doc/DETAILS); VALIDSIG ends with the primary key.
    if valid is None or valid[1] != fingerprint or "\n[GNUPG:] GOODSIG " not in f"\n{status}":
        lines = f"{status}\n{done.stderr}".splitlines()
        said = "\n".join([line for line in lines if re.search(r"SIG|NO_PUBKEY|ERROR|in the future", line)][-3:])
        step = "get the bundle again from where it was made"
        if re.search("EXPKEYSIG|EXPSIG|in the future", said):
            step = "date  # if the clock is right, where the bundle is made: "
            step += f"gpg --quick-set-expire {fingerprint} 1y; then make the bundle again"
        raise GpuprovError("the signature of the bundle's manifest is wrong", said or done.evidence(4), step)


def _gpgv(system: System, contents: Contents, key: bytes) -> Completed:
    """Return gpgv's status lines for the manifest's signature."""
    verifier = system.which("gpgv")
    if verifier is None:
        raise GpuprovError("there is no gpgv on this machine, and it checks the signature", "", "install gpgv")
    with system.temporary_directory() as folder:
        paths = [f"{folder}/{name}" for name in ("key.gpg", "manifest.asc", "manifest")]
        for path, content in zip(paths, (key, contents.signature, contents.manifest_bytes)):
            system.write(path, content)
        command = (verifier, "--homedir", folder, "--keyring", paths[0], "--status-fd", "1", paths[1], paths[2])
        return system.run(command, timeout=_SECONDS)
