"""Apply changes with a journal, resume after a kill, roll back; never decides what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Callable

from gpuprov.core.changes import Change, Json, NextAction, file_digest, images_in, is_as_shown
from gpuprov.core.journal import RUNS_DIRECTORY, STATE_DIRECTORY, Entry, Journal, Run, resume_journal, unfinished_run
from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError, Problem, Stopped, from_os_error, os_errors
from gpuprov.protocol.events import ChangeDone, ChangeProgress, ChangeStarted, Note, Sink

Kinds = Mapping[str, type[Change]]


@dataclass(frozen=True)
class Applied:
    """The number of changes made, and how the run continues after the last of them."""

    made: int
    next_action: NextAction = NextAction.CONTINUE


def apply_changes(
    changes: Sequence[Change], system: System, journal: Journal, sink: Sink,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Applied:  # fmt: skip
    """Make the changes in order, up to the first one that makes the rest of the plan stale.

    A change that fails is undone; those before it stand, and the next run continues from there. Raises the
    GpuprovError of a change that fails, or Stopped between two changes.
    """
    for index, change in enumerate(changes, 1):
        if stop_requested():
            raise Stopped([one.summary() for one in changes[index - 1 :]])
        sink(ChangeStarted(change.key, change.summary(), index, len(changes)))
        begun = system.now()
        outcome = _apply_one(change, system, journal, sink)
        sink(ChangeDone(change.key, round(system.now() - begun, 3)))
        if (next_action := change.next_action(outcome)) is not NextAction.CONTINUE:
            return Applied(index, next_action)
    return Applied(len(changes))


def _apply_one(change: Change, system: System, journal: Journal, sink: Sink) -> Json:
    def tell(message: str, done: int = 0, total: int = 0) -> None:
        sink(ChangeProgress(change.key, message, done, total))

    before = change.capture(system)
    number = journal.begin(change.key, type(change).__name__, before)
    try:
        outcome = change.apply(system, tell) or {}
        # Sync before the journal says "done": installers, rpm and dracut sync little of what they write.
        system.sync()
    except (GpuprovError, OSError) as error:
        told = error if isinstance(error, GpuprovError) else from_os_error(f"could not {change.summary()}", error)
        _undo_failed(change, before, number, system, journal, told)
        raise told from error
    # The digests of the files that it wrote, to recognise later edits by others.
    digests = {image["path"]: file_digest(system, image["path"]) for image in images_in(before)}
    outcome = {**outcome, "written": digests} if digests else outcome
    journal.done(number, outcome)
    return outcome


def _undo_failed(
    change: Change, before: Json, number: int, system: System, journal: Journal, told: GpuprovError
) -> None:
    """Undo the partial effects of a failed change. Raises GpuprovError with both problems if the undo fails too."""
    try:
        change.undo(system, before, None)
        system.sync()
        journal.undone(number)
    except (GpuprovError, OSError) as second:
        what = f"what this had begun could not be undone: {change.summary()}"
        step = "fix the first, then run the same command again: it begins by undoing this"
        raise GpuprovError.several((*told.problems, Problem(what, str(second), step))) from told


def obstacles(system: System, changes: Sequence[Change]) -> tuple[Problem, ...]:
    """Return what prevents changes, known before the first: files that can't be written, folders without programs."""
    images = (image for change in changes if not change.uses_package_manager
              for image in images_in(change.capture(system), links=True))  # fmt: skip
    paths = [f"{RUNS_DIRECTORY}/new", *(image["path"] for image in images)] if changes else []
    return system.write_problems(dict.fromkeys(paths), {change.executes: None for change in changes if change.executes})


def undo_obstacles(system: System, runs: Sequence[Run], kinds: Kinds) -> tuple[Problem, ...]:
    """Return what prevents the undo of these runs: a file that is not as before, or a journal, can't be written."""
    entries = [entry for run in runs for entry in run.undoable]
    images = (image for entry in entries for image in images_in(entry.before) if not is_as_shown(system, image))
    paths = [*(run.path for run in runs if run.undoable), *(image["path"] for image in images)]
    executed = {kinds[entry.kind].executes: None for entry in entries if entry.kind in kinds}
    return system.write_problems(dict.fromkeys(paths), filter(None, executed))


