"""A run as gpuprov makes it: a journal, changes, the end; and its undoing."""

from gpuprov.core.apply import Kinds, apply_changes, undo_runs
from gpuprov.core.changes import Change
from gpuprov.core.journal import Journal, last_undoable_run, new_journal
from gpuprov.core.system import System
from gpuprov.plan.steps import CHANGE_KINDS
from gpuprov.protocol.events import Event


def ignore(event: Event) -> None:
    """Watch nothing."""


def tell(message: str, done: int, total: int) -> None:
    """Hear what a change tells while it works: never nothing."""
    assert message


def as_a_run(system: System, *changes: Change, end: str = "done") -> Journal:
    """Make changes; return the journal. Without `end` the run has none, as one that was killed."""
    journal = new_journal(system, "install")
    apply_changes(changes, system, journal, ignore)
    if end:
        journal.end(end)
    return journal


def undo_last(system: System, kinds: Kinds = CHANGE_KINDS) -> int:
    """Undo the last run; return how many changes were undone."""
    last = last_undoable_run(system)
    assert last is not None
    return undo_runs(system, (last,), kinds, ignore)
