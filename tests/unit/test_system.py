"""The door to the operating system, on the real machine below a temporary root."""

import ctypes
import errno
import os
import resource
import signal
import socket
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from gpuprov.core import files
from gpuprov.core.commands import NOT_FOUND, TIMED_OUT
from gpuprov.core.files import NotRegularError, temporary_name
from gpuprov.core.journal import new_journal, read_runs
from gpuprov.core.system import System, sha256_of
from gpuprov.protocol.errors import GpuprovError
from tests.clock import clock_of, has_ended


@pytest.mark.root
def test_write_keeps_owner_and_leaves_no_temporary_file(system: System, tmp_path: Path) -> None:
    target = tmp_path / "daemon.json"
    target.write_bytes(b"old")
    os.chown(target, 12, 34)
    system.write("/daemon.json", b"new", mode=0o640)
    found = target.stat()
    assert target.read_bytes() == b"new"
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12, 34, 0o640)
    assert [entry.name for entry in tmp_path.iterdir()] == ["daemon.json"]


def test_write_keeps_acl_and_user_attributes(system: System, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    entries = ((1, 6, -1), (2, 4, os.geteuid()), (4, 4, -1), (16, 4, -1), (32, 0, -1))
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    os.setxattr(file, "user.team", b"storage")
    os.setxattr(file, "system.posix_acl_access", acl)
    system.write("/file", b"new", mode=0o640)
    assert os.getxattr(file, "user.team") == b"storage"
    assert os.getxattr(file, "system.posix_acl_access") == acl
    # A closed mode closes the file to the others whom an ACL names, too: its mask is empty.
    system.write("/file", b"secret", mode=0o600)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_write_keeps_other_attributes(system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    names = ("user.a", "user.b", "user.c")
    for name in names:
        os.setxattr(file, name, b"x")
    refused, set_attribute = os.listxattr(file)[0], os.setxattr

    def set_but_one(place: int, name: str, value: bytes) -> None:
        if name == refused:
            raise PermissionError(1, "Operation not permitted")
        set_attribute(place, name, value)

    monkeypatch.setattr(os, "setxattr", set_but_one)
    system.write("/file", b"new")
    assert set(os.listxattr(file)) == {*names} - {refused}


def test_write_through_a_link_keeps_the_link(system: System, tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    system.write("/link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_write_replaces_what_a_killed_write_left(system: System, tmp_path: Path) -> None:
    temporary_name(tmp_path / "file").symlink_to("/etc/passwd")
    system.write("/file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_failed_write_leaves_the_old_file(system: System, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(TypeError):
        system.write("/file", "no bytes")  # type: ignore[arg-type]
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_missing_things_are_none_or_empty(system: System) -> None:
    assert system.read_bytes("/nothing") is None
    assert system.read_text("/nothing/below") is None
    assert system.read_bytes("/") is None
    assert system.status("/nothing") is None
    assert system.list_directory("/nothing") == ()
    assert system.sha256("/nothing") == ""
    assert system.which("no-such-program") is None


@pytest.mark.root
def test_status_tells_kinds(system: System, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    os.mknod(tmp_path / "node", stat.S_IFCHR | 0o600, os.makedev(195, 7))
    kinds = {name: system.status(f"/{name}") for name in ("file", "link", "node")}
    assert {name: found.kind if found else "" for name, found in kinds.items()} == {
        "file": "file", "link": "link", "node": "char",
    }  # fmt: skip
    link, node = kinds["link"], kinds["node"]
    assert link is not None and link.target == "file"
    assert node is not None and (node.major, node.minor) == (195, 7)


def test_make_directory_returns_what_it_made(system: System) -> None:
    assert system.make_directory("/a/b/c") == ("/a", "/a/b", "/a/b/c")
    assert system.make_directory("/a/b/c/d") == ("/a/b/c/d",)
    assert system.make_directory("/a/b/c/d") == ()


def test_sha256_of_a_file_is_that_of_its_content(system: System, tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    (tmp_path / "file").write_bytes(content)
    assert system.sha256("/file") == sha256_of(content)


def test_run_returns_output_and_exit_code() -> None:
    done = System().run(("sh", "-c", "cat; echo err >&2; exit 3"), stdin=b"in\n")
    assert (done.returncode, done.stdout, done.stderr, done.ok) == (3, "in\n", "err\n", False)
    assert "exited 3" in done.evidence()


def test_run_ends_a_command_and_its_children_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_of(monkeypatch, "gpuprov.core.commands")
    children: list[int] = []

    def pass_time(line: str) -> None:
        children.append(int(line))
        clock.ahead = 7200

    done = System().run(("sh", "-c", "sleep 3600 & echo $!; wait"), timeout=3000, on_line=pass_time)
    assert done.returncode == TIMED_OUT
    assert "stopped after 3000 s, its time limit" in done.stderr
    assert [has_ended(pid) for pid in children] == [True]


@pytest.mark.parametrize("refusal", [None, PermissionError("nvidia-modprobe runs as root")])
def test_run_leaves_an_unkillable_command(monkeypatch: pytest.MonkeyPatch, refusal: PermissionError | None) -> None:
    # As nvidia-smi on a GPU that hangs, in a call that the kernel does not let go.
    def send(pid: int, number: int) -> None:
        clock.ahead += 10
        if refusal is not None:
            raise refusal

    clock = clock_of(monkeypatch, "gpuprov.core.commands")
    pids: list[int] = []

    def pass_time(line: str) -> None:
        pids.append(int(line))
        clock.ahead = 7200

    with monkeypatch.context() as deaf:
        deaf.setattr(os, "killpg", send)
        done = System().run(("sh", "-c", "echo $$; exec sleep 60"), timeout=3000, on_line=pass_time)
    (pid,) = pids
    assert (done.returncode, has_ended(pid)) == (TIMED_OUT, False)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_run_does_not_wait_for_a_command_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_of(monkeypatch, "gpuprov.core.commands")

    def pass_time(line: str) -> None:
        clock.ahead = 7200

    # More than a pipe takes. Without the limit, it ends by itself.
    done = System().run(("sh", "-c", "echo; exec sleep 30"), stdin=b"x" * (1 << 20), timeout=3000, on_line=pass_time)
    assert done.returncode == TIMED_OUT
    assert System().run(("cat",), stdin=b"abc" * (1 << 20), timeout=300).stdout == "abc" * (1 << 20)
    assert System().run(("true",), stdin=b"x" * (1 << 20), timeout=300).ok


def test_run_does_not_wait_for_a_daemon_that_holds_the_pipes() -> None:
    done = System().run(("sh", "-c", "sleep 3600 & echo $!"), timeout=300)
    assert done.returncode == 0
    os.kill(int(done.stdout), signal.SIGKILL)


def test_run_gives_the_exit_codes_of_a_shell() -> None:
    assert System().run(("sh", "-c", "kill -9 $$")).returncode == 137
    assert System().run(("no-such-program",)).returncode == NOT_FOUND


def test_run_gets_a_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/evil.so")
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    done = System().run(("sh", "-c", 'echo "$LD_PRELOAD,$https_proxy,$LC_ALL"'))
    assert done.stdout == ",http://proxy:3128,C.UTF-8\n"


def test_run_shows_lines_as_they_come() -> None:
    lines: list[str] = []
    System().run(("sh", "-c", "echo one; echo two >&2; printf three"), on_line=lines.append)
    assert sorted(lines) == ["one", "two"]


@pytest.fixture(params=["fifo", "link to a fifo", "directory", "socket", "sparse", "link loop", "missing"])
def no_file(request: pytest.FixtureRequest, system: System, tmp_path: Path) -> str:
    """Something that another user may put where root looks; return its path."""
    place = tmp_path / "x"
    if request.param == "directory":
        place.mkdir()
    elif request.param == "link loop":
        place.symlink_to("x")
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(place))
    elif request.param == "sparse":
        with place.open("wb") as file:
            file.truncate(1 << 42)
    elif request.param != "missing":
        os.mkfifo(tmp_path / "fifo")
        place.symlink_to("fifo")
    return "/fifo" if request.param == "fifo" else "/x"


def test_what_is_no_file_of_a_sane_size_reads_as_none_at_once(system: System, no_file: str) -> None:
    signal.alarm(300)  # instead of waiting for a FIFO's writer for ever
    try:
        assert system.read_bytes(no_file) is None
        assert system.read_text(no_file) is None
        assert system.read_foreign(no_file, 64) == ""
        if not (system.path(no_file).is_file()):
            assert system.read_start(no_file, 64) is None
            assert system.sha256(no_file) == ""
    finally:
        signal.alarm(0)


def test_a_device_is_no_file_and_is_not_opened(system: System, tmp_path: Path) -> None:
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert system.read_bytes("/zero") is None
    with pytest.raises(NotRegularError):
        system.open("/zero")


def test_files_of_the_kernel_are_read_whatever_size_they_say(system: System) -> None:
    machine = System("/")
    assert machine.read_text("/proc/version") == Path("/proc/version").read_text()
    assert machine.read_text("/proc/self/comm") == Path("/proc/self/comm").read_text()
    assert machine.read_bytes("/sys/kernel/mm/transparent_hugepage/enabled")


def test_a_foreign_file_is_small_and_no_link(system: System, tmp_path: Path) -> None:
    (tmp_path / "small").write_text("      4242\n")
    (tmp_path / "link").symlink_to("small")
    (tmp_path / "loop").symlink_to("loop")
    assert system.read_foreign("/small", 11) == "      4242\n"
    assert system.read_foreign("/small", 10) == ""
    assert system.read_foreign("/link", 64) == ""
    assert system.read_foreign("/loop", 64) == ""
    assert system.list_directory("/loop") == ()
    assert system.status("/loop/daemon.json") is None


def test_a_folder_that_is_a_link_to_nothing_prevents_a_write(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/cdi").symlink_to("/gone/cdi")
    (problem,) = system.write_problems(["/etc/cdi/nvidia.json"])
    assert problem.evidence == "/etc/cdi is a link to /gone/cdi, which does not exist"
    assert problem.next_step == "rm /etc/cdi"
    (tmp_path / "gone/cdi").mkdir(parents=True)
    assert system.write_problems(["/etc/cdi/nvidia.json"]) == ()
    (tmp_path / "gone/cdi/nvidia.json").mkdir()
    (problem,) = system.write_problems(["/gone/cdi/nvidia.json"])
    assert problem.next_step == "mv /gone/cdi/nvidia.json /gone/cdi/nvidia.json.old"


def test_a_file_in_the_place_of_a_folder_prevents_a_write(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    (tmp_path / "etc/apt").mkdir(parents=True)
    (tmp_path / "etc/docker").touch()
    (tmp_path / "etc/apt/keyrings").symlink_to("/etc/docker")
    file, link = system.write_problems(["/etc/docker/daemon.json", "/etc/apt/keyrings/new/key.gpg"])
    assert (file.evidence, file.next_step) == ("/etc/docker is no folder: file", "mv /etc/docker /etc/docker.old")
    assert link.evidence == "/etc/apt/keyrings is a link to /etc/docker, which is no folder"
    assert link.next_step == "rm /etc/apt/keyrings"


@pytest.mark.root
def test_a_link_to_a_device_prevents_a_write_and_the_device_stays(tmp_path: Path) -> None:
    """As `systemctl mask` makes it, and people who switch a file off."""
    system = System(str(tmp_path))
    system.make_directory("/dev")
    system.make_node("/dev/null", 1, 3, 0o666, 0)
    system.make_link("/x.conf", "/dev/null")
    (problem,) = system.write_problems(["/x.conf"])
    assert (problem.evidence, problem.next_step) == ("/x.conf is a link to /dev/null, which is no file", "rm /x.conf")
    with pytest.raises(OSError, match="no regular file"):
        system.write("/x.conf", b"text")
    status = system.status("/dev/null")
    assert status is not None and status.kind == "char"
    system.remove("/x.conf")
    assert system.write_problems(["/x.conf", "/dev/null"]) == ()
    # In the place of a folder: what lacks is the folder, not room in /dev, nor programs' right to run there.
    system.make_directory("/var/cache")
    system.make_link("/var/cache/gpuprov", "/dev/null")
    (problem,) = system.write_problems([], ["/var/cache/gpuprov"])
    assert problem.evidence == "/var/cache/gpuprov is a link to /dev/null, which is no folder"
    assert problem.next_step == "rm /var/cache/gpuprov"


def test_room_is_that_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/cache").symlink_to("/proc/self/mounts")
    assert System().free_bytes(str(tmp_path / "folder/cache")) > 0


def test_an_output_without_end_does_not_fill_the_memory() -> None:
    told: list[str] = []
    done = System().run(("sh", "-c", "head -c 70000000 /dev/zero | tr '\\0' x; echo end"), on_line=told.append)
    assert done.stdout.endswith("xend\n")
    assert len(done.stdout) == 64 << 20
    # A part of a line and the last piece that was read.
    assert [len(line) <= (1 << 20) + (1 << 16) for line in told] == [True]


# -- full and broken disks ---------------------------------------------------------------------------------------------
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


def test_directory_made_by_another_process_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists

    def made_after(self: Path) -> bool:
        there = exists(self)
        if not there:
            self.mkdir(mode=0o700)
        return there

    monkeypatch.setattr(Path, "exists", made_after)
    System(str(tmp_path)).make_directory("/gpuprov")
    assert (tmp_path / "gpuprov").stat().st_mode & 0o777 == 0o755


# In this order: a content before the name under which it is found, and each new name before anything else.
ON_DISK: dict[str, tuple[Callable[[System], object], list[str]]] = {
    "a line": (lambda system: system.append("/x.part", b"one\n"), ["fsync x.part"]),
    "a first line": (lambda system: system.append("/x", b"one\n"), ["fsync x", "fsync root"]),
    "a file": (lambda system: system.write("/x", b"new"), ["fsync .x.gpuprov", "rename .x.gpuprov x", "fsync root"]),
    "folders": (lambda system: system.make_directory("/a/b"), ["fsync root", "fsync a"]),
    "a name": (lambda system: system.rename("/x.part", "/to/x"), ["fsync x.part", "rename x.part x", "fsync to"]),
}


@pytest.mark.parametrize("name", ON_DISK)
def test_contents_and_names_are_on_the_disk_before_anything_else(tmp_path: Path, calls: list[str], name: str) -> None:
    act, expected = ON_DISK[name]
    (tmp_path / "root/to").mkdir(parents=True)
    (tmp_path / "root/x.part").write_bytes(b"x")
    act(System(str(tmp_path / "root")))
    assert calls == expected


def test_each_file_system_is_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    libc = ctypes.CDLL(None, use_errno=True)

    def syncfs(handle: int) -> int:
        synced.append(os.fstat(handle).st_dev)
        return int(libc.syncfs(handle))

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syncfs=syncfs))
    open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (no Path holds a descriptor open)
    files.sync_file_systems([tmp_path, tmp_path / "missing", tmp_path.parent, Path("/dev")])
    assert sorted(synced) == sorted({tmp_path.stat().st_dev, Path("/dev").stat().st_dev})
    assert len(os.listdir("/proc/self/fd")) == open_before  # noqa: PTH208
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syncfs=lambda _: libc.syncfs(-1)))
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.sync_file_systems([tmp_path])


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE])
def test_unreadable_file_system_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As a user's below /opt (FUSE), or one whose server has forgotten it (NFS): no run has written there."""
    opening, synced = os.open, []

    def refused(path: Any, *more: Any) -> int:
        if Path(path).name == "opt":
            raise OSError(number, os.strerror(number), path)
        return opening(path, *more)

    monkeypatch.setattr(os, "open", refused)

    def sync(handle: int) -> int:
        synced.append(os.fstat(handle).st_dev)
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syncfs=sync))
    (tmp_path / "opt").mkdir()
    files.sync_file_systems([tmp_path / "opt", tmp_path])
    assert synced == [tmp_path.stat().st_dev]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.ENOTCONN])
