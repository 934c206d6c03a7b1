"""Devices beside GPUs: each kind from the nodes that are there, a sentence where there are none."""

import json
import os
import stat
from pathlib import Path

import pytest

from gpuprov import toolkit
from gpuprov.cdi.generate import OTHER_PATHS, other_specifications, specification_of
from gpuprov.cdi.specification import problems
from gpuprov.core.system import System
from tests import simgpu

pytestmark = pytest.mark.root


@pytest.fixture
def host(tmp_path: Path) -> System:
    """A host with one of each."""
    simgpu.install_tree(tmp_path)
    simgpu.write_kernel_tree(tmp_path, 2)
    nodes = (
        "nvidia-fs0", "nvidia-fs10", "nvidia-fs2", "infiniband/uverbs0", "infiniband/rdma_cm", "infiniband/umad0",
        "gdrdrv",
        "nvidia-nvswitchctl", "nvidia-nvswitch0", "nvidia-caps-imex-channels/channel0",
        "nvidia-caps-imex-channels/channel7", "nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm",
        "nvidia-caps/nvidia-cap1",
    )  # fmt: skip
    for minor, name in enumerate(nodes):
        place = tmp_path / "dev" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(240, minor))
        place.chmod(0o660 if name == "gdrdrv" else 0o666)
        os.chown(place, 0, 27 if name == "gdrdrv" else 0)
    (tmp_path / "run/udev").mkdir(parents=True)
    (tmp_path / "etc").mkdir(exist_ok=True)
    (tmp_path / "etc/cufile.json").write_text("{}")
    return System(str(tmp_path))


@pytest.mark.parametrize(
    ("mode", "kind", "paths"),
    [
        ("gds", "nvidia.com/gds", ["nvidia-fs0", "nvidia-fs2", "nvidia-fs10"]),
        ("mofed", "nvidia.com/mofed", ["infiniband/rdma_cm", "infiniband/uverbs0"]),
        ("gdrcopy", "nvidia.com/gdrcopy", ["gdrdrv"]),
        ("nvswitch", "nvidia.com/nvswitch", ["nvidia-nvswitch0", "nvidia-nvswitchctl"]),
        (
            "imex", "nvidia.com/imex-channel",
            ["nvidia-caps-imex-channels/channel0", "nvidia-caps-imex-channels/channel7"],
        ),
    ],
)  # fmt: skip
def test_each_kind_has_its_nodes(host: System, mode: str, kind: str, paths: list[str]) -> None:
    found = specification_of(host, mode)
    assert found.kind == kind
    assert problems(found) == ()
    every = next(device for device in found.devices if device.name == "all")
    assert [node.path for node in every.edits.device_nodes] == [f"/dev/{path}" for path in paths]


def test_what_goes_with_storage_is_mounted(host: System) -> None:
    (device,) = specification_of(host, "gds").devices
    assert [mount.container_path for mount in device.edits.mounts] == ["/run/udev", "/etc/cufile.json"]


def test_channels_are_named_by_their_numbers(host: System) -> None:
    assert [device.name for device in specification_of(host, "imex").devices] == ["0", "7", "all"]


def test_a_node_that_not_everybody_may_open_keeps_mode_and_group(host: System) -> None:
    (device,) = specification_of(host, "gdrcopy").devices
    (node,) = device.edits.device_nodes
    assert (node.file_mode, node.gid) == (0o660, 27)


def test_management_is_everything_with_the_drivers_files(host: System) -> None:
    found = specification_of(host, "management")
    assert (found.kind, [device.name for device in found.devices]) == ("management.nvidia.com/gpu", ["all"])
    paths = {node.path for node in found.devices[0].edits.device_nodes}
    assert {"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-nvswitchctl"} <= paths
    assert "/usr/bin/nvidia-smi" in {mount.container_path for mount in found.edits.mounts}
    assert problems(found) == ()


def test_an_installation_writes_what_the_host_has_devices_for(host: System) -> None:
    found = other_specifications(host)
    assert tuple(found) == OTHER_PATHS
    assert json.loads(found["/etc/cdi/nvidia-gds.json"])["kind"] == "nvidia.com/gds"
    host.remove("/dev/gdrdrv")
    assert tuple(other_specifications(host)) == tuple(path for path in OTHER_PATHS if "gdrcopy" not in path)


@pytest.mark.parametrize(
    "text",
    [
        "cdiVersion: 0.5.0\nkind: nvidia.com/gds\n",
        "cdiVersion: 0.5.0\nkind: nvidia.com/gds  # ours\n",
        '{\n "cdiVersion": "0.5.0",\n "kind": "nvidia.com/gds",\n',
        '{"cdiVersion":"0.5.0","kind":"nvidia.com/gds","devices":[]}',
    ],
)
def test_a_kind_that_somebody_elses_file_has_is_left_to_it(host: System, text: str) -> None:
    host.make_directory("/etc/cdi")
    host.write("/etc/cdi/gds.yaml", text.encode())
    assert "/etc/cdi/nvidia-gds.json" not in other_specifications(host)
    host.write("/etc/cdi/gds.yaml", text.replace("/gds", "/gds-2").encode())
    assert "/etc/cdi/nvidia-gds.json" in other_specifications(host)
    # Engines read no such file.
    host.write("/etc/cdi/gds.yaml.bak", text.encode())
    assert "/etc/cdi/nvidia-gds.json" in other_specifications(host)
    # Our own of before is no other's.
    host.write("/etc/cdi/nvidia-gds.json", text.encode())
    assert "/etc/cdi/nvidia-gds.json" in other_specifications(host)


def test_an_installation_brings_them_up_to_date_with_the_gpus_own(host: System) -> None:
    (host.root / "lib").symlink_to("usr/lib")
    change = toolkit.WriteCdiSpecification(None)
    before = change.capture(host)
    change.apply(host, lambda *_: None)
    assert {path for path in OTHER_PATHS if host.exists(path)} == set(OTHER_PATHS)
    assert host.exists(toolkit.CDI_SPECIFICATION)
    change.undo(host, before, None)
    assert not [path for path in (*OTHER_PATHS, toolkit.CDI_SPECIFICATION) if host.exists(path)]
