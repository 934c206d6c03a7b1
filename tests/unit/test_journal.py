"""The journal and what is made of it: resume after a kill at any line, roll-back, the unfinished run."""

import os
from pathlib import Path

import pytest

from gpuprov.core.apply import apply_changes, resume_run
from gpuprov.core.changes import WriteFile
from gpuprov.core.journal import (
    RUNS_DIRECTORY,
    last_choice,
    new_journal,
    parse_run,
    read_runs,
    resume_journal,
    unfinished_run,
)
from gpuprov.core.system import System
from gpuprov.plan.steps import CHANGE_KINDS
from gpuprov.protocol.errors import GpuprovError
from tests.runs import as_a_run, ignore, undo_last


def test_killed_at_any_journal_line_the_next_run_takes_it_up(system: System, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    journal = as_a_run(system, WriteFile("/file", b"new"), WriteFile("/other", b"x"))
    path = tmp_path / journal.path.lstrip("/")
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 6
    for kept in range(1, 6):
        for torn in ("", lines[kept][: len(lines[kept]) // 2]):
            path.write_text("".join(lines[:kept]) + torn)
            run = parse_run("", path.read_text())
            assert run.end == ""
            interrupted = run.interrupted
            assert (interrupted.key if interrupted else None) == {2: "write /file", 4: "write /other"}.get(kept)
            taken = resume_run(system, CHANGE_KINDS, ignore)
            assert taken is not None
            apply_changes([WriteFile("/file", b"new")], system, taken, ignore)
            taken.end("done")
            again = read_runs(system)[-1]
            assert (again.end, again.interrupted) == ("done", None)


def test_a_run_that_was_cut_off_and_taken_up_rolls_back_all_parts(system: System, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    apply_changes([WriteFile("/file", b"half way")], system, new_journal(system, "install"), ignore)
    journal = resume_run(system, CHANGE_KINDS, ignore)
    assert journal is not None
    apply_changes([WriteFile("/file", b"new")], system, journal, ignore)
    journal.end("done")
    undo_last(system)
    assert (tmp_path / "file").read_bytes() == b"old"


def test_journals_are_for_root_alone(system: System, tmp_path: Path) -> None:
    new_journal(system, "install")
    folder = tmp_path / RUNS_DIRECTORY.lstrip("/")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]


@pytest.mark.root
@pytest.mark.parametrize("place", ["/var/lib/gpuprov", RUNS_DIRECTORY, f"{RUNS_DIRECTORY}/0001.jsonl"])
def test_a_journal_that_others_can_change_is_refused(system: System, place: str) -> None:
    """As after a restore by another user, or with its umask."""
    new_journal(system, "install").end("failed")
    path = system.path(place)
    for owner, group, mode in ((1000, 0, 0o700), (0, 0, 0o702), (0, 1000, 0o720)):
        os.chown(path, owner, group)
        path.chmod(mode)
        for read in (read_runs, unfinished_run, last_choice):
            with pytest.raises(GpuprovError, match=f"stat {place}: user {owner}, group {group}, mode {mode:o}"):
                read(system)
    os.chown(path, 0, 0)
    path.chmod(0o770)  # root's own group
    assert len(read_runs(system)) == 1


def test_the_unfinished_run_is_found_wherever_a_journal_was_cut_off(system: System) -> None:
    """Its quick look at the last line finds what the whole text says."""
    journal = new_journal(system, "install")
    for end in ("failed", "done"):
        journal.done(journal.begin("a", "WriteFile", {"path": "/end"}), {})
        journal.end(end)
        journal = resume_journal(system, read_runs(system)[0])
    text = (system.path(RUNS_DIRECTORY) / "0001.jsonl").read_text()
    new_journal(system, "install").end("done")
    answers = set()
    for length in range(len(text) + 1):
        system.write(journal.path, text[:length].encode())
        found = unfinished_run(system)
        assert (found is None) == bool(parse_run("", text[:length]).end), text[:length]
        answers.add(found is None)
    assert answers == {True, False}
