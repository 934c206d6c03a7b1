"""A bundle checked where the command is typed: its layout, every digest, and the signature if a key is pinned."""

from __future__ import annotations

from gpuprov.bundle.format import Contents, Progress
from gpuprov.bundle.signature import parse_fingerprint, require_signed
from gpuprov.bundle.use import opened
from gpuprov.system import System


def checked(path: str, key: str = "", progress: Progress = lambda done, total: None) -> Contents:
    """Return what a bundle holds. Raises GpuprovError if anything is wrong, with exit code 2 for a wrong `key`."""
    system = System()
    fingerprint = parse_fingerprint(key) if key else ""
    with opened(system, path, progress=progress) as bundle:
        if fingerprint:
            require_signed(system, bundle.file, bundle.contents, fingerprint)
        return bundle.contents
