"""The journal and what is made of it: resume after a kill at any line, roll-back, failures that undo themselves."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuprov.core.apply import apply_changes, resume_run
from gpuprov.core.changes import Change, Json, Tell, WriteFile
from gpuprov.core.journal import (
    RUNS_DIRECTORY,
    last_undoable_run,
    new_journal,
    parse_run,
    read_runs,
    resume_journal,
    unfinished_run,
)
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError, Stopped
from tests.runs import as_a_run, ignore, undo_last


@dataclass(frozen=True)
class Fails(Change):
    """Writes half of something, then fails as it is told to."""

    error: Exception

    def summary(self) -> str:
        return "fail"

    def capture(self, system: System) -> Json:
        return {"path": "/half"}

    def apply(self, system: System, tell: Tell) -> Json:
        system.write("/half", b"half")
        raise self.error

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        system.remove(before["path"])


KINDS: dict[str, type[Change]] = {"WriteFile": WriteFile, "Fails": Fails}


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    files = {str(path.relative_to(root)): path for path in root.rglob("*") if "var/lib/gpuprov" not in str(path)}
    return {name: (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"") for name, path in files.items()}


def test_roll_back_gives_back_every_byte_and_mode(system: System, tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old\xff")
    (tmp_path / "old").chmod(0o604)
    before = snapshot(tmp_path)
    as_a_run(system, WriteFile("/old", b"new"), WriteFile("/a/b/new", b"x", 0o755))
    assert snapshot(tmp_path) != before
    assert undo_last(system, KINDS) == 2
    assert {name: value for name, value in snapshot(tmp_path).items() if not name.startswith("var")} == before
    assert last_undoable_run(system) is None


@pytest.mark.parametrize("error", [GpuprovError("no"), OSError(28, "No space left on device")])
def test_failed_change_is_undone_and_the_earlier_ones_stand(system: System, tmp_path: Path, error: Exception) -> None:
    journal = new_journal(system, "install")
    with pytest.raises(GpuprovError) as caught:
        apply_changes([WriteFile("/first", b"1"), Fails(error), WriteFile("/third", b"3")], system, journal, ignore)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "var"]
    if isinstance(error, OSError):
        assert "No space left" in str(caught.value)
        assert "df -h" in str(caught.value)


def test_a_bug_is_not_taken_for_a_failure(system: System) -> None:
    with pytest.raises(ZeroDivisionError):
        apply_changes([Fails(ZeroDivisionError())], system, new_journal(system, "install"), ignore)


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
            taken = resume_run(system, KINDS, ignore)
            assert taken is not None
            apply_changes([WriteFile("/file", b"new")], system, taken, ignore)
            taken.end("done")
            again = read_runs(system)[-1]
            assert (again.end, again.interrupted) == ("done", None)


def test_a_run_that_was_cut_off_and_taken_up_rolls_back_all_parts(system: System, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    apply_changes([WriteFile("/file", b"half way")], system, new_journal(system, "install"), ignore)
    journal = resume_run(system, KINDS, ignore)
    assert journal is not None
    apply_changes([WriteFile("/file", b"new")], system, journal, ignore)
    journal.end("done")
    undo_last(system, KINDS)
    assert (tmp_path / "file").read_bytes() == b"old"


def test_stop_request_ends_between_two_changes(system: System, tmp_path: Path) -> None:
    stops = iter([False, True])
    changes = [WriteFile("/one", b"1"), WriteFile("/two", b"2")]
    with pytest.raises(Stopped):
        apply_changes(changes, system, new_journal(system, "install"), ignore, lambda: next(stops))
    assert (tmp_path / "one").exists()
    assert not (tmp_path / "two").exists()


def test_journals_are_for_root_alone(system: System, tmp_path: Path) -> None:
    new_journal(system, "install")
    folder = tmp_path / RUNS_DIRECTORY.lstrip("/")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]


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
