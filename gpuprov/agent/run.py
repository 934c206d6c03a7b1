"""Carry out one request on this machine, from lock to last event; the command line and the agent share it.

Most runs are installations that change nothing, so modules of other commands are imported where they are used.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Callable

from gpuprov import __version__
from gpuprov.agent.context import RunContext, StopRequested, devices_to_lose, for_target, keep_devices
from gpuprov.agent.install import check, forget_resume, install
from gpuprov.agent.site_tables import read_spec, use_newer_advisories
from gpuprov.boot.reboot import forget_asked
from gpuprov.bundle.manifest import ADVISORIES
from gpuprov.bundle.open import opened
from gpuprov.core.apply import last_undoable_run, roll_back, undo_obstacles
from gpuprov.core.journal import Run
from gpuprov.core.lock import host_lock, other_run
from gpuprov.core.proxy import Proxy
from gpuprov.core.retention import prune
from gpuprov.core.system import System
from gpuprov.engines.docker import reach_local_docker
from gpuprov.engines.docker_unit import failure
from gpuprov.facts import driver_change
from gpuprov.facts.boot import gather_reboot
from gpuprov.facts.host import facts_to_json, gather
from gpuprov.plan.steps import CHANGE_KINDS
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, Stopped
from gpuprov.protocol.events import ChangeDone, ChangeStarted, Event, FactsGathered, Finished, Planned, Sink, Started
from gpuprov.protocol.request import Request
from gpuprov.protocol.secrets import secret_free
from gpuprov.protocol.words import counted

if TYPE_CHECKING:
    from gpuprov.agent.uninstall import Removal

_NOTHING_THERE = "there is nothing of gpuprov on this host"


def run_request(
    request: Request, sink: Sink, system: System | None = None, stop_requested: StopRequested = lambda: False
) -> ExitCode:
    """Carry out a request on this machine; every outcome ends with a Finished event, whose exit code is returned."""
    system = system or System()
    begun = system.now()
    sink = _MadeChanges(secret_free(sink, request.spec))
    sink(Started(__version__, request.command, system.own_pid()))
    try:
        spec = read_spec(request.spec, request.tables)
        system.proxy = Proxy(spec.proxy, spec.no_proxy)
        finished = _dispatch(for_target(RunContext(request, spec, system, sink, stop_requested)))
    except GpuprovError as error:
        finished = Finished(int(error.exit_code), problems=error.problems)
    except Stopped as stopped:
        problem = sink.stopped(request.command, stopped.left)
        finished = Finished(int(ExitCode.INTERRUPTED), changed=len(sink.made), problems=(problem,))
    sink(replace(finished, seconds=round(system.now() - begun, 3)))
    return ExitCode(finished.exit_code)


class _MadeChanges:
    """Passes events on, and keeps which changes they name as made."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._begun: dict[str, str] = {}
        self.made: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, ChangeStarted):
            self._begun[event.key] = event.summary
        elif isinstance(event, ChangeDone):
            self.made.append(self._begun[event.key])
        self._sink(event)

    def stopped(self, command: str, left: Sequence[str]) -> Problem:
        """Return what a stopped run has done, and what not."""
        if not self.made:
            what = "stopped as asked while it looked at the host" if not left else "stopped as asked"
            return Problem(f"{what}: no change was begun", "", "run the same command again")
        seen = [*(f"made: {one}" for one in self.made), *(f"not made: {one}" for one in left)]
        step = "run the same command again: it makes the rest"
        return Problem(
            f"stopped as asked after {len(self.made)} of {counted(len(self.made) + len(left), 'change')}",
            "\n".join(seen), f"{step}; gpuprov rollback undoes what was made" if command == "install" else step,
        )  # fmt: skip


def _dispatch(run: RunContext) -> Finished:
    if run.request.changes_the_host:
        return _locked(_as_root(run))
    with run.system.interruptible(run.stop_requested):
        return _look(run)


def _as_root(run: RunContext) -> RunContext:
    if run.system.user_id() != 0:
        raise GpuprovError(
            f"gpuprov {run.request.command} must run as root",
            f"this process has user id {run.system.user_id()}",
            "put sudo before it; for remote hosts set ansible_become: true",
            exit_code=ExitCode.USAGE,
        )
    reach_local_docker(run.system)
    return run


