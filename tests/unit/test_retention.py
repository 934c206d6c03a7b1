"""What a host keeps of gpuprov after a thousand runs, and what it never loses."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuprov.core import retention
from gpuprov.core.apply import undo_runs
from gpuprov.core.changes import WriteFile
from gpuprov.core.journal import PRUNED, RUNS_DIRECTORY, pruned_numbers, read_runs
from gpuprov.core.places import CACHE_DIRECTORY, KEPT_PACKAGES
from gpuprov.core.retention import BOUNDS, JOURNALS, Bound, prune
from gpuprov.plan.steps import CHANGE_KINDS
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.request import Request
from tests.runs import as_a_run, ignore, undo_last
from tests.unit.ask import ask
from tests.unit.fake_host import FakeHost

pytestmark = pytest.mark.root


class Still(FakeHost):
    """A host whose files need not survive a power cut, so that a thousand runs take a second."""

    def append(self, path: str, content: bytes) -> None:
        with self.path(path).open("ab") as file:
            file.write(content)

    def write(self, path: str, content: bytes, *, mode: int = 0o644, owner: tuple[int, int] | None = None) -> None:
        self.path(path).write_bytes(content)


@pytest.fixture
def host(tmp_path: Path) -> Still:
    return Still(tmp_path)


def journals(host: FakeHost) -> list[str]:
    return [name for name in host.list_directory(RUNS_DIRECTORY) if name.endswith(".jsonl")]


def write_often(host: FakeHost, times: int, path: str = "/etc/one") -> None:
    """Make runs that write a file, each with its number."""
    for number in range(times):
        as_a_run(host, WriteFile(path, str(number).encode()))


def undo_all(host: FakeHost) -> None:
    runs = [one for one in reversed(read_runs(host)) if one.undoable]
    undo_runs(host, runs, CHANGE_KINDS, ignore)


def test_a_thousand_runs_keep_the_newest_and_the_first_state(host: Still, tmp_path: Path) -> None:
    (tmp_path / "etc/one").write_text("before gpuprov")
    for number in range(1000):
        as_a_run(host, WriteFile("/etc/one", str(number).encode()))
        if number % 50 == 49:
            prune(host, CHANGE_KINDS)
    # The first run alone has the first state.
    assert len(journals(host)) == JOURNALS.number + 1
    assert journals(host)[:2] == ["0001.jsonl", "0901.jsonl"]
    assert len(pruned_numbers(host)) == 899
    assert host.read_text(PRUNED) == "[[2, 900]]"
    undo_last(host)
    assert (tmp_path / "etc/one").read_text() == "998"
    undo_all(host)
    assert (tmp_path / "etc/one").read_text() == "before gpuprov"


@pytest.mark.parametrize(
    ("gigabytes", "keep_driver", "left"),
    [(0, True, ("2", "3")), (0, False, ()), (1, True, ("2", "3")), (3, True, ("3",)), (5, True, ("3",))],
)
def test_packages_of_two_drivers_stay(host: Still, gigabytes: int, keep_driver: bool, left: tuple[str, ...]) -> None:
    """The installed driver's stay, whatever their size."""
    for number in (1, 2, 3):
        folder = host.path(f"{KEPT_PACKAGES}/{number}")
        (folder / "below").mkdir(parents=True)
        for name in ("nvidia-open.deb", "below/libnvidia-ml1.deb"):
            (folder / name).touch()
            os.truncate(folder / name, gigabytes << 29)
        os.utime(folder, (number, number))
    prune(host, CHANGE_KINDS, keep_driver=keep_driver)
    assert host.list_directory(KEPT_PACKAGES) == left


def test_journals_of_a_large_size_are_fewer(host: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "JOURNALS", retention.Bound(RUNS_DIRECTORY, JOURNALS.names, 100, 10_000))
    for number in range(30):
        as_a_run(host, WriteFile("/etc/one", f"{number}".encode() * 700))
    prune(host, CHANGE_KINDS)
    sizes = [host.path(f"{RUNS_DIRECTORY}/{name}").stat().st_size for name in journals(host)]
    assert 2 <= len(sizes) < 15
    assert sum(sizes[1:]) <= 10_000


