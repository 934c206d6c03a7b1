"""One request carried out on this machine, from lock to last event: the same for the command line and for the agent.

Most runs are installations that change nothing; what only the others need is imported where it is used.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Callable

from gpuprov import __version__
from gpuprov.agent.resume import UNIT, begin_reboot, forget_resume, leave_resume
from gpuprov.boot.reboot import Reboot
from gpuprov.bundle.manifest import ADVISORIES
from gpuprov.bundle.open import OpenBundle, opened
from gpuprov.core.apply import PlanAfresh, Stopped, apply_changes, last_undoable_run, roll_back, take_up
from gpuprov.core.download import unreachable
from gpuprov.core.journal import Journal, journal_for
from gpuprov.core.lock import host_lock
from gpuprov.core.site_tables import use_newer_advisories, use_tables
from gpuprov.core.system import System
from gpuprov.driver import mirror
from gpuprov.facts.host import HostFacts, facts_to_json, gather
from gpuprov.facts.reboot_state import forget_asked
from gpuprov.packaging import turn
from gpuprov.plan import with_bundle
from gpuprov.plan.facts_for import gather_for
from gpuprov.plan.steps import CHANGE_KINDS, Plan, make_plan
from gpuprov.wire.advisories import TOOLKIT_PACKAGE
from gpuprov.wire.errors import ExitCode, GpuprovError, Problem
from gpuprov.wire.events import FactsGathered, Finished, Note, Planned, PlannedChange, Sink, Started
from gpuprov.wire.request import Request
from gpuprov.wire.spec import HostSpec, parse_spec

if TYPE_CHECKING:
    from gpuprov.agent.uninstall import Removal

# The plan, the plan after a reboot that was not needed, and one for what that brings.
_MOST_ROUNDS = 3
StopRequested = Callable[[], bool]
_NOTHING_THERE = "there is nothing of gpuprov on this host"


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
    return replace(finished, seconds=seconds)


def _dispatch(request: Request, sink: Sink, system: System, stop_requested: StopRequested) -> Finished:
    use_tables(request.tables)
    spec = parse_spec(request.spec)
    if request.command == "facts":
        return _facts(sink, system)
    if system.user_id() != 0:
        raise GpuprovError(
            f"gpuprov {request.command} must run as root",
            f"this process has user id {system.user_id()}",
            "put sudo before it; for remote hosts set ansible_become: true",
            exit_code=ExitCode.USAGE,
        )
    if request.command == "verify":
        return _verify(spec, sink, system)
    if request.command == "doctor":
        return _doctor(spec, sink, system)
    if request.command == "install" and request.check:
        with _bundle(request, sink, system) as bundle:
            return _check(request, spec, sink, system, bundle)
    if request.command == "uninstall" and request.check:
        return _check_uninstall(request, sink, system)
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
        if request.command == "uninstall":
            return _uninstall(request, sink, system, stop_requested)
        with _bundle(request, sink, system) as bundle:
            return _install(request, spec, sink, system, stop_requested, bundle)


def _facts(sink: Sink, system: System) -> Finished:
    try:
        sink(FactsGathered(facts_to_json(gather(system))))
    except PermissionError as error:
        raise GpuprovError(
            "not all of this machine can be looked at without root", str(error), "sudo gpuprov facts",
            exit_code=ExitCode.USAGE,
        ) from None  # fmt: skip
    return Finished(int(ExitCode.DONE))


@contextlib.contextmanager
def _bundle(request: Request, sink: Sink, system: System) -> Iterator[OpenBundle | None]:
    """Give the bundle that the request names, checked, or None if it names none."""
    if not request.bundle:
        yield None
        return
    sink(Note("checking every digest of the bundle", "debug"))
    with opened(system, request.bundle, request.bundle_digest) as bundle:
        use_newer_advisories(bundle.content(ADVISORIES), request.bundle)
        yield bundle


def _completed(spec: HostSpec, bundle: OpenBundle | None, system: System) -> HostSpec:
    """Return the spec with what a bundle, or else a mirror, says of the driver."""
    if bundle is None:
        return mirror.resolved(system, spec, system.architecture())
    return with_bundle.completed(mirror.of_bundle(spec, bundle.manifest.driver_version), bundle)


def _check(request: Request, spec: HostSpec, sink: Sink, system: System, bundle: OpenBundle | None) -> Finished:
    """Say what an installation would do."""
    spec = _completed(spec, bundle, system)
    facts = gather_for(system, spec, bundle, request.steps, sink)
    plan = _announced_plan(facts, spec, request, sink, system)
    busy = turn.holder(system, facts.packages.manager) if _needs_package_manager(plan) else ""
    if busy:
        sink(Note(f"{busy} holds the package manager's lock; a run waits up to {spec.lock_timeout} s for it"))
    count = len(plan.changes)
    summary = f"{count} changes would be made" if count else "nothing to change"
    return Finished(int(ExitCode.DONE), changed=count, summary=summary, versions=_versions(facts))


def _needs_package_manager(plan: Plan) -> bool:
    return any(item.step == "packages" for item in plan.changes)


def _install(
    request: Request, spec: HostSpec, sink: Sink, system: System, stop_requested: StopRequested,
    bundle: OpenBundle | None,
) -> Finished:  # fmt: skip
    forget_resume(system)
    interrupted = take_up(system, CHANGE_KINDS, sink)
    spec = _completed(spec, bundle, system)
    facts = gather_for(system, spec, bundle, request.steps, sink)
    plan = _announced_plan(facts, spec, request, sink, system)
    if _needs_package_manager(plan):
        # Before the first change: a run that must give up here has done nothing yet.
        turn.wait_for(system, facts.packages.manager, spec.lock_timeout, lambda text, *_: sink(Note(text)))
    count = 0
    if plan.changes:
        journal = interrupted or journal_for(system, request.command, request.run_id)
        try:
            count, facts, plan = _apply(plan, spec, request, sink, system, journal, stop_requested, bundle)
        except PlanAfresh as reboot:
            return _reboot(request, reboot.made, facts, sink, system)
        except (GpuprovError, Stopped) as error:
            # What follows a reboot belongs to the same run: one roll-back undoes both halves.
            if not isinstance(error, GpuprovError) or error.exit_code != ExitCode.REBOOT_NEEDED:
                # On a full disk it stays open: the next run takes it up all the same.
                with contextlib.suppress(GpuprovError):
                    journal.end("failed")
            raise
        _require_settled(plan)
        journal.end("done")
    elif interrupted is not None:
        interrupted.end("done")
    forget_asked(system)
    summary = f"{count} changes made" if count else "0 changes: the host is as it should be"
    return Finished(int(ExitCode.DONE), changed=count, summary=summary, versions=_versions(facts))


def _apply(
    plan: Plan, spec: HostSpec, request: Request, sink: Sink, system: System, journal: Journal,
    stop_requested: StopRequested, bundle: OpenBundle | None,
) -> tuple[int, HostFacts, Plan]:  # fmt: skip
    """Make the changes; return how many were made, the facts afterwards, and the plan that is left.

    A reboot that turns out needless leaves a stale plan, and a new driver may be a reason for one: then another round.
    Raises PlanAfresh if the host must reboot before the rest.
    """
    made, stale = 0, True
    for _ in range(_MOST_ROUNDS):
        try:
            # Each round takes out of the bundle what its own changes need.
            with with_bundle.unpacked(system, bundle, [item.change for item in plan.changes]):
                made += apply_changes([item.change for item in plan.changes], system, journal, sink, stop_requested)
            stale = False
        except PlanAfresh as afresh:
            made, stale = made + afresh.made, True
            if afresh.reboot:
                raise PlanAfresh(made, reboot=True) from None
        facts = gather_for(system, spec, bundle, request.steps, sink)
        plan = make_plan(facts, spec, request.steps)
        if not stale and not any(isinstance(item.change, Reboot) for item in plan.changes):
            break
    return made, facts, plan


def _reboot(request: Request, made: int, facts: HostFacts, sink: Sink, system: System) -> Finished:
    """Let the host reboot; the run goes on after it, asked again by the caller or by the host itself."""
    if not request.caller_returns:
        leave_resume(system, request)
    if facts.docker.running_containers:
        sink(Note(f"the reboot stops these containers: {', '.join(facts.docker.running_containers)}", "warning"))
    begin_reboot(system)
    summary = "rebooting; the rest is done after it"
    if not request.caller_returns:
        summary += f", by the host itself: journalctl -u {UNIT}"
    versions = _versions(facts)
    return Finished(
        int(ExitCode.REBOOT_NEEDED), made, summary=summary, left_boot=facts.reboot.boot_id, versions=versions
    )


def _announced_plan(facts: HostFacts, spec: HostSpec, request: Request, sink: Sink, system: System) -> Plan:
    """Make the plan and tell it. Raises GpuprovError with all problems at once."""
    plan = make_plan(facts, spec, request.steps)
    for note in plan.notes:
        sink(Note(note))
    for warning in plan.warnings:
        sink(Note(warning, "warning"))
    problems = plan.problems or unreachable(system, [url for item in plan.changes for url in item.change.urls])
    if problems:
        raise GpuprovError.several(problems)
    sink(
        Planned(
            tuple(
                PlannedChange(
                    item.change.key, item.step, item.change.summary(), item.change.diff(system) if request.diff else ""
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
    from gpuprov.agent.uninstall import lasting

    forget_resume(system)
    forget_asked(system)
    run = last_undoable_run(system)
    if run is None:
        return Finished(int(ExitCode.DONE), summary="there is no run to roll back")
    for sentence in lasting(system, (run,), CHANGE_KINDS):
        sink(Note(sentence, "warning"))
    count = roll_back(system, run, CHANGE_KINDS, sink)
    return Finished(int(ExitCode.DONE), changed=count, summary=f"{count} changes undone")


def _check_uninstall(request: Request, sink: Sink, system: System) -> Finished:
    """Say what an uninstall would do, and what it can't bring back."""
    count = _announced_removal(request, sink, system).count
    summary = f"{count} changes would be made" if count else _NOTHING_THERE
    return Finished(int(ExitCode.DONE), changed=count, summary=summary)


