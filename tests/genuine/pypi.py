"""Genuine CUDA runtimes, and the assembler: wheels from PyPI, fetched by pip and unpacked."""

import sys
import zipfile
from pathlib import Path

from tests.simgpu import cache
from tests.simgpu.commands import output_of

# CUDA's major release -> the wheel that has its libcudart.
_RUNTIMES = {
    "11": "nvidia-cuda-runtime-cu11==11.8.89",
    "12": "nvidia-cuda-runtime-cu12==12.4.127",
    "13": "nvidia-cuda-runtime==13.0.96",
}


def libcudart(major: str) -> Path:
    """Return the genuine libcudart of a major release of CUDA: 11.8, 12.4 or 13.0."""
    requirement = _RUNTIMES[major]
    folder = cache.built("genuine-wheel", requirement, lambda place: _fetch(place, requirement))
    (found,) = folder.rglob("libcudart.so.*")
    return found


def ptxas() -> Path:
    """Return the genuine assembler of CUDA 12.9."""
    requirement = "nvidia-cuda-nvcc-cu12==12.9.86"
    folder = cache.built("genuine-wheel", requirement, lambda place: _fetch(place, requirement))
    (found,) = folder.rglob("bin/ptxas")
    found.chmod(0o755)
    return found


def _fetch(folder: Path, requirement: str) -> None:
    words = ("download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement)
    output_of(sys.executable, "-m", "pip", *words, hint=f"check that pip can install {requirement} on this machine")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    wheel.unlink()
