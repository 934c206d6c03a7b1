"""Device nodes: those that a host lacks, MIG devices, the kernel's own nodes for graphics."""

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.boot import program_main
from gpuprov.cdi.discover import DriverFacts, Node, ask_nvml, discover, missing_nodes, parse_mig_minors
from gpuprov.cdi.generate import PATH, chosen_devices, difference, host_facts, specification
from gpuprov.cdi.specification import Edits, parse_json, problems, render_json
from gpuprov.core.changes import MakeNode
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from tests import simgpu
from tests.simgpu import gpu, mig_nodes, mig_uuid, write_kernel_tree
from tests.simgpu.gpus import MIG_INSTANCES
from tests.unit.cdi.test_discover import ANSWER, Host
from tests.unit.driver_tree import make_nodes, write_driver

pytestmark = pytest.mark.root
_MINORS = "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\nodd line\nconfig x\n"


@pytest.fixture
def host(tmp_path: Path) -> System:
    """A host with one GPU whose driver has MIG capabilities, and no node at all."""
    simgpu.install_tree(tmp_path)
    simgpu.write_kernel_tree(tmp_path, 1)
    minors = tmp_path / "proc/driver/nvidia-caps/mig-minors"
    minors.parent.mkdir(parents=True, exist_ok=True)
    minors.write_text(_MINORS)
    return System(str(tmp_path))


def test_what_is_missing_is_made_and_then_nothing_is_missing(host: System) -> None:
    missing = {node.path: node for node in missing_nodes(discover(host))}
    assert missing["/dev/nvidia-caps/nvidia-cap1"].mode == 0o400
    assert missing["/dev/nvidia-caps/nvidia-cap2"].mode == 0o444
    assert "/dev/nvidia-caps/nvidia-cap3" not in missing
    for node in missing.values():
        MakeNode(node.path, node.major, node.minor, node.mode, node.gid).apply(host, lambda *_: None)
    assert missing_nodes(discover(host)) == ()
    status = host.path("/dev/nvidia-caps/nvidia-cap1").stat()
    assert stat.S_ISCHR(status.st_mode)
    assert (os.minor(status.st_rdev), status.st_mode & 0o7777) == (1, 0o400)


def test_rights_over_mig_are_in_no_container_that_does_not_ask(host: System) -> None:
    found = specification(discover(host))
    paths = [node.path for edits in found.every_edits for node in edits.device_nodes]
    assert not [path for path in paths if "caps" in path]


# -- MIG devices -------------------------------------------------------------------------------------------------------
def answer() -> str:
    """What the child process says of two GPUs, the first of them divided."""
    first, second = ANSWER["gpus"]
    parts = [{"gpu_instance": one, "compute_instance": 0, "uuid": mig_uuid(0, one)} for one in MIG_INSTANCES]
    return json.dumps({**ANSWER, "gpus": [{**first, "mig": parts}, second]})


@pytest.fixture
def mig_host(tmp_path: Path) -> Host:
    """Two GPUs, the first of them divided into two instances, with all nodes."""
    write_driver(tmp_path, 2, divided=(0,))
    make_nodes(tmp_path, mig_nodes(0))
    mig_host = Host(tmp_path)
    mig_host.nvml = (0, answer())
    return mig_host


def edits(driver: DriverFacts) -> dict[str, Edits]:
    return {device.name: device.edits for device in specification(driver).devices}


def paths(found: Edits) -> list[str]:
    return [node.path for node in found.device_nodes]


def test_the_parts_are_devices_by_number_and_uuid(mig_host: Host) -> None:
    found = edits(ask_nvml(mig_host, discover(mig_host)))
    assert list(found) == ["0:0", mig_uuid(0, 1), "0:1", mig_uuid(0, 2), "1", gpu(1).uuid, gpu(1).sysfs_id, "all"]
    assert paths(found["0:0"]) == ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13"]
    assert paths(found["0:1"]) == ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22"]
    assert found[mig_uuid(0, 2)] == found["0:1"]
    assert problems(specification(discover(mig_host))) == ()