def _uninstall(request: Request, sink: Sink, system: System, stop_requested: StopRequested) -> Finished:
    from gpuprov.agent.uninstall import carry_out

    removal = _announced_removal(request, sink, system)
    carry_out(system, removal, CHANGE_KINDS, sink, stop_requested)
    count = removal.count
    summary = f"{count} changes undone: the host is as before gpuprov's first run" if count else _NOTHING_THERE
    return Finished(int(ExitCode.DONE), changed=count, summary=summary)


def _announced_removal(request: Request, sink: Sink, system: System) -> Removal:
    """Look at what an uninstall has to do and tell it, what lasts first. Raises GpuprovError with all problems."""
    from gpuprov.agent.uninstall import planned, problems, survey

    removal = survey(system, CHANGE_KINDS)
    found = problems(system, removal)
    if found:
        raise GpuprovError.several(found)
    for sentence in removal.lasting:
        sink(Note(sentence, "warning"))
    sink(Planned(planned(system, removal, diff=request.diff)))
    return removal


def _doctor(spec: HostSpec, sink: Sink, system: System) -> Finished:
    from gpuprov.doctor import examine

    return examine(system, spec, sink)


def _verify(spec: HostSpec, sink: Sink, system: System) -> Finished:
    from gpuprov.verify import known_holes, verify

    is_good = verify(system, spec, sink)
    for found in known_holes(system):
        sink(Note(f"{found}", "warning"))
    if is_good:
        return Finished(int(ExitCode.DONE), summary="containers see this host's GPUs")
    return Finished(int(ExitCode.FAILED), summary="containers do not see what the host has")


def _versions(facts: HostFacts) -> dict[str, str]:
    return {
        "os": facts.os.name,
        "kernel": facts.kernel.release,
        "driver": facts.driver_installed_version,
        "docker": facts.docker.version,
        "toolkit": facts.packages.installed.get(TOOLKIT_PACKAGE, ""),
        "gpus": str(len(facts.gpus)),
    }
