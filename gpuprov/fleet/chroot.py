"""Run the agent inside another root file system (`--root`): a mounted image that does not run.

It gets separate mount and process namespaces. Its mounts (/proc, /sys, /dev, /run) and its processes end with it in
every case.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprov.agent.probe import PYTHONS
from gpuprov.core.commands import Completed, run_command
from gpuprov.protocol.codec import dump
from gpuprov.protocol.errors import GpuprovError, UsageError
from gpuprov.protocol.events import EventReader, Finished, Sink
from gpuprov.protocol.request import Request

if TYPE_CHECKING:
    from gpuprov.fleet.agent_build import Agent

_SECONDS = 86400
_FOLDERS = ("proc", "sys", "dev", "run", "etc", "usr")
_NO_PYTHON = 77
_LOCKS = "/run"
_LOOK_SECONDS = 0.2
_BUNDLE = "/run/gpuprov.bundle"
# $1: the root; $2: the agent; $3: the bundle, or nothing; $4: where its resolv.conf leads, or nothing; $5: the
# builder's own Python; $6: what it runs; then the image's Pythons.
# Of the builder's devices it gets those that every program may use, so that nothing there is done to its disks or GPUs.
# What is the kernel's, or the builder's, is read-only or a copy: programs of the image run as root, and a sysctl of
# theirs, a module, a chmod of /dev/null or a new resolv.conf would be the builder's.
# Debian's maintainer scripts ask invoke-rc.d to start what they have installed.
_ENTER = r"""
set -eu
put() { mount --bind "$1" "$2"; mount -o remount,bind,ro "$2"; }
root=$1 agent=$2 bundle=$3 resolver=$4 builder=$5 change_root=$6; shift 6
# It would lead to the builder's docker.
unset DOCKER_HOST
mount --rbind "$root" "$root"
cd "$root"
mount -t proc proc proc
for place in sys sysrq-trigger irq bus fs; do
    if [ -e "proc/$place" ]; then put "proc/$place" "proc/$place"; fi