def resume_run(system: System, kinds: Kinds, sink: Sink) -> Journal | None:
    """Return the journal of an interrupted run, ready to resume, or None if there is none.

    The interrupted change is undone first: it may be half done, and facts gathered in that state are wrong.
    """
    run = unfinished_run(system)
    if run is None:
        return None
    journal = resume_journal(system, run)
    if (interrupted := run.interrupted) is not None:
        sink(Note(f"an earlier run was interrupted in: {interrupted.key}; resuming it"))
        kind = kind_of(journal, interrupted, kinds)
        if kind.undo_when_interrupted:
            _undo_entry(system, journal, interrupted, kinds)
        else:
            journal.done(interrupted.number, kind.interrupted(system, interrupted.before))
    return journal


def undo_disturbs(system: System, kinds: Kinds) -> bool:
    """Say whether resuming an interrupted run may stop containers, because its interrupted change is undone.

    Raises GpuprovError if this gpuprov does not know that change.
    """
    run = unfinished_run(system)
    if run is None or (interrupted := run.interrupted) is None:
        return False
    kind = kind_of(run, interrupted, kinds)
    return kind.undo_when_interrupted and kind.undo_disturbs


def undo_runs(
    system: System, runs: Sequence[Run], kinds: Kinds, sink: Sink, stop_requested: Callable[[], bool] = lambda: False
) -> int:
    """Undo the changes of these runs in the given order, the latest change of each run first; return their number.

    The journal notes each undone change, so an interrupted rollback resumes where it stopped. Raises Stopped between
    two changes.
    """
    left = [entry for run in runs for entry in run.undoable]
    total = len(left)
    for run in runs:
        journal = resume_journal(system, run)
        for entry in run.undoable:
            if stop_requested():
                raise Stopped([f"undo: {one.key}" for one in left])
            sink(ChangeStarted(entry.key, f"undo: {entry.key}", total - len(left) + 1, total))
            begun = system.now()
            _undo_entry(system, journal, entry, kinds, _first_image(left, kinds))
            sink(ChangeDone(entry.key, round(system.now() - begun, 3)))
            del left[0]
        journal.end("rolled-back")
    return total


def _first_image(entries: Sequence[Entry], kinds: Kinds) -> Json:
    """Return the state that the undo of the first of these entries (latest first) restores.

    The oldest entry is undone last, so an interrupted undo finds it again.
    """
    entry = entries[0]
    kind = kinds.get(entry.kind)
    if kind is None or not kind.undo_goes_to_first:
        return entry.before
    same = (one for one in reversed(entries) if one.kind == entry.kind)
    return {**entry.before, **next(one.before for one in same if _places(one) == _places(entry))}


def _places(entry: Entry) -> set[str]:
    """Return what a change captured, without gpuprov's own records: journals of earlier versions may lack them."""
    return {path for path in entry.paths if not path.startswith(f"{STATE_DIRECTORY}/")}


def _undo_entry(system: System, journal: Journal, entry: Entry, kinds: Kinds, before: Json | None = None) -> None:
    """Undo one change; `before` replaces the state that this change captured."""
    with os_errors(f"could not undo: {entry.key}"):
        kind_of(journal, entry, kinds).undo(system, before or entry.before, entry.outcome)
        system.sync()
    journal.undone(entry.number)


def kind_of(journal: Journal | Run, entry: Entry, kinds: Kinds) -> type[Change]:
    if entry.kind not in kinds:
        what = f"can't undo a change of kind {entry.kind!r}: this gpuprov does not know it"
        raise GpuprovError(what, f"journal {journal.path}, {entry.key}", "use the gpuprov version that made it")
    return kinds[entry.kind]
