"""The fan-out without SSH: order, limits, defects and Ctrl-C."""

import base64
import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from gpuprov.agent.probe import PROBE, claim_in, local_machine, machine_of, parse_probe
from gpuprov.agent.result import HostResult, overall_exit_code
from gpuprov.cli.main import cli
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.fleet.agent_file import Agent
from gpuprov.fleet.agent_run import run_agent
from gpuprov.fleet.grouping import spreads
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.options import Options, SshSettings
from gpuprov.fleet.report import last_line
from gpuprov.fleet.rolling import Rollout, parse_rollout
from gpuprov.fleet.run import Fleet, request_for
from gpuprov.fleet.ssh import wait_for_boot
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.events import (
    ChangeStarted,
    CheckDone,
    Event,
    FactsGathered,
    Finished,
    Note,
    Planned,
    PlannedChange,
    Sink,
    Started,
    to_line,
)  # fmt: skip
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, parse_spec
from tests.clock import clock_of
from tests.lab.shell import wait_for
from tests.unit.loaded_host import NEW, LoadedHost

HOSTS = [HostTarget(f"lab-{letter}", HostSpec(), connection="local") for letter in "abcdef"]


class Scripted(Fleet):
    """A fleet whose hosts do what a function says."""

    def __init__(self, script: Callable[[HostTarget, Sink], None], forks: int = 20) -> None:
        super().__init__(lambda: pytest.fail("no host needs the agent"), Options("install", forks=forks))
        self.script = script

    def run_host(self, request: Request, target: HostTarget, sink: Sink) -> None:
        self.script(target, sink)


def run(fleet: Fleet) -> tuple[HostResult, ...]:
    return fleet.run(HOSTS, Request("install"), lambda host, event: None)


def test_results_come_in_the_order_of_the_inventory() -> None:
    ended = threading.Semaphore(0)

    def script(target: HostTarget, sink: Sink) -> None:
        for _ in HOSTS[1:] if target == HOSTS[0] else ():
            ended.acquire()  # the first host is the last to end
        sink(Finished(0, changed=ord(target.name[-1])))
        ended.release()

    assert [(result.host, result.changed) for result in run(Scripted(script))] == [
        (host.name, ord(host.name[-1])) for host in HOSTS
    ]


def test_no_more_hosts_at_a_time_than_forks() -> None:
    running, most, lock, pairs = 0, 0, threading.Lock(), threading.Barrier(2)

    def script(target: HostTarget, sink: Sink) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pairs.wait()  # two do run at a time; a third one would come meanwhile
        time.sleep(0.02)
        with lock:
            running -= 1
        sink(Finished(0))

    run(Scripted(script, forks=2))
    assert most == 2


def test_failures_are_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def script(target: HostTarget, sink: Sink) -> None:
        if target.name == "lab-a":
            raise GpuprovError("gone", exit_code=ExitCode.UNREACHABLE)
        if target.name == "lab-b":
            raise ZeroDivisionError("a defect")
        if target.name != "lab-c":
            sink(Finished(0))

    results = run(Scripted(script))
    assert [result.exit_code for result in results] == [4, 1, 1, 0, 0, 0]
    assert results[1].problems[0].what == "internal error: ZeroDivisionError"
    log = next((tmp_path / "gpuprov/log").iterdir())
    assert str(log) in results[1].problems[0].next_step
    assert "Traceback" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    assert results[2].problems == (Problem("the run ended without a result", "", "run the same command again"),)


def test_result_keeps_what_the_report_needs() -> None:
    change = PlannedChange("k", "s", "write a file")
    check = CheckDone("gpus", "ok")
    events: tuple[Event, ...] = (
        Planned((change,)),
        check,
        FactsGathered({"a": 1}),
        Finished(3, 1, 2.0, (), "s", {"v": "1"}),
    )

    def script(target: HostTarget, sink: Sink) -> None:
        for event in events:
            sink(event)

    result = run(Scripted(script))[0]
    assert (result.plan, result.checks, result.facts) == ((change,), (check,), {"a": 1})
    assert (result.exit_code, result.changed, result.summary, result.versions) == (3, 1, "s", {"v": "1"})


