"""Metrics of a run: read back by Prometheus's own parser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from gpuprov.agent.result import HostResult
from gpuprov.cli.main import cli
from gpuprov.fleet import command
from gpuprov.fleet.history import Run
from gpuprov.fleet.report import write_metrics
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import CheckDone, HealthFound

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


def test_the_page_has_every_metric(tmp_path: Path) -> None:
    found = (HealthFound("unfit", "row-remap-failed", "3", "GPU-3", "broken", "Yes", "replace it"),)
    result = HostResult(
        "a", ExitCode.DONE, checks=(CheckDone("x", "ok"),), versions={"driver": "550.163.01", "gpus": "1"}, health=found
    )
    assert written(tmp_path, result)["gpuprov_health_finding", "3", "a", "row-remap-failed", "GPU-3"] == 2
    names = {name for check in (False, True) for name, *_ in written(tmp_path, result, check=check)}
    page = Path(__file__).parents[3] / "docs/fleets.md"
    assert set(re.findall(r"^\| `(gpuprov_\w+)` \|", page.read_text(), re.MULTILINE)) == names


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
    monkeypatch.setattr(command, "_run", lambda *_: ((result,), None))
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
