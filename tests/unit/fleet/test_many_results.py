"""What is left to read of a thousand hosts: causes, versions, folded names, counts."""

import io
import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from gpuprov.agent.result import HostResult
from gpuprov.checks.health import examine
from gpuprov.cli.main import cli
from gpuprov.fleet.grouping import causes, listed, shortened
from gpuprov.fleet.history import Run
from gpuprov.fleet.report import print_report, summary, write_metrics
from gpuprov.protocol.errors import ExitCode, Problem
from gpuprov.protocol.events import CheckDone, Finished, HealthFound, Sink
from gpuprov.protocol.request import Request
from gpuprov.protocol.words import one_line
from tests.unit.fleet.fleets import played, run_of
from tests.unit.test_health import HealthHost, report_of


def failed(host: str, what: str, evidence: str = "", next_step: str = "") -> HostResult:
    return HostResult(host, ExitCode.FAILED, problems=(Problem(what, evidence, next_step),))


def done(host: str, **versions: str) -> HostResult:
    return HostResult(host, ExitCode.DONE, changed=2, seconds=3.0, versions=versions)


def report(*results: HostResult, command: str = "install", verbose: bool = False) -> str:
    to = Console(file=io.StringIO(), width=160, highlight=False, markup=False, emoji=False)
    print_report(to, run_of(command, results), verbose=verbose)
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


# -- names ---------------------------------------------------------------------------------------------------------

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
    (list("abc"), "a, b, c"),
    (list("abcdefg"), "a, b, c, d, e and 2 more"),
    ([], ""),
]


@pytest.mark.parametrize(("names", "text"), NAMES, ids=[text[:20] for _, text in NAMES])
def test_rows_of_names_are_folded_as_an_inventory_writes_them(names: list[str], text: str) -> None:
    assert listed(names) == text


def test_what_is_too_long_to_read_is_cut() -> None:
    assert shortened("a\nb\nc", lines=2) == "a\nb\n… 1 line more"
    assert shortened("x" * 500, columns=3) == "xxx …"
    assert shortened("short\n") == "short"
    assert one_line("a\n  b") == "a b"


# -- causes --------------------------------------------------------------------------------------------------------

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


# One host's fault keeps its words; versions are no hosts; a name within another one is left alone.
APART = [
    [("gpu1", "10.0.0.1 port 22 does not answer")],
    [("a", "driver 550.163.01 is too old"), ("b", "driver 535.247.01 is too old")],
    [("gpu1", "gpu10 is full"), ("gpu10", "gpu10 is full")],
]


@pytest.mark.parametrize("faults", APART, ids=["one", "versions", "names"])
def test_faults_of_other_kinds_stay_apart(faults: list[tuple[str, str]]) -> None:
    found = causes([failed(host, what) for host, what in faults])
    assert [(cause.hosts, cause.what) for cause in found] == [((host,), what) for host, what in faults]


def test_one_command_that_names_all_hosts_is_one_cause() -> None:
    found = causes([replace(failed(name, "not run"), problems=(Problem("not run", "", "gpuprov install --hosts a,b,"),))
                    for name in "ab"])  # fmt: skip
    assert [(cause.hosts, cause.next_step) for cause in found] == [(("a", "b"), "gpuprov install --hosts a,b,")]


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


# -- versions ------------------------------------------------------------------------------------------------------


def test_odd_versions_are_named() -> None:
    fleet = [done(f"gpu{n}", driver="550.163.01", gpus="8") for n in range(8)]
    text = report(*fleet, done("gpu8", driver="535.247.01", gpus="8"), done("gpu9", driver="", gpus="8"))
    assert "driver  550.163.01         8  535.247.01: gpu8; none: gpu9" in text
    assert "gpus    8                 10" in text


def test_one_host_has_no_exceptions() -> None:
    assert "on most hosts" not in report(done("a", driver="1"), failed("b", "gone"))


# -- tables --------------------------------------------------------------------------------------------------------


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


# -- metrics -----------------------------------------------------------------------------------------------------------


Samples = dict[tuple[str, ...], float]
DOCS = Path(__file__).parents[3] / "docs"
EVIL = 'gpu"\n1{}\\'


def samples(path: Path) -> Samples:
    """Return the values by name and the values of its labels, these in the order of their names."""
    families = text_string_to_metric_families(path.read_text())
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def written(folder: Path, *results: HostResult, check: bool = False) -> Samples:
    run = Run("20261122T0815-7", "install", "2026-11-22T08:15:00+0000", 9.5, results, check)
    write_metrics(run, str(folder / "gpuprov.prom"), 1795338923.0)
    return samples(folder / "gpuprov.prom")