@pytest.mark.parametrize("code", [77, 143, 129, 5, -1])
def test_exit_code_that_no_host_has_is_a_failure(code: int) -> None:
    assert run(Scripted(lambda target, sink: sink(Finished(code))))[0].exit_code == ExitCode.FAILED


def test_first_interrupt_starts_no_further_host_and_lets_the_running_one_finish() -> None:
    def script(target: HostTarget, sink: Sink) -> None:
        fleet.interrupt()
        sink(Finished(0, changed=1))

    fleet = Scripted(script, forks=1)
    results = run(fleet)
    assert (results[0].exit_code, results[0].changed) == (ExitCode.DONE, 1)
    assert {result.problems[0].what for result in results[1:]} == {"not run: this run was stopped before"}


def test_ctrl_c_is_an_interruption_and_not_an_exception() -> None:
    told: list[str] = []

    def script(target: HostTarget, sink: Sink) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        wait_for("the main thread has handled the signal", lambda: told)
        sink(Finished(0))

    before = signal.getsignal(signal.SIGINT)
    fleet = Scripted(script, forks=1)
    fleet.output = told.append
    results = run(fleet)
    assert [result.exit_code for result in results] == [0, 1, 1, 1, 1, 1]
    assert overall_exit_code(results, fleet.ended_by) == ExitCode.INTERRUPTED
    assert "no further host begins" in told[0]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_of_a_run_on_this_machine_speaks_of_no_other_hosts() -> None:
    told: list[str] = []

    def script(target: HostTarget, sink: Sink) -> None:
        fleet.interrupt()
        sink(Finished(0))

    fleet = Scripted(script)
    fleet.output = told.append
    fleet.run(HOSTS[:1], Request("install"), lambda host, event: None)
    assert told == ["stopping: a change that has begun is finished, no further one begins"]


# The moment → changes begun, the first problem. On this machine alone; and among other hosts, whose rule it follows.
STOPPED_HERE = {
    (Started, True): (0, "stopped as asked while it looked at the host: no change was begun"),
    (Planned, True): (0, "stopped as asked while it looked at the host: no change was begun"),
    (ChangeStarted, True): (1, "stopped as asked after 1 of 2 changes"),
    (Planned, False): (0, "stopped as asked while it looked at the host: no change was begun"),
    (ChangeStarted, False): (2, "the host did not settle: after all changes were made, some are still wanted"),
}


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
@pytest.mark.parametrize(("moment", "alone"), STOPPED_HERE)
def test_ctrl_c_on_this_machine(
    moment: type[Event], number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, alone: bool
) -> None:
    """A real signal at an event of a run of two changes; SIGTERM is as two Ctrl-C."""
    monkeypatch.setattr("gpuprov.agent.run.System", lambda: LoadedHost(tmp_path / "root"))
    begun: list[str] = []

    def sink(host: str, event: Event) -> None:
        if isinstance(event, ChangeStarted):
            begun.append(event.key)
        if isinstance(event, moment) and not fleet.interruptions:
            os.kill(os.getpid(), number)
            while not fleet.interruptions:
                time.sleep(0.01)

    fleet = Fleet(lambda: Agent(b"", ""), Options("install", forks=1))
    here = replace(HOSTS[0], spec=parse_spec({"driver_version": NEW, "driver_url": "/driver.run"}))
    targets = [here, *([] if alone else [replace(HOSTS[1], connection="ssh")])]
    result = fleet.run(targets, Request("install", steps=("driver", "cdi")), sink)[0]
    count, what = STOPPED_HERE[moment, (alone and number == signal.SIGINT) or number == signal.SIGTERM]
    assert (len(begun), result.problems[0].what if result.problems else "") == (count, what)
    assert overall_exit_code([result], fleet.ended_by) == 128 + number
    assert result.word == ("stopped" if "stopped" in what else "failed")


