"""What NVIDIA's .run files share, the driver's and CUDA's: their download, their place, and checks before they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpuprov.core.changes import Change, Json, Tell, parent_of
from gpuprov.core.download import fetch, trusted_sha256
from gpuprov.core.places import CACHE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.secrets import masked


@dataclass(frozen=True)
class FetchRunfile(Change):
    """The .run file shall lie in the cache, its digest right. A partial download is kept and resumed."""

    url: str
    path: str
    sha256: str

    undo_when_interrupted: ClassVar[bool] = False

    def summary(self) -> str:
        return f"download {masked(self.url)}"

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,)

    def capture(self, system: System) -> Json:
        return {"path": self.path, "existed": system.exists(self.path)}

    def apply(self, system: System, tell: Tell) -> Json:
        digest = self.sha256 or trusted_sha256(system, self.url)
        if not digest:
            raise GpuprovError(
                "the driver's SHA-256 is not known, so a download could not be trusted",
                f"there is no {masked(self.url)}.sha256sum, or not over https",
                "set gpuprov_driver_sha256 (sha256sum FILE, of a file that you trust)",
            )
        system.make_directory(parent_of(self.path), 0o700)
        fetch(system, self.url, self.path, sha256=digest, tell=tell)
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if not before["existed"]:
            system.remove(before["path"])


def place_of(url: str) -> str:
    """Return where a file lies on the host once it is there: in the cache, unless `url` is a path already."""
    return url if url.startswith("/") else f"{CACHE_DIRECTORY}/{url.rstrip('/').rpartition('/')[2]}"


def require_digest(system: System, path: str, sha256: str, what: str, variable: str) -> None:
    """Raise GpuprovError if the file is not the one with this SHA-256; an empty digest asks for none."""
    if sha256 and (digest := system.sha256(path)) != sha256:
        raise GpuprovError(
            f"{what} is not the one that was asked for",
            f"{path} has SHA-256 {digest}, {variable} is {sha256}",
            "get the file again, or correct the digest",
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
                f"make room: {system.df(folder)}",
            )