def test_a_run(tmp_path: Path) -> None:
    checks = (CheckDone("driver", "ok"), CheckDone("docker", "failed"), CheckDone("image", "skipped"))
    versions = {"os": "Debian 12", "kernel": "6.1", "driver": "550.163.01", "docker": "26", "gpus": "2"}
    good = HostResult("gpu1", ExitCode.DONE, 3, 2.5, checks=checks, versions=versions)
    found = written(tmp_path, good, HostResult("gpu2", ExitCode.UNREACHABLE))
    assert found["gpuprov_run_timestamp_seconds", "install"] == 1795338923.0
    assert found["gpuprov_run_duration_seconds", "install"] == 9.5
    assert (found["gpuprov_host_success", "gpu1"], found["gpuprov_host_success", "gpu2"]) == (1, 0)
    assert found["gpuprov_host_exit_code", "gpu2"] == 4
    assert found["gpuprov_host_changes", "gpu1"] == 3
    assert {name: value for name, value in found.items() if name[0] == "gpuprov_check_success"} == {
        ("gpuprov_check_success", "driver", "gpu1"): 1, ("gpuprov_check_success", "docker", "gpu1"): 0,
    }  # fmt: skip
    assert found["gpuprov_version_info", "26", "550.163.01", "gpu1", "6.1", "Debian 12", ""] == 1
    assert found["gpuprov_gpus", "gpu1"] == 2
    vulnerabilities = [name for name in found if name[0] == "gpuprov_known_hole_score"]
    assert [name[2:] for name in vulnerabilities] == [("gpu1", "driver", "550.163.01")]
    assert found[vulnerabilities[0]] > 5


def test_a_finding_is_a_metric(tmp_path: Path) -> None:
    found = (HealthFound("unfit", "row-remap-failed", "3", "GPU-3", "broken", "Yes", "replace it"),)
    result = HostResult(
        "a", ExitCode.DONE, checks=(CheckDone("x", "ok"),), versions={"driver": "550.163.01", "gpus": "1"}, health=found
    )
    assert written(tmp_path, result)["gpuprov_health_finding", "3", "a", "row-remap-failed", "GPU-3"] == 2


def test_a_check_has_changes_that_are_pending(tmp_path: Path) -> None:
    found = written(tmp_path, HostResult("gpu1", ExitCode.DONE, 3), check=True)
    assert found["gpuprov_host_changes_pending", "gpu1"] == 3
    assert ("gpuprov_host_changes", "gpu1") not in found


def test_names_from_hosts_and_inventories_break_no_line(tmp_path: Path) -> None:
    found = written(tmp_path, HostResult(EVIL, ExitCode.DONE, versions={"driver": EVIL, "gpus": "many"}))
    assert found["gpuprov_host_success", EVIL] == 1
    assert found["gpuprov_version_info", "", EVIL, EVIL, "", "", ""] == 1
    assert not [name for name in found if name[0] == "gpuprov_gpus"]


def test_a_name_that_a_host_sends_twice_is_one_series(tmp_path: Path) -> None:
    twice = (CheckDone("driver", "ok"), CheckDone("driver", "failed"))
    found = written(tmp_path, HostResult("gpu1", ExitCode.FAILED, checks=twice))
    assert [value for name, value in found.items() if name[0] == "gpuprov_check_success"] == [0]
    (page,) = [path.read_text() for path in tmp_path.rglob("*.prom")]
    assert page.count('check="driver"') == 1