def test_all_are_all_parts_and_the_gpus_that_are_whole(mig_host: Host) -> None:
    caps = [f"/dev/nvidia-caps/nvidia-cap{number}" for number in (12, 13, 21, 22)]
    assert paths(edits(discover(mig_host))["all"]) == ["/dev/nvidia0", *caps, "/dev/nvidia1"]
    assert not [path for path in paths(specification(discover(mig_host)).edits) if path[-1].isdigit()]


def test_a_file_with_the_uuids_is_right_while_nvml_is_not_asked(mig_host: Host) -> None:
    asked = ask_nvml(mig_host, discover(mig_host))
    content = render_json(specification(asked))
    assert mig_uuid(0, 2).encode() in content
    assert difference(content, discover(mig_host)) == difference(content, asked) == ""


def test_parts_that_go_and_come_are_differences(mig_host: Host, tmp_path: Path) -> None:
    content = render_json(specification(ask_nvml(mig_host, discover(mig_host))))
    write_kernel_tree(tmp_path / "whole", 2)
    (tmp_path / "proc/driver/nvidia/capabilities/gpu0").rename(tmp_path / "gone")
    assert difference(content, discover(mig_host)) == "device 0 is missing"
    whole = render_json(specification(discover(mig_host)))
    (tmp_path / "gone").rename(tmp_path / "proc/driver/nvidia/capabilities/gpu0")
    assert difference(whole, discover(mig_host)) == "device 0:0 is missing"


def test_missing_capability_nodes_are_made_readable_by_all(mig_host: Host, tmp_path: Path) -> None:
    mig_host.remove("/dev/nvidia-caps/nvidia-cap21")
    (missing,) = missing_nodes(discover(mig_host))
    assert (missing.path, missing.minor, missing.mode) == ("/dev/nvidia-caps/nvidia-cap21", 21, 0o444)


def test_an_answer_about_other_parts_names_none(mig_host: Host) -> None:
    mig_host.nvml = (0, answer().replace('"gpu_instance": 2', '"gpu_instance": 9'))
    assert [part.uuid for part in ask_nvml(mig_host, discover(mig_host)).gpus[0].mig] == [mig_uuid(0, 1), ""]


def test_a_part_that_goes_while_nvml_is_asked_hides_no_other(mig_host: Host) -> None:
    mig_host.nvml = (0, answer().replace('"gpu_instance": 2', '"gpu_instance": null'))
    asked = ask_nvml(mig_host, discover(mig_host))
    assert [part.uuid for part in asked.gpus[0].mig] == [mig_uuid(0, 1), ""]
    assert asked.cuda_version


def test_uuids_that_nvml_did_not_tell_are_asked_for_again(mig_host: Host) -> None:
    """Nothing else changes later on, and a device plugin asks for MIG devices by their UUIDs."""
    mig_host.make_directory("/run")
    mig_host.nvml = (124, "")
    assert "it is missing" in program_main.refresh(mig_host)
    assert mig_uuid(0, 2) not in (mig_host.read_text(PATH) or "")
    assert program_main.refresh(mig_host) == "nothing has changed"
    mig_host.nvml = (0, answer())
    assert program_main.refresh(mig_host) == f"refreshed: {PATH}"
    assert mig_uuid(0, 2) in (mig_host.read_text(PATH) or "")
    assert program_main.refresh(mig_host) == "nothing has changed"


def test_another_part_in_the_place_of_one_gets_its_uuid(mig_host: Host) -> None:
    """Its ids and nodes may be those of the part before it."""
    mig_host.make_directory("/run")
    program_main.refresh(mig_host)
    other = mig_uuid(5, 2)
    mig_host.nvml = (0, answer().replace(mig_uuid(0, 2), other))
    program_main.refresh(mig_host)
    assert other in (mig_host.read_text(PATH) or "")


