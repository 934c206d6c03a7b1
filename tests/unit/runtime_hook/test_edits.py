"""CDI's edits in a config.json: what is added, what is replaced, and all the rest as it was."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from gpuprov.runtime_hook.edits import apply_edits, drop_nvidia_hooks, merge_edits
from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.files import normal_path
from tests.triplet import LIBRARIES


def node(path: str, minor: int, **more: Any) -> dict[str, Any]:
    return {"path": path, "type": "c", "major": 195, "minor": minor, "permissions": "rw", **more}


def mount(path: str, *options: str) -> dict[str, Any]:
    return {"hostPath": f"/host{path}", "containerPath": path, "options": list(options)}


GPU_0 = {"deviceNodes": [node("/dev/nvidia0", 0)]}
GPU_1 = {"deviceNodes": [node("/dev/nvidia1", 1)]}
CONTROL = [node("/dev/nvidiactl", 255), node("/dev/nvidia-uvm", 300), node("/dev/nvidia-modeset", 254)]


def edited(config: dict[str, Any], *parts: dict[str, Any], idmap: bool = False) -> dict[str, Any]:
    """Return the configuration with the edits, the edits themselves unchanged."""
    before = copy.deepcopy(parts)
    apply_edits(config, merge_edits(list(parts)), idmap=idmap)
    assert parts == before
    return config


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["A=1", "V=all", "B=2"], ["A=1", "V=void", "B=2"]),
        (["V=0", "A=1", "V=1"], ["V=void", "A=1"]),
        (["A=1"], ["A=1", "V=void"]),
        (["VV=1", "AV=2", "V"], ["VV=1", "AV=2", "V", "V=void"]),
        ([], ["V=void"]),
        (None, ["V=void"]),
    ],
)
def test_a_variable_is_replaced_in_its_place(before: object, after: list[str]) -> None:
    assert edited({"process": {"env": before}}, {"env": ["V=void"]})["process"]["env"] == after


def test_a_device_brings_its_own_variables_files_and_groups_too() -> None:
    device = {"env": ["MINE=1"], "mounts": [mount("/usr/bin/nvidia-smi")], "additionalGids": [44, 0, 44, 27]}
    config = edited({"process": {"user": {"additionalGids": [27]}}}, {}, device)
    assert config["process"]["env"] == ["MINE=1"]
    assert [one["destination"] for one in config["mounts"]] == ["/usr/bin/nvidia-smi"]
    assert config["process"]["user"]["additionalGids"] == [27, 44]


def test_nodes_come_with_numbers_mode_owner_and_a_rule() -> None:
    config = edited({"process": {"user": {"uid": 7, "gid": 8}}}, {"deviceNodes": [CONTROL[0]]}, GPU_0)
    common = {"type": "c", "major": 195, "fileMode": 0o666, "uid": 7, "gid": 8}
    assert config["linux"]["devices"] == [
        {"path": "/dev/nvidiactl", "minor": 255, **common},
        {"path": "/dev/nvidia0", "minor": 0, **common},
    ]
    assert config["linux"]["resources"]["devices"] == [
        {"allow": True, "type": "c", "major": 195, "minor": 255, "access": "rw"},
        {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rw"},
    ]


@pytest.mark.parametrize(
    ("more", "device", "access"),
    [
        ({"fileMode": 0o660, "gid": 44}, {"fileMode": 0o660, "gid": 44, "uid": 0}, "rw"),
        ({"permissions": ""}, {"fileMode": 0o666}, "rwm"),
        ({"permissions": "r"}, {}, "r"),
        ({"permissions": "none"}, {}, None),
        ({"type": "b"}, {"type": "b"}, "rw"),
        ({"type": ""}, {"type": "c"}, "rw"),
    ],
)
def test_what_a_node_says_of_itself_counts(more: dict[str, Any], device: dict[str, Any], access: str | None) -> None:
    config = edited({}, {}, {"deviceNodes": [node("/dev/nvidia0", 0, **more)]})
    (found,) = config["linux"]["devices"]
    assert device.items() <= found.items()
    rules = config["linux"]["resources"].get("devices", [])
    assert [rule["access"] for rule in rules] == ([] if access is None else [access])


def test_a_node_without_numbers_is_the_hosts_node() -> None:
    status = Path("/dev/null").stat()
    config = edited({}, {}, {"deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/dev/null"}]})
    (device,) = config["linux"]["devices"]
    assert (device["path"], device["type"], device["major"], device["minor"]) == ("/dev/nvidia0", "c", 1, 3)
    assert device["fileMode"] == status.st_mode & 0o7777
    assert config["linux"]["resources"]["devices"][0]["access"] == "rwm"


@pytest.mark.parametrize(
    ("path", "says"), [("absent", "is not on this host (No such file or directory)"), ("file", "is no device node")]
)
def test_a_node_without_numbers_that_the_host_lacks_is_refused(tmp_path: Path, path: str, says: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match=re.escape(says)):
        edited({}, {}, {"deviceNodes": [{"path": str(tmp_path / path)}]})


def test_nodes_and_rules_are_not_doubled() -> None:
    present = {"path": "/dev/nvidia0", "type": "c", "major": 1, "minor": 1}
    deny = {"allow": False, "access": "rwm"}
    allow = {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rw"}
    config: dict[str, Any] = {}
    config["linux"] = {"devices": [present, {"path": "/dev/fuse"}], "resources": {"devices": [deny, allow]}}
    edited(config, {}, GPU_0, GPU_0, GPU_1)
    assert [(one["path"], one.get("minor")) for one in config["linux"]["devices"]] == [
        ("/dev/fuse", None), ("/dev/nvidia0", 0), ("/dev/nvidia1", 1),
    ]  # fmt: skip
    assert config["linux"]["resources"]["devices"] == [deny, allow, {**allow, "minor": 1}]


def test_applying_twice_changes_once() -> None:
    common = {"env": ["V=void"], "deviceNodes": CONTROL, "mounts": [mount("/usr/bin/nvidia-smi", "ro")]}
    once = edited({"process": {"env": ["V=all"]}}, common, GPU_0)
    assert edited(copy.deepcopy(once), common, GPU_0) == once


def test_mounts_come_with_their_options_parents_before_what_lies_below() -> None:
    config = {
        "mounts": [
            {"destination": "/a/b/c/d", "extra": True}, {"destination": "/proc"},
            {"destination": "/usr/bin/nvidia-smi/"}, {"destination": "/a//b/"}, {"destination": "/sys"},
        ]
    }  # fmt: skip
    mounts = [mount(f"{LIBRARIES}/libcuda.so.1", "ro", "rbind"), mount("/usr/bin/nvidia-smi", "ro", "nosuid")]
    found = edited(config, {"mounts": mounts})["mounts"]
    assert [one["destination"] for one in found] == [
        "/proc", "/sys", "/a//b/", "/usr/bin/nvidia-smi", "/a/b/c/d", f"{LIBRARIES}/libcuda.so.1",
    ]  # fmt: skip
    assert found[3] == {
        "destination": "/usr/bin/nvidia-smi", "type": "bind", "source": "/host/usr/bin/nvidia-smi",
        "options": ["ro", "nosuid", "bind"],
    }  # fmt: skip
    assert found[4] == {"destination": "/a/b/c/d", "extra": True}
    assert found[5]["options"] == ["ro", "rbind"]


def test_what_nobody_here_knows_survives() -> None:
    config: dict[str, Any] = {
        "ociVersion": "9", "future": {"x": [1, None]}, "process": {"user": {"uid": 0, "umask": 18}, "odd": 1},
        "linux": {"seccomp": {"a": 1}, "resources": {"memory": {"limit": 1}}}, "hooks": {"poststop": [{"path": "/x"}]},
        "mounts": [{"destination": "/x", "uidMappings": []}],
    }  # fmt: skip
    before = copy.deepcopy(config)
    edited(config, {"env": ["V=void"], "deviceNodes": CONTROL, "mounts": [mount("/usr/bin/nvidia-smi")]}, GPU_0)
    for key in ("ociVersion", "future", "hooks"):
        assert config[key] == before[key]
    assert config["process"] == {**before["process"], "env": ["V=void"]}
    assert config["linux"]["seccomp"] == {"a": 1}
    assert config["linux"]["resources"]["memory"] == {"limit": 1}
    assert config["mounts"][0] == before["mounts"][0]


def test_nvidias_own_hook_is_dropped_and_others_stay() -> None:
    hooks = [
        {"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["x", "prestart"]}, {"path": "/usr/bin/other"},
        {"path": "/opt/nvidia-container-toolkit"},
    ]  # fmt: skip
    config: dict[str, Any] = {"hooks": {"prestart": hooks, "createRuntime": hooks}}
    drop_nvidia_hooks(config)
    assert config["hooks"] == {"prestart": [{"path": "/usr/bin/other"}], "createRuntime": hooks}


def test_hooks_are_added_behind_those_of_their_stage() -> None:
    hook = {"hookName": "createContainer", "path": "/usr/bin/x", "args": ["x", "y"], "env": [], "timeout": 5}
    config = edited({"hooks": {"createContainer": [{"path": "/first"}]}}, {"hooks": [hook]}, {"hooks": [hook]})
    entry = {"path": "/usr/bin/x", "args": ["x", "y"], "env": [], "timeout": 5}
    assert config["hooks"] == {"createContainer": [{"path": "/first"}, entry, entry]}


def test_a_hook_for_no_stage_is_refused() -> None:
    with pytest.raises(Refused, match="'sometimes', which is no stage"):
        edited({}, {"hooks": [{"hookName": "sometimes", "path": "/x"}]})


def test_network_devices_and_resource_control_go_where_runc_looks() -> None:
    device = {"hostInterfaceName": "ib0", "name": "eth1"}
    config = edited({"linux": {"intelRdt": {"closID": "a"}}}, {"netDevices": [device], "intelRdt": {"closID": "b"}})
    assert config["linux"] == {"netDevices": {"ib0": {"name": "eth1"}}, "intelRdt": {"closID": "b"}}


@pytest.mark.parametrize(
    ("options", "kind", "wanted"),
    [
        (["ro", "bind"], "", ["ro", "bind", "idmap"]),
        (["rbind"], "", ["rbind", "ridmap"]),
        (["ro"], "bind", ["ro", "idmap", "bind"]),
        (["idmap", "bind"], "", ["idmap", "bind"]),
        (["ro"], "tmpfs", ["ro"]),
    ],
)
def test_user_namespace_maps_bind_mounts_on_request(options: list[str], kind: str, wanted: list[str]) -> None:
    one = {"hostPath": "/x", "containerPath": "/y", "options": options, "type": kind}
    inside = {"linux": {"namespaces": [{"type": "user"}]}}
    assert edited(copy.deepcopy(inside), {"mounts": [one]}, idmap=True)["mounts"][0]["options"] == wanted
    for config, idmap in ((inside, False), ({"linux": {"namespaces": [{"type": "mount"}]}}, True)):
        found = edited(copy.deepcopy(config), {"mounts": [one]}, idmap=idmap)["mounts"][0]["options"]
        assert not {"idmap", "ridmap"} & set(found) - set(options)


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("/a//b/./c/", "/a/b/c"), ("/a/../b", "/b"), ("/../..", "/"), ("a/../..", ".."), ("", "."), ("/", "/"),
        ("a/..", "."), ("../a", "../a"),
    ],
)  # fmt: skip
def test_paths_are_cleaned_as_go_does(path: str, clean: str) -> None:
    assert normal_path(path) == clean


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"process": 5}, "process is no object"),
        ({"process": {"env": "A=1"}}, "env is no list"),
        ({"process": {"env": [5]}}, "env is no list"),
        ({"process": {"user": []}}, "user is no object"),
        ({"linux": "x"}, "linux is no object"),
        ({"linux": {"resources": [1]}}, "resources is no object"),
        ({"linux": {"resources": {"devices": {}}}}, "devices is no list"),
        ({"linux": {"devices": [None]}}, "devices is no list"),
        ({"mounts": {"destination": "/"}}, "mounts is no list"),
        ({"hooks": True}, "hooks is no object"),
        ({"hooks": {"prestart": 5}}, "prestart is no list"),
    ],
)
def test_a_configuration_without_a_place_for_an_edit_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused) as caught:
        hook = {"hookName": "prestart", "path": "/x"}
        edited(config, {"env": ["V=void"], "mounts": [mount("/usr/bin/nvidia-smi")], "hooks": [hook]}, GPU_0)
    assert str(caught.value).startswith(f"config.json: {says}")


def test_null_is_nothing() -> None:
    config = edited({"process": None, "linux": None, "mounts": None, "hooks": None}, {"env": ["V=void"]}, GPU_0)
    assert config["process"]["env"] == ["V=void"]
    assert len(config["linux"]["devices"]) == 1
    assert config["mounts"] is None
