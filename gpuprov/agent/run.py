"""Carry out one request on this machine, from lock to last event; the command line and the agent share it.

Most runs are installations that change nothing, so modules of other commands are imported where they are used.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Callable

from gpuprov import __version__
from gpuprov.agent.context import RunContext, StopRequested, for_target
from gpuprov.agent.install import check, install, versions_of
from gpuprov.agent.site_tables import checked_tables, with_newer_tables
from gpuprov.bundle.open import opened
from gpuprov.core.lock import host_lock, other_run
from gpuprov.core.proxy import Proxy
from gpuprov.core.retention import prune
from gpuprov.core.system import System
from gpuprov.engines.docker import reach_local_docker
from gpuprov.facts.driver import version_difference
from gpuprov.facts.host import facts_to_json, gather
from gpuprov.plan.steps import CHANGE_KINDS
from gpuprov.protocol.advisories import known_vulnerabilities
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, Stopped, UsageError
from gpuprov.protocol.events import ChangeDone, ChangeStarted, Event, FactsGathered, Finished, Sink, Started
from gpuprov.protocol.request import MOST_MINUTES, Request
from gpuprov.protocol.secrets import secret_free
from gpuprov.protocol.spec import parse_spec
from gpuprov.protocol.words import counted


def run_request(
    request: Request, sink: Sink, system: System | None = None, stop_requested: StopRequested = lambda: False
) -> ExitCode:
    """Carry out a request on this machine; every outcome ends with a Finished event, whose exit code is returned."""
    system = system or System()
    begun = system.now()
    sink = _MadeChanges(secret_free(sink, request.spec))
    sink(Started(__version__, request.command, system.own_pid()))
    try:
        system.tables = checked_tables(request.tables)
        spec = parse_spec(request.spec, tables=system.tables)
        system.proxy, system.lock_timeout = Proxy(spec.proxy, spec.no_proxy), spec.lock_timeout
        run = for_target(RunContext(request, spec, system, sink, stop_requested))
        if request.changes_the_host or request.command == "accept":
            finished = _locked(_as_root(run), sink)
        else:
            with system.interruptible(stop_requested):
                finished = _look(run)
    except GpuprovError as error:
        finished = Finished(int(error.exit_code), problems=error.problems)
    except Stopped as stopped:
        problem = sink.stopped(request.command, stopped.left)
        finished = Finished(int(ExitCode.INTERRUPTED), changed=len(sink.made), problems=(problem,))
    sink(replace(finished, seconds=round(system.now() - begun, 3)))
    return ExitCode(finished.exit_code)


@dataclass
class _MadeChanges:
    """Passes events on, keeps which changes they name as made, and notes each that begins in the host's lock."""

    sink: Sink
    note: Callable[[str], None] = lambda step: None
    made: list[str] = field(default_factory=list)
    _begun: dict[str, str] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        if isinstance(event, ChangeStarted):
            self._begun[event.key] = event.summary
            self.note(f"step {event.index} of {event.total}: {event.summary}")
        elif isinstance(event, ChangeDone):
            self.made.append(self._begun[event.key])
        self.sink(event)

    def stopped(self, command: str, left: Sequence[str]) -> Problem:
        """Return what a stopped run has done, and what not."""
        if not self.made:
            what = "stopped as asked while it looked at the host" if not left else "stopped as asked"
            return Problem(f"{what}: no change was begun", "", "run the same command again")
        seen = [*(f"made: {one}" for one in self.made), *(f"not made: {one}" for one in left)]
        undo = "; gpuprov rollback undoes what was made" if command == "install" else ""
        what = f"stopped as asked after {len(self.made)} of {counted(len(self.made) + len(left), 'change')}"
        return Problem(what, "\n".join(seen), f"run the same command again: it makes the rest{undo}")


def _as_root(run: RunContext) -> RunContext:
    if run.system.user_id() != 0:
        seen = f"this process has user id {run.system.user_id()}"
        step = "put sudo before it; for remote hosts set ansible_become: true"
        raise UsageError(f"gpuprov {run.request.command} must run as root", seen, step)
    # What installers and depmod make is for all users, whatever the caller's umask is: many sites have 077 for root.
    os.umask(0o022)
    reach_local_docker(run.system)
    return run


