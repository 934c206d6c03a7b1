"""Plain flags: what docker's command line, compose and quadlets get of a container's edits."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuprov.engines.plain_flags import (
    Device,
    Mount,
    PlainFlags,
    compose,
    incus,
    lxc,
    plain_flags,
    quadlet,
    shell_words,
    words,
)
from tests.triplet import LIBRARIES as DEBIAN

EDITS: dict[str, Any] = {
    "deviceNodes": [
        {"path": "/dev/nvidia0"}, {"path": "/dev/nvidiactl", "hostPath": "/mnt/nvidiactl", "permissions": "rw"},
    ],
    "mounts": [
        {"hostPath": "/drv/libcuda.so.550", "containerPath": f"{DEBIAN}/libcuda.so.550", "options": ["ro"]},
        {"hostPath": "/usr/bin/nvidia-smi", "containerPath": "/usr/bin/nvidia-smi"},
    ],
    "env": ["NVIDIA_VISIBLE_DEVICES=void"],
    "additionalGids": [44],
    "links": [f"libcuda.so.550::{DEBIAN}/libcuda.so.1", f"libcuda.so.1::{DEBIAN}/libcuda.so"],
}  # fmt: skip


def test_a_library_is_mounted_by_every_name_in_both_folders() -> None:
    flags = plain_flags(EDITS, DEBIAN)
    names = ("libcuda.so.550", "libcuda.so.1", "libcuda.so")
    places = [f"{folder}/{name}" for name in names for folder in (DEBIAN, "/usr/lib64")]
    assert flags.mounts == (
        *(Mount("/drv/libcuda.so.550", place) for place in places),
        Mount("/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi"),
    )


def test_a_redhat_hosts_libraries_go_to_debians_folder_too() -> None:
    edits = {"mounts": [{"hostPath": "/usr/lib64/vdpau/libv.so.1", "containerPath": "/usr/lib64/vdpau/libv.so.1"}]}
    assert [mount.target for mount in plain_flags(edits, DEBIAN).mounts] == [
        f"{DEBIAN}/vdpau/libv.so.1", "/usr/lib64/vdpau/libv.so.1",
    ]  # fmt: skip


def test_arguments() -> None:
    found = words(plain_flags(EDITS, DEBIAN))
    assert found[:2] == ("--device=/dev/nvidia0:/dev/nvidia0:rwm", "--device=/mnt/nvidiactl:/dev/nvidiactl:rw")
    assert f"--volume=/drv/libcuda.so.550:{DEBIAN}/libcuda.so.1:ro" in found
    assert found[-2:] == ("--env=NVIDIA_VISIBLE_DEVICES=void", "--group-add=44")
    assert shlex.split(" ".join(shell_words(plain_flags(EDITS, DEBIAN)))) == list(found)


@pytest.mark.parametrize("odd", ["/with blank", "/glob*", "/[a]", "/que?", "/back\\slash", "/tab\there"])
def test_what_a_shell_would_change_is_refused_for_shells_alone(odd: str) -> None:
    flags = plain_flags({"mounts": [{"hostPath": odd, "containerPath": "/x"}]}, DEBIAN)
    assert words(flags) == (f"--volume={odd}:/x:ro",)
    with pytest.raises(ValueError, match="a shell would split or expand"):
        shell_words(flags)


@pytest.mark.parametrize("odd", ["/a:b", "/line\nend"])
def test_what_dockers_flags_can_not_hold_is_refused(odd: str) -> None:
    with pytest.raises(ValueError, match="docker's flags can't hold the path"):
        plain_flags({"deviceNodes": [{"path": odd}]}, DEBIAN)


def test_what_flags_can_not_give_is_said() -> None:
    edits = {
        "hooks": [{"hookName": "createContainer", "path": "/opt/hook"}],
        "netDevices": [{"hostInterfaceName": "ib0", "name": "ib0"}],
        "intelRdt": {"closID": "x"},
    }
    assert [sentence.split(":")[0] for sentence in plain_flags(edits, DEBIAN).left_out] == [
        "the hook /opt/hook does not run", "the network device ib0 is not moved", "Intel RDT is not set",
    ]  # fmt: skip


def test_links_in_a_circle_end() -> None:
    edits = {"links": ["a.so::/l/b.so", "b.so::/l/a.so"], "mounts": [{"hostPath": "/h", "containerPath": "/l/c"}]}
    assert plain_flags(edits, DEBIAN).mounts == (Mount("/h", "/l/c"),)


def test_a_compose_file_is_yaml_and_expands_nothing() -> None:
    flags = PlainFlags((Device("/dev/a", "/dev/a"),), (Mount("/h $HOME", "/c"),), ("A=$B",), (44,), ())
    service = yaml.safe_load(compose(flags, "app: x"))["services"]["app: x"]
    assert service == {
        "devices": ["/dev/a:/dev/a:rwm"],
        "volumes": [{"type": "bind", "source": "/h $$HOME", "target": "/c", "read_only": True}],
        "environment": ["A=$$B"],
        "group_add": ["44"],
    }
    assert compose(PlainFlags((), (), (), (), ()), "app") == 'services:\n  "app":\n'


# A node that each machine has stands for a GPU's: 1:3, 0666.
_GUEST = PlainFlags(
    (Device("/dev/null", "/dev/nvidia0"),), (Mount("/h 1/libcuda.so", "/l/libcuda.so"),), ("A=b",), (), ()
)


def test_an_incus_profile_has_each_node_and_each_file_as_a_device() -> None:
    status = Path("/dev/null").stat()
    profile = json.loads(incus(_GUEST, {"/dev/null": status}))
    assert profile["config"] == {"environment.A": "b"}
    assert profile["devices"] == {
        "gpu0": {
            "type": "unix-char",
            "source": "/dev/null",
            "path": "/dev/nvidia0",
            "mode": "0666",
            "gid": str(status.st_gid),
        },
        "file0": {"type": "disk", "source": "/h 1/libcuda.so", "path": "/l/libcuda.so", "readonly": "true"},
    }


def test_lxc_gets_the_device_rule_the_mounts_and_the_environment() -> None:
    assert lxc(_GUEST, {"/dev/null": Path("/dev/null").stat()}).splitlines() == [
        "lxc.cgroup2.devices.allow = c 1:3 rwm",
        "lxc.mount.entry = /dev/null dev/nvidia0 none bind,create=file 0 0",
        "lxc.mount.entry = /h\\0401/libcuda.so l/libcuda.so none bind,ro,create=file 0 0",
        "lxc.environment = A=b",
    ]


def test_a_quadlet() -> None:
    flags = PlainFlags((Device("/dev/a", "/dev/a"),), (Mount("/100%", "/c"),), ("A=b",), (44,), ())
    assert quadlet(flags).splitlines() == [
        "[Container]", "AddDevice=/dev/a:/dev/a:rwm", "Volume=/100%%:/c:ro", "Environment=A=b", "GroupAdd=44",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "environment", "line"),
    [
        ((), ('A=b" "C=d',), r'Environment="A=b\" \"C=d"'),
        ((), ("A=b\n[Service]\nExecStartPre=/bin/x",), r'Environment="A=b\n[Service]\nExecStartPre=/bin/x"'),
        ((), ("A=C:\\x %h",), r'Environment="A=C:\\x %%h"'),
        ((), ("A='b'",), "Environment=\"A='b'\""),
        ((Device("/dev/a b", "/dev/a b"),), (), 'AddDevice="/dev/a b:/dev/a b:rwm"'),
    ],
)
def test_quadlet_value_is_one_word(devices: tuple[Device, ...], environment: tuple[str, ...], line: str) -> None:
    assert quadlet(PlainFlags(devices, (), environment, (), ())).splitlines() == ["[Container]", line]