@pytest.mark.parametrize(
    "add",
    [
        lambda host: as_a_run(host, WriteFile("/etc/two", b"another file")),
        lambda host: as_a_run(host, WriteFile("/etc/one", b"of an open run"), end=""),
        lambda host: as_a_run(host).begin("write /etc/one", "WriteFile", {"path": "/etc/one"}),
        lambda host: as_a_run(host).begin("x", "Unknown", {}),
    ],
    ids=["of another file", "open", "interrupted", "of an unknown kind"],
)
def test_a_journal_that_an_undo_needs_stays(host: Still, add: Callable[[FakeHost], object]) -> None:
    as_a_run(host, WriteFile("/etc/one", b"first"))
    add(host)
    write_often(host, 2 * JOURNALS.number)
    prune(host, CHANGE_KINDS)
    assert journals(host)[:2] == ["0001.jsonl", "0002.jsonl"]
    assert len(journals(host)) == JOURNALS.number + 2


def test_the_last_run_that_wrote_a_file_stays(host: Still) -> None:
    """It shows whether somebody changed the file since."""
    write_often(host, 3)
    write_often(host, 2 * JOURNALS.number, "/etc/two")
    prune(host, CHANGE_KINDS)
    assert journals(host)[:3] == ["0001.jsonl", "0003.jsonl", "0004.jsonl"]


def test_undone_runs_go_and_no_journal_counts_as_lost(host: Still) -> None:
    for number in range(2 * JOURNALS.number):
        journal = as_a_run(host, WriteFile("/etc/one", str(number).encode()))
        journal.undone(1)
        journal.end("rolled-back")
    prune(host, CHANGE_KINDS)
    assert len(journals(host)) == JOURNALS.number
    assert ask(host, Request("uninstall", {}))[0].exit_code == ExitCode.DONE
    assert not host.exists(RUNS_DIRECTORY)


