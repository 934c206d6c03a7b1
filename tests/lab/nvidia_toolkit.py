"""A mirror of the repository of NVIDIA's container toolkit for apt, with stand-ins of its four packages.

NVIDIA's own packages can't be fetched from everywhere: names, dependencies, folders and paths are theirs, the programs
inside are gpuprov's runtime and hook under NVIDIA's names.
"""

from pathlib import Path

from gpuprov.runtime_hook import deploy
from tests.lab.repository import build_package, build_repository, sign, stand_in

_PYTHON = "/usr/bin/python3"
_LIBRARY = "/usr/lib/nvidia-stand-in"
# Only the base is asked for in the very version: that is how apt comes to take newer ones of the others.
PACKAGES = {
    "libnvidia-container1": "",
    "libnvidia-container-tools": "libnvidia-container1 (>= {version})",
    "nvidia-container-toolkit-base": "",
    "nvidia-container-toolkit": (
        "nvidia-container-toolkit-base (= {version}), libnvidia-container-tools (>= {version})"
    ),
}
NAMES = tuple(PACKAGES)
# The same in rpm's words.
RPM_REQUIRES = {name: depends.replace("(", "").replace(")", "") for name, depends in PACKAGES.items()}


def build_toolkit(folder: Path, gnupg: Path, channels: dict[str, tuple[str, ...]]) -> str:
    """Build the mirror in `folder`: the versions of each channel. Return the fingerprint of its key."""
    fingerprint = ""
    for channel, versions in channels.items():
        place = folder / f"{channel}/deb/amd64"
        fingerprint = build_repository(place, gnupg)
        for version in versions:
            for name, depends in PACKAGES.items():
                build_package(place, stand_in(name, version, depends.format(version=version)), files_of(name))
        sign(place, gnupg)
        (folder / "gpgkey").write_bytes((place / "key.asc").read_bytes())
    return fingerprint


def files_of(name: str) -> dict[str, str]:
    """Return the files of a package of the toolkit."""
    if name == "nvidia-container-toolkit":
        return {"usr/bin/nvidia-container-runtime-hook": f'#!/bin/sh\nexec {_LIBRARY}/hook "$@"\n'}
    if name != "nvidia-container-toolkit-base":
        return {f"usr/share/doc/{name}/copyright": "a stand-in\n"}
    modules = {
        path.replace(deploy.LIBRARY_PATH, _LIBRARY).lstrip("/"): content.decode()
        for path, _, content in deploy.deployed_files(_PYTHON)
        if path.startswith(f"{deploy.LIBRARY_PATH}/")
    }
    programs = {
        "usr/bin/nvidia-container-runtime": deploy.render_launcher(_PYTHON, library=_LIBRARY),
        f"{_LIBRARY.lstrip('/')}/hook": deploy.render_hook(_PYTHON, library=_LIBRARY),
    }
    return {**modules, **programs}