@pytest.mark.parametrize("place", ["/opt", "/usr/local", "/etc"])
def test_what_root_may_not_see_is_missing_where_sites_mount_file_systems(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, place: str
) -> None:
    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any, *more: Any, **named: Any) -> Any:
            if str(path).startswith(f"{tmp_path}{place}"):
                raise OSError(number, os.strerror(number), path)
            return real(path, *more, **named)

        return look

    for name in ("open", "stat", "lstat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    tool = f"{place}/bin/tool"
    looks: list[Callable[[str], object]] = [system.read_bytes, system.status, system.list_directory, system.sha256]
    if place == "/etc":  # of the machine itself: "not there" would be wrong
        for look in looks:
            with pytest.raises(OSError, match=os.strerror(number)):
                look(tool)
    else:
        assert not any(look(tool) for look in (*looks, system.exists, system.which))


@pytest.mark.parametrize("name", ["stat", "comm", "cmdline"])
def test_a_file_of_a_process_that_ends_meanwhile_is_none(name: str) -> None:
    class Ending(System):
        def open(self, path: str) -> BinaryIO:
            file = super().open(path)
            child.kill()
            child.wait()
            return file

    with subprocess.Popen(("sleep", "60")) as child:
        assert Ending().read_text(f"/proc/{child.pid}/{name}") is None