def test_no_sink_gets_the_secrets_that_a_host_was_told() -> None:
    """A host that lies sends back its passwords, and the logins in its variables."""
    password, login = "hunter/22+x", base64.b64encode(b"ops:hunter/22+x").decode()
    spec = parse_spec({"driver_url": "https://robot:s3cret-one@mirror/driver.run"})
    target = HostTarget("lab-a", spec, connection="local", password=password, become_password="become-me")
    said = f"{password} {quote(password, safe='')} {json.dumps(password)} {login} become-me robot:s3cret-one s3cret-one"

    def script(host: HostTarget, sink: Sink) -> None:
        sink(Note(said))
        sink(CheckDone(said, "failed", said, said, said))
        raise GpuprovError(said, said, said)

    told: list[Event] = []
    result = Scripted(script).run([target], Request("verify"), lambda host, event: told.append(event))[0]
    text = f"{result} {told}"
    assert "***" in text
    assert not [word for word in ("hunter", login[8:16], "become-me", "s3cret") if word in text]


PRECEDENCE = [
    ((), 0), ((0, 0), 0), ((0, 3), 3), ((3, 4), 4), ((0, 4), 4), ((4, 1, 3), 1), ((1, 2, 4), 2),
    ((0, 5), 5), ((5, 3), 3), ((2, 1, 130), 130), ((130, 143), 143),
]  # fmt: skip


@pytest.mark.parametrize(("codes", "overall"), PRECEDENCE, ids=str)
def test_overall_exit_code(codes: tuple[int, ...], overall: int) -> None:
    assert overall_exit_code(tuple(HostResult("h", ExitCode(code)) for code in codes)) == overall


def test_page_and_help_list_all_exit_codes_in_their_precedence() -> None:
    page = (
        (Path(__file__).parents[3] / "docs/fleets.md").read_text().partition("### Exit codes")[2].partition("\n### ")[0]
    )
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    words = (cli.help or "").partition("Exit codes")[2]
    for listed in (" ".join(rows), re.sub(r"\((docs|install).*?\)", "", words)):
        assert [int(number) for number in re.findall(r"\d+", listed)] == [int(code) for code in ExitCode]


# -- batches -------------------------------------------------------------------------------------------------------


def in_order(rollout: Rollout, failing: str = "", forks: int = 20) -> tuple[list[str], tuple[HostResult, ...]]:
    """Return the hosts in the order in which they began, and the results; hosts named by a letter fail."""
    begun: list[str] = []

    def script(target: HostTarget, sink: Sink) -> None:
        begun.append(target.name[-1])
        sink(Finished(1 if target.name[-1] in failing else 0))

    fleet = Scripted(script, forks)
    fleet.rollout = rollout
    return begun, run(fleet)


def test_batch_begins_when_the_one_before_is_through() -> None:
    running: set[str] = set()
    together: set[frozenset[str]] = set()

    def script(target: HostTarget, sink: Sink) -> None:
        running.add(target.name[-1])
        time.sleep(0.05)
        together.add(frozenset(running))
        running.discard(target.name[-1])
        sink(Finished(0))

    fleet = Scripted(script)
    fleet.rollout = parse_rollout("2")
    run(fleet)
    assert all(seen <= pair for seen in together for pair in map(set, ("ab", "cd", "ef")) if seen & pair)


# The rollout, the hosts that fail, forks → the hosts that begin, and what is said of the last one.
FAILURES = [
    (parse_rollout("3", "1"), "bc", 20, "abc", "not run: too many hosts failed before it (batch 1 of 2)"),
    (parse_rollout("1"), "b", 20, "ab", "not run: too many hosts failed before it (batch 2 of 6)"),
    (parse_rollout(max_fail="1"), "abcdef", 1, "ab", "not run: too many hosts failed before it (the run)"),
    (parse_rollout(canary="2"), "b", 20, "ab", "not run: too many hosts failed before it (canary)"),
    (parse_rollout("3", "1"), "a", 20, "abcdef", ""),
    (parse_rollout("3", "1"), "ad", 20, "abcdef", ""),
    (Rollout(), "abcdef", 20, "abcdef", ""),
]