def _look(run: RunContext) -> Finished:
    """Carry out a command that changes nothing."""
    command = run.request.command
    if command == "facts":
        return _facts(run)
    if command == "cuda":
        reach_local_docker(run.system)
        return _cuda(run)
    run = _as_root(run)
    if command == "verify":
        return _verify(run)
    if command == "doctor":
        return _doctor(run)
    if command == "rollback":
        return _check_roll_back(run)
    if command == "uninstall":
        return _check_uninstall(run)
    with _with_bundle(run) as run:
        return check(run)


def _locked(run: RunContext) -> Finished:
    """Carry out a command that changes the host: one at a time."""
    with host_lock(
        run.system,
        pid=run.system.own_pid(),
        command=run.request.command,
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        wait_seconds=run.request.wait_seconds,
        tell=run.note,
    ) as note:
        run = replace(run, sink=_noting(run.sink, note))
        if run.request.command == "rollback":
            finished = _roll_back(run)
        elif run.request.command == "uninstall":
            finished = _uninstall(run)
        elif run.request.command == "doctor":
            finished = _fix(run)
        else:
            with _with_bundle(run) as run:
                finished = install(run)
        if finished.exit_code == ExitCode.DONE:
            prune(run.system, CHANGE_KINDS, keep_driver=run.spec.keep_driver)
        return finished


def _noting(sink: Sink, note: Callable[[str], None]) -> Sink:
    """Return a sink that also notes each change that begins, for others who look at the host."""

    def noted(event: Event) -> None:
        if isinstance(event, ChangeStarted):
            note(f"step {event.index} of {event.total}: {event.summary}")
        sink(event)

    return noted


def _facts(run: RunContext) -> Finished:
    hidden: set[str] = set()
    run.system.unreadable = hidden if run.system.user_id() != 0 else None
    try:
        reach_local_docker(run.system)
        facts = gather(run.system)
        run.sink(FactsGathered(facts_to_json(facts)))
        if replaced := driver_change.difference(run.system, facts.driver):
            run.note(replaced, "warning")
        if left_out := sorted(path for path in hidden if not path.startswith("/proc/")):
            run.note(f"left out, because only root may read it: {', '.join(left_out)}", "warning")
    except PermissionError as error:
        raise GpuprovError(
            "not all of this machine can be looked at without root", str(error), "sudo gpuprov facts",
            exit_code=ExitCode.USAGE,
        ) from None  # fmt: skip
    return Finished(int(ExitCode.DONE))


@contextlib.contextmanager
def _with_bundle(run: RunContext) -> Iterator[RunContext]:
    """Yield the run with the bundle that its request names, opened and verified; unchanged if it names none."""
    if not run.request.bundle:
        yield run
        return
    run.note("checking every digest of the bundle", "debug")
    with opened(run.system, run.request.bundle, run.request.bundle_digest) as bundle:
        use_newer_advisories(bundle.content(ADVISORIES), run.request.bundle)
        yield replace(run, bundle=bundle)


def _roll_back(run: RunContext) -> Finished:
    from gpuprov.agent.uninstall import irreversible

    forget_resume(run.system)
    forget_asked(run.system)
    last = last_undoable_run(run.system)
    count, summary = 0, "there is no run to roll back"
    if last is not None:
        _require_undoable(run, (last,))
        for sentence in irreversible(run.system, (last,), CHANGE_KINDS):
            run.note(sentence, "warning")
        _note_restored(run, (last,))
        devices_to_lose(run)
        keep_devices(run)
        count = roll_back(run.system, last, CHANGE_KINDS, run.sink, run.stop_requested)
        summary = f"{counted(count, 'change')} undone"
        for reason in gather_reboot(run.system).asked_for:
            run.note(f"reboot this host: {reason}", "warning")
    problem = failure(run.system)
    if problem is not None:
        return Finished(int(ExitCode.FAILED), changed=count, problems=(problem,), summary=summary)
    return Finished(int(ExitCode.DONE), changed=count, summary=summary)


