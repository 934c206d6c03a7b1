"""Genuine drivers from Debian's packages: four branches, of each the files that CUDA and nvidia-smi need."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.simgpu import BuildError, cache
from tests.simgpu.debian import fetch

_PACKAGES = ("libcuda1", "libnvidia-ml1", "nvidia-smi")


class UnavailableError(Exception):
    """Debian does not have this driver branch now; the message says what was asked for and what is there."""


@dataclass(frozen=True)
class Branch:
    """A driver branch, the suite of Debian that has it, and the CUDA version that its libcuda reports."""

    suite: str
    cuda: int


BRANCHES = {
    "470": Branch("bullseye", 11040),
    "535": Branch("bookworm", 12020),
    "550": Branch("trixie", 12040),
    "555": Branch("experimental", 12050),
}


@dataclass(frozen=True)
class Driver:
    """A driver's unpacked packages, with its whole version, such as 550.163.01."""

    version: str
    files: Path

    def file(self, name: str) -> Path:
        """Return the real file of this name; raises FileNotFoundError."""
        for path in sorted(self.files.rglob(name)):
            # nvidia-smi's package has a folder and a script of the same name.
            if path.is_file() and not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF":
                return path
        raise FileNotFoundError(f"no {name} below {self.files}")

    def library(self, stem: str) -> Path:
        """Return a library by its name up to `.so`."""
        return self.file(f"{stem}.so.{self.version}")


def driver(branch: str) -> Driver:
    """Return a driver of the branch, fetched once. Raises UnavailableError if Debian has moved on, else BuildError."""
    suite = BRANCHES[branch].suite
    try:
        folder = cache.built(
            "genuine-driver", f"{branch}-{cache.digest_of((suite, *_PACKAGES))}",
            lambda place: fetch(place, suite, "non-free", _PACKAGES, updates=False),
        )  # fmt: skip
    except BuildError as error:
        if suite == "experimental":  # what is there comes and goes
            raise UnavailableError(f"driver {branch} can't be fetched from Debian's {suite}: {error}") from None
        raise
    versions = {
        found[1] for path in folder.rglob("libcuda.so.*") if (found := re.search(r"\.so\.(\d+\..+)$", path.name))
    }
    version = next(iter(versions), "none")
    if not version.startswith(f"{branch}."):
        raise UnavailableError(f"Debian's {suite} has driver {version} now, not {branch}")
    return Driver(version, folder / "unpacked")