def test_a_change_while_nvml_does_not_answer_keeps_what_it_told(mig_host: Host) -> None:
    mig_host.make_directory("/run/nvidia-persistenced")
    program_main.refresh(mig_host)
    before = host_facts(parse_json(mig_host.read_bytes(PATH) or b""))
    mig_host.write("/run/nvidia-persistenced/socket", b"")
    mig_host.nvml = (124, "")
    assert "socket is missing" in program_main.refresh(mig_host)
    found = parse_json(mig_host.read_bytes(PATH) or b"")
    assert host_facts(found) == before
    assert {mig_uuid(0, 1), mig_uuid(0, 2)} <= {device.name for device in found.devices}


def test_a_driver_without_capability_devices_still_names_the_parts(mig_host: Host, tmp_path: Path) -> None:
    devices = tmp_path / "proc/devices"
    devices.write_text(devices.read_text().replace("nvidia-caps", "other"))
    assert paths(edits(discover(mig_host))["0:0"]) == ["/dev/nvidia0"]


def test_names_for_people_who_want_the_kind_in_them(mig_host: Host) -> None:
    found = specification(ask_nvml(mig_host, discover(mig_host)))
    named = chosen_devices(found, strategies=("type-index",), ids=(), no_all_device=True)
    assert [device.name for device in named] == ["mig0:0", "mig0:1", "gpu1"]
    both = chosen_devices(found, strategies=("index", "uuid"), ids=("0:1", gpu(1).uuid), no_all_device=False)
    assert [device.name for device in both] == ["0:1", mig_uuid(0, 2), "1", gpu(1).uuid, "all"]
    assert set(both[-1].edits.device_nodes) == {node for device in both[:-1] for node in device.edits.device_nodes}


def test_minors_of_other_forms_are_none() -> None:
    text = "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\ngpu0/gi0/ci0 5\nconfig x\n../x 6\n"
    assert parse_mig_minors(text) == {"config": 1, "monitor": 2, "gpu0/gi0/access": 3, "gpu0/gi0/ci0/access": 4}


def test_the_numbers_count_in_the_order_of_the_ids(mig_host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig"
    (folder / "gi10/ci0").mkdir(parents=True)
    (folder / "gi1/ci1").mkdir()
    (folder / "odd").mkdir()
    found = [(part.index, part.gpu_instance, part.compute_instance) for part in discover(mig_host).gpus[0].mig]
    assert found == [(0, 1, 0), (1, 1, 1), (2, 2, 0), (3, 10, 0)]
    assert replace(discover(mig_host).gpus[0].mig[3], nodes=()).uuid == ""


# -- the kernel's own nodes, for graphics ------------------------------------------------------------------------------
VIDEO = 44


def drm_host(root: Path) -> System:
    """A drm_host with two GPUs, nvidia-drm loaded, and an X server's modules."""
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
    driver = discover(drm_host(tmp_path))
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
    places = {mount.container_path for mount in specification(discover(drm_host(tmp_path))).edits.mounts}
    folder = "/usr/lib/xorg/modules"
    assert f"{folder}/drivers/nvidia_drv.so" in places
    assert f"{folder}/extensions/libglxserver_nvidia.so.{simgpu.DRIVER_VERSION}" in places


def test_device_node_gets_the_label_of_its_name_where_selinux_is(tmp_path: Path) -> None:
    commands: list[Sequence[str]] = []

    class Labelled(System):
        """This machine with the folder of a kernel that has SELinux."""

        def exists(self, path: str) -> bool:
            return path == "/sys/fs/selinux/enforce" or super().exists(path)

        def run(self, argv: Sequence[str], **_limits: Any) -> Completed:
            commands.append(argv)
            return Completed(tuple(argv), 0, "", "")

    node = tmp_path / "nvidia0"
    Labelled().make_node(str(node), 1, 3, 0o660)
    assert stat.S_ISCHR(node.stat().st_mode)
    assert commands == [("restorecon", str(node))]
    Labelled(str(tmp_path)).make_node("/nvidia1", 1, 3, 0o660)
    assert len(commands) == 1, "an image gets its labels from its builder"
