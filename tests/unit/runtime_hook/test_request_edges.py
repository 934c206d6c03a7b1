"""The edges of what a container asks for and requires: odd mounts, long numbers, hosts that can't tell."""

from __future__ import annotations

from typing import Any

import pytest

from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.request import parse_request
from gpuprov.runtime_hook.requirements import check, require, version_key
from gpuprov.runtime_hook.settings import Settings

MOUNT_ROOT = "/var/run/nvidia-container-devices"
MOUNTS_ACCEPTED = {"accept-nvidia-visible-devices-as-volume-mounts": True}
HOST = {"driver": "550.163.01", "cuda": "12.4", "brand": "Tesla", "arch": "9.0"}


def devices_of(mounts: object) -> list[str] | None:
    config: dict[str, Any] = {"process": {"env": ["NVIDIA_VISIBLE_DEVICES=9"]}, "mounts": mounts}
    return parse_request(config, Settings(MOUNTS_ACCEPTED)).devices


@pytest.mark.parametrize("mounts", [None, 5, "x", {}, [None, "x", 5, []], [{}], [{"source": "/dev/null"}]], ids=repr)
def test_mounts_that_name_nothing_leave_it_to_the_environment(mounts: object) -> None:
    assert devices_of(mounts) == ["9"]


def test_mounts_of_other_files_are_passed_over() -> None:
    other = {"source": "/dev/zero", "destination": f"{MOUNT_ROOT}/1"}
    named = {"source": "/dev/null", "destination": f"{MOUNT_ROOT}/2"}
    elsewhere = {"source": "/dev/null", "destination": "/elsewhere/3"}
    assert devices_of([other, "x", elsewhere, named]) == ["2"]


@pytest.mark.parametrize("name", ["cdi/nvidia.com/=0", "cdi/nvidia.com=0", "cdi/nvidia.com/gpu=", "cdi/gpu"])
def test_what_lacks_a_part_of_a_devices_name_names_none(name: str) -> None:
    assert devices_of([{"source": "/dev/null", "destination": f"{MOUNT_ROOT}/{name}"}]) == ["9"]


def test_a_container_that_asks_for_no_gpu_asks_for_nothing_else() -> None:
    config = {"process": {"env": ["NVIDIA_MIG_CONFIG_DEVICES=all", "NVIDIA_REQUIRE_CUDA=cuda>=99"]}}
    request = parse_request(config, Settings({}))
    assert request.devices is None
    assert (request.mig_config, request.mig_monitor, request.by_annotation) == ("", "", False)
    assert (request.capabilities, request.requirements, request.imex_channels, request.extras) == (
        frozenset(), [], [], [],
    )  # fmt: skip


def test_ignored_imex_channels_are_told() -> None:
    config = {"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_IMEX_CHANNELS=1"]}}
    assert parse_request(config, Settings({})).imex_channels == ["1"]
    request = parse_request(config, Settings({"features.ignore-imex-channel-requests": True}))
    assert request.imex_channels == []
    assert "IMEX channels don't count: ignore-imex-channel-requests is true" in request.decisions


def test_numbers_of_four_thousand_digits_are_no_version() -> None:
    assert version_key(f"1.{'1' * 3999}")[0] == 1
    with pytest.raises(ValueError, match="is no version"):
        version_key(f"1.{'1' * 4000}")
    environment = "NVIDIA_VISIBLE_DEVICES=all", f"CUDA_VERSION=9.1.{'1' * 3999}"
    assert parse_request({"process": {"env": list(environment)}}, Settings({})).requirements == ["cuda>=9.1"]
    with pytest.raises(Refused, match="is no version"):
        parse_request({"process": {"env": [environment[0], f"{environment[1]}1"]}}, Settings({}))


@pytest.mark.parametrize("expression", ["cuda>=12\tdriver>=550", "cuda!12.4.0.0.0", "!12.4.0.0.0"])
def test_what_is_no_condition_is_invalid(expression: str) -> None:
    assert check([expression], HOST)[0] == "invalid"
    with pytest.raises(Refused):
        require([expression], HOST)


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ({"brand": "Tesla"}, "this host's driver ? supports ?:"),
        ({"brand": "Tesla", "driver": "550.1"}, "this host's driver 550.1 supports ?:"),
        ({"brand": "Tesla", "cuda": "12.4"}, "this host's driver ? supports 12.4:"),
    ],
)
def test_what_a_host_can_not_tell_is_a_question_mark(host: dict[str, str], says: str) -> None:
    with pytest.raises(Refused) as caught:
        require(["brand=geforce"], host)
    assert f"requires brand=geforce, {says}" in str(caught.value)
