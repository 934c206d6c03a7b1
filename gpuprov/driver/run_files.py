"""NVIDIA's .run files: a site's mirror of them, their download, and checks before they run, CUDA's too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from gpuprov.core.changes import Change, Json, Tell, parent_of
from gpuprov.core.download import fetch, fetch_small, trusted_sha256
from gpuprov.core.places import CACHE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.protocol import driver_releases
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.secrets import masked
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.versions import version_numbers

_LINK = re.compile(r"""href\s*=\s*["']?([^"'\s>]+)""", re.IGNORECASE)
_VERSION = r"\d{3,4}\.\d{2,4}(?:\.\d{2})?"


def resolved(system: System, spec: HostSpec, architecture: str) -> HostSpec:
    """Return the spec with version, URL and digest from the mirror, if it names one; this uses the network.

    Raises GpuprovError if the index is unavailable, or has no release of the branch.
    """
    if not spec.driver_mirror or spec.driver != "runfile" or spec.driver_url or not spec.driver_version:
        return spec
    base, index = _places(spec.driver_mirror)
    if "." in spec.driver_version:
        # NVIDIA's own order of files: a version that is asked for by its name needs no index.
        return _with_file(spec, base, spec.driver_version, _nested(spec.driver_version, architecture), architecture)
    found = parse_index(fetch_small(system, index).decode("utf-8", "replace"), architecture)
    version = newest(spec.driver_version, found)
    if not version:
        branches = ", ".join(sorted({one.split(".")[0] for one in found})) or "none"
        raise GpuprovError(
            f"the mirror {masked(index)} has no driver of branch {spec.driver_version}",
            f"branches in its index: {branches}",
            "set gpuprov_driver_version to one of these, or gpuprov_driver_mirror to another mirror",
        )
    return _with_file(spec, base, version, found[version], architecture)


def of_bundle(spec: HostSpec, version: str) -> HostSpec:
    """Return the spec where a bundle stands in for the mirror: a branch is the bundle's release, if that is of it."""
    if not spec.driver_mirror or not spec.driver_version or "." in spec.driver_version:
        return spec
    matches = spec.driver_version in ("latest", version.split(".")[0])
    return replace(spec, driver_version=version if matches else driver_releases.resolved(spec.driver_version))


def _places(mirror: str) -> tuple[str, str]:
    """Return the folder and the index: the folder itself, or the named file in it."""
    folder, _, name = mirror.rstrip("/").rpartition("/")
    if re.search(r"\.(txt|html?)$", name):
        return folder, mirror
    return mirror.rstrip("/"), f"{mirror.rstrip('/')}/"


def _nested(version: str, architecture: str) -> str:
    return f"{version}/NVIDIA-Linux-{architecture}-{version}.run"


def _with_file(spec: HostSpec, base: str, version: str, path: str, architecture: str) -> HostSpec:
    # A known digest of NVIDIA's own file also applies to a mirror's copy.
    digest = spec.driver_sha256 or driver_releases.known_sha256(version, architecture)
    return replace(spec, driver_version=version, driver_url=f"{base}/{path}", driver_sha256=digest)


def parse_index(text: str, architecture: str) -> Mapping[str, str]:
    """Return version → path below the index of the drivers that an index lists for an architecture."""
    found: dict[str, str] = {}
    for word in _words(text):
        file = re.fullmatch(rf"(?:.*/)?NVIDIA-Linux-{re.escape(architecture)}-({_VERSION})\.run", word)
        folder = re.fullmatch(rf"(?:\./)?({_VERSION})/?", word)
        if file:
            found[file[1]] = word[2:] if word.startswith("./") else word
        elif folder:
            found.setdefault(folder[1], _nested(folder[1], architecture))
    return found


def _words(text: str) -> Iterator[str]:
    """Yield the relative links of a page, or the words of a text."""
    words = _LINK.findall(text) if _LINK.search(text) else text.split()
    return (word for word in words if ":" not in word and not word.startswith(("/", "?", "#")) and ".." not in word)


def newest(wanted: str, versions: Mapping[str, str]) -> str:
    """Return the newest version of a branch; for `latest` that of the long-term branch, or of all if it is missing."""
    branch = driver_releases.LONG_TERM_BRANCH if wanted == "latest" else wanted
    ordered = sorted(versions, key=version_numbers)
    of_branch = [version for version in ordered if version.split(".")[0] == branch]
    if not of_branch and wanted == "latest":
        of_branch = ordered
    return of_branch[-1] if of_branch else ""


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
