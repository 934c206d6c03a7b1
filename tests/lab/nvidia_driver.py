"""A mirror of NVIDIA's CUDA repository for apt, with stand-ins of the packages that bring the driver.

Names, dependencies and folders are NVIDIA's; inside are the simulated driver's libraries and its modules' sources.
"""

from pathlib import Path

from tests import simgpu
from tests.lab.repository import build_package, build_repository, sign, stand_in

_PREFERENCE = (
    "Package: nvidia-open nvidia-driver nvidia-kernel-open-dkms\nPin: version {branch}.*\nPin-Priority: 1000\n"
)
_LDCONFIG = "#!/bin/sh\nldconfig\n"
# As debhelper's dh_dkms has it in packages.
_DKMS_POSTINST = (
    "#!/bin/sh\nset -e\n[ $1 != configure ] || /usr/lib/dkms/common.postinst nvidia {version} '' amd64 ''\n"
)
_DKMS_PRERM = "#!/bin/sh\nset -e\ndkms remove -m nvidia -v {version} --all || :\n"


def build_cuda(folder: Path, gnupg: Path, versions: tuple[str, ...]) -> str:
    """Build debian12/x86_64 below `folder`: each of these drivers, and its branch's pin.

    Returns the fingerprint of the key.
    """
    place = folder / "debian12/x86_64"
    fingerprint = build_repository(place, gnupg)
    for version in versions:
        _build_driver(place, version, folder / "driver")
    sign(place, gnupg)
    (place / "3bf863cc.pub").write_bytes((place / "key.asc").read_bytes())
    return fingerprint


def _build_driver(place: Path, version: str, tree: Path) -> None:
    branch = version.partition(".")[0]
    preference = {f"etc/apt/preferences.d/nvidia-driver-pinning-{branch}": _PREFERENCE.format(branch=branch)}
    build_package(place, stand_in(f"nvidia-driver-pinning-{branch}", branch), preference)
    same = f"(= {version}-1)"
    needs = f"nvidia-driver {same}, nvidia-kernel-open-dkms {same}"
    build_package(place, stand_in("nvidia-open", f"{version}-1", needs), {})
    simgpu.install_tree(tree, version)
    scripts = {f"DEBIAN/{name}": _LDCONFIG for name in ("postinst", "postrm")}
    build_package(place, stand_in("nvidia-driver", f"{version}-1"), scripts, tree)
    build_package(place, stand_in("nvidia-kernel-open-dkms", f"{version}-1", "dkms"), _modules(version))


def _modules(version: str) -> dict[str, str]:
    sources = simgpu.module_sources(version, "kernel-open")
    return {
        **{f"usr/src/nvidia-{version}/{name}": text for name, text in sources.items()},
        "DEBIAN/postinst": _DKMS_POSTINST.format(version=version),
        "DEBIAN/prerm": _DKMS_PRERM.format(version=version),
    }
