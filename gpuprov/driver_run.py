"""Which .run file a host's driver comes from and how it is fetched; what all .run files are checked for (CUDA's too).

driver_install.py installs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpuprov.core.changes import Change, Json, Tell, parent_of
from gpuprov.core.download import fetch, trusted_sha256
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.places import CACHE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.facts.host import HostFacts
from gpuprov.protocol import driver_releases
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.secrets import masked
from gpuprov.protocol.spec import HostSpec

# Stands while an installer runs: libraries found beside it may be half an installation, whatever their version.
INCOMPLETE_MARK = f"{STATE_DIRECTORY}/driver-incomplete"


def plan_download(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the download of the .run file; it comes before all else, so that a wrong URL or digest costs nothing."""
    url, path = source(facts, spec)
    there = facts.downloads.get(path)
    digest = sha256(facts, spec)
    if not installs(facts, spec) or url == path or (there and digest in ("", there)):
        return ()
    return (FetchRunfile(url, path, digest),)


def sha256(facts: HostFacts, spec: HostSpec) -> str:
    """Return the digest that is asked for, or known of NVIDIA's own file: that holds wherever the file comes from.

    A path on the host is the administrator's own file. Nothing is returned where the digest beside the file counts.
    """
    if spec.driver_sha256 or spec.driver_url.startswith("/"):
        return spec.driver_sha256
    return driver_releases.known_sha256(spec.driver_version, facts.architecture)


def needs_digest(facts: HostFacts, spec: HostSpec) -> bool:
    """Say whether the file comes over http without a known digest: one beside it comes over the same channel."""
    return source(facts, spec)[0].startswith("http:") and not sha256(facts, spec)


def source(facts: HostFacts, spec: HostSpec) -> tuple[str, str]:
    """Return where the .run file comes from and where it lies on the host; the same if it is there already."""
    url = spec.driver_url or default_url(spec.driver_version, facts.architecture)
    return url, place_of(url)


def installs(facts: HostFacts, spec: HostSpec) -> bool:
    """Say whether the driver will be installed: it is of another version, or a file that all need is not whole."""
    if spec.driver != "runfile":
        return False
    other = facts.driver_installed_version != spec.driver_version
    return other or bool(facts.driver_damage) or INCOMPLETE_MARK in facts.files


def default_url(version: str, architecture: str) -> str:
    """Return where NVIDIA publishes a driver with its SHA-256 beside it.

    Some data-centre releases are only at …/tesla/VERSION/, where no digest lies: for those both must be given.
    """
    return (
        f"https://us.download.nvidia.com/XFree86/Linux-{architecture}/{version}/"
        f"NVIDIA-Linux-{architecture}-{version}.run"
    )


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
