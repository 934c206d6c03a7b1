"""`doctor --fix`: examine the host, apply the fixes that gpuprov can make, and examine it again to prove them."""

from __future__ import annotations

from collections.abc import Sequence

from gpuprov.agent import repair
from gpuprov.agent.context import RunContext, devices_to_lose, keep_devices
from gpuprov.agent.install import forget_resume, require_drained
from gpuprov.core.apply import apply_changes, resume_run, undo_disturbs
from gpuprov.core.download import unreachable
from gpuprov.core.journal import Journal, journal_for
from gpuprov.doctor.examine import Cause, diagnose, report, report_causes
from gpuprov.doctor.fix import Fix, needs_install, plan_fix, spec_as_found
from gpuprov.doctor.gather import gather
from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.driver.recommended import completed
from gpuprov.plan.inputs import gather_for, resolve
from gpuprov.plan.steps import CHANGE_KINDS, Plan, StepChange, make_plan
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, Stopped
from gpuprov.protocol.events import ChangeDone, Finished, Kept, Planned, PlannedChange
from gpuprov.protocol.words import counted

# Each round fixes what the round before made visible: nodes first, then what nvidia-smi reports.
_MOST_ROUNDS = 3


@dataclass
class _Look:
    """One examination of the host, and the fixes that gpuprov can make for its findings."""

    x: HostSnapshot
    causes: tuple[Cause, ...]
    fix: Fix


@dataclass
class _Work:
    """What was planned, tried (by key) and made so far, and what failed; `repair`: what the GPUs need besides."""

    planned: list[PlannedChange] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    made: int = 0
    problems: list[Problem] = field(default_factory=list)
    repair: repair.Repair = field(default_factory=repair.Repair)


def check(run: RunContext) -> Finished:
    """Report the causes, and the changes that would fix them."""
    look = _look(run)
    finished = report(look.x, look.causes, run.sink)
    wanted = repair.plan(run, look.x.host)
    _announce(run, look.fix.changes, _Work(repair=wanted), _undone(run, look.fix))
    _note_left(run, look.fix, wanted)
    count = len(look.fix.changes) + len(wanted.changes)
    summary = f"{finished.summary}; {counted(count, 'change')} would be made"
    return repair.judged(run, replace(finished, changed=count, summary=summary), wanted.found, ())


def fix(run: RunContext) -> Finished:
    """Make the changes, examine the host again and return the result."""
    forget_resume(run.system)
    earlier = repair.settle(run)
    with run.system.interruptible(run.stop_requested):
        look = _look(run)
        work = _Work(repair=repair.plan(run, look.x.host, earlier))
    require_drained(run, look.fix.changes, [*(one.summary for one in work.repair.changes), *_undone(run, look.fix)])
    journal: Journal | None = None
    if look.fix.whole or look.fix.changes:
        devices_to_lose(run)
        keep_devices(run)
    if look.fix.whole:
        journal = resume_run(run.system, CHANGE_KINDS, run.sink)
        look = _look(run) if journal is not None else look
    if look.fix.changes:
        report_causes(look.causes, run.sink)
        journal = journal or journal_for(run.system, run.request.command, run.request.run_id)
    if journal is not None:
        look = _rounds(run, journal, look, work)
        # A driver that was loaded again has initialised the GPUs. What the plan has not named is left to the next run.
        now = repair.plan(run, look.x.host, earlier)
        work.repair = work.repair if now.changes else now
    if not work.repair.changes:
        found = repair.load_after_reboot(run, earlier, work.repair.found)
        return repair.judged(run, _finished(run, look, work), found, ())
    if not work.planned:
        _announce(run, (), work)
    done = repair.carry_out(run, work.repair)
    if isinstance(done, Finished):
        return replace(done, changed=done.changed + work.made)
    found, problems = done
    work.made += not problems
    return repair.judged(run, _finished(run, _look(run), work), found, problems)


