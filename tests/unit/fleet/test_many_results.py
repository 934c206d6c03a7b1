"""What is left to read of a thousand hosts: causes, versions, folded names, counts."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from gpuprov.agent.result import HostResult
from gpuprov.fleet.grouping import causes, listed, shortened
from gpuprov.fleet.report import print_report, summary
from gpuprov.protocol.errors import ExitCode, Problem
from gpuprov.protocol.events import CheckDone
from tests.unit.fleet.fleets import run_of


def failed(host: str, what: str, evidence: str = "", next_step: str = "") -> HostResult:
    return HostResult(host, ExitCode.FAILED, problems=(Problem(what, evidence, next_step),))


def done(host: str, **versions: str) -> HostResult:
    return HostResult(host, ExitCode.DONE, changed=2, seconds=3.0, versions=versions)


def report(*results: HostResult, command: str = "install", verbose: bool = False) -> str:
    to = Console(file=io.StringIO(), width=160, highlight=False, markup=False, emoji=False)
    print_report(to, run_of(command, results), verbose=verbose)
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


# -- names -----------------------------------------------------------------------------------------------------------

NAMES = [
    (["gpu01", "gpu02", "gpu03"], "gpu[01:03]"),
    (["gpu1", "gpu2"], "gpu1, gpu2"),
    (["gpu8", "gpu9", "gpu10", "gpu11", "gpu12"], "gpu8, gpu9, gpu[10:12]"),
    (["gpu01.dc1.example.org", "gpu02.dc1.example.org", "gpu03.dc1.example.org"], "gpu[01:03].dc1.example.org"),
    (["rack2-gpu1-a", "rack2-gpu2-a", "rack2-gpu3-a", "b"], "rack2-gpu[1:3]-a, b"),
    (["gpu1", "gpu3", "gpu5"], "gpu1, gpu3, gpu5"),
    ([f"gpu{number:03}" for number in range(0, 300, 2)], "gpu000, gpu002, gpu004, gpu006, gpu008 and 145 more"),
    (["gpu1", "gpu2", "gpu3", "a", "b", "c", "d", "x7", "x8", "x9"], "gpu[1:3], a, b, c, d and 3 more"),
    (["gpu" + "1" * 30], "gpu" + "1" * 30),
    ([], ""),
]


@pytest.mark.parametrize(("names", "text"), NAMES, ids=[text[:20] for _, text in NAMES])
def test_rows_of_names_are_folded_as_an_inventory_writes_them(names: list[str], text: str) -> None:
    assert listed(names) == text


def test_what_is_too_long_to_read_is_cut() -> None:
    assert shortened("a\nb\nc", lines=2) == "a\nb\n… 1 line more"
    assert shortened("x" * 500, columns=3) == "xxx …"
    assert shortened("short\n") == "short"


# -- causes ----------------------------------------------------------------------------------------------------------

SAME = [
    ("10.0.0.{n} port 22 does not answer", "HOST does not answer"),
    ("gpu{n} is full", "HOST is full"),
    ("[10.0.0.{n}]:2222 offers another key", "HOST offers another key"),
    ("gpu{n}.example.org port 22 refuses to log in root", "HOST refuses to log in root"),
    ("the disk is full", "the disk is full"),
]


@pytest.mark.parametrize(("what", "common"), SAME, ids=[common for _, common in SAME])
def test_faults_that_differ_by_the_host_alone_are_one(what: str, common: str) -> None:
    found = causes(failed(f"gpu{n}", what.format(n=n), next_step=f"ssh -v root@gpu{n}") for n in range(3))
    assert [(cause.what, cause.hosts) for cause in found] == [(common, ("gpu0", "gpu1", "gpu2"))]
    assert found[0].next_step == "ssh -v root@HOST"


def test_fault_of_one_host_keeps_its_words() -> None:
    assert causes([failed("gpu1", "10.0.0.1 port 22 does not answer")])[0].what == "10.0.0.1 port 22 does not answer"


def test_versions_are_no_hosts() -> None:
    two = [failed("a", "driver 550.163.01 is too old"), failed("b", "driver 535.247.01 is too old")]
    assert len(causes(two)) == 2


def test_one_command_that_names_all_hosts_is_one_cause() -> None:
    found = causes([replace(failed(name, "not run"), problems=(Problem("not run", "", "gpuprov install --hosts a,b,"),))
                    for name in "ab"])  # fmt: skip
    assert [(cause.hosts, cause.next_step) for cause in found] == [(("a", "b"), "gpuprov install --hosts a,b,")]


def test_name_within_another_name_is_left_alone() -> None:
    found = causes([failed("gpu1", "gpu10 is full"), failed("gpu10", "gpu10 is full")])
    assert [cause.what for cause in found] == ["gpu10 is full", "gpu10 is full"]


def test_cause_of_most_hosts_comes_first_and_evidence_is_shown_thrice() -> None:
    many = [failed(f"gpu{n}", "full", f"{n} %") for n in range(9)]
    first, second = causes([failed("x", "gone"), *many])
    assert (first.what, len(first.hosts), first.evidence) == ("full", 9, ("0 %", "1 %", "2 %"))
    assert second.what == "gone"


def test_many_hosts_with_one_cause_are_counted_and_named_in_short() -> None:
    text = report(*(failed(f"gpu{n:02}", "the disk is full", "df says 100 %", "make room") for n in range(37)))
    assert "37 hosts: the disk is full\n  on:   gpu[00:36]\n  seen: df says 100 %\n  next: make room\n" in text


def test_programs_get_the_causes_too() -> None:
    results = [failed("a", "full", next_step="make room"), failed("b", "full", "", "make room")]
    assert summary(run_of("install", results))["causes"] == [
        {"what": "full", "next_step": "make room", "hosts": ("a", "b"), "evidence": ()}
    ]


# -- versions --------------------------------------------------------------------------------------------------------


def test_odd_versions_are_named() -> None:
    fleet = [done(f"gpu{n}", driver="550.163.01", gpus="8") for n in range(8)]
    text = report(*fleet, done("gpu8", driver="535.247.01", gpus="8"), done("gpu9", driver="", gpus="8"))
    assert "driver  550.163.01         8  535.247.01: gpu8; none: gpu9" in text
    assert "gpus    8                 10" in text


def test_one_host_has_no_exceptions() -> None:
    assert "on most hosts" not in report(done("a", driver="1"), failed("b", "gone"))


# -- tables ----------------------------------------------------------------------------------------------------------


def test_of_many_hosts_only_the_outcomes_are_counted() -> None:
    fleet = [*(done(f"gpu{n:03}") for n in range(100)), failed("x", "full"), HostResult("y", ExitCode.UNREACHABLE)]
    text = report(*fleet)
    assert "done           100      200      3.0  gpu000 3.0" in text
    assert "unreachable      1" in text
    assert "gpu055" not in text
    assert text.splitlines()[-1] == "100 of 102 hosts installed; failed: x; unreachable: y"
    assert "gpu055" in report(*fleet, verbose=True)


def test_a_host_that_was_never_started_is_not_called_failed() -> None:
    later = HostResult("b", ExitCode.FAILED, problems=(Problem("not run: too many"),), begun=False)
    assert report(failed("a", "full"), later).splitlines()[-1] == "0 of 2 hosts installed; failed: a; not run: b"


def test_checks_of_many_hosts_are_counted() -> None:
    good, bad = CheckDone("driver", "ok", "550"), CheckDone("driver", "failed", reason="none")
    fleet = [HostResult(f"gpu{n}", ExitCode.DONE, checks=(bad if n in (3, 4) else good,)) for n in range(10)]
    text = report(*fleet, command="verify")
    assert "check   ok  failed  skipped  failed on \ndriver   8       2        0  gpu3, gpu4" in text


def test_hundreds_of_changes_are_summed() -> None:
    assert report(*(done(f"gpu{n}") for n in range(20))).splitlines()[-1] == "20 hosts installed: 40 changes"


def test_an_area_in_which_the_doctor_found_causes_is_told_by_these_alone() -> None:
    areas = (CheckDone("docker", "failed"), CheckDone("driver", "failed", reason="rc 9"))
    ill = HostResult("a", ExitCode.FAILED, checks=areas, problems=(Problem("docker does not run", "seen", "start it"),))
    assert [cause.what for cause in causes((ill,))] == ["driver: rc 9", "docker does not run"]
    # Where nothing else is told, the check is.
    assert [cause.what for cause in causes((replace(ill, problems=()),))] == ["docker", "driver: rc 9"]
