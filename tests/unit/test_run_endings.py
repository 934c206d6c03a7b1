"""How a run ends in its journal, and what the next one makes of it: failures, undoings that fail, kills, syncs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from gpuprov.agent.run import run_request
from gpuprov.core import journal as journals
from gpuprov.core.apply import Applied, apply_changes, resume_run, undo_runs
from gpuprov.core.changes import Change, Json, NextAction, Tell, WriteFile
from gpuprov.core.journal import (
    RUNS_DIRECTORY,
    journal_for,
    last_undoable_run,
    new_journal,
    read_runs,
    resume_journal,
    unfinished_run,
)
from gpuprov.core.system import System, sha256_of
from gpuprov.protocol.errors import ExitCode, GpuprovError, Stopped
from gpuprov.protocol.events import ChangeDone, ChangeProgress, ChangeStarted, Event, Finished, Note, Planned
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import parse_spec, spec_to_json
from tests.runs import as_a_run, ignore
from tests.unit.fake_host import FakeHost
from tests.unit.loaded_host import NEW, LoadedHost, install
from tests.unit.refused import refused

MARK = "/half"
FAILURES = {
    "fail": GpuprovError("the first fault", "seen", "next"),
    "full disk": OSError(28, "No space left on device"),
    "bug": ZeroDivisionError(),
    "killed": KeyboardInterrupt(),
}


@dataclass(frozen=True)
class Half(Change):
    """Writes a mark, then does what it is told; its undoing takes the mark away, or fails while `/stuck` is there."""

    how: str = ""

    def summary(self) -> str:
        return "do half of it"

    def capture(self, system: System) -> Json:
        return {"path": MARK}

    def apply(self, system: System, tell: Tell) -> Json:
        system.write(MARK, b"half")
        if self.how in FAILURES:
            raise FAILURES[self.how]
        tell("half way", 1, 2)
        return {"did": "it"}

    def next_action(self, outcome: Json) -> NextAction:
        return {"reboot": NextAction.REBOOT, "plan": NextAction.PLAN_AGAIN}.get(self.how, NextAction.CONTINUE)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if system.exists("/stuck"):
            raise OSError(5, "Input/output error")
        system.remove(before["path"])

    @classmethod
    def interrupted(cls, system: System, before: Json) -> Json:
        return {"seen": system.exists(before["path"])}


@dataclass(frozen=True)
class Kept(Half):
    """The same, but what a kill left of it is left for the next run to resume."""

    undo_when_interrupted: ClassVar[bool] = False


KINDS: Mapping[str, type[Change]] = {"Half": Half, "Kept": Kept, "WriteFile": WriteFile}


class Recording(System):
    """Notes, in order, each journal line and each time that all was synced."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.noted: list[str] = []
        self.full = False
        self.time = 0.0

    def append(self, path: str, content: bytes) -> None:
        super().append(path, content)
        self.noted.append(content.decode("utf-8", "replace").partition('"')[2].partition('"')[0])

    def sync(self) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.noted.append("sync")

    def write(self, path: str, content: bytes, *, mode: int = 0o644, owner: tuple[int, int] | None = None) -> None:
        super().write(path, content, mode=mode, owner=owner)
        self.noted.append(f"write {path}")

    def remove(self, path: str) -> None:
        super().remove(path)
        self.noted.append(f"remove {path}")

    def now(self) -> float:
        self.time += 1.5
        return self.time


@pytest.fixture
def system(tmp_path: Path) -> Recording:
    return Recording(tmp_path)


# -- what is on the disk before the journal says so ------------------------------------------------------------------


def test_the_journal_calls_done_and_undone_what_is_on_the_disk(system: Recording) -> None:
    journal = new_journal(system, "install")
    system.noted.clear()
    apply_changes([Half()], system, journal, ignore)
    assert system.noted == ["begin", f"write {MARK}", "sync", "done"]
    journal.end("done")
    system.noted.clear()
    assert undo_runs(system, read_runs(system), KINDS, ignore) == 1
    assert system.noted == [f"remove {MARK}", "sync", "undone", "end"]


@pytest.mark.parametrize(("how", "said"), [("fail", "the first fault"), ("full disk", "No space left")])
def test_a_failed_run_that_undid_its_change_is_finished(system: Recording, how: str, said: str) -> None:
    journal = new_journal(system, "install")
    system.noted.clear()
    changes = [WriteFile("/first", b"1"), Half(how), WriteFile("/third", b"3")]
    problem = refused(apply_changes, changes, system, journal, ignore)
    assert said in f"{problem.what} {problem.evidence}"
    assert ("df -h" in problem.next_step) is (how == "full disk")
    assert system.noted[4:] == ["begin", f"write {MARK}", f"remove {MARK}", "sync", "undone"]
    assert system.exists("/first") and not system.exists("/third")
    journal.end("failed")
    assert unfinished_run(system) is None