def _rounds(run: RunContext, journal: Journal, look: _Look, work: _Work) -> _Look:
    """Apply the fixes of one examination after the other until one plans nothing new; return the last examination."""
    if not look.fix.changes:
        # The interrupted change has been undone, and there is nothing else to do.
        journal.end("done")
        return _look(run)
    for _ in range(_MOST_ROUNDS):
        changes = [one for one in look.fix.changes if one.change.key not in work.tried]
        if not changes:
            break
        _announce(run, changes, work)
        try:
            _make(run, journal, changes, work, stop=look.fix.whole)
        except Stopped:
            # The next examination must not find an open run.
            journal.end("failed")
            raise
        # A further round continues the same journal.
        journal.end("failed" if work.problems else "done")
        look = _look(run)
    return look


def _finished(run: RunContext, look: _Look, work: _Work) -> Finished:
    finished = report(look.x, look.causes, run.sink)
    if not work.planned:
        _announce(run, (), work)
    _note_left(run, look.fix, work.repair)
    summary = f"{counted(work.made, 'change')} made; {finished.summary}"
    code = int(ExitCode.FAILED) if work.problems else finished.exit_code
    problems = (*work.problems, *finished.problems)
    return replace(finished, exit_code=code, changed=work.made, problems=problems, summary=summary)


def _look(run: RunContext) -> _Look:
    x = gather(run.system, run.spec)
    causes = diagnose(x)
    whole: Plan | None = None
    if needs_install(causes):
        # What prevents the installation is among the plan's problems.
        try:
            spec = resolve(run.system, completed(run.system, spec_as_found(x)), None)
            whole = make_plan(gather_for(run.system, spec, None, (), run.sink), spec)
            wrong = unreachable(run.system, [url for item in whole.changes for url in item.change.urls])
            whole = replace(whole, problems=whole.problems or wrong)
        except GpuprovError as error:
            whole = Plan((), error.problems)
    return _Look(x, causes, plan_fix(x, causes, whole))


def _undone(run: RunContext, fix: Fix) -> tuple[str, ...]:
    """Return what disturbs containers besides the changes: the undo of an earlier run's interrupted change."""
    disturbs = fix.whole and undo_disturbs(run.system, CHANGE_KINDS)
    return ("undo an earlier run's interrupted change",) if disturbs else ()


def _announce(run: RunContext, changes: Sequence[StepChange], work: _Work, undone: Sequence[str] = ()) -> None:
    """Report the plan: the changes announced before, and the changes found since."""
    for step, change in ((item.step, item.change) for item in changes):
        diff = change.diff(run.system) if run.request.diff else ""
        work.planned.append(PlannedChange(change.key, step, change.summary(), diff, "", change.disturbs))
    planned = (*work.planned, *work.repair.changes)
    run.sink(Planned(planned, bool(undone) or any(one.disturbs for one in planned)))


def _note_left(run: RunContext, fix: Fix, wanted: repair.Repair) -> None:
    for sentence in (*fix.left, *([f"{wanted.summary}: {wanted.refused}"] if wanted.refused else ())):
        run.note(f"left to you: {sentence}", "warning")


def _make(run: RunContext, journal: Journal, changes: list[StepChange], work: _Work, *, stop: bool) -> None:
    """Make the changes. A failed change is undone and reported.

    With `stop` it ends the run; otherwise the others go on.
    """
    rest = [item.change for item in changes]
    while rest:
        done = Kept(ChangeDone, run.sink)
        failed = 0
        try:
            apply_changes(rest, run.system, journal, done, run.stop_requested)
        except GpuprovError as error:
            work.problems += error.problems
            failed = 1
        work.made += len(done.events)
        tried = len(done.events) + failed
        work.tried += [change.key for change in rest[:tried]]
        # After a change that makes the rest of the plan stale, examine the host again.
        rest = rest[tried:] if failed and not stop else []
