"""One host of three that answers nonsense, in every field of every event: the report of the others stands."""

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from gpuprov.agent.result import HostResult, Recorder
from gpuprov.cli.main import cli
from gpuprov.fleet.history import Run, before, load, save
from gpuprov.fleet.page import render
from gpuprov.fleet.progress import JsonLines, PlainLines
from gpuprov.fleet.report import print_report, summary, write_metrics
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.events import (
    CauseFound,
    ChangeDone,
    ChangeProgress,
    ChangeStarted,
    CheckDone,
    CudaSurveyed,
    Event,
    EventReader,
    FactsGathered,
    Finished,
    GpuMeasured,
    HealthFound,
    Note,
    Planned,
    PlannedChange,
    Started,
    to_line,
)  # fmt: skip
from tests.unit.fleet.fleets import run_of

VERSIONS = {"os": "Debian 12", "kernel": "6.1", "driver": "550.163.01", "docker": "26.1.5", "gpus": "2", "mig": ""}
FACTS = {"os": {"name": "Debian 12"}, "driver": {"library_version": "550.163.01"}, "gpus": [1, 2], "mig": []}
CHANGE = PlannedChange("k", "docker", "write /etc/docker/daemon.json", "-a\n+b", "+b", True)
PROBLEM = Problem("a check failed", "seen", "next")
# All that an agent may send in one run; the last event decides.
RUN: tuple[Event, ...] = (
    Started("0.1.0", "verify", 7), Note("careful", "warning"), Planned((CHANGE,), True),
    ChangeStarted("k", "write", 1, 1), ChangeProgress("k", "written", 1, 2), ChangeDone("k", 1.5),
    FactsGathered(FACTS), CheckDone("docker, all GPUs", "ok", "2 GPUs", "2 GPUs, the same", "", "docker"),
    CudaSurveyed({"kind": "host", "name": "h"}),
    CauseFound(1, "rule", "area", "what", "evidence", "next", "certain", "", "remedy"),
    HealthFound("unfit", "ecc", "0", "GPU-1", "what", "evidence", "next"),
    GpuMeasured("0", "GPU-1", "H100", {"rate": 1.5}),
    Finished(1, 1, 2.0, (PROBLEM,), "done", VERSIONS, ""),
)  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    "9" * 5000, "5²", "5² GPUs", "9" * 400 + " GPUs", "0: 1g.10gb; " * 20, "\ud800", "a\x1b[2J\x9b1A\r\n\u202eb",
    "[bold]x[/nope]", "</td><script>", "{{ 1 }}", '"} 1\n# HELP', "x" * 3_000_000, "\n" * 5000, "٣" * 20, "",
    10**15, -1, 1e300, True, None, [], {}, {"a": [[]] * 9}, ["x"] * 20_000, {str(one): one for one in range(20_000)},
)  # fmt: skip


def with_value(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of JSON with another value at the path."""
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = with_value(data[path[0]], path[1:], value)
    return copy


def paths(data: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in JSON, of parts and wholes."""
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, (list, tuple)) else ()
    for key, part in pairs:
        yield (*here, key)
        yield from paths(part, (*here, key))


def result_of(host: str, lines: list[str], *sinks: Any) -> HostResult:
    """Return what a run makes of the lines that a host sends."""

    def tell(name: str, event: Event) -> None:
        for sink in sinks:
            sink(name, event)

    recorder = Recorder(host, tell)
    read = EventReader()
    try:
        for line in lines:
            event = read(line)
            if event is not None:
                recorder(event)
    except GpuprovError as error:
        recorder(Finished(int(error.exit_code), problems=error.problems))
    return recorder.result(1.0)


def all_outputs(results: tuple[HostResult, ...], folder: Path) -> str:
    """Return the report and the page, with JSON, metrics and history written and read back."""
    run = Run("20261122T081500-7", "verify", "2026-11-22T08:15:00+0000", 9.5, results)
    console = Console(file=io.StringIO(), width=160)
    for command, verbose in (("verify", True), ("install", False), ("facts", True), ("health", True)):
        print_report(console, run_of(command, results), verbose=verbose)
    json.dumps(summary(run_of("verify", results)))
    write_metrics(run, str(folder / "gpuprov.prom"), 1.0)
    families = text_string_to_metric_families((folder / "gpuprov.prom").read_text("utf-8"))
    named = {one.labels["host"] for family in families for one in family.samples if "host" in one.labels}
    assert {result.host for result in results} == named
    save(run)
    kept = load(run.identifier)
    assert [one.host for one in kept.results] == [one.host for one in results]
    before(run)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue() + render(run, kept)


