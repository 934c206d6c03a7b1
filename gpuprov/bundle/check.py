"""Check a bundle on the controller: its layout, every digest, and the signature if a key is pinned."""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path

from gpuprov.bundle.format import Contents, Progress
from gpuprov.bundle.open import opened
from gpuprov.bundle.signature import parse_fingerprint, require_signed
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError


def checked(path: str, key: str = "", progress: Progress = lambda done, total: None) -> Contents:
    """Return the content of a bundle. Raises GpuprovError if anything is wrong, with exit code 2 for a wrong `key`."""
    system = System()
    fingerprint = parse_fingerprint(key) if key else ""
    with opened(system, path, progress=progress) as bundle:
        if fingerprint:
            require_signed(system, bundle.file, bundle.contents, fingerprint)
        return bundle.contents


def digest_once(path: str, key: str, folder: Path) -> str:
    """Return the digest of a bundle. The first process checks it; the others read the result from `folder`.

    `folder` belongs to one run only. Raises GpuprovError as `checked` does.
    """
    try:
        found = Path(path).stat()
    except OSError as error:
        raise GpuprovError(f"the bundle {path} can't be read", str(error), "check the path") from None
    name = hashlib.sha256(repr((path, found.st_mtime_ns, found.st_size, key)).encode()).hexdigest()[:16]
    with (folder / f"bundle-{name}").open("a+") as known:
        fcntl.flock(known, fcntl.LOCK_EX)
        known.seek(0)
        digest = known.read()
        if not digest:
            digest = checked(path, key).digest
            known.write(digest)
        return digest