def _note_restored(run: RunContext, runs: Sequence[Run]) -> None:
    """Report what a rollback restores besides files."""
    for entry in (entry for one in runs for entry in one.undoable if entry.kind in CHANGE_KINDS):
        for sentence in CHANGE_KINDS[entry.kind].restores(run.system, entry.before, entry.outcome):
            run.note(sentence)


def _require_undoable(run: RunContext, runs: Sequence[Run]) -> None:
    """Raise GpuprovError with all that prevents an undo, before its first change."""
    if found := undo_obstacles(run.system, runs, CHANGE_KINDS):
        raise GpuprovError.several(found)


def _check_roll_back(run: RunContext) -> Finished:
    """Report what a rollback would do, and what it can't restore."""
    from gpuprov.agent.uninstall import last_run, planned

    removal = last_run(run.system, CHANGE_KINDS)
    _require_undoable(run, removal.runs)
    for sentence in removal.irreversible:
        run.note(sentence, "warning")
    _note_restored(run, removal.runs)
    found = planned(run.system, removal, "rollback", diff=run.request.diff)
    lost = devices_to_lose(run) if found else ()
    run.sink(Planned(found, removal.disturbs(CHANGE_KINDS) or bool(lost)))
    summary = f"{counted(removal.count, 'change')} would be undone" if removal.count else "there is no run to roll back"
    return Finished(int(ExitCode.DONE), changed=removal.count, summary=summary)


def _check_uninstall(run: RunContext) -> Finished:
    """Report what an uninstall would do, and what it can't restore."""
    count = _announced_removal(run).count
    summary = f"{counted(count, 'change')} would be made" if count else _NOTHING_THERE
    return Finished(int(ExitCode.DONE), changed=count, summary=summary)


def _uninstall(run: RunContext) -> Finished:
    from gpuprov.agent.uninstall import carry_out

    with run.system.interruptible(run.stop_requested):
        removal = _announced_removal(run)
    keep_devices(run)
    carry_out(run.system, removal, CHANGE_KINDS, run.sink, run.stop_requested)
    count = removal.count
    summary = (
        f"{counted(count, 'change')} undone: the host is as before gpuprov's first run" if count else _NOTHING_THERE
    )
    return Finished(int(ExitCode.DONE), changed=count, summary=summary)


def _announced_removal(run: RunContext) -> Removal:
    """Plan and report an uninstall, warnings first. Raises GpuprovError with all problems."""
    from gpuprov.agent.uninstall import planned, problems, survey

    removal = survey(run.system, CHANGE_KINDS)
    found = problems(run.system, removal, CHANGE_KINDS)
    if found:
        raise GpuprovError.several(found)
    for sentence in removal.irreversible:
        run.note(sentence, "warning")
    planned_changes = planned(run.system, removal, "uninstall", diff=run.request.diff)
    lost = devices_to_lose(run) if planned_changes else ()
    run.sink(Planned(planned_changes, removal.disturbs(CHANGE_KINDS) or bool(lost)))
    return removal


def _doctor(run: RunContext) -> Finished:
    if run.request.fix:
        from gpuprov.agent.fix import check as check_fix

        return check_fix(run)
    from gpuprov.doctor import examine

    return examine(run.system, run.spec, run.sink)


def _cuda(run: RunContext) -> Finished:
    from gpuprov.checks.cuda.survey import examine

    return examine(run.system, run.request.arguments, run.sink)


def _fix(run: RunContext) -> Finished:
    from gpuprov.agent.fix import fix

    return fix(run)


def _verify(run: RunContext) -> Finished:
    from gpuprov.verify import installed_versions, known_vulnerabilities, verify

    verdict = verify(run.system, run.spec, run.sink, remember=run.request.remember)
    versions = installed_versions(run.system)
    for found in known_vulnerabilities(versions):
        run.note(f"{found}", "warning")
    code = ExitCode.DONE if verdict.good else ExitCode.FAILED
    working = () if verdict.good or not (holder := other_run(run.system)) else (
        Problem(
            "a run is working on this host: what it has not done yet looks as missing", f"{holder}",
            f"tail --pid={holder.pid} -f /dev/null; gpuprov verify  # the first ends when that run does",
        ),
    )  # fmt: skip
    return Finished(int(code), summary=verdict.summary(), versions=versions, problems=working)