@pytest.mark.parametrize("event", RUN, ids=lambda event: type(event).__name__)
def test_nonsense_of_one_host_fails_only_it(event: Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    lines = [to_line(one) for one in RUN]
    place = RUN.index(event)
    data = json.loads(lines[place])
    honest = result_of("a", lines), result_of("c", lines)
    for path in paths(data):
        to = Console(file=io.StringIO(), width=120)
        results: list[HostResult] = []
        for number, value in enumerate(HOSTILE):
            hostile = [*lines]
            hostile[place] = json.dumps(with_value(data, path, value))
            result = result_of(f"b{number}", hostile, JsonLines(to), PlainLines(to, verbose=True, diff=True))
            # What another value has led to already is in that one's outputs.
            known = [replace(one, host=result.host) for one in results]
            if result not in known and not (result.problems and "never sends" in result.problems[0].what):
                results.append(result)
        if results:
            text = all_outputs((honest[0], *results, honest[1]), tmp_path)
            assert isinstance(to.file, io.StringIO)
            assert not {"\x1b", "\x9b", "\r", "\u202e", "\ud800"} & {*text, *to.file.getvalue()}, path


def test_what_is_refused_is_in_every_output_as_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    lines = [to_line(one) for one in RUN]
    refused = result_of("b", [*lines[:5], json.dumps({"event": "CheckDone", "name": 7, "status": "ok"})])
    text = all_outputs((result_of("a", lines), refused, result_of("c", lines)), tmp_path)
    assert "CheckDone.name is not a text" in text


@pytest.mark.parametrize(
    "lines",
    [
        lambda: [to_line(CheckDone(f"check {number}", "ok", "x" * 100)) for number in range(16_000)],
        lambda: [json.dumps({**json.loads(to_line(Finished(0))), "summary": "x" * 3_000_000})],
        lambda: [to_line(ChangeStarted(f"k{number}", "x", 1, 1)) for number in range(50_000)],
        lambda: [to_line(Planned((CHANGE,) * 5_000))],
    ],
    ids=["16,000 checks", "3 MB summary", "50,000 changes", "5,000 planned"],
)
def test_flood_is_refused_soon(lines: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    honest, too_many = [to_line(one) for one in RUN], lines()
    begun = time.process_time()
    result = result_of("b", too_many)
    all_outputs((result_of("a", honest), result, result_of("c", honest)), tmp_path)
    assert result.exit_code == ExitCode.FAILED
    assert "never sends" in result.problems[0].what
    # Processor time, of which a busy machine takes no more: without the limits it was minutes.
    assert time.process_time() - begun < 60


def test_every_event_and_every_field_is_tried() -> None:
    assert {type(event) for event in RUN} == set(get_args(Event))
    for event in RUN:
        assert set(asdict(event)) == {one.name for one in fields(event)}


@pytest.mark.parametrize("record", [{}, {"container": "a", "way": "hook", "requirements": "", "nodes": 1}])
def test_a_hosts_spoiled_record_is_that_hosts_failure(monkeypatch: pytest.MonkeyPatch, record: dict[str, Any]) -> None:
    good = {
        "container": "a", "way": "hook", "devices": ["0"], "capabilities": ["compute"], "requirements": "",
        "privileged": False, "legacy": False, "nodes": [], "files": [], "links": [], "decisions": [],
    }  # fmt: skip
    records = [record, good]
    monkeypatch.setattr("gpuprov.fleet.ssh.connected", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("gpuprov.fleet.agent_run.RemoteSystem", lambda *_: None)
    monkeypatch.setattr("gpuprov.engines.containers.decision_of", lambda *_: records.pop(0))
    done = CliRunner().invoke(cli, ["hook", "explain", "a", "--hosts", "liar,honest"])
    assert (done.exit_code, done.exception) == (0, None)
    assert "liar: the host sends what gpuprov's agent never sends" in done.stderr
    assert done.stdout.splitlines()[:2] == ["host           honest", "container      a, started with GPUs by the hook"]
