"""The manifest: the target of a bundle and its content, every file with its SHA-256. Pure.

The SHA-256 of the manifest is the bundle's digest: it covers all content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gpuprov.core.places import KEYS, REPOSITORY_KEY
from gpuprov.protocol.codec import WrongDataError, load, parse
from gpuprov.protocol.dataclass import asdict, dataclass, field
from gpuprov.protocol.errors import ExitCode, GpuprovError, require_format

# 2: the repository is signed. 3: the CUDA toolkit may be included.
FORMAT = 3
MANIFEST = "manifest.json"
SIGNATURE = "manifest.json.asc"
SIGNING_KEY = f"{KEYS}/bundle.gpg"
CUDA = "cuda"
LARGEST_MANIFEST = 16 << 20

# No part begins with a dot: no hidden files, no way up. A hundred bytes is what a tar header holds.
_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._~-]*(?:/[A-Za-z0-9][A-Za-z0-9+._~-]*)*")
LONGEST_PATH = 100
FINGERPRINT = re.compile(r"[0-9A-F]{40}|[0-9A-F]{64}")


@dataclass(frozen=True)
class BundleFile:
    """One file of a bundle; `size` is in bytes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class BundlePackage:
    """A package, and the path of its file in the bundle."""

    name: str
    version: str
    architecture: str
    file: str


@dataclass(frozen=True)
class BundleImage:
    """A container image as `docker save` wrote it: its name, its identity (engines/containers.py), its file."""

    reference: str
    identity: str
    file: str


@dataclass(frozen=True)
class Manifest:
    """The target and content of a bundle. `architecture` is from `uname -m`, `inputs` lists what it was made from.

    `driver_file` and `cuda_file` are .run files, or nothing. `repository_key` is the full fingerprint of the key that
    signed the repository of its packages.
    """

    distribution: str
    version: str
    architecture: str
    gpuprov: str
    driver_version: str = ""
    driver_file: str = ""
    cuda_version: str = ""
    cuda_file: str = ""
    repository_key: str = ""
    packages: tuple[BundlePackage, ...] = ()
    images: tuple[BundleImage, ...] = ()
    files: tuple[BundleFile, ...] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """Return the hosts that the bundle is for, as a short text for messages."""
        return f"{self.distribution} {self.version} on {self.architecture}"

    def file(self, path: str) -> BundleFile:
        """Return a file by its path; the manifest was checked, so it exists."""
        return next(one for one in self.files if one.path == path)

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON; the same manifest gives the same bytes."""
        data = {"format": FORMAT, **asdict(self)}
        return (json.dumps(data, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Return the manifest in these bytes. Raises GpuprovError if they are not a valid and consistent manifest."""
        try:
            data = parse(content)
            step = "; or make the bundle with this gpuprov: gpuprov bundle create"
            require_format(data, FORMAT, "the bundle", MANIFEST, ExitCode.FAILED, step)
            found = data.get("format") if isinstance(data, dict) else None
            if found != FORMAT:
                raise WrongDataError(f"its format is {found!s:.20}, this gpuprov reads {FORMAT} alone")
            # As they are: a path without its control characters would be another.
            manifest = load(cls, data, trusted=True)
            _require_sound(manifest)
            if manifest.to_bytes() != content:
                raise WrongDataError("it is not written as gpuprov writes manifests, or has keys that it does not know")
        except (WrongDataError, RecursionError) as error:
            what = "the bundle's manifest is damaged or not gpuprov's"
            seen = f"{MANIFEST}: {str(error)[:200]}"
            raise GpuprovError(what, seen, "make the bundle again: gpuprov bundle create") from None
        return manifest


@dataclass(frozen=True)
class BundleFacts:
    """The bundle that an installation uses instead of a network, and which of its images docker already has."""

    manifest: Manifest
    loaded_images: frozenset[str] = frozenset()

    @property
    def vendor_keys(self) -> tuple[str, ...]:
        """The fingerprints of the keys that signed the packages for rpm."""
        names = (one.path for one in self.manifest.files if one.path.startswith(f"{KEYS}/"))
        return tuple(name[len(KEYS) + 1 : -len(".asc")] for name in names if name.endswith(".asc"))


def is_safe_path(path: str) -> bool:
    """Say whether a path is allowed in a bundle: relative, plain letters, no way out."""
    return len(path) <= LONGEST_PATH and _PATH.fullmatch(path) is not None


def _require_sound(manifest: Manifest) -> None:
    """Raise WrongDataError if paths could lead out of the bundle, or name files that it does not contain."""
    paths = [one.path for one in manifest.files]
    for one in manifest.files:
        if not is_safe_path(one.path) or one.path in (MANIFEST, SIGNATURE):
            raise WrongDataError(f"{one.path[:120]!r} is no path for a bundle")
        if one.size < 0 or not re.fullmatch(r"[0-9a-f]{64}", one.sha256):
            raise WrongDataError(f"size or digest of {one.path} is none")
    if paths != sorted(set(paths)):
        raise WrongDataError("its files are not in order, or one is there twice")
    # A file where another path needs a folder can't be unpacked.
    folders = {path.rpartition("/")[0] for path in paths}
    if any(folder == path or folder.startswith(f"{path}/") for folder in folders for path in paths if folder):
        raise WrongDataError("a file is named like a folder")
    named = [one.file for one in manifest.packages] + [one.file for one in manifest.images]
    named += filter(None, (manifest.driver_file, manifest.cuda_file))
    if manifest.packages:
        named.append(REPOSITORY_KEY)
        if not FINGERPRINT.fullmatch(manifest.repository_key):
            raise WrongDataError("it has packages, and no full fingerprint of the key that signed their repository")
    for path in named:
        if path not in paths:
            raise WrongDataError(f"it names {path[:120]!r}, which it does not list")
