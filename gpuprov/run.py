"""One request carried out on this machine, from lock to last event: the same for the command line and for the agent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Callable

from gpuprov import __version__
from gpuprov.apply import Stopped, apply_changes, last_undoable_run, roll_back, take_up
from gpuprov.bundle import use
from gpuprov.errors import ExitCode, GpuprovError, Problem
from gpuprov.events import FactsGathered, Finished, Note, Planned, PlannedChange, Sink, Started
from gpuprov.facts import HostFacts, facts_to_json, gather
from gpuprov.journal import new_journal
from gpuprov.lock import host_lock
from gpuprov.plan import CHANGE_KINDS, Plan, make_plan
from gpuprov.request import Request
from gpuprov.spec import HostSpec, parse_spec
from gpuprov.system import System
from gpuprov.verify import verify

StopRequested = Callable[[], bool]


def run_request(
    request: Request, sink: Sink, system: System | None = None, stop_requested: StopRequested = lambda: False
) -> ExitCode:
    """Carry out a request on this machine; every outcome ends with a Finished event, whose exit code is returned."""
    system = system or System()
    begun = system.now()
    sink(Started(__version__, request.command, system.own_pid()))
    try:
        finished = _dispatch(request, sink, system, stop_requested)
    except GpuprovError as error:
        finished = Finished(int(error.exit_code), problems=error.problems)
    except Stopped as stopped:
        problem = Problem(str(stopped), "", "run the same command again to go on from there")
        finished = Finished(int(ExitCode.FAILED), problems=(problem,))
    sink(_with_seconds(finished, round(system.now() - begun, 3)))
    return ExitCode(finished.exit_code)


def _with_seconds(finished: Finished, seconds: float) -> Finished:
    return Finished(
        finished.exit_code, finished.changed, seconds, finished.problems, finished.summary, finished.versions
    )


def _dispatch(request: Request, sink: Sink, system: System, stop_requested: StopRequested) -> Finished:
    spec = parse_spec(request.spec)
    if request.command == "facts":
        sink(FactsGathered(facts_to_json(gather(system))))
        return Finished(int(ExitCode.DONE))
    if system.user_id() != 0:
        raise GpuprovError(
            f"gpuprov {request.command} must run as root",
            f"this process has user id {system.user_id()}",
            "put sudo before it; for remote hosts set ansible_become: true",
            exit_code=ExitCode.USAGE,
        )
    if request.command == "verify":
        return _verify(spec, sink, system)
    if request.command == "install" and request.check:
        with _bundle(request, sink, system) as bundle:
            return _check(request, spec, sink, system, bundle)
    with host_lock(
        system,
        pid=system.own_pid(),
        command=request.command,
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        wait_seconds=request.wait_seconds,
        tell=lambda message: sink(Note(message)),
    ):
        if request.command == "rollback":
            return _roll_back(sink, system)
        with _bundle(request, sink, system) as bundle:
            return _install(request, spec, sink, system, stop_requested, bundle)


@contextlib.contextmanager
def _bundle(request: Request, sink: Sink, system: System) -> Iterator[use.OpenBundle | None]:
    """Give the bundle that the request names, checked, or None if it names none."""
    if not request.bundle:
        yield None
        return
    sink(Note("checking every digest of the bundle", "debug"))
    with use.opened(system, request.bundle, request.bundle_digest) as bundle:
        yield bundle


def _gather(system: System, bundle: use.OpenBundle | None) -> HostFacts:
    facts = gather(system)
    return facts if bundle is None else replace(facts, bundle=use.gather(system, bundle.manifest))


def _check(request: Request, spec: HostSpec, sink: Sink, system: System, bundle: use.OpenBundle | None) -> Finished:
    """Say what an installation would do."""
    spec = use.completed(spec, bundle)
    facts = _gather(system, bundle)
    plan = _announced_plan(facts, spec, sink, system, diff=request.diff)
    count = len(plan.changes)
    summary = f"{count} changes would be made" if count else "nothing to change"
    return Finished(int(ExitCode.DONE), changed=count, summary=summary, versions=_versions(facts))


def _install(
    request: Request,
    spec: HostSpec,
    sink: Sink,
    system: System,
    stop_requested: StopRequested,
    bundle: use.OpenBundle | None,
) -> Finished:
    interrupted = take_up(system, CHANGE_KINDS, sink)
    spec = use.completed(spec, bundle)
    facts = _gather(system, bundle)
    plan = _announced_plan(facts, spec, sink, system, diff=request.diff)
    if plan.changes:
        journal = interrupted or new_journal(system, request.command)
        try:
            with use.unpacked(system, bundle, {item.step for item in plan.changes}):
                apply_changes([item.change for item in plan.changes], system, journal, sink, stop_requested)
        except (GpuprovError, Stopped):
            journal.end("failed")
            raise
        facts = _gather(system, bundle)
        _require_settled(make_plan(facts, spec))
        journal.end("done")
    elif interrupted is not None:
        interrupted.end("done")
    count = len(plan.changes)
    summary = f"{count} changes made" if count else "0 changes: the host is as it should be"
    return Finished(int(ExitCode.DONE), changed=count, summary=summary, versions=_versions(facts))


def _announced_plan(facts: HostFacts, spec: HostSpec, sink: Sink, system: System, *, diff: bool) -> Plan:
    """Make the plan and tell it. Raises GpuprovError with all problems at once."""
    plan = make_plan(facts, spec)
    for note in plan.notes:
        sink(Note(note))
    if plan.problems:
        raise GpuprovError.several(plan.problems)
    sink(
        Planned(
            tuple(
                PlannedChange(
                    item.change.key, item.step, item.change.summary(), item.change.diff(system) if diff else ""
                )
                for item in plan.changes
            )
        )
    )
    return plan


def _require_settled(plan: Plan) -> None:
    """Done means looked again: what is still to change after all changes were made is a fault, and said so."""
    if plan.problems:
        raise GpuprovError.several(plan.problems)
    if plan.changes:
        raise GpuprovError(
            "the host did not settle: after all changes were made, some are still wanted",
            "\n".join(item.change.summary() for item in plan.changes),
            "something on the host undoes them (another tool that manages it?); find it, then run this again",
        )


def _roll_back(sink: Sink, system: System) -> Finished:
    run = last_undoable_run(system)
    if run is None:
        return Finished(int(ExitCode.DONE), summary="there is no run to roll back")
    count = roll_back(system, run, CHANGE_KINDS, sink)
    return Finished(int(ExitCode.DONE), changed=count, summary=f"{count} changes undone")


def _verify(spec: HostSpec, sink: Sink, system: System) -> Finished:
    if verify(system, spec, sink):
        return Finished(int(ExitCode.DONE), summary="containers see this host's GPUs")
    return Finished(int(ExitCode.FAILED), summary="containers do not see what the host has")


def _versions(facts: HostFacts) -> dict[str, str]:
    return {
        "os": facts.os.name,
        "kernel": facts.kernel.release,
        "driver": facts.driver_installed_version,
        "docker": facts.docker.version,
        "gpus": str(len(facts.gpus)),
    }