def test_a_kill_between_note_and_removal_loses_nothing(host: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    write_often(host, 2 * JOURNALS.number)

    def killed(path: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as now:
        now.setattr(host, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(host, CHANGE_KINDS)
    assert len(journals(host)) == 2 * JOURNALS.number
    prune(host, CHANGE_KINDS)
    assert len(journals(host)) == JOURNALS.number + 1
    undo_all(host)
    assert not host.exists("/etc/one")


def test_folders_and_downloads_have_a_bound(host: Still, tmp_path: Path) -> None:
    cache = tmp_path / CACHE_DIRECTORY[1:]
    cache.mkdir(parents=True)
    for number in range(100):
        folders = cache / f"agent-{number:02}", tmp_path / f"var/tmp/gpuprov-tmp-abcd_{number:03}"
        files = cache / f"NVIDIA-{number}.run", cache / f"bundle-{number}.tar.part"
        for folder in folders:
            folder.mkdir()
        for path in (*folders, *files):
            path.touch()
            os.utime(path, (number, number))
    (cache / "bundle").mkdir()
    (cache / "unpack").mkdir()
    (tmp_path / "var/tmp/gpuprov-backup").mkdir()  # an administrator's own
    os.utime(tmp_path / "var/tmp/gpuprov-backup", (1, 1))
    prune(host, CHANGE_KINDS)
    kept = {
        "agent-96", "agent-97", "agent-98", "agent-99", "NVIDIA-98.run", "NVIDIA-99.run",
        "bundle-98.tar.part", "bundle-99.tar.part", "bundle", "unpack",
    }  # fmt: skip
    assert {path.name for path in cache.iterdir()} == kept
    assert [path.name for path in (tmp_path / "var/tmp").iterdir()] == ["gpuprov-backup"]


_EXAMPLES = {
    r"\.?(agent|host)-\w+": "agent-{}", r".+\.run(\.part)?": "{}.run", ".+": "{}", r"\d+\.json": "{}.json",
    r"bundle-.+\.tar(\.part)?": "bundle-{}.tar", r"gpuprov-tmp-[a-z0-9_]{8}": "gpuprov-tmp-{:08}",
}  # fmt: skip


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: f"{bound.folder} {bound.names}")
@pytest.mark.parametrize("size", [1, 1000])
def test_of_a_thousand_entries_the_newest_within_number_and_bytes_stay(host: Still, bound: Bound, size: int) -> None:
    """Each has the `size`-th part of all bytes that may stay, or a byte."""
    folder = host.path(bound.folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = [_EXAMPLES[bound.names].format(number) for number in range(1000)]
    for number, name in enumerate(names):
        (folder / name).touch()
        os.truncate(folder / name, bound.size // size or 1)
        os.utime(folder / name, (number, number))
    prune(host, CHANGE_KINDS)
    left = {path.name for path in folder.iterdir()} & {*names}
    assert left == {*names[1000 - min(bound.number, size) :]}


def test_what_was_used_today_stays(host: Still, tmp_path: Path) -> None:
    cache = tmp_path / CACHE_DIRECTORY[1:]
    for number in range(9):
        (cache / f"agent-{number}").mkdir(parents=True)
    (tmp_path / "var/tmp/gpuprov-tmp-abcd_123").mkdir()
    for place in (*cache.iterdir(), tmp_path / "var/tmp/gpuprov-tmp-abcd_123"):
        os.utime(place, (time.time(), time.time()))  # the kernel's clock may differ from libfaketime's
    prune(host, CHANGE_KINDS)
    assert len(list(cache.iterdir())) == 9
    assert (tmp_path / "var/tmp/gpuprov-tmp-abcd_123").exists()


def test_no_link_is_followed_and_only_files_of_root_go(host: Still, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/gpuprov-1.run").write_text("x")
    place = tmp_path / "var/tmp"
    (place / "gpuprov-tmp-linklink").symlink_to(tmp_path / "precious")
    (place / "gpuprov-tmp-deepdeep").mkdir()
    (place / "gpuprov-tmp-deepdeep/link").symlink_to(tmp_path / "precious")
    (place / "gpuprov-tmp-user1000").mkdir()
    for name in ("gpuprov-tmp-deepdeep", "gpuprov-tmp-user1000", "gpuprov-tmp-linklink"):
        os.utime(place / name, (0, 0), follow_symlinks=False)
    os.chown(place / "gpuprov-tmp-user1000", 1000, 1000)
    # A folder that is a link as a whole belongs to an administrator.
    (tmp_path / "var/cache").mkdir()
    (tmp_path / CACHE_DIRECTORY[1:]).symlink_to(tmp_path / "precious")
    for name in ("1.run", "2.run", "3.run"):
        (tmp_path / "precious" / name).write_text("x")
    prune(host, CHANGE_KINDS)
    assert len(list((tmp_path / "precious").iterdir())) == 4
    assert sorted(path.name for path in place.iterdir()) == ["gpuprov-tmp-linklink", "gpuprov-tmp-user1000"]


def test_a_folder_that_cannot_be_written_fails_no_run(host: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    write_often(host, 2 * JOURNALS.number)
    (host.root / CACHE_DIRECTORY[1:]).mkdir(parents=True)
    for number in range(9):
        (host.root / CACHE_DIRECTORY[1:] / f"{number}.run").write_text("x")

    def refused(path: str, *more: object, **named: object) -> None:
        raise OSError(30, "Read-only file system", path)

    monkeypatch.setattr(host, "remove", refused)
    monkeypatch.setattr(retention, "read_runs", refused)
    prune(host, CHANGE_KINDS)
    assert len(journals(host)) == 2 * JOURNALS.number


def test_a_run_that_ends_well_prunes_and_others_do_not(host: Still) -> None:
    cache = host.root / CACHE_DIRECTORY[1:]
    cache.mkdir(parents=True)

    def runs_left(command: str, *, check: bool = False) -> tuple[int, ExitCode]:
        for number in range(9):
            (cache / f"{number}.run").write_text("x")
        ended, _ = ask(host, Request(command, {}, check=check))
        return len(list(cache.glob("*.run"))), ExitCode(ended.exit_code)

    assert runs_left("rollback", check=True) == (9, ExitCode.DONE)
    assert runs_left("install") == (9, ExitCode.FAILED)
    assert runs_left("rollback") == (2, ExitCode.DONE)
