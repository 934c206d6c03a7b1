"""What graphics need beside libraries: the kernel's own device nodes, and modules for an X server."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpuprov.cdi.discover import Node, discover
from gpuprov.cdi.generate import specification
from gpuprov.cdi.specification import problems
from gpuprov.core.system import System
from tests import simgpu

pytestmark = pytest.mark.root

VIDEO = 44


def host(root: Path) -> System:
    """A host with two GPUs, nvidia-drm loaded, and an X server's modules."""
    simgpu.install_tree(root)
    simgpu.write_kernel_tree(root, 2)
    for number in range(2):
        folder = root / f"sys/bus/pci/devices/{simgpu.gpu(number).sysfs_id}/drm"
        for name, minor in ((f"card{number}", number), (f"renderD{128 + number}", 128 + number), ("version", 0)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            if name != "version":
                place = root / "dev/dri" / name
                place.parent.mkdir(parents=True, exist_ok=True)
                os.mknod(place, stat.S_IFCHR | 0o660, os.makedev(226, minor))
                place.chmod(0o660)
                os.chown(place, 0, VIDEO)
    for name in ("drivers/nvidia_drv.so", f"extensions/libglxserver_nvidia.so.{simgpu.DRIVER_VERSION}"):
        place = root / "usr/lib/xorg/modules" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    return System(str(root))


def test_each_gpu_brings_its_own_nodes_for_rendering(tmp_path: Path) -> None:
    driver = discover(host(tmp_path))
    assert driver.gpus[1].drm_nodes == (
        Node("/dev/dri/card1", 226, 1, 0o660, VIDEO), Node("/dev/dri/renderD129", 226, 129, 0o660, VIDEO),
    )  # fmt: skip
    found = specification(driver)
    assert problems(found) == ()
    edits = {device.name: device.edits for device in found.devices}
    assert [node.path for node in edits["1"].device_nodes] == ["/dev/nvidia1", "/dev/dri/card1", "/dev/dri/renderD129"]
    assert edits["1"].additional_gids == (VIDEO,)
    assert len(edits["all"].device_nodes) == 6
    assert not [node for node in found.edits.device_nodes if "/dri/" in node.path]


def test_an_x_servers_modules_are_mounted_where_they_lie(tmp_path: Path) -> None:
    places = {mount.container_path for mount in specification(discover(host(tmp_path))).edits.mounts}
    folder = "/usr/lib/xorg/modules"
    assert f"{folder}/drivers/nvidia_drv.so" in places
    assert f"{folder}/extensions/libglxserver_nvidia.so.{simgpu.DRIVER_VERSION}" in places
