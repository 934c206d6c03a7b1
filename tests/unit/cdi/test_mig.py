"""A GPU that is divided by MIG: its parts are devices, with their own capability nodes; the whole is none."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov.cdi.discover import DriverFacts, ask_nvml, discover, missing_nodes, parse_mig_minors
from gpuprov.cdi.generate import chosen_devices, difference, specification
from gpuprov.cdi.specification import Edits, problems, render_json
from tests.simgpu import gpu, install_tree, mig_nodes, mig_uuid, write_kernel_tree
from tests.simgpu.gpus import MIG_INSTANCES
from tests.unit.cdi.test_discover import ANSWER, Host, make_nodes

pytestmark = pytest.mark.root


def answer() -> str:
    """What the child process says of two GPUs, the first of them divided."""
    first, second = ANSWER["gpus"]
    parts = [{"gpu_instance": one, "compute_instance": 0, "uuid": mig_uuid(0, one)} for one in MIG_INSTANCES]
    return json.dumps({**ANSWER, "gpus": [{**first, "mig": parts}, second]})


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Two GPUs, the first of them divided into two instances, with all nodes."""
    install_tree(tmp_path)
    write_kernel_tree(tmp_path, 2, divided=(0,))
    (tmp_path / "lib").symlink_to("usr/lib")
    make_nodes(tmp_path, 2)
    for node in mig_nodes(0):
        os.mknod(tmp_path / node.path.lstrip("/"), stat.S_IFCHR | node.mode, os.makedev(node.major, node.minor))
    host = Host(tmp_path)
    host.answer = (0, answer())
    return host


def edits(driver: DriverFacts) -> dict[str, Edits]:
    return {device.name: device.edits for device in specification(driver).devices}


def paths(found: Edits) -> list[str]:
    return [node.path for node in found.device_nodes]


def test_the_parts_are_devices_by_number_and_uuid(host: Host) -> None:
    found = edits(ask_nvml(host, discover(host)))
    assert list(found) == ["0:0", mig_uuid(0, 1), "0:1", mig_uuid(0, 2), "1", gpu(1).uuid, gpu(1).sysfs_id, "all"]
    assert paths(found["0:0"]) == ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13"]
    assert paths(found["0:1"]) == ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22"]
    assert found[mig_uuid(0, 2)] == found["0:1"]
    assert problems(specification(discover(host))) == ()


def test_all_are_all_parts_and_the_gpus_that_are_whole(host: Host) -> None:
    caps = [f"/dev/nvidia-caps/nvidia-cap{number}" for number in (12, 13, 21, 22)]
    assert paths(edits(discover(host))["all"]) == ["/dev/nvidia0", *caps, "/dev/nvidia1"]
    assert not [path for path in paths(specification(discover(host)).edits) if path[-1].isdigit()]


def test_a_file_with_the_uuids_is_right_while_nvml_is_not_asked(host: Host) -> None:
    asked = ask_nvml(host, discover(host))
    content = render_json(specification(asked))
    assert mig_uuid(0, 2).encode() in content
    assert difference(content, discover(host)) == difference(content, asked) == ""


def test_parts_that_go_and_come_are_differences(host: Host, tmp_path: Path) -> None:
    content = render_json(specification(ask_nvml(host, discover(host))))
    write_kernel_tree(tmp_path / "whole", 2)
    (tmp_path / "proc/driver/nvidia/capabilities/gpu0").rename(tmp_path / "gone")
    assert difference(content, discover(host)) == "device 0 is missing"
    whole = render_json(specification(discover(host)))
    (tmp_path / "gone").rename(tmp_path / "proc/driver/nvidia/capabilities/gpu0")
    assert difference(whole, discover(host)) == "device 0:0 is missing"


def test_missing_capability_nodes_are_made_readable_by_all(host: Host, tmp_path: Path) -> None:
    host.remove("/dev/nvidia-caps/nvidia-cap21")
    (missing,) = missing_nodes(discover(host))
    assert (missing.path, missing.minor, missing.mode) == ("/dev/nvidia-caps/nvidia-cap21", 21, 0o444)


def test_an_answer_about_other_parts_names_none(host: Host) -> None:
    text = answer().replace('"gpu_instance": 2', '"gpu_instance": 9')
    host.answer = (0, text)
    assert [part.uuid for part in ask_nvml(host, discover(host)).gpus[0].mig] == [mig_uuid(0, 1), ""]


def test_a_driver_without_capability_devices_still_names_the_parts(host: Host, tmp_path: Path) -> None:
    devices = tmp_path / "proc/devices"
    devices.write_text(devices.read_text().replace("nvidia-caps", "other"))
    assert paths(edits(discover(host))["0:0"]) == ["/dev/nvidia0"]


def test_names_for_people_who_want_the_kind_in_them(host: Host) -> None:
    found = specification(ask_nvml(host, discover(host)))
    named = chosen_devices(found, strategies=("type-index",), ids=(), no_all_device=True)
    assert [device.name for device in named] == ["mig0:0", "mig0:1", "gpu1"]
    both = chosen_devices(found, strategies=("index", "uuid"), ids=("0:1", gpu(1).uuid), no_all_device=False)
    assert [device.name for device in both] == ["0:1", mig_uuid(0, 2), "1", gpu(1).uuid, "all"]
    assert set(both[-1].edits.device_nodes) == {node for device in both[:-1] for node in device.edits.device_nodes}


def test_minors_of_other_forms_are_none() -> None:
    text = "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\ngpu0/gi0/ci0 5\nconfig x\n../x 6\n"
    assert parse_mig_minors(text) == {"config": 1, "monitor": 2, "gpu0/gi0/access": 3, "gpu0/gi0/ci0/access": 4}


def test_the_numbers_count_in_the_order_of_the_ids(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig"
    (folder / "gi10/ci0").mkdir(parents=True)
    (folder / "gi1/ci1").mkdir()
    (folder / "odd").mkdir()
    found = [(part.index, part.gpu_instance, part.compute_instance) for part in discover(host).gpus[0].mig]
    assert found == [(0, 1, 0), (1, 1, 1), (2, 2, 0), (3, 10, 0)]
    assert replace(discover(host).gpus[0].mig[3], nodes=()).uuid == ""
