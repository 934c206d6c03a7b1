"""Whether the host's own MPS daemon serves a folder. Hostile: all that users, containers and dead daemons leave there.

No real daemon was looked at: the worst is assumed of its folder, a pid file and a socket that all users may write.
"""

import os
import posix
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuprov.runtime_hook.mps import is_served

pytestmark = pytest.mark.root
PID = "4711"
INODE = 8899


class Daemon:
    """A running daemon: its folder, and its process in a /proc of the test's own."""

    def __init__(self, path: Path) -> None:
        self.folder = path / "nvidia-mps"
        self.folder.mkdir()
        self.pid_file = self.folder / "nvidia-cuda-mps-control.pid"
        self.pid_file.write_text(f"{PID}\n")
        self.pid_file.chmod(0o666)
        self.control = self.folder / "control"
        self._bind(self.control)
        self.proc = path / "proc"
        self.process = self.proc / PID
        (self.process / "fd").mkdir(parents=True)
        (self.process / "net").mkdir()
        (self.process / "root").symlink_to("/")
        self.write_status("0\t0\t0\t0")
        self.link("exe", "/usr/bin/nvidia-cuda-mps-control")
        self.link("fd/0", "/dev/null")
        self.link("fd/7", f"socket:[{INODE}]")
        self.write_sockets()

    @staticmethod
    def _bind(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
        path.chmod(0o666)

    def link(self, name: str, target: str) -> None:
        (self.process / name).unlink(missing_ok=True)
        (self.process / name).symlink_to(target)

    def write_status(self, users: str, name: str = "nvidia-cuda-mps") -> None:
        (self.process / "status").write_bytes(f"Name:\t{name}\nUid:\t{users}\nGid:\t0\t0\t0\t0\n".encode())

    def write_sockets(self, flags: str = "00010000", path: str = "", inode: int = INODE) -> None:
        row = f"ffff9a5c0: 00000002 00000000 {flags} 0001 01 {inode} {path or self.control}"
        heading = "Num       RefCount Protocol Flags    Type St Inode Path"
        (self.process / "net/unix").write_text(f"{heading}\nffff9a5c1: 00000003 00000000 00000000 0001 03 17\n{row}\n")

    @property
    def serves(self) -> bool:
        return is_served(str(self.folder), str(self.proc))


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path)


SERVING: dict[str, Callable[[Daemon], object]] = {
    "as it started": lambda one: None,
    "its program was upgraded": lambda one: one.link("exe", "/usr/bin/nvidia-cuda-mps-control (deleted)"),
    # As a descriptor that was closed after it was listed: no link can be read.
    "a client has left": lambda one: (one.process / "fd/5").touch(),
}


@pytest.mark.parametrize("name", SERVING)
def test_a_running_daemon_serves_its_folder(daemon: Daemon, name: str) -> None:
    SERVING[name](daemon)
    assert daemon.serves


