"""What containers ask for and what they get: the toolkit's rules as tables, on the runtime's own functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.runtime_hook import jsonio
from gpuprov.runtime_hook.deploy import bytecode_is_current, compile_bytecode, deployed_files, render_launcher
from gpuprov.runtime_hook.edits import apply_edits
from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.main import bundle_of, is_create, prepare
from gpuprov.runtime_hook.request import parse_request
from gpuprov.runtime_hook.requirements import cuda_version_of_driver, require
from gpuprov.runtime_hook.rootfs import LibraryFolder
from gpuprov.runtime_hook.settings import Settings, parse_settings
from gpuprov.runtime_hook.specification import Specification, find_devices

DEFAULT = frozenset({"compute", "utility"})
ALL = frozenset({"compat32", "compute", "display", "graphics", "ngx", "utility", "video"})
UNPRIVILEGED_REFUSED = {"accept-nvidia-visible-devices-envvar-when-unprivileged": False}
HOST = {"driver": "550.163.01", "cuda": "12.4", "brand": "Tesla"}


def config_of(*environment: str, privileged: bool = False, mounts: tuple[str, ...] = ()) -> dict[str, Any]:
    capabilities = {"bounding": ["CAP_SYS_ADMIN"] if privileged else ["CAP_CHOWN"]}
    devices = [{"source": "/dev/null", "destination": path} for path in mounts]
    return {"process": {"env": list(environment), "capabilities": capabilities}, "mounts": devices}


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ((), None),
        (("NVIDIA_VISIBLE_DEVICES=",), None),
        (("NVIDIA_VISIBLE_DEVICES=void",), None),
        (("NVIDIA_VISIBLE_DEVICES=0,void",), None),
        (("NVIDIA_VISIBLE_DEVICES=,",), None),
        (("NVIDIA_VISIBLE_DEVICES=all",), ["all"]),
        (("NVIDIA_VISIBLE_DEVICES=0,all,none",), ["all"]),
        (("NVIDIA_VISIBLE_DEVICES=none",), []),
        (("NVIDIA_VISIBLE_DEVICES=none,all",), []),
        (("NVIDIA_VISIBLE_DEVICES= 0 , GPU-1 ",), ["0", "GPU-1"]),
        (("NVIDIA_VISIBLE_DEVICES=ALL",), ["ALL"]),
        (("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=1"), ["1"]),
        (("CUDA_VERSION=9.0",), ["all"]),
        (("CUDA_VERSION=9.0", "NVIDIA_VISIBLE_DEVICES="), None),
        (("CUDA_VERSION=9.0", "NVIDIA_REQUIRE_CUDA=cuda>=9.0"), None),
    ],
)
def test_visible_devices(environment: tuple[str, ...], devices: list[str] | None) -> None:
    request = parse_request(config_of(*environment), Settings({}))
    assert (request.devices if request else None) == devices


@pytest.mark.parametrize(
    ("settings", "environment", "privileged", "mounts", "devices"),
    [
        ({"swarm-resource": "SWARM"}, ("SWARM=1", "NVIDIA_VISIBLE_DEVICES=0"), False, (), ["1"]),
        ({"swarm-resource": "A, B"}, ("B=1", "A=0"), False, (), ["0", "1"]),
        ({"swarm-resource": "A"}, ("NVIDIA_VISIBLE_DEVICES=0",), False, (), ["0"]),
        (UNPRIVILEGED_REFUSED, ("NVIDIA_VISIBLE_DEVICES=0",), False, (), None),
        (UNPRIVILEGED_REFUSED, ("NVIDIA_VISIBLE_DEVICES=0",), True, (), ["0"]),
        ({}, (), False, ("/var/run/nvidia-container-devices/0",), None),
        ({"accept-nvidia-visible-devices-as-volume-mounts": True}, ("NVIDIA_VISIBLE_DEVICES=1",), False,
         ("/var/run/nvidia-container-devices/0", "/var/run/nvidia-container-devices/imex/3"), ["0"]),
        ({"accept-nvidia-visible-devices-as-volume-mounts": True}, (), False,
         ("/var/run/nvidia-container-devices/cdi/nvidia.com/gpu/0",), ["nvidia.com/gpu=0"]),
        ({"accept-nvidia-visible-devices-as-volume-mounts": True}, ("NVIDIA_VISIBLE_DEVICES=1",), False,
         ("/var/run/nvidia-container-devices", "/elsewhere/0"), ["1"]),
    ],
)  # fmt: skip
def test_settings_decide_whose_word_counts(
    settings: dict[str, Any], environment: tuple[str, ...], privileged: bool, mounts: tuple[str, ...], devices: Any
) -> None:
    request = parse_request(config_of(*environment, privileged=privileged, mounts=mounts), Settings(settings))
    assert (request.devices if request else None) == devices


@pytest.mark.parametrize(
    ("environment", "capabilities"),
    [
        ((), DEFAULT),
        (("NVIDIA_DRIVER_CAPABILITIES=",), DEFAULT),
        (("NVIDIA_DRIVER_CAPABILITIES=video",), frozenset({"video"})),
        (("NVIDIA_DRIVER_CAPABILITIES=video, compute,",), frozenset({"video", "compute"})),
        (("NVIDIA_DRIVER_CAPABILITIES=all",), ALL),
        (("NVIDIA_DRIVER_CAPABILITIES=,",), frozenset()),
        (("CUDA_VERSION=9.0",), ALL),
        (("CUDA_VERSION=9.0", "NVIDIA_DRIVER_CAPABILITIES="), DEFAULT),
    ],
)
def test_driver_capabilities(environment: tuple[str, ...], capabilities: frozenset[str]) -> None:
    request = parse_request(config_of("NVIDIA_VISIBLE_DEVICES=all", *environment), Settings({}))
    assert request is not None
    assert request.capabilities == capabilities


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (("NVIDIA_DRIVER_CAPABILITIES=compute,telepathy",), "telepathy"),
        (("NVIDIA_MIG_CONFIG_DEVICES=all",), "NVIDIA_MIG_CONFIG_DEVICES is for privileged"),
        (("CUDA_VERSION=nine",), "CUDA_VERSION=nine is no version"),
    ],
)
def test_what_cannot_be_is_refused(environment: tuple[str, ...], says: str) -> None:
    with pytest.raises(Refused, match=says):
        parse_request(config_of("NVIDIA_VISIBLE_DEVICES=all", *environment), Settings({}))


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("", True), ("cuda>=12.4", True), ("cuda>=12.10", False), ("cuda>=12.4.0", True), ("cuda=12.4", True),
        ("cuda!=12.4", False), ("cuda<13", True), ("cuda>13", False), ("cuda<=12.04", True),
        ("cuda>=13.0 driver>=550", True), ("cuda>=13.0 driver>=560", False), ("cuda>=12,driver<550", False),
        ("brand=tesla", True), ("brand!=tesla", False), ("brand=geforce brand=tesla", True),
        ("unknown>=7", True), ("cuda>=13 unknown=1", True), ("cuda>=12.2 ", True), ("arch>=9.0", True),
    ],
)  # fmt: skip
def test_requirements(expression: str, holds: bool) -> None:
    if holds:
        require([expression], HOST)
    else:
        with pytest.raises(Refused):
            require([expression], HOST)


@pytest.mark.parametrize(
    "expression", ["cuda", "cuda==12", "cuda=>12", "cuda><12", ">=12", "cuda>=", "cuda>=x", "brand>x"]
)
def test_broken_requirements_are_refused(expression: str) -> None:
    with pytest.raises(Refused):
        require([expression], HOST)


def test_a_driver_too_old_is_told_what_to_do() -> None:
    with pytest.raises(Refused) as caught:
        require(["cuda>=13.0"], HOST)
    assert str(caught.value) == (
        "requires cuda>=13.0, this host's driver 550.163.01 supports 12.4: "
        "update the driver to >= 580 or use an image for CUDA <= 12.4"
    )


@pytest.mark.parametrize(
    ("driver", "cuda"), [("550.163.01", "12.4"), ("580.65.06", "13.0"), ("999.1", ""), ("300.1", "")]
)
def test_cuda_version_of_a_driver(driver: str, cuda: str) -> None:
    assert cuda_version_of_driver(driver) == cuda


SPECIFICATION = Specification(
    {"0": {"n": 0}, "GPU-a": {"n": 0}, "0000:1b:00.0": {"n": 0}, "1": {"n": 1}, "all": {}}, {}, {}
)


@pytest.mark.parametrize("name", ["0", "GPU-a", "nvidia.com/gpu=0", "0000:1b:00.0", "00000000:1B:00.0"])
def test_a_device_by_each_of_its_names(name: str) -> None:
    assert find_devices(SPECIFICATION, [name]) == [{"n": 0}]


def test_an_unknown_device_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(Refused, match=r"there is no GPU '7' on this host; there are 0, 1"):
        find_devices(SPECIFICATION, ["7"])


def mount(path: str) -> dict[str, Any]:
    return {"hostPath": f"/host{path}", "containerPath": path, "options": ["ro"]}


COMMON = {
    "env": ["NVIDIA_VISIBLE_DEVICES=void"],
    "deviceNodes": [
        {"path": "/dev/nvidiactl", "major": 195, "minor": 255, "permissions": "rw"},
        {"path": "/dev/nvidia-uvm", "major": 240, "minor": 0, "permissions": "rw"},
        {"path": "/dev/nvidia-modeset", "major": 195, "minor": 254, "permissions": "rw"},
    ],
    "mounts": [
        mount("/usr/lib/x86_64-linux-gnu/libcuda.so.1"),
        mount("/usr/bin/nvidia-smi"),
        mount("/usr/lib/libnvcuvid.so.1"),
    ],
}
GPU = {"deviceNodes": [{"path": "/dev/nvidia0", "major": 195, "minor": 0, "permissions": "rw"}]}


def edited(config: dict[str, Any], capabilities: set[str], devices: list[Any]) -> dict[str, Any]:
    apply_edits(config, COMMON, devices, frozenset(capabilities), LibraryFolder("/nonexistent"))
    return config


def test_edits_keep_what_they_do_not_know() -> None:
    before = {
        "future": {"x": 1}, "process": {"env": ["A=1", "NVIDIA_VISIBLE_DEVICES=all", "B=2"], "user": {"uid": 7}},
        "linux": {"devices": [{"path": "/dev/fuse"}], "resources": {"devices": [{"allow": False}], "memory": {}}},
        "mounts": [{"destination": "/a/b/c", "extra": True}, {"destination": "/usr/bin/nvidia-smi", "source": "old"}],
    }  # fmt: skip
    after = edited(before, {"compute", "utility"}, [GPU])
    assert after["future"] == {"x": 1}
    assert after["process"]["env"] == ["A=1", "NVIDIA_VISIBLE_DEVICES=void", "B=2"]
    assert [one["path"] for one in after["linux"]["devices"]] == [
        "/dev/fuse", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0",
    ]  # fmt: skip
    assert after["linux"]["devices"][-1]["uid"] == 7
    rules = after["linux"]["resources"]["devices"]
    assert rules[0] == {"allow": False}
    assert {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rw"} in rules
    destinations = [one["destination"] for one in after["mounts"]]
    assert destinations == ["/a/b/c", "/usr/bin/nvidia-smi", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"]
    assert after["mounts"][1]["source"] == "/host/usr/bin/nvidia-smi"


@pytest.mark.parametrize(
    ("capabilities", "nodes", "files"),
    [
        ({"utility"}, {"nvidiactl", "nvidia0"}, {"nvidia-smi"}),
        ({"compute"}, {"nvidiactl", "nvidia-uvm", "nvidia0"}, {"libcuda.so.1"}),
        ({"graphics"}, {"nvidiactl", "nvidia-modeset", "nvidia0"}, set()),
        ({"video"}, {"nvidiactl", "nvidia0"}, {"libnvcuvid.so.1"}),
        (set(), {"nvidiactl", "nvidia0"}, set()),
    ],
)
def test_each_capability_brings_its_files(capabilities: set[str], nodes: set[str], files: set[str]) -> None:
    after = edited({}, capabilities, [GPU])
    assert {one["path"].rpartition("/")[2] for one in after["linux"]["devices"]} == nodes
    assert {one["destination"].rpartition("/")[2] for one in after["mounts"]} == files


def test_none_brings_files_and_no_device() -> None:
    after = edited({}, {"utility"}, [])
    assert "linux" not in after
    assert [one["destination"] for one in after["mounts"]] == ["/usr/bin/nvidia-smi"]


def test_libraries_go_where_the_images_loader_looks(tmp_path: Path) -> None:
    multiarch, red_hat = "/usr/lib/x86_64-linux-gnu", "/usr/lib64"
    for name, folders, expected in (
        ("debian", [multiarch], multiarch), ("rhel", [red_hat], red_hat), ("both", [multiarch, red_hat], multiarch),
        ("neither", [], multiarch),
    ):  # fmt: skip
        for folder in folders:
            (tmp_path / name / folder.lstrip("/")).mkdir(parents=True)
        found = LibraryFolder(str(tmp_path / name)).in_container(f"{multiarch}/libcuda.so.1")
        assert found == f"{expected}/libcuda.so.1", name
    assert LibraryFolder(str(tmp_path / "rhel")).in_container("/usr/bin/nvidia-smi") == "/usr/bin/nvidia-smi"


def test_a_link_in_a_hostile_image_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr/lib64").symlink_to("/usr/lib")
    found = LibraryFolder(str(tmp_path)).in_container("/usr/lib/x86_64-linux-gnu/libcuda.so.1")
    assert found == "/usr/lib/x86_64-linux-gnu/libcuda.so.1"


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "not valid JSON"), ("[]", "object"), ('{"typo": 1}', "no key 'typo'"),
     ('{"disable-require": "yes"}', "true or false"),
     ('{"supported-driver-capabilities": "compute,magic"}', "magic")],
)  # fmt: skip
def test_broken_settings_name_the_key(text: str, says: str) -> None:
    with pytest.raises(Refused, match=says):
        parse_settings(text)


@pytest.mark.parametrize(
    ("words", "create", "bundle"),
    [
        (["create", "--bundle", "/b", "id"], True, "/b"),
        (["--root", "/r", "create", "--bundle=/b", "id"], True, "/b"),
        (["create", "-b", "/a", "--bundle", "/b", "id"], True, "/b"),
        (["create", "id"], True, ""),
        (["state", "id"], False, ""),
        (["run", "--bundle", "create", "id"], False, "create"),
        ([], False, ""),
    ],
)
def test_arguments(words: list[str], create: bool, bundle: str) -> None:
    assert is_create(words) is create
    assert bundle_of(words) == bundle


def test_a_container_without_gpus_is_untouched_whatever_else_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{ "process" : {"env": ["A=1"]}, "odd":   1.50 }\n')
    os.utime(path, (1, 1))
    settings = tmp_path / "settings.json"
    settings.write_text("{broken")
    prepare(str(tmp_path), str(settings))
    assert path.read_text() == '{ "process" : {"env": ["A=1"]}, "odd":   1.50 }\n'
    assert path.stat().st_mtime == 1
    path.write_text('{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}')
    with pytest.raises(Refused, match="not valid JSON"):
        prepare(str(tmp_path), str(settings))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(_JSON)
def test_our_json_is_pythons_json(value: object) -> None:
    assert jsonio.loads(json.dumps(value)) == value
    assert json.loads(jsonio.dumps(value)) == value


@given(st.text())
def test_no_text_raises_anything_but_value_error(text: str) -> None:
    try:
        found = jsonio.loads(text)
    except ValueError:
        return
    assert repr(json.loads(text)) == repr(found)


_ODD_VALUES: tuple[object, ...] = (
    None,
    True,
    5,
    1.5,
    "NVIDIA_VISIBLE_DEVICES=all",
    [],
    [5],
    ["="],
    [["x"]],
    {},
    {"env": 5},
    {"": ""},
)


@pytest.mark.parametrize("odd", _ODD_VALUES, ids=repr)
def test_odd_places_in_a_config_raise_nothing_but_a_refusal(odd: object) -> None:
    settings = Settings({"accept-nvidia-visible-devices-as-volume-mounts": True})
    good = config_of("NVIDIA_VISIBLE_DEVICES=0", mounts=("/var/run/nvidia-container-devices/0",))
    configs: list[dict[str, Any]] = [{**good, key: odd} for key in ("process", "mounts", "linux", "root")]
    configs += [{**good, "process": {**good["process"], key: odd}} for key in ("env", "capabilities")]
    configs += [{**good, "mounts": [odd]}, {**good, "mounts": [{"source": odd, "destination": odd}]}]
    configs += [{**good, "process": {"env": [odd]}}, {**good, "process": {"capabilities": {"bounding": odd}}}]
    for config in configs:
        try:
            parse_request(config, settings)
        except Refused:
            continue


@given(st.dictionaries(st.sampled_from(["process", "mounts", "linux", "root"]), _JSON))
def test_no_config_raises_anything_but_a_refusal(config: dict[str, Any]) -> None:
    settings = Settings({"accept-nvidia-visible-devices-as-volume-mounts": True})
    try:
        parse_request(config, settings)
    except Refused:
        return


def test_what_is_deployed_runs_alone_and_imports_little(tmp_path: Path) -> None:
    for path, mode, content in deployed_files():
        place = tmp_path / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        place.chmod(mode)
    library = tmp_path / "usr/lib/gpuprov"
    assert not (library / "runtime_hook/deploy.py").exists()
    assert not bytecode_is_current(str(library / "runtime_hook"))
    compile_bytecode(str(library / "runtime_hook"))
    assert bytecode_is_current(str(library / "runtime_hook"))
    code = f"import sys; sys.path.insert(0, {str(library)!r}); import runtime_hook.main; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-E", "-c", code], capture_output=True, text=True, check=True)
    expensive = {
        "json",
        "re",
        "typing",
        "enum",
        "pathlib",
        "subprocess",
        "logging",
        "dataclasses",
        "collections",
        "ctypes",
    }
    assert expensive.isdisjoint(done.stdout.split())
    (library / "runtime_hook/errors.py").write_text("# changed\n")
    assert not bytecode_is_current(str(library / "runtime_hook"))


def test_the_launcher_is_plain_shell() -> None:
    text = render_launcher("/usr/bin/python3", "/usr/lib/gpuprov", ("runc", "/opt/crun"))
    assert subprocess.run(("sh", "-n"), input=text, text=True, check=False).returncode == 0
    assert "/usr/bin/runc /opt/crun;" in text
