"""The CDI specification read, and devices found in it by each of their names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.settings import Settings
from gpuprov.runtime_hook.specification import Specifications

FIRST, SECOND, EVERY = {"env": ["N=0"]}, {"env": ["N=1"]}, {"env": ["N=all"]}
UUID = "GPU-5d4c3b2a-0000-1111-2222-333344445555"
COMMON = {"env": ["COMMON=1"]}
GPUS = {
    "0": FIRST,
    UUID: FIRST,
    "0000:1b:00.0": FIRST,
    "1": SECOND,
    "10000:e1:00.0": SECOND,
    "10": SECOND,
    "1:0": SECOND,
    "all": EVERY,
}


def write(path: Path, devices: dict[str, dict[str, Any]], kind: str = "nvidia.com/gpu", **more: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    listed = [{"name": name, "containerEdits": edits} for name, edits in devices.items()]
    path.write_text(json.dumps({"cdiVersion": "0.6.0", "kind": kind, "devices": listed, **more}))


def specifications(*folders: Path, default_kind: str = "nvidia.com/gpu") -> Specifications:
    prefix = "nvidia-container-runtime.modes.cdi"
    return Specifications(
        Settings({f"{prefix}.spec-dirs": [str(one) for one in folders], f"{prefix}.default-kind": default_kind})
    )


@pytest.fixture
def gpus(tmp_path: Path) -> Specifications:
    write(tmp_path / "nvidia.json", GPUS, containerEdits=COMMON)
    return specifications(tmp_path)


@pytest.mark.parametrize(
    ("name", "edits"),
    [
        ("0", FIRST),
        ("1", SECOND),
        (UUID, FIRST),
        ("0000:1b:00.0", FIRST),
        ("0000:1B:00.0", FIRST),
        ("00000000:1B:00.0", FIRST),
        ("00010000:E1:00.0", SECOND),
        ("nvidia.com/gpu=0", FIRST),
        (f"nvidia.com/gpu={UUID}", FIRST),
        ("nvidia.com/gpu=00000000:1B:00.0", FIRST),
        ("runtime.nvidia.com/gpu=1", SECOND),
        ("all", EVERY),
        ("nvidia.com/gpu=all", EVERY),
    ],
)
def test_a_device_by_each_of_its_names(gpus: Specifications, name: str, edits: dict[str, Any]) -> None:
    assert gpus.edits_of([name]) == [COMMON, edits]


def test_devices_come_in_the_order_in_which_they_are_named(gpus: Specifications) -> None:
    assert gpus.edits_of(["1", UUID]) == [COMMON, SECOND, FIRST]
    assert gpus.edits_of([]) == [{**COMMON, "deviceNodes": [], "additionalGids": []}]


@pytest.mark.parametrize(
    "name",
    ["7", "00", "GPU-5d4c3b2a", UUID.lower(), "0001:1b:00.0", "1b:00.0", "ALL", "", "0:0", "00010000:1B:00.0",
     "evil0000:1b:00.0"],
)  # fmt: skip
def test_an_unknown_device_is_refused_with_those_that_there_are(gpus: Specifications, name: str) -> None:
    with pytest.raises(Refused) as caught:
        gpus.edits_of(["0", name])
    assert str(caught.value) == f"there is no GPU {name!r} on this host; its GPUs: 0, 1, 1:0, 10; next: gpuprov doctor"


def test_on_a_host_without_gpus_there_are_none(tmp_path: Path) -> None:
    write(tmp_path / "nvidia.json", {})
    with pytest.raises(Refused, match="its GPUs: none"):
        specifications(tmp_path).edits_of(["all"])


def test_a_specification_is_read_with_what_it_says_of_the_host(tmp_path: Path) -> None:
    words = ["h", "createContainer", "--host-driver-version", "550.163.01", "--host-cuda-version", "12.4", "--x", "y"]
    common = {**COMMON, "hooks": [{"hookName": "createContainer", "path": "/hook", "args": words}]}
    write(tmp_path / "nvidia.json", {"0": FIRST}, containerEdits=common)
    found = specifications(tmp_path).own
    assert (found.devices, found.common) == ({"0": FIRST}, common)
    assert found.host == {"driver": "550.163.01", "cuda": "12.4"}
    write(tmp_path / "nvidia.json", {}, containerEdits=None)
    bare = specifications(tmp_path).own
    assert (bare.devices, bare.common, bare.host) == ({}, {}, {})


def test_other_kinds_are_found_in_all_folders_the_later_one_winning(tmp_path: Path) -> None:
    first, second = tmp_path / "etc", tmp_path / "run"
    write(first / "nvidia.json", GPUS, containerEdits=COMMON)
    write(first / "a.json", {"x": {"env": ["X=etc"]}, "y": {"env": ["Y=etc"]}}, "vendor.com/net", containerEdits=COMMON)
    write(second / "b.json", {"x": {"env": ["X=run"]}}, "vendor.com/net")
    (second / "broken.json").write_text("{")
    found = specifications(first, second, tmp_path / "none").edits_of(["vendor.com/net=x", "0", "vendor.com/net=y"])
    assert [one.get("env") for one in found] == [None, ["X=run"], ["COMMON=1"], ["N=0"], ["COMMON=1"], ["Y=etc"]]


def test_what_a_files_devices_share_comes_once_and_intels_rdt_is_kept(tmp_path: Path) -> None:
    hook = {"hookName": "createContainer", "path": "/hook"}
    device = {"intelRdt": {"closID": "x"}}
    write(tmp_path / "a.json", {"x": device, "y": FIRST}, "vendor.com/net", containerEdits={"hooks": [hook]})
    found = specifications(tmp_path).edits_of(["vendor.com/net=x", "vendor.com/net=y", "vendor.com/net=x"])
    assert found == [{"hooks": [hook]}, device, FIRST]


def test_a_device_in_two_files_of_one_folder_is_neither_unless_a_later_folder_has_it(tmp_path: Path) -> None:
    first, second = tmp_path / "etc", tmp_path / "run"
    for name in ("a", "b"):
        write(first / f"{name}.json", {"x": FIRST, name: SECOND}, "vendor.com/net")
    for name, edits in (("a", SECOND), ("b", SECOND)):
        assert specifications(first).edits_of([f"vendor.com/net={name}"])[-1] == edits
    with pytest.raises(Refused) as caught:
        specifications(first).edits_of(["vendor.com/net=x"])
    assert str(caught.value).startswith(f"{first}/a.json and {first}/b.json have a device vendor.com/net=x: ")
    write(second / "c.json", {"x": EVERY}, "vendor.com/net")
    assert specifications(first, second).edits_of(["vendor.com/net=x"])[-1] == EVERY


def test_a_name_a_hundred_thousand_times_over_is_one(gpus: Specifications) -> None:
    assert gpus.edits_of(["0"] * 100_000) == [COMMON, FIRST]


def test_a_default_kind_of_ones_own_is_where_plain_names_are_looked_for(tmp_path: Path) -> None:
    write(tmp_path / "own.json", {"0": SECOND}, "example.com/gpu")
    assert specifications(tmp_path, default_kind="example.com/gpu").edits_of(["0"])[-1] == SECOND


@pytest.mark.parametrize("name", ["0", "all", "0000:1B:00.0", "nvidia.com/gpu=1", "runtime.nvidia.com/gpu=1"])
def test_the_runtimes_own_kind_as_default_is_that_of_the_gpus(tmp_path: Path, name: str) -> None:
    write(tmp_path / "nvidia.json", GPUS)
    found = specifications(tmp_path, default_kind="runtime.nvidia.com/gpu").edits_of([name])
    assert found == specifications(tmp_path).edits_of([name])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("vendor.com/net=z", "there is no device vendor.com/net=z on this host; there are x"),
        ("other.com/net=0", "there is no CDI specification of other.com/net in "),
        ("yaml.com/net=0", "is YAML, which this runtime can't read: gpuprov cdi transform"),
    ],
)
def test_a_device_of_another_kind_that_is_not_there_is_refused(tmp_path: Path, name: str, says: str) -> None:
    write(tmp_path / "a.json", {"x": FIRST}, "vendor.com/net")
    (tmp_path / "b.yaml").write_text('cdiVersion: "0.5.0"\nkind: "yaml.com/net"\n')
    with pytest.raises(Refused, match=re.escape(says)):
        specifications(tmp_path).edits_of([name])


def test_a_device_that_an_annotation_names_and_only_yaml_has_is_the_engines(tmp_path: Path) -> None:
    write(tmp_path / "a.json", {"x": FIRST}, "vendor.com/net")
    (tmp_path / "b.yaml").write_text("cdiVersion: 0.5.0\nkind: yaml.com/net\n")
    names = ["yaml.com/net=0", "vendor.com/net=x"]
    assert specifications(tmp_path).edits_of(names, by_annotation=True) == [{}, FIRST]
    with pytest.raises(Refused, match="is YAML"):
        specifications(tmp_path).edits_of(names)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "5", "{}", '{"devices": 5}', '{"devices": [5]}', '{"devices": [{}]}', '{"devices": [{"name": []}]}',
     '{"devices": []}', '{"devices": [], "containerEdits": 5, "kind": "nvidia.com/gpu"}', "\ufeff{}",
     "kind: nvidia.com/gpu\n", "\udcff"],
)  # fmt: skip
def test_a_broken_specification_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nvidia.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(Refused) as caught:
        _ = specifications(tmp_path).own
    assert str(caught.value).startswith(f"the CDI specification {path} can't be used (")
    assert str(caught.value).endswith("): run gpuprov install on this host")


def test_a_missing_specification_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        _ = specifications(tmp_path).own
    said = f"there is no CDI specification {tmp_path}/nvidia.json on this host: run gpuprov install there"
    assert str(caught.value) == said
    (tmp_path / "nvidia.json").mkdir()
    with pytest.raises(Refused, match="can't be used"):
        _ = specifications(tmp_path).own