def test_a_bug_is_not_taken_for_a_failure(system: Recording) -> None:
    with pytest.raises(ZeroDivisionError):
        apply_changes([Half("bug")], system, new_journal(system, "install"), ignore)


def test_a_disk_that_can_not_take_it_fails_the_change(system: Recording) -> None:
    journal = new_journal(system, "install")
    system.full = True
    with pytest.raises(GpuprovError) as caught:
        apply_changes([Half()], system, journal, ignore)
    first, second = caught.value.problems
    assert (first.what, second.what) == (
        "could not do half of it", "what this had begun could not be undone: do half of it",
    )  # fmt: skip
    assert "No space left" in first.evidence and "No space left" in second.evidence
    assert read_runs(system)[0].interrupted is not None


# -- a failed run ----------------------------------------------------------------------------------------------------


def failed_with_its_undoing(system: System) -> GpuprovError:
    system.write("/stuck", b"")
    journal = new_journal(system, "install")
    with pytest.raises(GpuprovError) as caught:
        apply_changes([WriteFile("/first", b"1"), Half("fail")], system, journal, ignore)
    journal.end("failed")
    return caught.value


def test_failed_run_whose_undo_failed_is_unfinished_until_undone(system: Recording) -> None:
    error = failed_with_its_undoing(system)
    assert [problem.what for problem in error.problems] == [
        "the first fault", "what this had begun could not be undone: do half of it",
    ]  # fmt: skip
    assert "Input/output error" in error.problems[1].evidence
    assert "run the same command again" in error.problems[1].next_step
    run = unfinished_run(system)
    assert run is not None and run.interrupted is not None
    assert (run.end, run.interrupted.key) == ("failed", "do half of it")
    with pytest.raises(GpuprovError, match="could not undo: do half of it"):
        resume_run(system, KINDS, ignore)
    system.remove("/stuck")
    journal = resume_run(system, KINDS, ignore)
    assert journal is not None and journal.path == run.path
    assert not system.exists(MARK)
    assert [entry.state for entry in read_runs(system)[0].entries] == ["done", "undone"]
    assert unfinished_run(system) is None
    assert resume_run(system, KINDS, ignore) is None


def test_of_runs_before_the_last_only_one_without_an_end_is_unfinished(system: Recording) -> None:
    failed_with_its_undoing(system)
    new_journal(system, "install").end("done")
    assert unfinished_run(system) is None
    interrupted = new_journal(system, "install").path
    new_journal(system, "install").end("done")
    run = unfinished_run(system)
    assert run is not None and run.path == interrupted


@pytest.mark.root
def test_a_run_that_fails_says_so_in_its_journal(tmp_path: Path) -> None:
    host = LoadedHost(tmp_path / "root")
    host.installer_fails = True
    assert install(host)[0].exit_code == ExitCode.FAILED
    assert [run.end for run in read_runs(host)] == ["failed"]
    host.installer_fails = False
    assert install(host)[0].exit_code == ExitCode.DONE
    assert [run.end for run in read_runs(host)] == ["failed", "done"]


@pytest.mark.root
def test_a_run_that_is_stopped_says_so_in_its_journal(tmp_path: Path) -> None:
    host = LoadedHost(tmp_path / "root")
    spec = parse_spec({"driver_version": NEW, "driver_url": "/driver.run"})
    events: list[Event] = []
    request = Request("install", spec_to_json(spec), steps=("driver",))

    def asked() -> bool:
        return isinstance(events[-1], Planned) if events else False

    assert run_request(request, events.append, host, asked) == ExitCode.INTERRUPTED
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.problems[0].what == "stopped as asked while it looked at the host: no change was begun"
    assert read_runs(host) == ()
    # Later: between two changes.
    events.clear()
    request = Request("install", spec_to_json(spec), steps=("driver", "cdi"))
    asking = lambda: any(isinstance(event, ChangeStarted) for event in events)  # noqa: E731
    assert run_request(request, events.append, host, asking) == ExitCode.INTERRUPTED
    finished = events[-1]
    assert isinstance(finished, Finished)
    (problem,) = finished.problems
    assert (problem.what, finished.changed) == ("stopped as asked after 1 of 2 changes", 1), problem
    assert "made: " in problem.evidence and "not made: " in problem.evidence
    assert [run.end for run in read_runs(host)] == ["failed"]


# -- a run that was cut off ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "state", "outcome"), [(Half, "undone", None), (Kept, "done", {"seen": True})])
def test_killed_change_is_undone_or_kept(system: Recording, kind: type[Half], state: str, outcome: Json | None) -> None:
    with pytest.raises(KeyboardInterrupt):
        apply_changes([kind("killed")], system, new_journal(system, "install"), ignore)
    assert system.exists(MARK)
    notes: list[Event] = []
    assert resume_run(system, KINDS, notes.append) is not None
    assert notes == [Note("an earlier run was interrupted in: do half of it; resuming it")]
    (entry,) = read_runs(system)[0].entries
    assert (entry.state, entry.outcome, system.exists(MARK)) == (state, outcome, kind is Kept)


