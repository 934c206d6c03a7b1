"""What a container gets of all that there is: by capability, by request, and where its image looks for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpuprov.runtime_hook import driver_files, mps
from gpuprov.runtime_hook.edits import ContainerEdits, choose
from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.request import parse_request
from gpuprov.runtime_hook.rootfs import Root
from gpuprov.runtime_hook.settings import Settings
from gpuprov.runtime_hook.specification import Specifications
from tests.triplet import LIBRARIES as MULTIARCH
from tests.triplet import TRIPLET

# An ordinary user's tests see the machine's /dev, where a driver may have nodes of these names.
pytestmark = pytest.mark.root
FILES = (
    f"{MULTIARCH}/libcuda.so.550", f"{MULTIARCH}/libnvidia-ml.so.550", f"{MULTIARCH}/libnvcuvid.so.550",
    f"{MULTIARCH}/libGLX_nvidia.so.550", f"{MULTIARCH}/libnvidia-ngx.so.550", f"{MULTIARCH}/libnvidia-new.so.550",
    f"{MULTIARCH}/vdpau/libvdpau_nvidia.so.550", "/usr/lib/i386-linux-gnu/libcuda.so.550", "/usr/bin/nvidia-smi",
    "/lib/firmware/nvidia/550/gsp_tu10x.bin",
)  # fmt: skip
LINKS = (("libcuda.so.550", "libcuda.so.1"), ("libnvidia-ml.so.550", "libnvidia-ml.so.1"))


def node(path: str, minor: int) -> dict[str, Any]:
    return {"path": path, "type": "c", "major": 195, "minor": minor}


@pytest.fixture
def common() -> dict[str, Any]:
    words = ["gpuprov-container-runtime-hook", "createContainer", "--host-driver-version", "550.163.01"]
    for target, name in LINKS:
        words += ["--link", f"{target}::{MULTIARCH}/{name}"]
    return {
        "deviceNodes": [node("/dev/nvidiactl", 255), node("/dev/nvidia-uvm", 0), node("/dev/nvidia-modeset", 254)],
        "mounts": [{"hostPath": path, "containerPath": path, "options": ["ro", "rbind"]} for path in FILES],
        "hooks": [{"hookName": "createContainer", "path": driver_files.HOOK_PATH, "args": words, "env": ["A=1"]}],
        "additionalGids": [44],
    }


def chosen(
    folder: Path, common: dict[str, Any], *environment: str, root: Path | None = None, **settings: Any
) -> ContainerEdits:
    """Return what a container with this environment gets."""
    devices = [{"name": name, "containerEdits": {"deviceNodes": [node("/dev/nvidia0", 0)]}} for name in ("0", "all")]
    document = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "containerEdits": common, "devices": devices}
    (folder / "nvidia.json").write_text(json.dumps(document))
    values = {"nvidia-container-runtime.modes.cdi.spec-dirs": [str(folder)], **settings}
    privileged = {"bounding": ["CAP_SYS_ADMIN"]}
    process = {"env": list(environment) or ["NVIDIA_VISIBLE_DEVICES=all"], "capabilities": privileged}
    request = parse_request({"process": process}, Settings(values))
    opened = Root(str(root)) if root else None
    try:
        return choose(Specifications(Settings(values)), request, Settings(values), opened)
    finally:
        if opened:
            opened.close()


def names(edits: ContainerEdits) -> set[str]:
    return {mount["containerPath"].rpartition("/")[2] for mount in edits.cdi.get("mounts", ())}


def paths(edits: ContainerEdits) -> list[str]:
    return [one["path"] for one in edits.cdi.get("deviceNodes", ())]


@pytest.mark.parametrize(
    ("capabilities", "nodes", "files", "links"),
    [
        ("utility", {"nvidiactl"}, {"libnvidia-ml.so.550", "nvidia-smi"}, {"libnvidia-ml.so.1"}),
        ("compute", {"nvidiactl", "nvidia-uvm"}, {"libcuda.so.550", "libnvidia-new.so.550"}, {"libcuda.so.1"}),
        ("video", {"nvidiactl"}, {"libnvcuvid.so.550", "libvdpau_nvidia.so.550", "libnvidia-new.so.550"}, set()),
        ("graphics", {"nvidiactl", "nvidia-modeset"}, {"libGLX_nvidia.so.550", "libnvidia-new.so.550"}, set()),
        ("display", {"nvidiactl", "nvidia-modeset"}, {"libGLX_nvidia.so.550", "libnvidia-new.so.550"}, set()),
        ("ngx", {"nvidiactl"}, {"libnvidia-ngx.so.550", "libnvidia-new.so.550"}, set()),
        ("compat32", {"nvidiactl"}, {"libcuda.so.550"}, set()),
    ],
)
def test_each_capability_brings_its_nodes_files_and_links(
    tmp_path: Path, common: dict[str, Any], capabilities: str, nodes: set[str], files: set[str], links: set[str]
) -> None:
    got = chosen(tmp_path, common, "NVIDIA_VISIBLE_DEVICES=0", f"NVIDIA_DRIVER_CAPABILITIES={capabilities}")
    assert {path.rpartition("/")[2] for path in paths(got)} == {*nodes, "nvidia0"}
    # Firmware goes with every capability.
    assert names(got) == {*files, "gsp_tu10x.bin"}
    assert {path.rpartition("/")[2] for _, path in got.links} == links


def test_files_need_a_capability_and_nodes_a_device(tmp_path: Path, common: dict[str, Any]) -> None:
    bare = chosen(tmp_path, common, "NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=,")
    assert (names(bare), paths(bare), bare.links) == (set(), ["/dev/nvidiactl", "/dev/nvidia0"], [])
    files = chosen(tmp_path, common, "NVIDIA_VISIBLE_DEVICES=none")
    assert paths(files) == []
    assert "libcuda.so.550" in names(files)


def test_own_hook_becomes_links_and_others_keep_their_environment(tmp_path: Path, common: dict[str, Any]) -> None:
    common["hooks"] += [
        {"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "x"]},
        {"hookName": "prestart", "path": "/opt/x", "env": ["B=1"]},
    ]
    got = chosen(tmp_path, common)
    assert [(hook["path"], hook["env"]) for hook in got.cdi["hooks"]] == [
        ("/usr/bin/nvidia-cdi-hook", []), ("/opt/x", ["B=1"]),
    ]  # fmt: skip
    assert got.links == [(target, f"{MULTIARCH}/{name}") for target, name in LINKS]
    assert got.host_driver == "550.163.01"


@pytest.mark.root
def test_a_socket_that_is_gone_keeps_no_container_from_starting(tmp_path: Path, common: dict[str, Any]) -> None:
    there = tmp_path / "there/socket"
    there.parent.mkdir()
    there.touch()
    for path in (str(there), str(tmp_path / "absent/socket")):
        common["mounts"].append({"hostPath": path, "containerPath": path, "options": ["ro", "noexec", "bind"]})
    assert [one["hostPath"] for one in chosen(tmp_path, common).cdi["mounts"] if "socket" in one["hostPath"]] == [
        str(there)
    ]


@pytest.mark.parametrize(
    ("devices", "off", "groups"), [("0", False, [44]), ("none", False, None), ("all", False, [44]), ("all", True, None)]
)
def test_groups_come_with_nodes_and_can_be_turned_off(
    tmp_path: Path, common: dict[str, Any], devices: str, off: bool, groups: list[int] | None
) -> None:
    common["deviceNodes"][0]["gid"] = 44
    settings: dict[str, Any] = {"features.no-additional-gids-for-device-nodes": off}
    got = chosen(tmp_path, common, f"NVIDIA_VISIBLE_DEVICES={devices}", **settings)
    assert (got.cdi.get("additionalGids") or None) == groups


@pytest.mark.parametrize(
    ("capabilities", "nodes", "groups"), [("compute", 0, [27]), ("graphics", 1, [27, 44]), ("display", 1, [27, 44])]
)
def test_a_node_that_is_left_out_brings_no_group(
    tmp_path: Path, common: dict[str, Any], capabilities: str, nodes: int, groups: list[int]
) -> None:
    common["deviceNodes"] += [{**node("/dev/dri/card0", 0), "gid": 44}, {**node("/dev/nvidia-x", 0), "gid": 27}]
    common["additionalGids"] = [27, 44]
    got = chosen(tmp_path, common, "NVIDIA_VISIBLE_DEVICES=0", f"NVIDIA_DRIVER_CAPABILITIES={capabilities}")
    assert len([path for path in paths(got) if "/dri/" in path]) == nodes
    assert got.cdi["additionalGids"] == groups


@pytest.mark.parametrize(
    ("image", "folder", "folder_32"),
    [
        ([f"usr/lib/{TRIPLET}", "usr/lib64"], MULTIARCH, "/usr/lib/i386-linux-gnu"),
        ([f"usr/lib/{TRIPLET}", "usr/lib/i386-linux-gnu"], MULTIARCH, "/usr/lib/i386-linux-gnu"),
        (["usr/lib64", "usr/lib"], "/usr/lib64", "/usr/lib"),
        (["usr/lib64", "usr/lib32"], "/usr/lib64", "/usr/lib32"),
        (["usr/lib"], MULTIARCH, "/usr/lib/i386-linux-gnu"),
        ([], MULTIARCH, "/usr/lib/i386-linux-gnu"),
    ],
)
def test_libraries_go_where_the_images_loader_searches(
    tmp_path: Path, common: dict[str, Any], image: list[str], folder: str, folder_32: str
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in image:
        (root / name).mkdir(parents=True, exist_ok=True)
    everything = ("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=all")
    got = chosen(tmp_path, common, *everything, root=root)
    places = [mount["containerPath"] for mount in got.cdi["mounts"]]
    assert f"{folder}/libcuda.so.550" in places and f"{folder_32}/libcuda.so.550" in places
    assert f"{folder}/vdpau/libvdpau_nvidia.so.550" in places
    assert "/usr/bin/nvidia-smi" in places
    assert got.links[0] == ("libcuda.so.550", f"{folder}/libcuda.so.1")
    assert any("where this image's loader searches" in one for one in got.decisions) is (folder != MULTIARCH)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ("NVIDIA_IMEX_CHANNELS=x", "asks for 'x': channels are numbers below 1048576"),
        ("NVIDIA_IMEX_CHANNELS=1048576", "channels are numbers below"),
        ("NVIDIA_IMEX_CHANNELS=3", "the IMEX channel /dev/nvidia-caps-imex-channels/channel3 is not on this host"),
        (
            "NVIDIA_IMEX_CHANNELS=0",
            "NVreg_CreateImexChannel0=1 in /etc/modprobe.d.*the MAJOR of nvidia-caps-imex-channels",
        ),
        ("NVIDIA_MIG_CONFIG_DEVICES=all", "no MIG capability 'config'"),
        ("NVIDIA_MIG_MONITOR_DEVICES=all", "no MIG capability 'monitor'"),
        ("NVIDIA_GDS=enabled", "no CDI specification of nvidia.com/gds"),
        ("NVIDIA_GDRCOPY=enabled", "no CDI specification of nvidia.com/gdrcopy"),
    ],
)
def test_missing_extra_device_is_refused(tmp_path: Path, common: dict[str, Any], environment: str, says: str) -> None:
    with pytest.raises(Refused, match=says):
        chosen(tmp_path, common, "NVIDIA_VISIBLE_DEVICES=0", environment)


def test_what_has_a_specification_of_its_own_comes_from_there(tmp_path: Path, common: dict[str, Any]) -> None:
    edits = {
        "deviceNodes": [node("/dev/nvidia-fs0", 9)],
        "mounts": [{"hostPath": "/a", "containerPath": "/etc/cufile.json"}],
    }
    document = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gds", "devices": [{"name": "all", "containerEdits": edits}]}
    (tmp_path / "gds.json").write_text(json.dumps(document))
    got = chosen(tmp_path, common, "NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_GDS=enabled")
    assert "/dev/nvidia-fs0" in paths(got)
    assert "cufile.json" in names(got)


def test_other_kind_of_device_needs_no_own_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "is_served", lambda folder: True)
    device = {"name": "0", "containerEdits": {"deviceNodes": [node("/dev/net0", 0)]}}
    document = {"cdiVersion": "0.5.0", "kind": "vendor.com/net", "containerEdits": {}, "devices": [device]}
    (tmp_path / "vendor.json").write_text(json.dumps(document))
    settings = Settings({"nvidia-container-runtime.modes.cdi.spec-dirs": [str(tmp_path)]})
    request = parse_request({"annotations": {"cdi.k8s.io/net": "vendor.com/net=0"}}, settings)
    got = choose(Specifications(settings), request, settings, None)
    assert (paths(got), got.cdi.get("mounts")) == (["/dev/net0"], None)


@pytest.mark.parametrize(
    ("capabilities", "served", "given"), [("compute", True, 1), ("compute", False, 0), ("utility", True, 0)]
)
def test_mps_goes_by_its_daemon_and_not_by_the_specification(
    tmp_path: Path, common: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capabilities: str, served: bool, given: int
) -> None:
    monkeypatch.setattr(mps, "is_served", lambda folder: served)
    common["mounts"].append({"hostPath": mps.FOLDER, "containerPath": mps.FOLDER, "options": ["ro", "rbind"]})
    environment = ("NVIDIA_VISIBLE_DEVICES=all", f"NVIDIA_DRIVER_CAPABILITIES={capabilities}")
    mounts = chosen(tmp_path, common, *environment).cdi["mounts"]
    assert [one["options"] for one in mounts if one["containerPath"] == mps.FOLDER] == [
        ["ro", "nosuid", "nodev", "noexec", "rbind", "rprivate"]
    ] * given
