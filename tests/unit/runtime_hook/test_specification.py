"""The CDI specification read, and devices found in it by each of their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.specification import Specification, find_devices, load_specification

FIRST, SECOND, EVERY = {"env": ["N=0"]}, {"env": ["N=1"]}, {"env": ["N=all"]}
UUID = "GPU-5d4c3b2a-0000-1111-2222-333344445555"
GPUS = Specification(
    {"0": FIRST, UUID: FIRST, "0000:1b:00.0": FIRST, "1": SECOND, "10": SECOND, "all": EVERY}, {}, {}
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "edits"),
    [
        ("0", FIRST),
        ("1", SECOND),
        (UUID, FIRST),
        ("0000:1b:00.0", FIRST),
        ("0000:1B:00.0", FIRST),
        ("00000000:1B:00.0", FIRST),
        ("nvidia.com/gpu=0", FIRST),
        (f"nvidia.com/gpu={UUID}", FIRST),
        ("nvidia.com/gpu=00000000:1B:00.0", FIRST),
        ("runtime.nvidia.com/gpu=1", SECOND),
        ("all", EVERY),
        ("nvidia.com/gpu=all", EVERY),
    ],
)
def test_a_device_by_each_of_its_names(name: str, edits: dict[str, Any]) -> None:
    assert find_devices(GPUS, [name]) == [edits]


def test_devices_come_in_the_order_in_which_they_are_named() -> None:
    assert find_devices(GPUS, ["1", UUID]) == [SECOND, FIRST]
    assert find_devices(GPUS, []) == []


@pytest.mark.parametrize(
    "name", ["7", "00", "GPU-5d4c3b2a", UUID.lower(), "0001:1b:00.0", "1b:00.0", "ALL", "vendor.com/gpu=0", "", "0:0"]
)
def test_an_unknown_device_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(Refused) as caught:
        find_devices(GPUS, ["0", name])
    assert str(caught.value) == f"there is no GPU {name!r} on this host; there are 0, 1, 10"


def test_on_a_host_without_gpus_there_are_none() -> None:
    with pytest.raises(Refused, match="there are none"):
        find_devices(Specification({}, {}, {}), ["all"])


def test_a_specification_is_read_with_what_it_says_of_the_host(tmp_path: Path) -> None:
    path = tmp_path / "nvidia.json"
    annotations = {"gpuprov.io/driver-version": "550.163.01", "gpuprov.io/cuda-version": "12.4", "other": "x"}
    document = {
        "cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "annotations": annotations,
        "containerEdits": {"env": ["A=1"]}, "devices": [{"name": "0", "containerEdits": FIRST}],
    }  # fmt: skip
    path.write_text(json.dumps(document))
    found = load_specification(str(path))
    assert found.devices == {"0": FIRST}
    assert found.common == {"env": ["A=1"]}
    assert found.host == {"driver": "550.163.01", "cuda": "12.4"}
    path.write_text(json.dumps({"devices": [], "annotations": None, "containerEdits": None}))
    bare = load_specification(str(path))
    assert (bare.devices, bare.common, bare.host) == ({}, {}, {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        "{}",
        '{"devices": 5}',
        '{"devices": [5]}',
        '{"devices": [{}]}',
        '{"devices": [{"name": []}]}',
        '{"devices": [], "annotations": 5}',
        "\ufeff{}",
        "kind: nvidia.com/gpu\n",
        "\udcff",
    ],
)
def test_a_broken_specification_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nvidia.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(Refused) as caught:
        load_specification(str(path))
    assert str(caught.value).startswith(f"the CDI specification {path} can't be used (")
    assert str(caught.value).endswith("): run gpuprov install on this host")


def test_a_missing_specification_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        load_specification(f"{tmp_path}/nvidia.json")
    assert (
        str(caught.value) == f"there is no CDI specification {tmp_path}/nvidia.json on this host: "
        "run gpuprov install there"
    )
    with pytest.raises(Refused, match="can't be used"):
        load_specification(str(tmp_path))