@pytest.mark.parametrize(
    ("words", "result", "code"),
    [
        (("--check", "--detailed-exitcode"), HostResult("localhost", ExitCode.DONE, 2), 5),
        (("--check", "--detailed-exitcode"), HostResult("localhost", ExitCode.DONE, 0), 0),
        (("--check", "--detailed-exitcode"), HostResult("localhost", ExitCode.FAILED, 2), 1),
        (("--check",), HostResult("localhost", ExitCode.DONE, 2), 0),
    ],
)
def test_drift_has_an_exit_code_for_those_who_ask(
    words: tuple[str, ...], result: HostResult, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("gpuprov.fleet.run.Fleet.run", lambda *_: (result,))
    path = tmp_path / "gpuprov.prom"
    done = CliRunner().invoke(cli, ["install", "--hosts", "gpu1,", *words, "--metrics", str(path)])
    assert done.exit_code == code, done.output
    assert samples(path)["gpuprov_host_changes_pending", "localhost"] == result.changed


def test_the_alerts_of_the_page_ask_for_metrics_that_exist() -> None:
    """promtool is not here (100 MB): the rules are read as YAML, their metrics are looked up in the table."""
    rules = re.findall(r"```yaml\n(groups:.*?)```", (DOCS / "fleets.md").read_text(), re.DOTALL)
    alerts = [rule for group in yaml.safe_load(rules[0])["groups"] for rule in group["rules"]]
    documented = set(re.findall(r"^\| `(gpuprov_\w+)` \|", (DOCS / "fleets.md").read_text(), re.MULTILINE))
    assert len(alerts) == 4
    for alert in alerts:
        assert set(re.findall(r"gpuprov_\w+", alert["expr"])) <= documented, alert
        assert alert["annotations"]["summary"]


# -- health and doctor of many hosts -----------------------------------------------------------------------------------


_HOSTS, _GPUS, _FORKS = 100, 8, 10
_SICK = {17: "<remapped_rows><remapped_row_failure>Yes</remapped_row_failure></remapped_rows>",
         64: "<compute_mode>Prohibited</compute_mode>"}  # fmt: skip
_DEGRADED = {3: "<remapped_rows><remapped_row_pending>Yes</remapped_row_pending></remapped_rows>",
             99: "<persistence_mode>Disabled</persistence_mode>"}  # fmt: skip
# Its nvidia-smi is gone.
_SILENT = 40


def name_of(number: int) -> str:
    return f"gpu{number:02}"


class Fleet:
    """Hosts that are judged in this process, each by a report of its own; it counts those that are judged at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self.now = self.most = 0
        self.judged: list[str] = []

    def answer(self, name: str, request: Request, sink: Sink) -> Finished:
        assert request.command == "health"
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.judged.append(name)
        number = int(name[3:])
        host = HealthHost(self.folder / name)
        ill = {**_SICK, **_DEGRADED}.get(number, "")
        if number != _SILENT:
            host.report = report_of(*("" if gpu != number % _GPUS else ill for gpu in range(_GPUS)))
        try:
            return examine(host, sink)
        finally:
            with self.lock:
                self.now -= 1


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    found = Fleet(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    played(monkeypatch, found.answer)
    hosts = "".join(f"{name_of(number)} ansible_connection=local\n" for number in range(_HOSTS))
    (tmp_path / "hosts.ini").write_text(hosts)
    return found


def health(fleet: Fleet, *words: str) -> Result:
    inventory = str(fleet.folder / "hosts.ini")
    return CliRunner().invoke(cli, ["health", "--hosts", inventory, "--forks", str(_FORKS), *words])


def test_the_sick_hosts_are_named_and_nobody_else(fleet: Fleet) -> None:
    done = health(fleet)
    assert done.exit_code == 7, done.output
    assert sorted(fleet.judged) == [name_of(number) for number in range(_HOSTS)]
    assert fleet.most <= _FORKS
    last = done.output.strip().splitlines()[-1]
    assert last == "95 of 100 hosts healthy; degraded: gpu03, gpu99; unfit: gpu17, gpu40, gpu64", last
    assert "GPU 1: broken memory rows could not be replaced" in done.output


def test_each_finding_names_its_host_its_gpu_and_its_rule(fleet: Fleet) -> None:
    done = health(fleet, "--json")
    events = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    found = {(one["host"], one["rule"], one["gpu"]) for one in events if one["event"] == "HealthFound"}
    assert found == {
        ("gpu17", "row-remap-failed", "1"), ("gpu64", "compute-prohibited", "0"), ("gpu03", "row-remap-pending", "3"),
        ("gpu99", "persistence-off", "3"), ("gpu40", "no-report", ""),
    }  # fmt: skip
    finished = [one["host"] for one in events if one["event"] == "Finished"]
    assert sorted(finished) == [name_of(number) for number in range(_HOSTS)]


def test_the_metrics_have_a_line_for_each_sick_gpu(fleet: Fleet) -> None:
    health(fleet, "--metrics", str(fleet.folder / "health.prom"))
    text = (fleet.folder / "health.prom").read_text()
    lines = re.findall(r'^gpuprov_health_finding\{.*\bhost="(\w+)".*\} (\d)\.0$', text, re.MULTILINE)
    assert sorted(lines) == [("gpu03", "1"), ("gpu17", "2"), ("gpu40", "2"), ("gpu64", "2"), ("gpu99", "1")]
