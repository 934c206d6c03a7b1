"""`gpuprov health --hosts` over a hundred simulated hosts: who is named, in which order, and how many at a time."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpuprov.checks.health import examine
from gpuprov.cli.main import cli
from gpuprov.protocol.events import Finished, Sink
from gpuprov.protocol.request import Request
from tests.unit.test_health import HealthHost, report_of

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
        self.here = threading.local()
        self.lock = threading.Lock()
        self.now = self.most = 0
        self.judged: list[str] = []

    def claim(self, name: str, *rest: object) -> None:
        """Learn which host this thread serves: all of them are this machine."""
        self.here.name = name

    def answer(self, request: Request, sink: Sink, stop: Callable[[], bool]) -> Finished:
        assert request.command == "health"
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.judged.append(self.here.name)
        number = int(self.here.name[3:])
        host = HealthHost(self.folder / self.here.name)
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
    monkeypatch.setattr("gpuprov.fleet.run.run_here", found.answer)
    monkeypatch.setattr("gpuprov.fleet.run.Fleet._claim", found.claim)
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
