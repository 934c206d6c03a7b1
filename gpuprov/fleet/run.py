"""One request on many hosts, batch by batch, many at once; what happens on one never ends another."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gpuprov.agent import same_machine
from gpuprov.agent.same_machine import local_machine
from gpuprov.core.site_tables import for_request
from gpuprov.core.system import System
from gpuprov.fleet.agent_run import Agent, run_agent
from gpuprov.fleet.batches import Batch, Rollout, make_batches
from gpuprov.fleet.options import Options
from gpuprov.fleet.reboot import wait_for_boot
from gpuprov.fleet.result import HostResult, MadeChange
from gpuprov.fleet.root_run import run_in_root
from gpuprov.fleet.ssh import close, connected
from gpuprov.fleet.target import HostTarget
from gpuprov.fleet.versions import versions_of_facts
from gpuprov.wire.errors import ExitCode, GpuprovError, Problem
from gpuprov.wire.events import (
    ChangeDone,
    ChangeStarted,
    CheckDone,
    Event,
    FactsGathered,
    Finished,
    Note,
    Planned,
    Sink,
)
from gpuprov.wire.request import Request
from gpuprov.wire.spec import spec_to_json
from gpuprov.wire.words import counted

# A host that asks for more has a fault that reboots do not fix.
_MOST_REBOOTS = 3
HostSink = Callable[[str, Event], None]
# What a run does with one host; a parameter, so that the fan-out can be tried without SSH.
RunHost = Callable[[HostTarget, Sink], None]


@dataclass(frozen=True)
class RunSettings:
    """What a run over hosts needs besides the hosts and the request.

    `build` returns the agent; it is called once, and only if a host is reached by SSH. `tell` shows a sentence.
    """

    build: Callable[[], Agent]
    options: Options
    tell: Callable[[str], None] = lambda _: None
    rollout: Rollout = field(default_factory=Rollout)


class Fleet:
    """A run over hosts. `interrupt` lets running hosts finish and starts no more; called twice, it cuts connections."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.interruptions = 0
        # Why no further host begins; None while hosts may.
        self.stopped: Problem | None = None
        self._connections: set[Any] = set()
        self._lock = threading.Lock()
        self._alone = True
        self._here = False
        # Machine → the name under which it was met first; name → the other name of its machine.
        self._machines: dict[str, str] = {}
        self._same_as: dict[str, str] = {}

    def interrupt(self) -> None:
        """Start no further host; at the second call, close the connections of those that run."""
        self.interruptions += 1
        self.stopped = self.stopped or _STOPPED_BY_CTRL_C
        if self.interruptions == 1:
            self.settings.tell(_HERE_ONCE if self._here else _ONCE)
            return
        with self._lock:
            connections = list(self._connections)
        for connection in connections:  # each in a thread: closing waits for the connection's own
            threading.Thread(target=close, args=(connection,), daemon=True).start()

    def run_host(self, request: Request, agent: Callable[[], Agent]) -> RunHost:
        """Return what runs the request on one host."""

        def run(target: HostTarget, sink: Sink) -> None:
            wanted = request_for(target, request, alone=self._alone)
            if target.connection == "local":
                self._claim(target.name, local_machine(System()), wanted, sink)
                run_here(wanted, sink, lambda: self.interruptions > 1)
                return
            if target.connection == "chroot":
                run_in_root(target.address, wanted, agent(), sink)
                return
            made = 0
            for _ in range(1 + _MOST_REBOOTS):
                finished = self._run_agent(target, wanted, agent(), _adding(made, sink))
                if not finished.left_boot:
                    return
                made += finished.changed
                sink(Note(f"{finished.summary}; waiting for the host"))
                wait_for_boot(target, self.settings.options, finished.left_boot, lambda: self.interruptions > 1)
            sink(finished)

        return run

    def _run_agent(self, target: HostTarget, request: Request, agent: Agent, sink: Sink) -> Finished:
        """Run the request over one connection; return its last event, all others go to the sink."""
        with self._held() as hold, connected(target, self.settings.options, hold) as connection:
            if self.interruptions > 1:
                raise _left()
            return run_agent(
                connection, target, request, agent, sink, bootstrap_python=self.settings.options.bootstrap_python,
                host_timeout=self.settings.options.host_timeout,
                claim=lambda machine: self._claim(target.name, machine, request, sink),
            )  # fmt: skip

    def _claim(self, name: str, machine: str, request: Request, sink: Sink) -> None:
        """Note that this host is this machine. Raises GpuprovError if another one is too, and it would be changed."""
        with self._lock:
            other = self._machines.setdefault(machine, name) if machine else name
        if other == name:
            return
        self._same_as[name] = other
        if same_machine.changes_the_host(request):
            raise GpuprovError.several(
                (same_machine.problem(name, other, machine),), exit_code=ExitCode.USAGE
            )  # fmt: skip
        sink(Note(same_machine.sentence(name, other), "warning"))

    @contextmanager
    def _held(self) -> Iterator[Callable[[Any], None]]:
        """Give what notes a connection, for `interrupt` to close it as long as it is in use."""
        held: list[Any] = []

        def hold(connection: Any) -> None:
            held.append(connection)
            with self._lock:
                self._connections.add(connection)

        try:
            yield hold
        finally:
            with self._lock:
                self._connections.difference_update(held)

    def run(self, targets: Sequence[HostTarget], request: Request, sink: HostSink) -> tuple[HostResult, ...]:
        """Run the request on all hosts and return one result for each, in the hosts' order."""
        batches = make_batches(targets, self.settings.rollout)
        agent = self.settings.build() if any(target.connection != "local" for target in targets) else None
        run_host = self.run_host(request, lambda: _present(agent))
        results: dict[str, HostResult] = {}
        self._alone = len(targets) == 1
        self._here = self._alone and targets[0].connection == "local"
        forks = max(1, min(self.settings.options.forks, len(targets)))
        with self._interruptible(), ThreadPoolExecutor(max_workers=forks) as pool:
            for batch in batches:
                if batch.name and self.stopped is None:
                    self.settings.tell(f"{batch.name}: {counted(len(batch.targets), 'host')}")
                run_one = self._one_of(batch, run_host, sink)
                results |= {result.host: result for result in pool.map(run_one, batch.targets)}
        return tuple(results[target.name] for target in targets)

    def _one_of(self, batch: Batch, run_host: RunHost, sink: HostSink) -> Callable[[HostTarget], HostResult]:
        """Return what runs one host of the batch; too many failures among them, and no further host begins."""
        failed: list[str] = []

        def run_one(target: HostTarget) -> HostResult:
            result = self._one(target, run_host, sink)
            if result.has_failed and result.begun:
                with self._lock:
                    failed.append(target.name)
                    if batch.most_failed is not None and len(failed) > batch.most_failed:
                        self.stopped = self.stopped or _too_many_failed(batch, failed)
            return result

        return run_one

    def _one(self, target: HostTarget, run_host: RunHost, sink: HostSink) -> HostResult:
        if self.stopped is not None:
            return HostResult(target.name, ExitCode.FAILED, problems=(self.stopped,), begun=False)
        recorder = Recorder(target.name, sink)
        begun = time.monotonic()
        recorder(Note("connecting" if target.connection == "ssh" else "starting", "debug"))
        try:
            run_host(target, recorder)
        except GpuprovError as error:
            # What breaks after the second Ctrl-C breaks because of it.
            error = _left() if self.interruptions > 1 else error
            recorder(Finished(int(error.exit_code), problems=error.problems))
        except Exception as error:  # a defect on one host must not end the others; the log has it all
            from gpuprov.fleet.crash import write_log

            recorder(Finished(int(ExitCode.FAILED), problems=(write_log(error),)))
        return replace(recorder.result(time.monotonic() - begun), same_as=self._same_as.get(target.name, ""))

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let Ctrl-C call `interrupt`, instead of raising an exception wherever the main thread happens to be."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, lambda number, frame: self.interrupt())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class Recorder:
    """Passes a host's events on and keeps what the result needs of them."""

    def __init__(self, host: str, sink: HostSink) -> None:
        self._host = host
        self._sink = sink
        self._finished: Finished | None = None
        self._checks: list[CheckDone] = []
        self._made: dict[str, MadeChange] = {}
        self._planned: Planned | None = None
        self._facts: FactsGathered | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished):
            self._finished = event
        elif isinstance(event, CheckDone):
            self._checks.append(event)
        elif isinstance(event, Planned):
            self._planned = event
        elif isinstance(event, ChangeStarted):
            self._made[event.key] = MadeChange(event.key, self._step(event.key), event.summary)
        elif isinstance(event, ChangeDone) and event.key in self._made:
            self._made[event.key] = replace(self._made[event.key], seconds=event.seconds)
        elif isinstance(event, FactsGathered):
            self._facts = event
        self._sink(self._host, event)

    def result(self, seconds: float) -> HostResult:
        """Return what came of the host, which took that long as seen from here."""
        last = self._finished or Finished(
            int(ExitCode.FAILED),
            problems=(Problem("the run ended without a result", "", "run the same command again"),),
        )
        return HostResult(
            host=self._host,
            exit_code=_exit_code(last.exit_code),
            changed=last.changed,
            seconds=round(seconds, 1),
            problems=last.problems,
            summary=last.summary,
            versions=last.versions or (versions_of_facts(self._facts.facts) if self._facts else {}),
            checks=tuple(self._checks),
            plan=self._planned.changes if self._planned else (),
            made=tuple(self._made.values()),
            facts=self._facts.facts if self._facts else None,
        )

    def _step(self, key: str) -> str:
        planned = self._planned.changes if self._planned else ()
        return next((change.step for change in planned if change.key == key), "")


