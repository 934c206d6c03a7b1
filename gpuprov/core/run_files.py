"""What .run files have in common, the driver's and CUDA's: where they lie on a host, their digest, room for them."""

from __future__ import annotations

from gpuprov.core.places import CACHE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.wire.errors import GpuprovError


def place_of(url: str) -> str:
    """Return where a file lies on the host once it is there: in the cache, unless `url` is a path already."""
    return url if url.startswith("/") else f"{CACHE_DIRECTORY}/{url.rstrip('/').rpartition('/')[2]}"


def require_digest(system: System, path: str, sha256: str, what: str, variable: str) -> None:
    """Raise GpuprovError if the file is not the one with this SHA-256; an empty digest asks for none."""
    if sha256 and (digest := system.sha256(path)) != sha256:
        raise GpuprovError(
            f"{what} is not the one that was asked for",
            f"{path} has SHA-256 {digest}, {variable} is {sha256}",
            "get the file anew, or correct the digest",
        )


def require_room(system: System, path: str, ratio: int, place: str, what: str) -> None:
    """Raise GpuprovError if the cache or `place` has less room than `ratio` times the file's size.

    A full disk shows up as exit code 15 or a SIGBUS in the middle: look before.
    """
    found = system.status(path)
    need = (found.size if found else 0) * ratio
    for folder in (CACHE_DIRECTORY, place):
        free = system.free_bytes(folder)
        if free < need:
            raise GpuprovError(
                f"not enough room on the file system of {folder} to install {what}",
                f"{free // 2**20} MiB free, {need // 2**20} MiB needed",
                f"make room: df -h {folder}",
            )