def test_the_root_of_a_users_process_is_not_looked_at(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a file system of the user's, which never answers."""
    seen: list[str] = []
    stat = posix.stat

    def recorded(path: str, **more: bool) -> os.stat_result:
        seen.append(path)
        return stat(path, **more)

    monkeypatch.setattr(posix, "stat", recorded)
    daemon.write_status("1000\t1000\t1000\t1000")
    assert not daemon.serves
    daemon.write_status("0\t0\t0\t0")
    daemon.link("exe", "/usr/bin/fusermount")
    assert not daemon.serves
    assert not [path for path in seen if path.endswith("/root/.")]


def remove(path: Path) -> None:
    path.unlink()


def empty_folder(daemon: Daemon) -> None:
    daemon.control.unlink()
    daemon.pid_file.unlink()


def rename_folder(daemon: Daemon) -> None:
    moved = daemon.folder.with_name("elsewhere")
    daemon.folder.rename(moved)
    daemon.folder.symlink_to(moved)


def fifo_for_pid_file(daemon: Daemon) -> None:
    daemon.pid_file.unlink()
    os.mkfifo(daemon.pid_file)


def link_for_pid_file(daemon: Daemon) -> None:
    daemon.pid_file.rename(daemon.pid_file.with_suffix(".old"))
    daemon.pid_file.symlink_to(daemon.pid_file.with_suffix(".old"))


def file_for_socket(daemon: Daemon) -> None:
    daemon.control.unlink()
    daemon.control.touch()


def container_root(daemon: Daemon) -> None:
    (daemon.proc / "container").mkdir()
    daemon.link("root", str(daemon.proc / "container"))


HOSTILE: dict[str, Callable[[Daemon], object]] = {
    "no folder": lambda one: one.folder.rename(one.folder.with_name("gone")),
    "the folder of a user": lambda one: os.chown(one.folder, 1000, 1000),
    "a link to the folder": rename_folder,
    "an empty folder": empty_folder,
    "no socket: quit": lambda one: remove(one.control),
    "a file in the place of the socket": file_for_socket,
    "the socket of a user": lambda one: os.chown(one.control, 1000, 1000),
    "no pid file": lambda one: remove(one.pid_file),
    "the pid file of a user": lambda one: os.chown(one.pid_file, 1000, 1000),
    "a pid file that is a link": link_for_pid_file,
    "a pid file that is a pipe": fifo_for_pid_file,
    "an empty pid file": lambda one: one.pid_file.write_text(""),
    "a pid file that leads out of /proc": lambda one: one.pid_file.write_text(f"../proc/{PID}"),
    "a pid that is no number": lambda one: one.pid_file.write_text("self"),
    "a pid in other digits": lambda one: one.pid_file.write_text("४७११"),
    "a huge pid file": lambda one: one.pid_file.write_text(f"{'0' * 100_000}{PID}"),
    "the pid of a killed daemon": lambda one: one.pid_file.write_text("4712"),
    "another program with the pid": lambda one: one.link("exe", "/usr/bin/sudo"),
    "a program of a similar name": lambda one: one.link("exe", "/tmp/nvidia-cuda-mps-control/x"),
    "the daemon of a user": lambda one: one.write_status("1000\t1000\t1000\t1000"),
    "a user's process whose name begins a line": lambda one: one.write_status("1000\t" * 4, "\rUid: 0 0 0 0"),
    "a user's process whose name has a form feed": lambda one: one.write_status("1000\t" * 4, "\x0cUid: 0 0 0 0"),
    "a user's program with root's rights": lambda one: one.write_status("1000\t0\t0\t0"),
    "no status": lambda one: remove(one.process / "status"),
    "the daemon of a container": container_root,
    "a program that can't be seen": lambda one: remove(one.process / "exe"),
    "a socket that does not listen": lambda one: one.write_sockets("00000000"),
    "the daemon of another folder": lambda one: one.write_sockets(path="/run/mps/control"),
    "another process's socket": lambda one: one.write_sockets(inode=INODE + 1),
    "no list of sockets": lambda one: remove(one.process / "net/unix"),
    "no list of descriptors": lambda one: (one.process / "fd").rename(one.process / "gone"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_else_serves_it(daemon: Daemon, name: str) -> None:
    HOSTILE[name](daemon)
    assert not daemon.serves


_SERVE = """
import os, socket
control = socket.socket(socket.AF_UNIX)
control.bind("{folder}/control")
control.listen()
print(os.getpid(), flush=True)
input()
"""


@pytest.mark.parametrize(
    ("name", "wrapper", "serves"),
    [
        ("nvidia-cuda-mps-control", "", True),
        ("python3", "", False),
        # As with PrivateTmp= of the daemon's unit: it serves, but not what containers would get.
        ("nvidia-cuda-mps-control", """unshare -m sh -c 'mount -t tmpfs none {folder}; exec "$@"' sh""", False),
    ],
    ids=["the daemon", "another program", "of another mount namespace"],
)
def test_a_real_process_serves_its_own_folder(tmp_path: Path, name: str, wrapper: str, serves: bool) -> None:
    """By the kernel's own list of sockets; a killed one leaves its files."""
    daemon = Daemon(tmp_path)
    program = tmp_path / name
    shutil.copy(os.path.realpath("/usr/bin/python3"), program)
    if not wrapper:
        daemon.control.unlink()
    script = f'exec {wrapper.format(folder=daemon.folder)} "$@"'
    words = ("sh", "-c", script, "sh", program, "-c", _SERVE.format(folder=daemon.folder))
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        daemon.pid_file.write_text(process.stdout.readline())
        assert is_served(str(daemon.folder)) == serves
        process.stdin.close()
    assert not is_served(str(daemon.folder))
