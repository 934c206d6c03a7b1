"""From driver trees as installers and distributions lay them to the CDI specification."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gpuprov.cdi.discover import (
    DriverFacts,
    Gpu,
    Node,
    discover,
    expected_nodes,
    missing_nodes,
    parse_devices,
    parse_kernel_version,
)
from gpuprov.cdi.files import Library
from gpuprov.cdi.generate import host_facts, specification
from gpuprov.cdi.specification import Edits, Specification, render_json
from gpuprov.core.system import System
from gpuprov.runtime_hook.driver_files import HOOK_PATH
from tests.simgpu import device_nodes, gpu, install_tree, write_kernel_tree
from tests.triplet import LIBRARIES as DEBIAN
from tests.unit.driver_tree import mounts, write_driver

pytestmark = pytest.mark.root

VERSION = "550.163.01"
_NVRM, _GCC = "NVRM version: NVIDIA UNIX", "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)\n"


def host(root: Path, gpus: int = 1) -> System:
    write_driver(root, gpus)
    return System(str(root))


def document(driver: DriverFacts) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(render_json(specification(driver)))
    return found


@pytest.mark.parametrize("count", [1, 16])
def test_driver_and_gpus_are_found(tmp_path: Path, count: int) -> None:
    driver = discover(host(tmp_path, count))
    assert (driver.kernel_version, driver.library_version) == (VERSION, VERSION)
    assert driver.gpus == tuple(
        Gpu(index, index, gpu(index).uuid, gpu(index).sysfs_id, gpu(index).name) for index in range(count)
    )
    paths = [node.path for node in driver.nodes]
    own = [f"/dev/nvidia{index}" for index in range(count)]
    control = ["/dev/nvidiactl", "/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
    assert paths == [*own, *control]
    rights = [node.path for node in driver.capability_nodes]
    assert rights == ["/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"]
    assert driver.present == (*paths, *rights)
    assert missing_nodes(driver) == ()
    assert "/usr/bin/nvidia-smi" in [program.path for program in driver.programs]
    assert driver.firmware == tuple(f"/lib/firmware/nvidia/{VERSION}/gsp_{name}.bin" for name in ("ga10x", "tu10x"))


@pytest.mark.parametrize("directory", [DEBIAN, "/usr/lib64"])
def test_each_name_of_a_library_is_a_mount_of_its_own(tmp_path: Path, directory: str) -> None:
    write_driver(tmp_path, 1, library_directory=directory)
    found = mounts(discover(System(str(tmp_path))))
    sonames = (
        "libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so", "libnvidia-ptxjitcompiler.so.1",
        "libnvidia-nvvm.so.4", "libnvidia-opencl.so.1", "libnvidia-encode.so.1", "libnvcuvid.so.1", "libnvoptix.so.1",
        "libcudadebugger.so.1", "libEGL_nvidia.so.0", "libGLX_nvidia.so.0",
    )  # fmt: skip
    for soname in sonames:
        real = f"{directory}/{soname.partition('.so')[0]}.so.{VERSION}"
        assert found[f"{directory}/{soname}"] == real
        assert found[real] == real
    assert found["/usr/bin/nvidia-smi"] == "/usr/bin/nvidia-smi"
    assert not [path for path in found if "libGL.so" in path or "libEGL.so" in path]


def test_libraries_of_another_version_stay_out(tmp_path: Path) -> None:
    system = host(tmp_path)
    (tmp_path / f"{DEBIAN[1:]}/libcuda.so.470.256.02").write_bytes(b"left over")
    (tmp_path / f"{DEBIAN[1:]}/libnvidia-old.so.1").symlink_to("libnvidia-old.so.470.256.02")
    assert not [path for path in mounts(discover(system)) if "470" in path or "old" in path]


def test_libraries_that_count_on_their_own_come_too(tmp_path: Path) -> None:
    system = host(tmp_path)
    (tmp_path / f"{DEBIAN[1:]}/libnvidia-egl-gbm.so.1.1.1").write_bytes(b"")
    (tmp_path / f"{DEBIAN[1:]}/libnvidia-egl-gbm.so.1").symlink_to("libnvidia-egl-gbm.so.1.1.1")
    found = mounts(discover(system))
    assert found[f"{DEBIAN}/libnvidia-egl-gbm.so.1"] == f"{DEBIAN}/libnvidia-egl-gbm.so.1.1.1"


@pytest.mark.parametrize(
    ("links", "path", "real"),
    [
        ({"a": "/b/c"}, "/a", "/b/c"),
        ({"a": "b", "b": "/c/../d"}, "/a", "/d"),
        ({"x/a": "../y"}, "/x/a/z", "/y/z"),
        ({"a": "../../../etc/passwd"}, "/a", "/etc/passwd"),
        ({"a": "a"}, "/a", "/a"),
        ({}, "/no/./such//file", "/no/such/file"),
    ],
)
def test_links_are_followed_within_the_root(tmp_path: Path, links: dict[str, str], path: str, real: str) -> None:
    for name, target in links.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
    assert System(str(tmp_path)).real_path(path) == real


def test_a_library_of_another_version_than_the_kernels_is_told_apart(tmp_path: Path) -> None:
    install_tree(tmp_path, "550.163.01")
    write_kernel_tree(tmp_path, 1, "535.216.03")
    driver = discover(System(str(tmp_path)))
    assert (driver.kernel_version, driver.library_version) == ("535.216.03", "550.163.01")
    assert host_facts(specification(driver)) == {"--host-cuda-version": "12.4", "--host-driver-version": "550.163.01"}


def test_a_host_without_a_driver_has_nothing(tmp_path: Path) -> None:
    driver = discover(System(str(tmp_path)))
    assert driver == DriverFacts()
    assert specification(driver) == Specification((), Edits(env=("NVIDIA_VISIBLE_DEVICES=void",)), {})


def rewrite(root: Path, index: int, old: str, new: str) -> None:
    path = root / f"proc/driver/nvidia/gpus/{gpu(index).sysfs_id}/information"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_gpu_that_was_not_initialised_has_no_uuid(tmp_path: Path) -> None:
    system = host(tmp_path, 2)
    rewrite(tmp_path, 0, gpu(0).uuid, "GPU-????????-????-????-????-????????????")
    driver = discover(system)
    assert [one.uuid for one in driver.gpus] == ["", gpu(1).uuid]
    names = [device["name"] for device in document(driver)["devices"]]
    assert names == ["0", gpu(0).sysfs_id, "1", gpu(1).uuid, gpu(1).sysfs_id, "all"]


def test_an_excluded_gpu_does_not_count(tmp_path: Path) -> None:
    system = host(tmp_path, 3)
    rewrite(tmp_path, 1, "GPU Excluded:\t No", "GPU Excluded:\t Yes")
    driver = discover(system)
    assert [(one.index, one.minor) for one in driver.gpus] == [(0, 0), (1, 2)]
    devices = {device["name"]: device for device in document(driver)["devices"]}
    assert devices["1"]["containerEdits"]["deviceNodes"][0]["path"] == "/dev/nvidia2"


def test_a_gpu_whose_version_file_is_missing_is_not_served(tmp_path: Path) -> None:
    system = host(tmp_path)
    (tmp_path / "proc/driver/nvidia/version").unlink()
    driver = discover(system)
    assert (driver.kernel_version, driver.library_version) == ("", VERSION)
    assert (driver.gpus, driver.nodes) == ((), ())
    assert document(driver)["devices"] == []


def test_nodes_that_are_missing_or_have_other_numbers_are_to_be_made(tmp_path: Path) -> None:
    system = host(tmp_path, 2)
    (tmp_path / "dev/nvidia1").unlink()
    (tmp_path / "dev/nvidiactl").unlink()
    os.mknod(tmp_path / "dev/nvidiactl", stat.S_IFCHR | 0o666, os.makedev(195, 7))
    (tmp_path / "dev/nvidia-uvm").unlink()
    (tmp_path / "dev/nvidia-uvm").write_text("a plain file")
    uvm = next(node for node in device_nodes(2) if node.path == "/dev/nvidia-uvm")
    assert missing_nodes(discover(system)) == (
        Node("/dev/nvidia1", 195, 1),
        Node("/dev/nvidiactl", 195, 255),
        Node("/dev/nvidia-uvm", uvm.major, 0),
    )


@pytest.mark.parametrize("count", [1, 16])
def test_the_specification_names_every_gpu_three_ways(tmp_path: Path, count: int) -> None:
    found = document(discover(host(tmp_path, count)))
    assert (found["cdiVersion"], found["kind"]) == ("0.5.0", "nvidia.com/gpu")
    expected = [name for index in range(count) for name in (str(index), gpu(index).uuid, gpu(index).sysfs_id)]
    assert [device["name"] for device in found["devices"]] == [*expected, "all"]
    for index in range(count):
        for device in found["devices"][index * 3 : index * 3 + 3]:
            node = {"path": f"/dev/nvidia{index}", "type": "c", "major": 195, "minor": index, "permissions": "rw"}
            assert device["containerEdits"] == {"deviceNodes": [node]}
    everyone = found["devices"][-1]["containerEdits"]["deviceNodes"]
    assert [node["path"] for node in everyone] == [f"/dev/nvidia{index}" for index in range(count)]
    control = [node["path"] for node in found["containerEdits"]["deviceNodes"]]
    assert control == ["/dev/nvidiactl", "/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
    assert found["containerEdits"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
    (hook,) = found["containerEdits"]["hooks"]
    assert (hook["hookName"], hook["path"]) == ("createContainer", HOOK_PATH)
    # Without `env`, runc 1.1 would give the hook the image's environment.
    assert hook["env"]


def test_every_mount_is_read_only_and_unique(tmp_path: Path) -> None:
    system = host(tmp_path)
    (tmp_path / "run/nvidia-persistenced").mkdir(parents=True)
    (tmp_path / "run/nvidia-persistenced/socket").touch()
    found = document(discover(system))["containerEdits"]["mounts"]
    assert all({"ro", "nosuid", "nodev"} <= set(mount["options"]) for mount in found)
    paths = [mount["containerPath"] for mount in found]
    assert len(paths) == len(set(paths))
    (socket,) = (mount for mount in found if mount["containerPath"] == "/run/nvidia-persistenced/socket")
    assert "noexec" in socket["options"]


def test_a_library_without_links_is_mounted_where_it_lies() -> None:
    driver = DriverFacts(libraries=(Library("/usr/lib64/libnvidia-tls.so.1.2", ()),))
    assert mounts(driver) == {"/usr/lib64/libnvidia-tls.so.1.2": "/usr/lib64/libnvidia-tls.so.1.2"}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (f"{_NVRM} x86_64 Kernel Module  550.163.01  Tue Apr  8 12:41:17 UTC 2025\n{_GCC}", "550.163.01"),
        (f"{_NVRM} Open Kernel Module for x86_64  570.86.16  Release Build  (dvs-builder@U22-I3)\n", "570.86.16"),
        (f"{_NVRM} Open Kernel Module for aarch64  580.65.06  Release Build\n", "580.65.06"),
        (f"{_NVRM} x86_64 Kernel Module  390.157  Wed Oct 12 09:19:07 UTC 2022\n", "390.157"),
        ("", ""),
        (_GCC, ""),
    ],
)
def test_kernel_version(text: str, version: str) -> None:
    assert parse_kernel_version(text) == version


def test_proc_devices() -> None:
    text = (
        "Character devices:\n  1 mem\n  5 /dev/tty\n195 nvidia\n195 nvidiactl\n511 nvidia-uvm\n\n"
        "Block devices:\n  8 sd\n195 nvidia-uvm\n"
    )
    assert parse_devices(text) == {"mem": 1, "/dev/tty": 5, "nvidia": 195, "nvidiactl": 195, "nvidia-uvm": 511}
    assert parse_devices("") == {}


@pytest.mark.parametrize(
    ("majors", "paths"),
    [
        ({}, ["/dev/nvidia0", "/dev/nvidiactl"]),
        ({"nvidia-frontend": 195, "nvidia-uvm": 511}, [
            "/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools",
        ]),
        ({"nvidia": 195, "nvidia-modeset": 195}, ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-modeset"]),
    ],
)  # fmt: skip
def test_nodes_follow_the_devices_that_the_kernel_knows(majors: dict[str, int], paths: list[str]) -> None:
    assert [node.path for node in expected_nodes((0,), majors)] == paths
    assert expected_nodes((), majors) == ()
    assert expected_nodes((7,), majors)[0] == Node("/dev/nvidia7", 195, 7)