def test_a_run_that_was_cut_off_between_two_changes_is_resumed_in_silence(system: Recording) -> None:
    apply_changes([Half()], system, new_journal(system, "install"), ignore)
    notes: list[Event] = []
    journal = resume_run(system, KINDS, notes.append)
    assert journal is not None and notes == []
    apply_changes([WriteFile("/more", b"1")], system, journal, ignore)
    (run,) = read_runs(system)
    assert [(entry.number, entry.state) for entry in run.entries] == [(1, "done"), (2, "done")]


# -- what is told, and what becomes of the outcome -------------------------------------------------------------------


def test_each_change_is_announced_told_of_and_timed(system: Recording) -> None:
    events: list[Event] = []
    journal = new_journal(system, "install")
    assert apply_changes([Half(), WriteFile("/a", b"1")], system, journal, events.append) == Applied(2)
    assert events == [
        ChangeStarted("do half of it", "do half of it", 1, 2),
        ChangeProgress("do half of it", "half way", 1, 2),
        ChangeDone("do half of it", 1.5),
        ChangeStarted("write /a", "write /a", 2, 2),
        ChangeDone("write /a", 1.5),
    ]
    journal.end("done")
    events.clear()
    assert undo_runs(system, (read_runs(system)[0],), KINDS, events.append) == 2
    assert events == [
        ChangeStarted("write /a", "undo: write /a", 1, 2), ChangeDone("write /a", 1.5),
        ChangeStarted("do half of it", "undo: do half of it", 2, 2), ChangeDone("do half of it", 1.5),
    ]  # fmt: skip


@pytest.mark.parametrize(("how", "next_action"), [("reboot", NextAction.REBOOT), ("plan", NextAction.PLAN_AGAIN)])
def test_change_that_makes_others_stale_ends_round(system: Recording, how: str, next_action: NextAction) -> None:
    changes = [WriteFile("/a", b"1"), Half(how), WriteFile("/b", b"2")]
    events: list[Event] = []
    assert apply_changes(changes, system, new_journal(system, "install"), events.append) == Applied(2, next_action)
    assert isinstance(events[-1], ChangeDone)
    assert not system.exists("/b")
    assert [entry.state for entry in read_runs(system)[0].entries] == ["done", "done"]


def test_journal_keeps_outcome_and_digest_of_a_change(system: Recording) -> None:
    apply_changes([Half(), WriteFile("/a", b"1")], system, new_journal(system, "install"), ignore)
    first, second = read_runs(system)[0].entries
    assert (first.number, second.number) == (1, 2)
    assert (first.kind, first.before, first.outcome) == ("Half", {"path": MARK}, {"did": "it"})
    assert second.outcome == {"written": {"/a": sha256_of(b"1")}}


# -- rolling back ----------------------------------------------------------------------------------------------------


def two_runs(system: System) -> None:
    for name in ("/a", "/b"):
        as_a_run(system, WriteFile(name, b"1"), WriteFile(f"{name}2", b"2"))


def test_several_runs_are_undone_in_the_order_given_and_counted_as_one(system: Recording) -> None:
    two_runs(system)
    events: list[Event] = []
    assert undo_runs(system, tuple(reversed(read_runs(system))), KINDS, events.append) == 4
    started = [event for event in events if isinstance(event, ChangeStarted)]
    assert [(one.key, one.index, one.total) for one in started] == [
        ("write /b2", 1, 4), ("write /b", 2, 4), ("write /a2", 3, 4), ("write /a", 4, 4),
    ]  # fmt: skip
    assert [run.end for run in read_runs(system)] == ["rolled-back", "rolled-back"]
    assert last_undoable_run(system) is None


def test_an_undoing_that_is_stopped_goes_on_from_there(system: Recording) -> None:
    two_runs(system)
    answers = iter([False, True])
    with pytest.raises(Stopped) as stopped:
        undo_runs(system, tuple(reversed(read_runs(system))), KINDS, ignore, lambda: next(answers))
    assert stopped.value.left[0] == "undo: write /b" and len(stopped.value.left) == 3
    first, second = read_runs(system)
    assert [entry.state for entry in second.entries] == ["done", "undone"]
    assert (first.end, second.end) == ("done", "done")
    assert undo_runs(system, tuple(reversed(read_runs(system))), KINDS, ignore) == 3