@pytest.mark.parametrize(("rollout", "failing", "forks", "begin", "said"), FAILURES, ids=range(len(FAILURES)))
def test_too_many_failures_end_the_run(rollout: Rollout, failing: str, forks: int, begin: str, said: str) -> None:
    begun, results = in_order(rollout, failing, forks)
    assert "".join(sorted(begun)) == begin
    assert [result.begun for result in results] == [host.name[-1] in begin for host in HOSTS]
    assert {result.problems[0].what for result in results if not result.begun} == {said} - {""}
    assert overall_exit_code(results) == ExitCode.FAILED


def test_batch_with_too_many_failures_says_how_many() -> None:
    results = in_order(parse_rollout("3", "1"), failing="bc")[1]
    assert "2 of 3 hosts failed, at most 1 may" in results[5].problems[0].evidence


def test_canary_runs_first_and_results_keep_the_inventory_s_order() -> None:
    begun, results = in_order(parse_rollout(canary="lab-d"))
    assert begun[0] == "d"
    assert [result.host for result in results] == [host.name for host in HOSTS]


def test_host_that_needs_a_reboot_has_not_failed() -> None:
    fleet = Scripted(lambda target, sink: sink(Finished(3)))
    fleet.rollout = parse_rollout("1", "0")
    assert all(result.begun for result in run(fleet))


REBOOTS = {
    ("local", True): "if-needed",
    ("local", False): "never",
    ("ssh", True): "if-needed",
    ("ssh", False): "if-needed",
}


@pytest.mark.parametrize(("connection", "alone"), REBOOTS)
def test_this_machine_never_reboots_under_a_run_over_others(connection: str, *, alone: bool) -> None:
    target = HostTarget("lab-a", HostSpec(reboot="if-needed"), connection=connection)
    asked = request_for(target, Request("install"), alone=alone)
    assert asked.spec["reboot"] == REBOOTS[connection, alone]
    assert asked.caller_returns is (connection == "ssh")


def test_a_host_that_does_not_come_back_is_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One pause is longer than the patience: the host is tried once.
    clock = clock_of(monkeypatch, "gpuprov.fleet.ssh")
    monkeypatch.setattr(clock, "sleep", lambda seconds: setattr(clock, "ahead", 7200))
    (tmp_path / "config").write_text("")
    # Port 1 (tcpmux) is nobody's.
    target = HostTarget(
        "gone", HostSpec(), address="127.0.0.1", port=1, connection="ssh", ssh_config_file=str(tmp_path / "config")
    )
    with pytest.raises(GpuprovError, match="did not come back from its reboot") as raised:
        wait_for_boot(target, SshSettings(), "boot-1", lambda: False, patience=3600)
    assert raised.value.exit_code == ExitCode.UNREACHABLE
    assert "refused" in str(raised.value)


