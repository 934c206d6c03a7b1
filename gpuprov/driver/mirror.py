"""A site's mirror of NVIDIA's .run files: the versions in its index, and the one that a branch means.

An index is a page with links, as web servers generate for a folder, or a text with a version or a path per line (as
NVIDIA's own latest.txt). Below it lie VERSION/NVIDIA-Linux-ARCH-VERSION.run, as on NVIDIA's server, or only the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from gpuprov.core.download import fetch_small
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
