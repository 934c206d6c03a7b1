"""What reaches the disk, and in which order: a power cut may come after any of these calls."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuprov.core import files
from gpuprov.core.journal import new_journal, read_runs
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let this process write files up to that size: the kernel then refuses as on a full disk, after the first part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which every fsync and rename adds the name that it is for, once it was made."""
    made: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(handle: int) -> None:
        fsync(handle)
        made.append(f"fsync {Path(f'/proc/self/fd/{handle}').readlink().name}")

    def noted_replace(place: Path, target: Path) -> Path:
        found = replace(place, target)
        made.append(f"rename {place.name} {Path(target).name}")
        return found

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    return made


def test_an_append_that_the_disk_cuts_short_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    place = tmp_path / "lines"
    place.write_bytes(b"the first\n")
    with room_for(15), pytest.raises(OSError, match="File too large"):
        files.append_whole(place, b"the second, which is longer\n")
    assert place.read_bytes() == b"the first\n"
    files.append_whole(place, b"the third\n")
    assert place.read_bytes() == b"the first\nthe third\n"


def test_a_journal_that_had_no_room_is_read_and_written_on_as_before(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    journal = new_journal(system, "install")
    number = journal.begin("a", "WriteFile", {"path": "/a"})
    size = system.path(journal.path).stat().st_size
    with room_for(size + 20), pytest.raises(GpuprovError, match="could not write the run's journal") as caught:
        journal.begin("b", "WriteFile", {"path": "/b", "content": "x" * 100})
    assert journal.path in str(caught.value)
    journal.undone(number)
    (run,) = read_runs(system)
    assert [(entry.key, entry.state) for entry in run.entries] == [("a", "undone")]


def test_an_appended_line_is_on_the_disk_and_so_is_the_name_of_a_new_file(tmp_path: Path, calls: list[str]) -> None:
    files.append_whole(tmp_path / "lines", b"one\n")
    assert calls == ["fsync lines", f"fsync {tmp_path.name}"]
    calls.clear()
    files.append_whole(tmp_path / "lines", b"two\n")
    assert calls == ["fsync lines"]


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_the_name_before_anything_else(
    tmp_path: Path, calls: list[str]
) -> None:
    files.write_whole(tmp_path / "file", b"new", 0o644, None)
    assert calls == ["fsync .file.gpuprov", "rename .file.gpuprov file", f"fsync {tmp_path.name}"]


def test_directory_that_another_process_makes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists

    def made_after(self: Path) -> bool:
        there = exists(self)
        if not there:
            self.mkdir(mode=0o700)
        return there

    monkeypatch.setattr(Path, "exists", made_after)
    System(str(tmp_path)).make_directory("/gpuprov")
    assert (tmp_path / "gpuprov").stat().st_mode & 0o777 == 0o755


def _make_directories(system: System) -> None:
    system.make_directory("/a/b")


def _rename(system: System) -> None:
    system.rename("/x.part", "/there/x")


@pytest.mark.parametrize(
    ("act", "expected"),
    [(_make_directories, ["fsync root", "fsync a"]), (_rename, ["fsync x.part", "rename x.part x", "fsync there"])],
    ids=["directories", "a rename"],
)
def test_names_are_on_the_disk_too(
    tmp_path: Path, calls: list[str], act: Callable[[System], None], expected: list[str]
) -> None:
    (tmp_path / "root/there").mkdir(parents=True)
    (tmp_path / "root/x.part").write_bytes(b"x")
    act(System(str(tmp_path / "root")))
    assert calls == expected


def test_each_file_system_is_synced_once_and_missing_folders_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    call = files._call_libc

    def noted(function: str, handle: int) -> None:
        call(function, handle)
        synced.append(os.fstat(handle).st_dev)

    monkeypatch.setattr(files, "_call_libc", noted)
    open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (no Path holds a descriptor open)
    files.sync_file_systems([tmp_path, tmp_path / "missing", tmp_path.parent, Path("/dev")])
    assert sorted(synced) == sorted({tmp_path.stat().st_dev, Path("/dev").stat().st_dev})
    assert len(os.listdir("/proc/self/fd")) == open_before  # noqa: PTH208
    with pytest.raises(OSError, match="Bad file descriptor"):
        call("syncfs", -1)