def test_what_a_login_shell_prints_is_no_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_of(monkeypatch, "gpuprov.fleet.ssh"), "sleep", lambda seconds: None)
    answers = ["boot-1", "boot-2", "offline", "boot-2", "running"]

    def run(connection: object, command: str, **more: object) -> Completed:
        return Completed((command,), 0, f"welcome to gpu01\n{answers.pop(0)}\n")

    monkeypatch.setattr("gpuprov.fleet.ssh.connected", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("gpuprov.fleet.ssh.remote.run", run)
    wait_for_boot(HOSTS[0], SshSettings(), "boot-1", lambda: not answers)
    assert answers == []


def test_the_agent_has_time_to_arrive_over_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    # sshd has it all in its window, and says nothing, until the link has brought it.
    agent, limits = Agent(bytes(1_700_000), "d" * 64), []

    def run(connection: object, command: str, stdin: bytes, *, timeout: float) -> Completed:
        if stdin == agent.content:
            limits.append(timeout)
        answer = "gpuprov-probe 1\nsystem Linux x86_64\nuid 0\ncache /root\npython 3.11.2 /usr/bin/python3\nend\n"
        return Completed((command,), 0, answer)

    def stream(connection: object, command: str, on_line: Callable[[str], None], **more: object) -> Completed:
        on_line(to_line(Finished(0)))
        return Completed((command,), 0)

    monkeypatch.setattr("gpuprov.fleet.remote.run", run)
    monkeypatch.setattr("gpuprov.fleet.remote.stream", stream)
    connection: Any = SimpleNamespace(ssh_config={})
    run_agent(connection, HOSTS[0], Request("facts"), agent, lambda event: None)
    slowest = 80_000 / 8  # bytes a second
    assert limits[0] > len(agent.content) / slowest


def test_a_host_that_asks_for_a_fourth_reboot_is_told_to_stay_up(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[str] = []

    def run_agent(connection: object, target: HostTarget, request: Request, *rest: object, **more: object) -> Finished:
        allowed.append(request.spec["reboot"])
        asks = request.spec["reboot"] != "never"
        return Finished(int(ExitCode.REBOOT_NEEDED), 1, left_boot="boot-1" if asks else "", summary="nouveau")

    waited: list[str] = []
    monkeypatch.setattr("gpuprov.fleet.run.run_agent", run_agent)
    monkeypatch.setattr("gpuprov.fleet.run.connected", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("gpuprov.fleet.run.wait_for_boot", lambda *words: waited.append(words[2]))
    target = HostTarget("a", HostSpec(reboot="if-needed"), address="a", connection="ssh")
    fleet = Fleet(lambda: Agent(b"", ""), Options("install", forks=1), lambda line: None)
    (result,) = fleet.run([target], Request("install"), lambda host, event: None)
    assert allowed == ["if-needed"] * 3 + ["never"]
    assert waited == ["boot-1"] * 3
    assert (result.exit_code, result.changed) == (ExitCode.REBOOT_NEEDED, 4)


# -- one machine under two names ---------------------------------------------------------------------------------------


def test_the_probe_and_this_machine_itself_say_the_same() -> None:
    done = subprocess.run(
        ("sh", "-s", "0" * 64, "sudo"), input=PROBE, capture_output=True, text=True, check=True, timeout=60
    )
    probe = parse_probe(done.stdout)
    assert probe is not None
    assert len(probe.machine.split()) == 3
    assert probe.machine == local_machine(System("/"))


@pytest.mark.parametrize("text", ["", "  ", "machineid bootid", "bootid pid:[1]"])
def test_what_is_not_known_is_no_machine(text: str) -> None:
    assert machine_of(text) == ""


@pytest.mark.parametrize(
    ("request_", "changes"),
    [
        (Request("install"), True), (Request("rollback"), True), (Request("uninstall"), True),
        (Request("doctor", fix=True), True), (Request("doctor"), False), (Request("verify"), False),
        (Request("facts"), False), (Request("install", check=True), False),
        (Request("doctor", fix=True, check=True), False),
    ],
)  # fmt: skip
def test_only_what_changes_a_host_gets_in_the_way(request_: Request, changes: bool) -> None:
    assert request_.changes_the_host is changes


def test_the_first_name_keeps_the_machine(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    assert claim_in(folder, "a", "") == ""
    assert [claim_in(folder, name, "m 1 2") for name in ("a", "b", "a")] == ["", "a", ""]
    assert claim_in(folder, "b", "m 2 2") == ""
    assert len(list(folder.iterdir())) == 2


def _claim(folder: Path, name: str) -> str:
    return claim_in(folder, name, "m 1 2")


def test_of_many_processes_at_once_one_is_first(tmp_path: Path) -> None:
    names = [f"host{number}" for number in range(16)]
    with multiprocessing.Pool(8) as pool:
        others = pool.starmap(_claim, [(tmp_path / "claims", name) for name in names])
    first = next(name for name, other in zip(names, others) if not other)
    assert set(others) == {"", first}
    assert others.count("") == 1


def test_machines_are_counted_once() -> None:
    check = CheckDone("container, all GPUs", "ok", "8 GPUs", "8 GPUs")
    versions = {"driver": "550.163.01", "gpus": "8"}
    names = (("a", ""), ("b", "a"), ("c", ""))
    results = [
        HostResult(name, ExitCode.DONE, 1, checks=(check,), versions=versions, same_as=same) for name, same in names
    ]
    assert last_line("verify", results, check=False, next_command="").endswith("containers see 8 + 8 GPUs")
    assert "2 changes" in last_line("install", results, check=True, next_command="")
    assert {len(versions[0][1]) for _, versions in spreads(results)} == {2}
