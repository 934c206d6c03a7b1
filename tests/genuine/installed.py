"""A whole genuine driver as Debian's own packages install it: dpkg and their scripts, in a copy of a lab host's files.

The copy is an overlay that exists while the packages are installed; what they brought is kept.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.lab.base import build_base
from tests.lab.lab import REPOSITORY
from tests.simgpu import cache
from tests.simgpu.commands import output_of
from tests.simgpu.debian import download

_SUITE = "trixie"
# Every package of the driver with user space files, but for libnvoptix1 (100 MB), kernel modules and 32-bit libraries.
_DRIVER = (
    "libcuda1", "libcudadebugger1", "libegl-nvidia0", "libgl1-nvidia-glvnd-glx", "libgles-nvidia1", "libgles-nvidia2",
    "libglx-nvidia0", "libnvcuvid1", "libnvidia-allocator1", "libnvidia-api1", "libnvidia-cfg1", "libnvidia-eglcore",
    "libnvidia-encode1", "libnvidia-fbc1", "libnvidia-glcore", "libnvidia-glvkspirv", "libnvidia-gpucomp",
    "libnvidia-ml1", "libnvidia-ngx1", "libnvidia-nvvm4", "libnvidia-opticalflow1", "libnvidia-pkcs11-openssl3",
    "libnvidia-ptxjitcompiler1", "libnvidia-rtcore", "nvidia-alternative", "nvidia-cuda-mps", "nvidia-egl-common",
    "nvidia-egl-icd", "nvidia-opencl-icd", "nvidia-opencl-common", "nvidia-persistenced", "nvidia-smi",
    "nvidia-vdpau-driver", "nvidia-vulkan-common", "nvidia-vulkan-icd", "nvidia-xconfig", "xserver-xorg-video-nvidia",
    "nvidia-driver-bin", "nvidia-powerd", "nvidia-modprobe",
)  # fmt: skip
# NVIDIA's plug-ins of EGL, which are free software.
_FREE = ("libnvidia-egl-wayland1", "libnvidia-egl-gbm1")
# What the driver's packages need to be configured.
_SCRIPTS = (
    "glx-alternative-nvidia", "glx-alternative-mesa", "glx-diversions", "update-glx", "nvidia-support",
    "nvidia-installer-cleanup", "nvidia-legacy-check",
)  # fmt: skip
# What an image brings itself: the C library, and what NVIDIA's graphics libraries are linked with.
_IMAGE = (
    "libc6", "libgcc-s1", "libssl3t64", "zlib1g", "libzstd1", "libx11-6", "libxext6", "libxcb1", "libxau6",
    "libxdmcp6", "libbsd0", "libmd0", "libdrm2", "libgbm1", "libexpat1", "libffi8", "libwayland-client0",
    "libwayland-server0", "libegl1", "libglvnd0",
)  # fmt: skip
_INSTALL = """
set -e
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root"
mkdir "$2/root/packages"
mount --bind "$2/packages" "$2/root/packages"
mount -t proc proc "$2/root/proc"
DEBIAN_FRONTEND=noninteractive chroot "$2/root" sh -c 'dpkg --force-depends --install /packages/*.deb' >&2
root=$2/root
shift 2
chroot "$root" sh -c 'for name do echo "package $name"; dpkg -L "$name"; done' sh "$@"
"""


@dataclass(frozen=True)
class Installed:
    """A host's root with the driver's files in it, and of each package the files that dpkg lists."""

    root: Path
    lists: dict[str, tuple[str, ...]]


def installed_driver() -> Installed:
    """Return driver 550 as Debian 13 installs it. Raises BuildError."""
    packages = (*_DRIVER, *_FREE)
    digest = cache.digest_of((_SUITE, _INSTALL, *packages, *_SCRIPTS))
    folder = cache.built("genuine-installed", f"550-{digest}", lambda place: _install(place, packages))
    lists = json.loads((folder / "lists.json").read_text())
    return Installed(folder / "upper", {name: tuple(paths) for name, paths in lists.items()})


def image_files() -> Path:
    """Return a root file system with the libraries that an image with graphics brings."""
    digest = cache.digest_of((_SUITE, *_IMAGE))

    def build(folder: Path) -> None:
        download(folder, _SUITE, "main", _IMAGE)
        for package in folder.glob("*.deb"):
            output_of("dpkg-deb", "-x", str(package), str(folder / "root"), hint="install dpkg")
            package.unlink()

    return cache.built("genuine-image", digest, build) / "root"


def _install(folder: Path, packages: tuple[str, ...]) -> None:
    base = build_base(REPOSITORY / ".cache/bases", _SUITE, print)
    for name in ("packages", "upper", "work", "root"):
        (folder / name).mkdir()
    download(folder / "packages", _SUITE, "main contrib non-free", (*packages, *_SCRIPTS), updates=False)
    argv = ("unshare", "--mount", "sh", "-c", _INSTALL, "sh", str(base), str(folder), *packages)
    said = output_of(*argv, hint="the packages could not be installed: the lines above say why")
    lists: dict[str, list[str]] = {}
    for line in said.splitlines():
        if line.startswith("package "):
            lists[line.partition(" ")[2]] = []
        else:
            list(lists.values())[-1].append(line)
    (folder / "lists.json").write_text(json.dumps(lists))
    for place in (folder / "packages").glob("*.deb"):
        place.unlink()