def request_for(target: HostTarget, request: Request, *, alone: bool) -> Request:
    """Return the request with this host's own spec; `alone`: it is the only host of the run.

    This machine must not reboot while it runs others: their runs would end with it. To those one can come back.
    """
    here = target.connection == "local"
    spec = replace(target.spec, reboot="never") if here and not alone else target.spec
    return replace(request, spec=spec_to_json(spec), caller_returns=not here, tables=for_request(spec))


def _adding(made: int, sink: Sink) -> Sink:
    """Return a sink to which the changes made before a reboot are changes of the same run."""

    def add(event: Event) -> None:
        sink(replace(event, changed=event.changed + made) if isinstance(event, Finished) else event)

    return add


def run_here(request: Request, sink: Sink, stop_requested: Callable[[], bool]) -> None:
    """Run the request on this machine, in this process."""
    from gpuprov.agent.run import run_request

    run_request(request, sink, stop_requested=stop_requested)


def _present(agent: Agent | None) -> Agent:
    assert agent is not None
    return agent


def _exit_code(number: int) -> ExitCode:
    return ExitCode(number) if number in tuple(ExitCode) else ExitCode.FAILED


def _left() -> GpuprovError:
    next_step = "the agent on the host continues; run the same command again to get its result"
    return GpuprovError("left by Ctrl-C while it ran", "", next_step)


def _too_many_failed(batch: Batch, failed: Sequence[str]) -> Problem:
    where = batch.name or "the run"
    return Problem(
        f"not run: too many hosts failed before it ({where})",
        f"{len(failed)} of {counted(len(batch.targets), 'host')} failed, at most {batch.most_failed} may",
        "fix what failed, then run the same command again: hosts that are done change nothing",
    )


_ONCE = "no further host begins; those that run are let finish (Ctrl-C again to leave them)"
_HERE_ONCE = "the run is let finish (Ctrl-C again: it stops after the change that it is at)"
_STOPPED_BY_CTRL_C = Problem("not run: stopped by Ctrl-C before it began", "", "run the same command again")
