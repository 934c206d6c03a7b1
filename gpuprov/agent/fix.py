"""`doctor --fix`: examine the host, apply the fixes that gpuprov can make, and examine it again to prove them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gpuprov.agent.context import RunContext, devices_to_lose, keep_devices
from gpuprov.core.apply import Applied, apply_changes, resume_run
from gpuprov.core.download import unreachable
from gpuprov.core.journal import Journal, journal_for
from gpuprov.doctor.examine import Cause, diagnose, report, report_causes
from gpuprov.doctor.fix import Fix, needs_install, plan_fix, spec_as_found
from gpuprov.doctor.gather import gather
from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.plan.inputs import gather_for, resolve
from gpuprov.plan.steps import CHANGE_KINDS, Plan, StepChange, make_plan
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, Stopped
from gpuprov.protocol.events import ChangeDone, Event, Finished, Planned, PlannedChange
from gpuprov.protocol.words import counted

# Each round fixes what the round before made visible: nodes first, then what nvidia-smi reports.
_MOST_ROUNDS = 3


@dataclass
class _Look:
    """One examination of the host, and the fixes that gpuprov can make for its findings."""

    x: HostSnapshot
    causes: tuple[Cause, ...]
    fix: Fix

    def without(self, done: Sequence[str]) -> list[StepChange]:
        """Return the changes that were not tried yet."""
        return [one for one in self.fix.changes if one.change.key not in done]


@dataclass
class _Work:
    """What was planned, tried (by key) and made so far, and what failed."""

    planned: list[PlannedChange] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    made: int = 0
    problems: list[Problem] = field(default_factory=list)


def check(run: RunContext) -> Finished:
    """Report the causes, and the changes that would fix them."""
    look = _look(run)
    finished = report(look.x, look.causes, run.sink)
    _announce(run, look.fix.changes, _Work())
    _note_left(run, look.fix)
    count = len(look.fix.changes)
    return replace(finished, changed=count, summary=f"{finished.summary}; {counted(count, 'change')} would be made")


def fix(run: RunContext) -> Finished:
    """Make the changes, examine the host again and return the result."""
    with run.system.interruptible(run.stop_requested):
        look, work = _look(run), _Work()
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
    return _finished(run, look, work)


@contextlib.contextmanager
def _ended(journal: Journal, work: _Work) -> Iterator[None]:
    """End the journal, also for a run that was asked to stop: the next examination must not find an open run.

    A further round continues the same journal.
    """
    try:
        yield
    except Stopped:
        journal.end("failed")
        raise
    journal.end("failed" if work.problems else "done")


def _rounds(run: RunContext, journal: Journal, look: _Look, work: _Work) -> _Look:
    """Apply the fixes of one examination after the other until one plans nothing new; return the last examination."""
    if not look.fix.changes:
        # The interrupted change has been undone, and there is nothing else to do.
        journal.end("done")
        return _look(run)
    for _ in range(_MOST_ROUNDS):
        changes = look.without(work.tried)
        if not changes:
            break
        _announce(run, changes, work)
        with _ended(journal, work):
            _make(run, journal, changes, work, stop=look.fix.whole)
        look = _look(run)
    return look


def _finished(run: RunContext, look: _Look, work: _Work) -> Finished:
    finished = report(look.x, look.causes, run.sink)
    if not work.planned:
        _announce(run, (), work)
    _note_left(run, look.fix)
    summary = f"{counted(work.made, 'change')} made; {finished.summary}"
    if work.problems:
        failed, problems = int(ExitCode.FAILED), (*work.problems, *finished.problems)
        return replace(finished, exit_code=failed, changed=work.made, problems=problems, summary=summary)
    return replace(finished, changed=work.made, summary=summary)


def _look(run: RunContext) -> _Look:
    x = gather(run.system, run.spec)
    causes = diagnose(x)
    return _Look(x, causes, plan_fix(x, causes, _installation(run, x) if needs_install(causes) else None))


def _installation(run: RunContext, x: HostSnapshot) -> Plan:
    """Return the plan of a whole installation; what prevents it is among its problems."""
    try:
        spec = resolve(run.system, spec_as_found(x), None)
        plan = make_plan(gather_for(run.system, spec, None, (), run.sink), spec)
        wrong = unreachable(run.system, [url for item in plan.changes for url in item.change.urls])
    except GpuprovError as error:
        return Plan((), error.problems)
    return replace(plan, problems=plan.problems or wrong)


def _announce(run: RunContext, changes: Sequence[StepChange], work: _Work) -> None:
    """Report the plan: the changes announced before, and the changes found since."""
    for item in changes:
        diff = item.change.diff(run.system) if run.request.diff else ""
        work.planned.append(PlannedChange(item.change.key, item.step, item.change.summary(), diff))
    run.sink(Planned(tuple(work.planned)))


def _note_left(run: RunContext, fix: Fix) -> None:
    for sentence in fix.left:
        run.note(f"left to you: {sentence}", "warning")


def _make(run: RunContext, journal: Journal, changes: list[StepChange], work: _Work, *, stop: bool) -> None:
    """Make the changes. A failed change is undone and reported.

    With `stop` it ends the run; otherwise the others go on.
    """
    rest = [item.change for item in changes]
    while rest:
        done: list[str] = []

        def note(event: Event, done: list[str] = done) -> None:
            if isinstance(event, ChangeDone):
                done.append(event.key)
            run.sink(event)

        try:
            applied = apply_changes(rest, run.system, journal, note, run.stop_requested)
        except GpuprovError as error:
            work.problems += error.problems
            applied = Applied(len(done) + 1)
            failed = 1
        else:
            failed = 0
        work.made += applied.made - failed
        work.tried += [change.key for change in rest[: applied.made]]
        # After a change that makes the rest of the plan stale, examine the host again.
        rest = rest[applied.made :] if failed and not stop else []
