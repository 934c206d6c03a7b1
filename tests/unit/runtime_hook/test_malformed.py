"""Malformed documents of every kind: one clean line, never an internal error, and nothing left behind."""

import copy
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuprov.runtime_hook import hook_main, jsonio
from gpuprov.runtime_hook.decision import explain
from gpuprov.runtime_hook.edits import node_identity
from gpuprov.runtime_hook.errors import Refused, printable
from gpuprov.runtime_hook.settings import read_settings
from tests.unit.runtime_hook.test_main import Bundle

# Every key of CDI's, each with a right value.
EDITS = {
    "env": ["A=1"],
    "deviceNodes": [
        {
            "path": "/dev/nvidia0", "hostPath": "/dev/null", "type": "c", "major": 195, "minor": 0, "fileMode": 438,
            "permissions": "rw", "uid": 0, "gid": 0,
        }
    ],
    "netDevices": [{"hostInterfaceName": "eth1", "name": "eth0"}],
    "mounts": [{"hostPath": "/x", "containerPath": "/usr/lib64/libcuda.so.1", "type": "bind", "options": ["ro"]}],
    "hooks": [
        {
            "hookName": "createContainer", "path": "/usr/bin/gpuprov-container-runtime-hook", "env": ["A=1"],
            "args": ["x", "createContainer", "--host-driver-version", "550.1", "--host-cuda-version", "12.4",
                     "--link", "a::/usr/lib64/b.so"], "timeout": 5,
        },
        {"hookName": "prestart", "path": "/other", "args": ["other"]},
    ],
    "additionalGids": [44], "intelRdt": {"closID": "x"},
}  # fmt: skip
SPECIFICATION = {
    "cdiVersion": "1.1.0", "kind": "nvidia.com/gpu", "annotations": {"a": "b"}, "containerEdits": EDITS,
    "devices": [{"name": name, "annotations": {"c": "d"}, "containerEdits": EDITS} for name in ("0", "all")],
}  # fmt: skip
CONFIG = {
    "ociVersion": "1.0.2", "root": {"path": "rootfs", "readonly": False}, "annotations": {"a": "b"},
    "hooks": {"prestart": [{"path": "/x", "args": ["x"]}]},
    "process": {
        "user": {"uid": 0, "gid": 0, "additionalGids": [1]}, "args": ["sh"], "capabilities": {"bounding": []},
        "env": ["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=all", "NVIDIA_REQUIRE_CUDA=cuda>=12.0"],
    },
    "mounts": [{"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid"]}],
    "linux": {
        "namespaces": [{"type": "mount"}], "uidMappings": [{"containerID": 0, "hostID": 0, "size": 1}],
        "devices": [{"path": "/dev/x", "type": "c"}], "resources": {"devices": [{"allow": False, "access": "rwm"}]},
    },
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return the document with another value at that place."""
    if not path:
        return value
    changed = copy.deepcopy(document)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return changed


WRONG: st.SearchStrategy[Any] = st.sampled_from(
    [
        None, True, -1, 0, 5, 1 << 31, 1 << 32, 1 << 64, -(1 << 64), 0.5, 1e300,
        "", "x", "/", "::", "\0", "/a\0b", "\ud800",
        "é" * 3000, [], [[]], [{}], [None], ["x"], [5], {}, {"x": {}}, {"path": 5}, {"name": []},
    ]
)  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    made = Bundle(tmp_path_factory.mktemp("malformed"))
    made.set("nvidia-container-cli.no-cgroups = false")
    return made


def require_clean(bundle: Bundle) -> None:
    """Start the container, by the runtime and as `hook explain` and the prestart hook see it: done, or one line."""
    try:
        bundle.run()
    except Refused as refused:
        assert printable(f"gpuprov: {refused}")
        assert "Error:" not in str(refused)
    finally:
        assert {one.name for one in bundle.folder.iterdir()} == {"config.json", "rootfs"}


@example(path=("containerEdits", "deviceNodes", 0, "major"), value=1 << 31)
@given(path=st.sampled_from(list(places(SPECIFICATION))), value=WRONG)
def test_wrong_value_in_a_specification_is_one_line(bundle: Bundle, path: tuple[Any, ...], value: Any) -> None:
    bundle.specification.write_text(json.dumps(replaced(SPECIFICATION, path, value)))
    bundle.config.write_text(json.dumps(CONFIG))
    require_clean(bundle)
    settings, trouble = read_settings(str(bundle.settings), str(bundle.absent))
    explained = explain(json.dumps(CONFIG), settings, trouble, str(bundle.folder))
    for node in explained["edits"].get("deviceNodes", ()):
        found = node_of(node)
        os.makedev(found["major"], found["minor"])


def node_of(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node's numbers as the prestart hook takes them; one that is not on this host is refused."""
    try:
        return node_identity(node)
    except Refused:
        return {"major": 0, "minor": 0}


# Another root than the bundle's would be written to.
@given(
    path=st.sampled_from([path for path in places(CONFIG) if path[:2] not in ((), ("root",), ("root", "path"))]),
    value=WRONG,
)
def test_wrong_value_in_config_json_is_one_line(bundle: Bundle, path: tuple[Any, ...], value: Any) -> None:
    bundle.specification.write_text(json.dumps(SPECIFICATION))
    bundle.config.write_text(json.dumps(replaced(CONFIG, path, value)))
    require_clean(bundle)


DEEP = 100_000


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: str, end: str) -> None:
    deep = begin * DEEP + "1" + end * DEEP
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(deep.encode())))
    with pytest.raises(Refused, match="standard input holds no OCI state: nested too deeply"):
        hook_main.serve(["prestart"])
    made = Bundle(tmp_path)
    made.specification.write_text(f'{{"kind": "nvidia.com/gpu", "devices": {deep}}}')
    with pytest.raises(Refused, match=r"nvidia\.json can't be used \(nested too deeply\)"):
        made.prepare(json.dumps(CONFIG))
    with pytest.raises(Refused, match="is not valid JSON: nested too deeply"):
        made.prepare(deep)


def test_what_can_be_read_but_not_written_again_is_one_clean_line(tmp_path: Path) -> None:
    """Reading and writing may go to different depths."""
    value: Any = []
    for _ in range(DEEP):
        value = [value]
    with pytest.raises(ValueError, match="nested too deeply"):
        jsonio.dumps(value)


@pytest.mark.parametrize("text", ["{key} = 1", "[{key}]", "[a]\n{key} = 1", "'x' . {key} = 1"])
def test_a_key_of_five_thousand_parts_is_one_clean_line(tmp_path: Path, text: str) -> None:
    made = Bundle(tmp_path)
    made.settings.write_text(text.format(key=".".join(["a"] * 5000)))
    with pytest.raises(Refused, match=r"settings\.toml can't be read: line \d: a key of more than 40 parts"):
        made.prepare(json.dumps(CONFIG))