def test_the_run_to_roll_back_is_the_latest_of_which_something_stands(system: Recording) -> None:
    assert last_undoable_run(system) is None
    two_runs(system)
    first, second = read_runs(system)
    assert last_undoable_run(system) == second
    # A roll-back that could not bring all back has an end all the same: the next one is for the run before it.
    resume_journal(system, second).end("rolled-back")
    assert last_undoable_run(system) == first
    new_journal(system, "install").end("done")
    assert last_undoable_run(system) == first


def test_change_of_an_unknown_kind_is_left_and_named(system: Recording) -> None:
    two_runs(system)
    problem = refused(undo_runs, system, read_runs(system)[:1], {"Half": Half}, ignore)
    assert problem.what == "can't undo a change of kind 'WriteFile': this gpuprov does not know it"
    assert problem.evidence == f"journal {RUNS_DIRECTORY}/0001.jsonl, write /a2"
    assert "gpuprov version" in problem.next_step
    assert system.exists("/a2")


# -- journals --------------------------------------------------------------------------------------------------------


def test_journals_are_numbered_and_what_is_none_is_passed_over(system: Recording) -> None:
    assert new_journal(system, "install").path == f"{RUNS_DIRECTORY}/0001.jsonl"
    for name in ("notes.txt", "9.jsonl.gz", "x12.jsonl", "0007.jsonl"):
        system.write(f"{RUNS_DIRECTORY}/{name}", b'{"run":"install","id":""}\n')
    assert new_journal(system, "rollback", "abc").path == f"{RUNS_DIRECTORY}/0008.jsonl"
    runs = read_runs(system)
    assert [run.path.rpartition("/")[2] for run in runs] == ["0001.jsonl", "0007.jsonl", "0008.jsonl"]
    assert [(run.command, run.run_id) for run in runs] == [("install", ""), ("install", ""), ("rollback", "abc")]


def test_a_request_joins_the_run_that_it_is_a_part_of(system: Recording) -> None:
    first = journal_for(system, "install", "abc")
    first.done(first.begin("a", "Half", {}), {})
    first.end("done")
    again = journal_for(system, "install", "abc")
    assert again.path == first.path
    assert again.begin("b", "Half", {}) == 2
    assert read_runs(system)[0].end == ""
    other = journal_for(system, "install", "def")
    assert other.path != first.path
    # Only the last run may be joined, and none that was rolled back; requests without an id are runs of their own.
    assert journal_for(system, "install", "abc").path not in (first.path, other.path)
    last = journal_for(system, "install", "def")
    last.end("rolled-back")
    assert journal_for(system, "install", "def").path != last.path
    assert journal_for(system, "install", "").path != journal_for(system, "install", "").path


def test_a_torn_last_line_does_not_swallow_the_next(system: Recording) -> None:
    journal = new_journal(system, "install")
    journal.begin("a", "Half", {})
    system.append(journal.path, b'{"do\xc3')
    resume_journal(system, read_runs(system)[0]).done(1, {"x": 1})
    (run,) = read_runs(system)
    assert [(entry.state, entry.outcome) for entry in run.entries] == [("done", {"x": 1})]
    content = system.read_bytes(journal.path)
    assert unfinished_run(system) == run
    resume_journal(system, run)
    assert system.read_bytes(journal.path) == content


def test_lines_that_are_no_records_are_passed_over() -> None:
    lines = '{"run":"install"}\n[1]\n"end"\n\x00\n{"begin":1,"key":"a","kind":"Half","before":{}}\n'
    run = journals.parse_run("/j", lines)
    assert (run.path, run.command, run.run_id, run.end) == ("/j", "install", "", "")
    assert run.interrupted is not None and run.interrupted.outcome is None
    assert journals.parse_run("/j", "") == journals.Run("/j", "", (), "")


def test_undoing_keeps_what_the_journal_knows_of_the_outcome() -> None:
    lines = '{"begin":1,"key":"a","kind":"Half","before":{"b":1}}\n{"done":1,"outcome":{"x":1}}\n{"undone":1}\n'
    run = journals.parse_run("/j", lines)
    (entry,) = run.entries
    assert (entry.number, entry.key, entry.kind, entry.state) == (1, "a", "Half", "undone")
    assert (entry.before, entry.outcome) == ({"b": 1}, {"x": 1})
    assert run.undoable == ()


def test_a_journal_that_can_not_be_begun_says_which(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    system.make_directory("/var/lib")
    system.write("/var/lib/gpuprov", b"a file where the folder belongs")
    what = refused(new_journal, system, "install").what
    assert "could not begin the run's journal" in what and f"{RUNS_DIRECTORY}/0001.jsonl" in what


def test_programs_make_files_for_all_users_whatever_the_callers_umask_is(tmp_path: Path) -> None:
    """depmod's modules.dep with umask 077 is root's alone: modinfo of other users fails."""
    before = os.umask(0o077)
    try:
        run_request(Request("install", check=True), ignore, FakeHost(tmp_path))
    finally:
        assert os.umask(before) == 0o022