done
put /sys sys
mount -t tmpfs -o mode=0755 tmpfs dev
for node in null zero full random urandom tty; do : > "dev/$node"; put "/dev/$node" "dev/$node"; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin; ln -s /proc/self/fd/1 dev/stdout; ln -s /proc/self/fd/2 dev/stderr
mount -t tmpfs -o mode=0755 tmpfs run
mkdir run/lock
cp "$agent" run/gpuprov-agent.pyz
if [ -n "$bundle" ]; then : > run/gpuprov.bundle; put "$bundle" run/gpuprov.bundle; fi
if [ -n "$resolver" ] && [ -e /etc/resolv.conf ]; then
    case $resolver in run/*) mkdir -p "${resolver%/*}"; : > "$resolver" ;; esac
    cp /etc/resolv.conf run/gpuprov-resolv.conf
    mount --bind run/gpuprov-resolv.conf "$resolver"
fi
if [ -f usr/sbin/invoke-rc.d ] && [ ! -L usr/sbin/invoke-rc.d ]; then
    printf '#!/bin/sh\nexit 0\n' > run/start-nothing
    chmod 755 run/start-nothing
    mount --bind run/start-nothing usr/sbin/invoke-rc.d
fi
exec "$builder" -I -c "$change_root" "$@"
"""
# After pivot_root(2) the builder's files are in no mount of this namespace; a program can leave a chroot and would find
# them. No program of the image runs before that, or with the dropped capabilities. Nothing is imported after.
_CHANGE_ROOT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(function, *arguments):
    if function(*arguments) < 0:
        sys.exit(f"{function.__name__}{arguments}: {os.strerror(ctypes.get_errno())}")
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
MNT_DETACH, PR_CAPBSET_DROP = 2, 24
SYS_MODULE, SYS_RAWIO, SYS_TIME = 16, 17, 25
call(libc.syscall, PIVOT_ROOT, b".", b".")
call(libc.umount2, b".", MNT_DETACH)
os.chdir("/")
for capability in (SYS_MODULE, SYS_RAWIO, SYS_TIME):
    call(libc.prctl, PR_CAPBSET_DROP, capability, 0, 0, 0)
CHECK = "import sys; sys.exit(sys.version_info < (3, 9))"
for name in sys.argv[1:]:
    for folder in [""] if name.startswith("/") else os.environ["PATH"].split(":"):
        path = os.path.join(folder, name)
        if not os.access(path, os.X_OK):
            continue
        child = os.fork()
        if not child:
            try:
                os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
                os.execv(path, [path, "-I", "-c", CHECK])
            except OSError as error:
                os.write(2, f"{path}: {error.strerror}\\n".encode())
                os._exit(77)
        if os.waitpid(child, 0)[1] == 0:
            os.execv(path, [path, "-I", "/run/gpuprov-agent.pyz"])
sys.exit(77)
"""


@contextlib.contextmanager
def _passing_on(stop: Callable[[], bool]) -> Iterator[None]:
    """Tell the agent inside once `stop` is true: the terminal's Ctrl-C does not reach it."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_SECONDS):
            for pid in _agents() if stop() else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _agents() -> list[int]:
    """Return the first processes inside: the children of this process's unshare(1)."""
    return [inside for child in _children(os.getpid()) for inside in _children(child) if _is_unshare(child)]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _is_unshare(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text() == "unshare\n"
    return False


def run_in_root(
    root: str, request: Request, agent: Agent, sink: Sink, stop: Callable[[], bool] = lambda: False
) -> None:
    """Carry the request out in a root file system; once `stop` is true, it ends after the change that it is at.

    Raises GpuprovError if it is none, or has no Python.
    """
    path = _examined(root)
    lock = _locked(path) if request.changes_the_host else contextlib.nullcontext()
    with lock, _passing_on(stop):
        _run_in(path, root, request, agent, sink)


def _run_in(path: str, root: str, request: Request, agent: Agent, sink: Sink) -> None:
    finished: list[Finished] = []
    refused: list[GpuprovError] = []
    read = EventReader()

    def on_line(line: str) -> None:
        try:
            event = None if refused else read(line)
        except GpuprovError as error:
            refused.append(error)
            return
        if event is not None:
            finished.extend([event] if isinstance(event, Finished) else [])
            sink(event)

    with tempfile.NamedTemporaryFile(prefix="gpuprov-agent-") as file:
        file.write(agent.content)
        file.flush()
        inside = replace(request, bundle=_BUNDLE if request.bundle else "")
        done = run_command(
            (
                "unshare", "--mount", "--propagation", "private", "--uts", "--ipc", "--pid", "--fork", "--kill-child",
                "sh", "-c", _ENTER, "sh", path, file.name, request.bundle, _resolver(path),
                sys.executable, _CHANGE_ROOT, *PYTHONS,
            ),
            timeout=_SECONDS,
            env={},
            stdin=f"{dump(inside)}\n".encode(),
            on_line=on_line,
        )  # fmt: skip
    if refused:
        raise refused[0]
    if not finished:
        raise _unfinished_error(done, root, list(read.strays))


def _unfinished_error(done: Completed, root: str, strays: list[str]) -> GpuprovError:
    """Return why the run in a root file system ended without a result."""
    foreign = next((line for line in done.stderr.splitlines() if "Exec format error" in line), "")
    if done.returncode == _NO_PYTHON and foreign:
        return GpuprovError(
            f"the programs in {root} are of another architecture than this machine's", foreign,
            "build the image on a machine of its own architecture",
        )  # fmt: skip
    if done.returncode == _NO_PYTHON:
        return GpuprovError(
            "there is no Python in this root file system that gpuprov runs on: it must be 3.9 or later",
            f"looked in {root} for {', '.join(PYTHONS)}",
            f"install it there (chroot {root} apt-get install python3)",
        )
    output = "\n".join(strays[-6:]) or "\n".join(done.stderr.strip().splitlines()[-5:])
    return GpuprovError(
        f"the run in {root} did not come to its end",
        f"exit code {done.returncode}: {output or 'no output'}",
        "is it of this machine's architecture, and may this process mount (root, CAP_SYS_ADMIN)?",
    )


def _examined(root: str) -> str:
    """Return the real path of a root. Raises GpuprovError for an invalid one: mounts must not leave it."""
    path = os.path.realpath(root)
    wrong = [name for name in _FOLDERS if not _is_directory(f"{path}/{name}")]
    # A bind mount of this machine's root has another path.
    own = not wrong and Path(path).samefile("/")
    if own or wrong:
        seen = "it is this machine's own" if own else f"no directory: {', '.join(wrong)}"
        raise UsageError(
            f"{root} is no root file system of an image", seen,
            "mount the image and name its root: --root /mnt/image; for this machine's own disk: --image",
        )  # fmt: skip
    if pid := _running_in(path):
        raise UsageError(
            f"a system runs from {root}, and an image loses its identity (machine-id, SSH host keys)",
            f"process {pid} is its first process", "stop that container first: ps -fp " + pid,
        )  # fmt: skip
    return path


def _running_in(path: str, proc: Path = Path("/proc")) -> str:
    """Return the first process of a container whose root this is, nothing where none runs; a chroot's shell is none."""
    for place in proc.iterdir():
        if not place.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            ids = re.search(r"^NSpid:.*\t1$", (place / "status").read_text(), re.MULTILINE)
            if ids and (place / "root").samefile(path):
                return place.name
    return ""


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Let one run at a time change this root: its own lock lies in a /run that only it sees. Raises GpuprovError.

    Its processes inherit the lock, so a killed run holds it until they have ended.
    """
    status = Path(path).stat()
    name = f"gpuprov-root-{status.st_dev:x}-{status.st_ino:x}.lock"
    handle = os.open(f"{_LOCKS}/{name}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GpuprovError(
                f"another gpuprov run works in {path}", f"it holds {_LOCKS}/{name}",
                f"wait for its end, or look for it: fuser -v {_LOCKS}/{name}",
            ) from None  # fmt: skip
        os.set_inheritable(handle, True)
        yield
    finally:
        os.close(handle)


def _is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _resolver(root: str) -> str:
    """Return the path of the root's resolv.conf below the root; "" if none can be mounted over it."""
    place = Path(root, "etc/resolv.conf")
    if not place.is_symlink():
        return "etc/resolv.conf" if place.is_file() else ""
    target = os.path.normpath(Path("/etc", place.readlink()))
    return target.lstrip("/") if target.startswith("/run/") else ""
