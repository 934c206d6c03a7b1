"""Open a bundle on a host: every digest is checked before any of its content is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from gpuprov.bundle.format import Contents, Progress, chunks, read_contents, verify_files
from gpuprov.bundle.manifest import Manifest
from gpuprov.bundle.place import CACHE
from gpuprov.core.places import REPOSITORY_KEY
from gpuprov.core.system import System
from gpuprov.packages.keys import fingerprints
from gpuprov.protocol.errors import GpuprovError


@dataclass(frozen=True)
class OpenBundle:
    """A bundle whose digests were all right when it was opened. Its file stays open, so it can't be exchanged."""

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
    try:
        file = system.open(path)
    except OSError as error:
        raise GpuprovError(f"the bundle {path} can't be read", str(error), "check the path") from None
    with file:
        try:
            contents = read_contents(file)
            _require_digest(contents, path, digest)
            verify_files(file, contents, progress)
            _require_repository_key(file, contents)
        except GpuprovError:
            # Remove a bundle that an upload damaged: otherwise the next run would find it again and fail.
            if path.startswith(f"{CACHE}/"):
                system.remove(path)
            raise
        yield OpenBundle(file, contents)


def _require_digest(contents: Contents, path: str, digest: str) -> None:
    if digest not in ("", contents.digest):
        raise GpuprovError(
            "this is not the bundle that was asked for",
            f"{path}: the manifest's SHA-256 is {contents.digest}, expected {digest}",
            "run the same command again: the bundle is uploaded again",
        )


def _require_repository_key(file: BinaryIO, contents: Contents) -> None:
    """Raise GpuprovError unless the key that comes with the packages is exactly the one that the manifest names."""
    manifest = contents.manifest
    if not manifest.packages:
        return
    key = b"".join(chunks(file, contents.offsets[REPOSITORY_KEY], manifest.file(REPOSITORY_KEY).size))
    if fingerprints(key) != (manifest.repository_key,):
        raise GpuprovError(
            "the key of the bundle's repository is not the one that its manifest names",
            f"{REPOSITORY_KEY} holds {', '.join(fingerprints(key))}; the manifest says {manifest.repository_key}",
            "make the bundle again: gpuprov bundle create",
        )