def _look(run: RunContext) -> Finished:
    """Carry out a command that changes nothing."""
    command = run.request.command
    if command == "facts":
        return _facts(run)
    if command == "health":
        from gpuprov.checks import health

        return health.examine(run.system, run.sink)
    if command == "cuda":
        from gpuprov.checks.cuda import survey

        reach_local_docker(run.system)
        return survey.examine(run.system, run.request.arguments, run.sink)
    run = _as_root(run)
    if command == "verify":
        return _verify(run)
    if command == "doctor" and run.request.fix:
        from gpuprov.agent import fix

        return fix.check(run)
    if command == "doctor":
        from gpuprov.doctor.examine import examine

        return examine(run.system, run.spec, run.sink)
    if command in ("rollback", "uninstall"):
        from gpuprov.agent import uninstall

        return uninstall.check(run)
    with _with_bundle(run) as run:
        return check(run)


def _locked(run: RunContext, sink: _MadeChanges) -> Finished:
    """Carry out a command that changes the host, or loads its GPUs: one at a time."""
    with host_lock(
        run.system,
        pid=run.system.own_pid(),
        command=run.request.command,
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        wait_seconds=run.request.wait_seconds,
        tell=run.note,
    ) as note:
        sink.note = note
        if run.request.command == "accept":
            with run.system.interruptible(run.stop_requested):
                return _accept(run)
        if run.request.command in ("rollback", "uninstall"):
            from gpuprov.agent.uninstall import roll_back, uninstall

            finished = roll_back(run) if run.request.command == "rollback" else uninstall(run)
        elif run.request.command == "doctor":
            from gpuprov.agent.fix import fix

            finished = fix(run)
        else:
            with _with_bundle(run) as run:
                finished = install(run)
        if finished.exit_code in (ExitCode.DONE, ExitCode.DEGRADED, ExitCode.UNFIT):
            prune(run.system, CHANGE_KINDS, keep_driver=run.spec.keep_driver)
        return finished


def _facts(run: RunContext) -> Finished:
    hidden: set[str] = set()
    run.system.unreadable = hidden if run.system.user_id() != 0 else None
    try:
        reach_local_docker(run.system)
        facts = gather(run.system)
        run.sink(FactsGathered(facts_to_json(facts)))
        if replaced := version_difference(run.system, facts.driver):
            run.note(replaced, "warning")
        if left_out := sorted(path for path in hidden if not path.startswith("/proc/")):
            run.note(f"left out, because only root may read it: {', '.join(left_out)}", "warning")
    except PermissionError as error:
        what = "not all of this machine can be looked at without root"
        raise UsageError(what, str(error), "sudo gpuprov facts") from None
    return Finished(int(ExitCode.DONE), versions=versions_of(facts))


@contextlib.contextmanager
def _with_bundle(run: RunContext) -> Iterator[RunContext]:
    """Yield the run with the bundle that its request names, opened and verified; unchanged if it names none."""
    if not run.request.bundle:
        yield run
        return
    run.note("checking every digest of the bundle", "debug")
    with opened(run.system, run.request.bundle, run.request.bundle_digest) as bundle:
        run.system.tables = with_newer_tables(run.system.tables, bundle.content, run.request.bundle)
        yield replace(run, bundle=bundle)


def _accept(run: RunContext) -> Finished:
    from gpuprov.checks.accept import accept
    from gpuprov.verify import verify

    reach_local_docker(run.system)
    minutes = run.request.arguments.get("minutes", 10)
    if type(minutes) is not int or not 1 <= minutes <= MOST_MINUTES:
        raise UsageError(f"accept takes 1 to {MOST_MINUTES} minutes", f"{minutes!r:.80}", "give another number")
    return accept(
        run.system, run.spec, run.sink, minutes, lambda tests: verify(run.system, run.spec, run.sink, tests=tests).good
    )


def _verify(run: RunContext) -> Finished:
    from gpuprov.verify import installed_versions, verify

    verdict = verify(run.system, run.spec, run.sink, remember=run.request.remember)
    versions = installed_versions(run.system)
    for found in known_vulnerabilities(versions, run.system.tables):
        run.note(f"{found}", "warning")
    code = ExitCode.DONE if verdict.good else ExitCode.FAILED
    working = () if verdict.good or not (holder := other_run(run.system)) else (
        Problem(
            "a run is working on this host: what it has not done yet looks as missing", f"{holder}",
            f"tail --pid={holder.pid} -f /dev/null; gpuprov verify  # the first ends when that run does",
        ),
    )  # fmt: skip
    return Finished(int(code), summary=verdict.summary(), versions=versions, problems=working)
