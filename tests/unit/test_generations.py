"""Which driver serves which GPU, told before anything is downloaded."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.agent.site_tables import checked_tables, for_request
from gpuprov.driver.generations import module_type, problems
from gpuprov.protocol import tables
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.models import generation_of
from gpuprov.protocol.spec import parse_spec
from gpuprov.protocol.tables import PACKAGED, checked_releases
from gpuprov.protocol.versions import version_numbers

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
        # By the PCI ID database of 2026-10: GT 520, GTX 560 Ti, C2050; GT 1030's neighbours; CMP 170HX; H200 SXM.
        ("1040", "Fermi or older"), ("1200", "Fermi or older"), ("1091", "Fermi or older"), ("1140", "Fermi or older"),
        ("1180", "Kepler"), ("1287", "Kepler"), ("1725", "Pascal"), ("17fd", "Maxwell"), ("2082", "Ampere"),
        ("20c2", "Ampere"), ("237e", "Hopper"), ("2e12", "Blackwell"), ("3002", "Rubin"), ("3182", "Blackwell Ultra"),
        ("31c2", "Blackwell Ultra"), ("3224", "Blackwell Ultra"), ("3340", "Blackwell Ultra"),
    ],
)  # fmt: skip
def test_boards_are_of_their_generation(device_id: str, name: str) -> None:
    found = generation_of(device_id, PACKAGED)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("device_id", ["", "xyz", "ffff", "3fff", "22ce", "2f95"])
def test_what_nobody_knows_is_held_against_nothing(device_id: str) -> None:
    assert generation_of(device_id, PACKAGED) is None
    assert problems([device_id], "550.163.01", "auto", PACKAGED) == ()


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
def test_kernel_modules_are_what_the_gpus_need(device_ids: list[str], version: str, asked: str, kind: str) -> None:
    assert module_type(device_ids, version, asked, PACKAGED) == kind
    assert problems(device_ids, version, asked, PACKAGED) == ()


@pytest.mark.parametrize(
    ("device_ids", "version", "asked", "says", "next_step"),
    [
        ([V100], "590.48.01", "auto", "driver 590.48.01 no longer serves this host's Volta GPU", 'version: "580"'),
        ([K80], "550.163.01", "auto", "no longer serves this host's Kepler GPU", 'version: "470"'),
        ([B200], "550.163.01", "auto", "does not know this host's Blackwell GPU yet", 'version: "580"'),
        ([L4], "470.256.02", "auto", "does not know this host's Ada Lovelace GPU yet", 'version: "580"'),
        ([V100, B200], "580.159.04", "auto", "serves Volta GPUs and Blackwell GPUs, but not in one host", "vfio-pci"),
        ([V100], "580.159.04", "open", "open kernel modules do not serve Volta GPUs", "type: proprietary"),
        ([B200], "580.159.04", "proprietary", "proprietary kernel modules do not serve", "type: open"),
        (["3182"], "570.211.01", "auto", "does not know this host's Blackwell Ultra GPU yet", 'version: "580"'),
        (["2e12"], "570.211.01", "auto", "does not know this host's Blackwell GPU yet", 'version: "580"'),
        (["3002"], "580.178.04", "auto", "does not know this host's Rubin GPU yet", 'version: "615"'),
        ([A100], "470.256.02", "open", "driver 470.256.02 has no open kernel modules", "a newer"),
        ([A100], "620.10", "proprietary", "has no proprietary kernel modules any more", 'version: "580"'),
    ],
)
def test_refusals_name_a_way_out(device_ids: list[str], version: str, asked: str, says: str, next_step: str) -> None:
    found = problems(device_ids, version, asked, PACKAGED)
    assert says in found[0].what
    assert next_step in found[0].next_step
    assert all(one.evidence for one in found)


@given(st.lists(st.sampled_from([V100, T4, A100, H100, L4, T4]), min_size=1))
def test_the_long_term_branch_serves_everything_but_a_mix_with_open_only(device_ids: list[str]) -> None:
    assert problems(device_ids, PACKAGED.resolved("latest"), "auto", PACKAGED) == ()


def test_a_branch_is_its_newest_known_release() -> None:
    for branch in PACKAGED.branches():
        assert PACKAGED.resolved(branch).startswith(f"{branch}.")
        assert len(PACKAGED.known_sha256(PACKAGED.resolved(branch), "x86_64")) == 64
        assert len(PACKAGED.known_sha256(PACKAGED.resolved(branch), "aarch64")) in (0, 64)
    assert PACKAGED.known_sha256("575.64.05", "aarch64") == ""
    assert PACKAGED.resolved("latest") == PACKAGED.resolved("580")
    assert PACKAGED.resolved("550.54.14") == "550.54.14"
    assert PACKAGED.known_sha256("550.54.14", "x86_64") == ""
    assert list(PACKAGED.branches()) == sorted(PACKAGED.branches(), key=version_numbers)


def test_a_branch_without_a_known_release_is_named_as_such() -> None:
    with pytest.raises(GpuprovError, match="of which no release is known"):
        parse_spec({"driver_version": "620"})
    assert parse_spec({"driver_version": "620.32.03"}).driver_version == "620.32.03"
    table = tables.packaged(tables.RELEASES)
    assert not set(table["announced"]) & set(table["newest"])


def test_a_branch_may_be_asked_for_in_an_inventory() -> None:
    assert parse_spec({"driver_version": "580"}).driver_version == PACKAGED.resolved("580")
    assert parse_spec({"driver_version": "latest"}).driver_version == PACKAGED.resolved("580")
    with pytest.raises(GpuprovError, match=r"nor a branch \(390, 470.*nor latest"):
        parse_spec({"driver_version": "581"})


def test_what_a_hint_asks_for_is_accepted() -> None:
    """Kepler was told to take 470, which nobody knew."""
    (problem,) = problems([K80], "550.163.01", "auto", PACKAGED)
    name, _, value = problem.next_step.removeprefix("set ").partition(": ")
    assert (name, value) == ("gpuprov_driver_version", '"470"')
    found = parse_spec({"driver_version": value.strip('"')}).driver_version
    assert found == "470.256.02"
    assert problems([K80], found, "auto", PACKAGED) == ()
    assert len(PACKAGED.known_sha256(found, "x86_64")) == len(PACKAGED.known_sha256(found, "aarch64")) == 64


def test_a_site_has_its_own_table_of_releases(tmp_path: Path) -> None:
    table = {
        "format": 1, "date": "2027-01-01", "support_ends": {"580": "2028-06"},
        "newest": {"580": "580.200.01", "625": "625.10.01"}, "sha256": {"x86_64": {"580.200.01": "a" * 64}},
    }  # fmt: skip
    file = tmp_path / "releases.json"
    file.write_text(json.dumps(table))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    values = {"driver_version": "580", "driver_releases": str(file), "driver_releases_sha256": digest}
    # Where the table is not yet, nothing is resolved by another one.
    asked = parse_spec(values)
    assert asked.driver_version == "580"
    assert parse_spec({**values, "driver_version": "latest"}).driver_version == "latest"
    found = checked_tables(json.loads(json.dumps(for_request(asked))))
    assert parse_spec(values, tables=found).driver_version == "580.200.01"
    assert found.known_sha256("580.200.01", "x86_64") == "a" * 64
    assert len(found.known_sha256("580.178.04", "x86_64")) == 64
    assert parse_spec({**values, "driver_version": "625"}, tables=found).driver_version == "625.10.01"
    with pytest.raises(GpuprovError, match="branch"):
        parse_spec({**values, "driver_version": "595"}, tables=found)
    assert parse_spec({"driver_version": "580"}).driver_version == PACKAGED.resolved("580") != "580.200.01"
    with pytest.raises(GpuprovError, match="not the one that was asked for"):
        for_request(replace(asked, driver_releases_sha256="b" * 64))
    with pytest.raises(GpuprovError, match="has no digest"):
        for_request(replace(asked, driver_releases_sha256=""))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"format": 0}, "its format is not 1"),
        ({"newest": {"580": "590.1.1"}}, "is no release of that branch"),
        ({"newest": {"590": "590.1.1"}}, "lacks the long-term branch 580"),
        ({"newest": []}, "must be mappings"),
        ({"sha256": {"x86_64": {"580.1.1": "abc"}}}, "has no SHA-256 digest"),
        ({"support_ends": {"580": "June"}}, "not a month"),
    ],
)
def test_a_table_of_releases_that_is_not_sound_is_refused(damage: dict[str, object], says: str) -> None:
    good = {"format": 1, "newest": {"580": "580.1.1"}, "sha256": {}, "support_ends": {}}
    assert checked_releases(good, "site.json") == good
    with pytest.raises(GpuprovError, match=says):
        checked_releases({**good, **damage}, "site.json")


def test_branches_without_fixes_are_known_to_have_ended() -> None:
    assert PACKAGED.support_end("580.178.04") == "2028-06"
    assert PACKAGED.support_end("535") == "2026-06"
    assert PACKAGED.support_end("615.71.09") == ""
