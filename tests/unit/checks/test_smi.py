"""What nvidia-smi says, and where two of its reports differ."""

import re
from pathlib import Path

import pytest

from gpuprov.checks.smi import SmiGpu, SmiReport, difference, parse_smi, per_gpu
from tests.simgpu import gpu
from tests.unit.refused import refused

# `nvidia-smi -q -x` of driver 550.163.01 on a host with two GPUs.
REPORT = (Path(__file__).parents[2] / "data/nvidia-smi-q-x-2-gpus.xml").read_text()


def test_a_real_report() -> None:
    report = parse_smi(REPORT)
    assert (report.driver, report.cuda) == ("550.163.01", "12.4")
    assert report.gpus == tuple(
        SmiGpu(
            uuid=gpu(minor).uuid,
            name="NVIDIA H100 80GB HBM3",
            bus_id=gpu(minor).bus_id,
            minor=str(minor),
            memory=f"{gpu(minor).memory_mib} MiB",
            mig="Disabled",
        )
        for minor in (0, 1)
    )
    assert difference(report, report) is None


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("<driver_version>550.163.01", "<driver_version>535.216.03", "driver"),
        ("<cuda_version>12.4", "<cuda_version>12.2", "CUDA"),
        (f"<uuid>{gpu(0).uuid}", f"<uuid>{gpu(5).uuid}", "GPU 0 UUID"),
        (f"<uuid>{gpu(1).uuid}", f"<uuid>{gpu(5).uuid}", "GPU 1 UUID"),
        ("<product_name>NVIDIA H100 80GB HBM3", "<product_name>NVIDIA H200", "GPU 0 name"),
        (f"<pci_bus_id>{gpu(0).bus_id}", f"<pci_bus_id>{gpu(5).bus_id}", "GPU 0 PCI bus id"),
        ("<minor_number>1", "<minor_number>7", "GPU 1 minor number"),
        (f"<total>{gpu(1).memory_mib} MiB", "<total>16 MiB", "GPU 1 memory"),
        ("<current_mig>Disabled", "<current_mig>Enabled", "GPU 0 MIG mode"),
    ],
)
def test_the_first_field_that_differs_is_named(old: str, new: str, field: str) -> None:
    assert old in REPORT
    found = difference(parse_smi(REPORT), parse_smi(REPORT.replace(old, new, 1)))
    assert found is not None
    assert found[0] == field and found[1] in old and found[2] in new


def test_a_missing_gpu_is_named_before_its_fields() -> None:
    whole = parse_smi(REPORT)
    one = SmiReport(whole.driver, whole.cuda, whole.gpus[1:])
    assert difference(whole, one) == ("GPU count", "2", "1")


def test_what_changes_by_itself_is_no_difference() -> None:
    changed = re.sub(r"<timestamp>[^<]*", "<timestamp>Mon Jan  1 00:00:00 2024", REPORT)
    changed = re.sub(r"<used>[^<]*", "<used>77 MiB", changed)
    assert changed != REPORT
    assert difference(parse_smi(REPORT), parse_smi(changed)) is None


LAUGHS = '<!DOCTYPE a [<!ENTITY b "{}"><!ENTITY c "{}">]><a>&c;</a>'.format("ha" * 1000, "&b;" * 1000)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (LAUGHS, "is no report"),
        ('<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><a>&x;</a>', "is no report"),
        ("<a>" + "x" * (8 << 20) + "</a>", "is no report"),
        ("", "is no XML report"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "is no XML report"),
        (REPORT[: len(REPORT) // 2], "is no XML report"),
        ("<a>&undeclared;</a>", "is no XML report"),
        ("<a>" * 100_000, "is no XML report"),
    ],
    ids=["laughs", "entity", "huge", "empty", "words", "torn", "undeclared", "deep"],
)
def test_hostile_output_is_a_plain_error(text: str, what: str) -> None:
    problem = refused(parse_smi, text)
    assert what in problem.what
    assert len(problem.evidence) < 400


@pytest.mark.parametrize("sign", [*map(chr, (0, 1, 11, 27, 31)), "\ufffe", "\ufffd", "\r"])
def test_a_process_whose_name_is_no_xml_hides_no_gpu(sign: str) -> None:
    """The genuine nvidia-smi 535 and 550 escape < and &, and print other signs of a name as they are."""
    name = f"<process_info><process_name>{sign}x</process_name></process_info>"
    text = REPORT.replace("<processes>", f"<processes>{name}")
    assert text.count(sign) >= 2
    assert parse_smi(text) == parse_smi(REPORT)
    found = per_gpu(text)
    assert [one["uuid"] for one in found] == [one["uuid"] for one in per_gpu(REPORT)]
    assert all(one["processes/process_info/process_name"].endswith("x") for one in found)


def test_deep_and_foreign_xml_has_no_gpus() -> None:
    assert parse_smi("<a>" * 100_000 + "</a>" * 100_000) == SmiReport("", "", ())
    assert parse_smi("<nvidia_smi_log><gpu/></nvidia_smi_log>").gpus == (SmiGpu("", "", "", "", "", ""),)
