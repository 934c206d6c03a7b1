"""Which driver serves which GPU, told before anything is downloaded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.driver.generations import generation_of, module_type, problems
from gpuprov.wire.driver_releases import branches, known_sha256, resolved
from gpuprov.wire.errors import GpuprovError
from gpuprov.wire.spec import parse_spec
from gpuprov.wire.versions import version_key

# Device ids of well-known boards, from the PCI ID database.
K80, M60, P100, GTX_1080, V100, T4, RTX_2080, GTX_1660 = "102d", "13f2", "15f8", "1b80", "1db4", "1eb8", "1e87", "2184"
A100, A10, RTX_3090, L4, H100, GH200, B200, RTX_5090 = "20b0", "2236", "2204", "27b8", "2330", "2342", "2901", "2b85"


@pytest.mark.parametrize(
    ("device_id", "name"),
    [
        (K80, "Kepler"), (M60, "Maxwell"), (P100, "Pascal"), (GTX_1080, "Pascal"), (V100, "Volta"), (T4, "Turing"),
        (RTX_2080, "Turing"), (GTX_1660, "Turing"), (A100, "Ampere"), (A10, "Ampere"), (RTX_3090, "Ampere"),
        (L4, "Ada Lovelace"), (H100, "Hopper"), ("2335", "Hopper"), (GH200, "Grace Hopper"), (B200, "Blackwell"),
        (RTX_5090, "Blackwell"),
    ],
)  # fmt: skip
def test_boards_are_of_their_generation(device_id: str, name: str) -> None:
    found = generation_of(device_id)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("device_id", ["", "xyz", "ffff", "3fff"])
def test_what_nobody_knows_is_held_against_nothing(device_id: str) -> None:
    assert generation_of(device_id) is None
    assert problems([device_id], "550.163.01", "auto") == ()


@pytest.mark.parametrize(
    ("device_ids", "version", "asked", "kind"),
    [
        ([H100], "550.163.01", "auto", "auto"),
        ([H100, T4], "550.163.01", "open", "open"),
        ([B200], "580.159.04", "auto", "open"),
        ([V100], "580.159.04", "auto", "proprietary"),
        ([V100, A100], "580.159.04", "auto", "proprietary"),
        ([GH200, H100], "550.163.01", "auto", "open"),
        ([H100], "620.10", "auto", "open"),
        ([], "550.163.01", "auto", "auto"),
    ],
)
def test_kernel_modules_are_those_that_the_gpus_need(
    device_ids: list[str], version: str, asked: str, kind: str
) -> None:
    assert module_type(device_ids, version, asked) == kind
    assert problems(device_ids, version, asked) == ()


@pytest.mark.parametrize(
    ("device_ids", "version", "asked", "says", "next_step"),
    [
        ([V100], "590.48.01", "auto", "driver 590.48.01 no longer serves this host's Volta GPU", "version: 580"),
        ([K80], "550.163.01", "auto", "no longer serves this host's Kepler GPU", "version: 470"),
        ([B200], "550.163.01", "auto", "does not know this host's Blackwell GPU yet", "version: 580"),
        ([L4], "470.256.02", "auto", "does not know this host's Ada Lovelace GPU yet", "version: 580"),
        ([V100, B200], "580.159.04", "auto", "no driver serves a Volta and a Blackwell GPU in one host", "vfio-pci"),
        ([V100], "580.159.04", "open", "open kernel modules can't drive this host's Volta GPU", "type: proprietary"),
        ([B200], "580.159.04", "proprietary", "proprietary kernel modules can't drive", "type: open"),
        ([A100], "470.256.02", "open", "driver 470.256.02 has no open kernel modules", "a newer"),
        ([A100], "620.10", "proprietary", "has no proprietary kernel modules any more", "version: 580"),
    ],
)
def test_what_cannot_work_is_said_with_its_way_out(
    device_ids: list[str], version: str, asked: str, says: str, next_step: str
) -> None:
    found = problems(device_ids, version, asked)
    assert says in found[0].what
    assert next_step in found[0].next_step
    assert all(one.evidence for one in found)


@given(st.lists(st.sampled_from([V100, T4, A100, H100, L4, T4]), min_size=1))
def test_the_long_term_branch_serves_everything_but_a_mix_with_open_only(device_ids: list[str]) -> None:
    assert problems(device_ids, resolved("latest"), "auto") == ()


def test_a_branch_is_its_newest_known_release() -> None:
    for branch in branches():
        assert resolved(branch).startswith(f"{branch}.")
        assert len(known_sha256(resolved(branch), "x86_64")) == 64
        assert known_sha256(resolved(branch), "aarch64") == ""
    assert resolved("latest") == resolved("580")
    assert resolved("550.54.14") == "550.54.14"
    assert known_sha256("550.54.14", "x86_64") == ""
    assert list(branches()) == sorted(branches(), key=version_key)


def test_a_branch_may_be_asked_for_in_an_inventory() -> None:
    assert parse_spec({"driver_version": "580"}).driver_version == resolved("580")
    assert parse_spec({"driver_version": "latest"}).driver_version == resolved("580")
    with pytest.raises(GpuprovError, match=r"nor a branch \(510, 525.*nor latest"):
        parse_spec({"driver_version": "581"})
