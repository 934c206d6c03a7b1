"""Drain, change, prove, undrain: what is run in which order, and what is told of hosts that stay drained."""

import io
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gpuprov.agent.result import Drain, HostResult
from gpuprov.fleet.history import Run, from_json, to_json
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.options import Options
from gpuprov.fleet.page import render
from gpuprov.fleet.report import print_report, summary
from gpuprov.fleet.rolling import Rolling, Rollout, parse_host_commands, parse_rollout
from gpuprov.fleet.run import Fleet
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.events import ChangeStarted, CheckDone, Event, Finished, Note, Planned, PlannedChange, Sink
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec
from tests.files import put
from tests.unit.fleet.fleets import played, run_of
from tests.unit.refused import refused

CALLS = "calls"
SCRIPT = """#!/bin/sh
echo "$1 $2" >> {calls}; sleep 0.1
if [ "$1 $2" = "{fails}" ]; then echo "error: $2 \033[31mhas pods\033[0m <b>" >&2; exit 1; fi
"""


class Site:
    """Hosts named by letters that answer requests as they are told, and a script that drains them."""

    def __init__(self, folder: Path, fails: str = "") -> None:
        self.calls = folder / CALLS
        self.script = folder / "hosts.sh"
        put(self.script, SCRIPT.format(calls=self.calls, fails=fails), 0o700)
        self.disturbing = "abcdef"
        self.ill = self.lost = self.failing = self.reboots = self.unwell = self.settled = ""
        # Hosts that can't be rolled back, and those on which that is no cure.
        self.stuck = self.incurable = ""
        self.rolled_back: set[str] = set()
        self.told: list[str] = []
        self.hosts: tuple[str, ...] = ()
        self.notes: list[str] = []

    def answer(self, name: str, request: Request, sink: Sink) -> Finished:
        kind = "look" if request.check else "calm" if request.require_drained else request.command
        with self.calls.open("a") as file:
            file.write(f"{kind} {name}\n")
        if request.command == "verify":
            if name in self.lost:
                raise GpuprovError("the host can't be reached", exit_code=ExitCode.UNREACHABLE)
            ill = name in self.ill and (name not in self.rolled_back or name in self.incurable)
            sink(CheckDone("docker, all GPUs", "failed" if ill else "ok"))
            seen = (Problem("no GPU"),) * ill
            return Finished(int(ill), problems=seen, summary="docker is broken" * ill, versions={"driver": "550"})
        if request.command == "rollback" and not request.check:
            if name in self.stuck:
                return Finished(1, problems=(Problem("the disk is full"),))
            self.rolled_back.add(name)
            return Finished(0, 1)
        sink(Planned((PlannedChange("k", "docker", "restart docker", disturbs=name in self.disturbing),)))
        if not request.check and name in self.unwell:
            sink(ChangeStarted("k", "restart docker", 1, 1))
            return Finished(1, problems=(Problem("docker did not come up"),))
        if not request.check and name in self.failing:
            raise GpuprovError("the disk is full")
        if not request.check and name in self.settled:
            return Finished(0)
        return Finished(3 if not request.check and name in self.reboots else 0, 1)

    def run(
        self, names: str = "ab", command: str = "install", *, check: bool = False, after: bool = True,
        rollout: Rollout | None = None, clock: Callable[[], float] = time.time, drain: bool = True,
    ) -> tuple[HostResult, ...]:  # fmt: skip
        words = f"{self.script} drain {{host}}" * drain, f"{self.script} undrain {{host}}" * (drain and after)
        commands = parse_host_commands(*words, 20)
        self.fleet = Fleet(
            lambda: pytest.fail("no host needs the agent"), Options(command, hosts=self.hosts, forks=1),
            self.told.append, rollout or Rollout(), commands, f"gpuprov {command}", clock,
        )  # fmt: skip
        targets = [HostTarget(name, HostSpec(), connection="local") for name in names]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", str(self.calls.parent / "state"))
            played(patch, self.answer)
            return self.fleet.run(targets, Request(command, check=check), self._sink)

    def _sink(self, host: str, event: object) -> None:
        if isinstance(event, Note):
            self.notes.append(event.message)

    def order(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


def states(results: tuple[HostResult, ...]) -> list[str]:
    return [result.drain.state if result.drain else "" for result in results]


def of(site: Site, name: str) -> list[str]:
    return [line.split()[0] for line in site.order() if line.endswith(name)]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_each_host_is_looked_at_drained_changed_verified_and_undrained(site: Site) -> None:
    results = site.run("ab")
    assert [result.exit_code for result in results] == [0, 0]
    assert site.order() == [f"{word} {name}" for name in "ab" for word in
                            ("look", "drain", "install", "verify", "undrain")]  # fmt: skip
    assert states(results) == ["undrained", "undrained"]
    assert results[0].checks[0].status == "ok"
    assert results[0].versions == {"driver": "550"}
    assert results[0].drain is not None and results[0].drain.seconds > 0


def test_drain_that_fails_stops_its_host_alone(tmp_path: Path) -> None:
    site = Site(tmp_path, fails="drain a")
    results = site.run("abc")
    assert [result.exit_code for result in results] == [1, 0, 0]
    assert of(site, "a") == ["look", "drain"]
    problem = results[0].problems[0]
    assert "so the host was not changed" in problem.what
    assert "exit code 1\nerror: a has pods <b>" in problem.evidence
    assert f"{site.script} undrain a" in problem.next_step
    assert states(results) == ["failed", "undrained", "undrained"]


def test_host_that_is_not_green_stays_drained_with_the_command_to_type(site: Site) -> None:
    site.ill = "a"
    results = site.run("ab")
    assert [result.exit_code for result in results] == [1, 0]
    assert "undrain a" not in site.order()
    assert results[0].changed == 1
    assert [one.evidence for one in results[0].problems] == ["", "docker is broken"]
    assert f"once verify is green: {site.script} undrain a" in results[0].problems[1].next_step
    assert states(results) == ["drained", "undrained"]


def test_host_that_is_lost_during_verify_stays_drained_and_keeps_its_result(site: Site) -> None:
    site.lost = "a"
    (result,) = site.run("a")
    assert site.order() == ["look a", "drain a", "install a", "verify a"]
    assert (result.exit_code, result.changed, states((result,))) == (ExitCode.FAILED, 1, ["drained"])
    lost, drained = result.problems
    assert lost.what == "the host can't be reached"
    assert drained.next_step.endswith(f"once verify is green: {site.script} undrain a")


@pytest.mark.parametrize("trouble", ["failing", "reboots"])
def test_host_that_fails_or_waits_for_a_reboot_stays_drained(site: Site, trouble: str) -> None:
    setattr(site, trouble, "a")
    results = site.run("a")
    assert results[0].exit_code == (1 if trouble == "failing" else 3)
    assert site.order() == ["look a", "drain a", "install a"]
    assert states(results) == ["drained"]


def test_without_a_command_for_afterwards_the_host_stays_drained(site: Site) -> None:
    results = site.run("a", "uninstall", after=False)
    assert site.order() == ["look a", "drain a", "uninstall a"]
    assert states(results) == ["drained"]
    assert results[0].exit_code == ExitCode.DONE


@pytest.mark.parametrize(
    ("rollout", "fails", "begin"), [(parse_rollout(canary="1"), "a", "a"), (parse_rollout("2", "0"), "b", "ab")]
)
def test_too_many_drains_that_fail_end_the_run(tmp_path: Path, rollout: Rollout, fails: str, begin: str) -> None:
    site = Site(tmp_path, fails=f"drain {fails}")
    results = site.run("abcd", rollout=rollout)
    assert [line for line in site.order() if line.startswith("drain")] == [f"drain {name}" for name in begin]
    assert of(site, fails) == ["look", "drain"]
    assert [result.begun for result in results] == [name in begin for name in "abcd"]


@pytest.mark.parametrize(("rollout", "drained"), [(parse_rollout(canary="1"), "a"), (parse_rollout("2", "1"), "ab")])
def test_hosts_that_stay_drained_for_a_reboot_count_as_failed(site: Site, rollout: Rollout, drained: str) -> None:
    site.reboots = "abcdef"
    results = site.run("abcdef", rollout=rollout)
    assert [line for line in site.order() if line.startswith("drain")] == [f"drain {name}" for name in drained]
    assert results[-1].problems[0].what.startswith("not run: too many hosts failed before it")


def test_ctrl_c_during_the_look_leaves_the_host_alone(site: Site) -> None:
    real = site.answer

    def answer(name: str, request: Request, sink: Sink) -> Finished:
        site.fleet.interrupt()
        return real(name, request, sink)

    site.answer = answer  # type: ignore[method-assign]
    results = site.run("a")
    assert site.order() == ["look a"]
    assert results[0].exit_code == ExitCode.FAILED


def test_the_first_ctrl_c_ends_a_drain_that_hangs(site: Site) -> None:
    site.script.write_text(f"#!/bin/sh\necho drain >> {site.calls}; sleep 3600\n")

    def cut() -> None:
        while "drain" not in site.order():
            time.sleep(0.05)
        site.fleet.interrupt()

    thread = threading.Thread(target=cut)
    thread.start()
    (result,) = site.run("a")
    thread.join()
    assert states((result,)) == ["failed"]
    assert "it was stopped with this run" in result.problems[0].evidence
    assert "the host may be drained in part" in result.problems[0].next_step
    assert site.order() == ["look a", "drain"]


@pytest.mark.parametrize("number", [0, signal.SIGTERM, signal.SIGHUP], ids=["Ctrl-C", "SIGTERM", "SIGHUP"])
def test_a_cancelled_run_drains_no_further_host_and_says_who_is_drained(site: Site, number: int) -> None:
    real = site.answer

    def answer(name: str, request: Request, sink: Sink) -> Finished:
        if request.command == "install" and not request.check:
            site.failing = "a"
            if number:
                os.kill(os.getpid(), number)
            else:
                site.fleet.interrupt()
            while site.fleet.interruptions < 1 + bool(number):
                time.sleep(0.05)
        return real(name, request, sink)

    before = signal.signal(number or signal.SIGTERM, lambda *_: None)
    try:
        site.answer = answer  # type: ignore[method-assign]
        results = site.run("ab")
    finally:
        signal.signal(number or signal.SIGTERM, before)
    assert states(results) == ["drained", ""]
    assert any(line.startswith("drained now: a;") for line in site.told)
    assert not results[1].begun


# -- --rollback-on-failure -------------------------------------------------------------------------------------------


def report(results: tuple[HostResult, ...]) -> str:
    out = io.StringIO()
    print_report(Console(file=out, width=200), run_of("install", results))
    return out.getvalue()


def test_report_json_page_and_history_say_who_is_still_drained(tmp_path: Path) -> None:
    site = Site(tmp_path, fails="drain c")
    site.ill = "a"
    results = site.run("abc")
    text = report(results)
    assert text.rstrip().endswith("; still drained: a; drain failed: c")
    assert f"{site.script} undrain a" in text
    assert "\x1b" not in text
    run = run_of("install", results)
    hosts = json.loads(json.dumps(summary(run)))["hosts"]
    assert [host["drain"]["state"] for host in hosts] == ["drained", "undrained", "failed"]
    page = render(run)
    assert "Drained hosts" in page and "still drained" in page
    assert "has pods &lt;b&gt;" in page and "<b>\n" not in page
    again = from_json(json.loads(json.dumps(to_json(run))))
    assert [result.drain for result in again.results] == [result.drain for result in results]
    assert report(again.results) == text


# -- one host, without a fleet ---------------------------------------------------------------------------------------

REQUEST = Request("install", steps=("docker",), diff=True, bundle="/b.tar", bundle_digest="0" * 64)
PLANNED = Planned((PlannedChange("k", "docker", "restart docker", disturbs=True),))
LOOK = replace(REQUEST, check=True, diff=False)


class Host:
    """A host that answers requests as it is told; `script` is what drains and undrains it."""

    def __init__(self, folder: Path, script: str = "exit 0", *, after: bool = True) -> None:
        path = put(folder / "hosts.sh", f"#!/bin/sh\n{script}\n", 0o700)
        self.words = (f"{path} drain a", f"{path} undrain a" if after else "")
        self.commands = parse_host_commands(*self.words, 20)
        self.answers: dict[str, Finished] = {}
        self.events: tuple[Event, ...] = (PLANNED,)
        self.requests: list[Request] = []
        self.seen: list[Event] = []
        self.kept: list[Drain] = []
        self.stopped: Problem | None = None
        self.interruptions: Callable[[], int] = lambda: 0

    def carry_out(self, request: Request, sink: Sink) -> Finished:
        self.requests.append(request)
        for event in self.events:
            sink(event)
        return self.answers.get("look" if request.check else request.command, Finished(0, 1, summary=request.command))

    def run(self, request: Request = REQUEST) -> Finished:
        target = HostTarget("a", HostSpec(), connection="local")
        rolling = Rolling(target, self.commands, self.kept.append, lambda: self.stopped, lambda: self.interruptions())
        return rolling.run(request, self.seen.append, self.carry_out)

    @property
    def notes(self) -> list[str]:
        return [event.message for event in self.seen if isinstance(event, Note)]


def test_what_is_asked_of_a_host_shown_and_kept(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.answers = {
        "install": Finished(0, 3, summary="done", versions={"driver": "550", "docker": "20.10"}),
        "verify": Finished(0, versions={"driver": "", "docker": "26.1"}),
    }
    finished = host.run()
    assert finished == replace(host.answers["install"], versions={"driver": "550", "docker": "26.1"})
    verify = replace(REQUEST, command="verify", steps=(), bundle="", bundle_digest="")
    assert host.requests == [LOOK, REQUEST, verify]
    # What the look at the plan says is not shown twice.
    assert [event for event in host.seen if not isinstance(event, Note)] == [PLANNED, PLANNED]
    draining, drained, verifying, undrained = host.notes
    assert draining == f"draining: {host.words[0]}" and "verif" in verifying
    seconds = [float(word) for note in (drained, undrained) for word in re.findall(r" (\d+\.\d) s", note)]
    assert len(seconds) == 2 and max(seconds) < 60 and undrained.endswith(f": {host.words[1]}")
    assert [one.state for one in host.kept] == ["failed", "drained", "undrained", "undrained"]
    assert {(one.before, one.after) for one in host.kept} == {host.words}
    assert all(re.match(r"\d{4}-\d\d-\d\dT", one.since) for one in host.kept)
    assert isinstance(host.kept[-1].seconds, float) and host.kept[-1].seconds < 60


def test_check_shows_the_plan_and_its_diff(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert host.run(replace(REQUEST, check=True)).summary == "install"
    assert host.requests == [replace(REQUEST, check=True)] and PLANNED in host.seen
    assert [one.state for one in host.kept] == ["foreseen"]
    assert host.notes == [f"would run before the changes: {host.words[0]}",
                          f"would run once verify is green: {host.words[1]}"]  # fmt: skip


@pytest.mark.parametrize("events", [(), (Planned(()),)])
@pytest.mark.parametrize("check", [True, False])
def test_plan_without_disruption_is_shown_as_usual(tmp_path: Path, events: tuple[Event, ...], check: bool) -> None:
    host = Host(tmp_path, "exit 1")
    host.events = events
    assert host.run(replace(REQUEST, check=check)).summary == "install"
    assert (host.kept, host.seen) == ([], list(events))
    assert check or host.requests == [LOOK, replace(REQUEST, require_drained=True)]


def test_undo_of_a_cut_off_run_disturbs_too(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.events = (Planned((), disturbs=True),)
    host.run()
    assert host.kept[-1].state == "undrained"


def test_host_whose_plan_fails_is_not_drained(tmp_path: Path) -> None:
    host = Host(tmp_path, "exit 1")
    host.answers = {"look": Finished(1, summary="no driver")}
    assert (host.run().summary, host.kept, host.requests) == ("no driver", [], [LOOK])


def test_run_that_is_stopped_says_why(tmp_path: Path) -> None:
    host = Host(tmp_path, "exit 1")
    host.stopped = Problem("stopped by Ctrl-C")
    with pytest.raises(GpuprovError) as caught:
        host.run()
    assert (caught.value.problems, host.kept) == ((host.stopped,), [])


@pytest.mark.parametrize("after", [True, False])
def test_drain_that_fails_in_silence(tmp_path: Path, after: bool) -> None:
    host = Host(tmp_path, "exit 7", after=after)
    problem = refused(host.run)
    assert problem.evidence == f"{host.words[0]}: exit code 7"
    assert problem.next_step.startswith(
        f"the host may be drained in part{f': {host.words[1]}' if after else ''}; fix what the command names"
    )
    assert (host.requests, [one.state for one in host.kept]) == ([LOOK], ["failed"])


def test_undrain_that_fails_says_how(tmp_path: Path) -> None:
    host = Host(tmp_path, '[ "$1" = drain ] || exit 7')
    finished = host.run()
    (problem,) = finished.problems
    assert (finished.exit_code, problem.evidence) == (ExitCode.FAILED, f"{host.words[1]}: exit code 7")
    assert "drained" in problem.what and host.kept[-1].state == "drained"
    assert problem.next_step == f"the host is ready: {host.words[1]}"


def test_undrain_ends_with_the_second_ctrl_c(tmp_path: Path) -> None:
    host = Host(tmp_path, f'[ "$1" = drain ] || {{ touch {tmp_path}/begun; sleep 30; }}')
    host.interruptions = lambda: 2 if (tmp_path / "begun").exists() else 0
    assert "stopped with this run" in host.run().problems[0].evidence


def test_undrain_goes_on_after_the_first_ctrl_c(tmp_path: Path) -> None:
    host = Host(tmp_path, f'[ "$1" = drain ] || {{ touch {tmp_path}/begun; sleep 1; }}')
    host.interruptions = (tmp_path / "begun").exists
    assert (host.run().exit_code, host.kept[-1].state) == (ExitCode.DONE, "undrained")


def test_runs_kept_by_an_earlier_version_have_no_drain(site: Site) -> None:
    results = (HostResult("a", ExitCode.FAILED, problems=(Problem("x"),)),)
    kept = to_json(Run("20261121T081500-7", "install", "2026-11-21T08:15:00+0000", 1.0, results))
    del kept["results"][0]["drain"]
    assert from_json(kept).results[0].drain is None
    assert "drain" not in report(results)
