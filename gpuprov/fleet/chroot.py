"""Run the agent inside another root file system (`--root`): a mounted image that does not run.

It gets separate mount and process namespaces. Its mounts (/proc, /sys, /dev, /run) and its processes end with it in
every case.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pkgutil
import re
import signal
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
from gpuprov.protocol.events import EventReader, Sink
from gpuprov.protocol.request import Request

if TYPE_CHECKING:
    from gpuprov.fleet.agent_file import Agent

_SECONDS = 86400
_FOLDERS = ("proc", "sys", "dev", "run", "etc", "usr")
_NO_PYTHON = 77
_LOCKS = "/run"
_LOOK_SECONDS = 0.2
_BUNDLE = "/run/gpuprov.bundle"
_ENTER = (pkgutil.get_data("gpuprov.fleet", "chroot.sh") or b"").decode()
_CHANGE_ROOT = (pkgutil.get_data("gpuprov.fleet", "change_root.py.template") or b"").decode()


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
    found: list[int] = []
    for child in _children(os.getpid()):
        with contextlib.suppress(OSError):
            found += _children(child) if Path(f"/proc/{child}/comm").read_text() == "unshare\n" else ()
    return found


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]
    return []


def run_in_root(
    root: str, request: Request, agent: Agent, sink: Sink, stop: Callable[[], bool] = lambda: False
) -> None:
    """Carry the request out in a root file system; once `stop` is true, it ends after the change that it is at.

    Raises GpuprovError if it is none, or has no Python.
    """
    path = _examined(root)
    if request.command == "install" and os.statvfs(path).f_flag & os.ST_RDONLY:
        step = f"findmnt -T {root}; mount -o remount,rw MOUNT"
        raise GpuprovError(f"{root} is mounted read-only", f"findmnt -no OPTIONS -T {root}: ro", step)
    lock = _locked(path) if request.changes_the_host else contextlib.nullcontext()
    refused: list[GpuprovError] = []
    read = EventReader()

    def on_line(line: str) -> None:
        try:
            event = None if refused else read(line)
        except GpuprovError as error:
            refused.append(error)
            return
        if event is not None:
            sink(event)

    with lock, _passing_on(stop), tempfile.TemporaryFile() as file:  # nameless: nothing stays of a killed run
        file.write(agent.content)
        file.flush()
        inside = replace(request, bundle=_BUNDLE if request.bundle else "")
        done = run_command(
            (
                "unshare", "--mount", "--propagation", "private", "--uts", "--ipc", "--pid", "--fork", "--kill-child",
                "sh", "-c", _ENTER, "sh", path, f"/proc/{os.getpid()}/fd/{file.fileno()}", request.bundle,
                _resolver(path), sys.executable, _CHANGE_ROOT, *PYTHONS,
            ),
            timeout=_SECONDS,
            env={},
            stdin=f"{dump(inside)}\n".encode(),
            on_line=on_line,
        )  # fmt: skip
    if refused:
        raise refused[0]
    if read.finished is None:
        raise _unfinished_error(done, root, list(read.strays))


def _unfinished_error(done: Completed, root: str, strays: list[str]) -> GpuprovError:
    foreign = next((line for line in done.stderr.splitlines() if "Exec format error" in line), "")
    if done.returncode == _NO_PYTHON and foreign:
        what = f"the programs in {root} are of another architecture than this machine's"
        return GpuprovError(what, foreign, "build the image on a machine of its own architecture")
    if done.returncode == _NO_PYTHON and os.statvfs(f"{root}/usr").f_flag & os.ST_NOEXEC:
        what = f"no program of {root} can run: it is mounted noexec"
        return GpuprovError(what, f"{root}/usr", f"findmnt -T {root}/usr; mount -o remount,exec MOUNT")
    if done.returncode == _NO_PYTHON:
        what = "there is no Python in this root file system that gpuprov runs on: it must be 3.9 or later"
        seen = f"looked in {root} for {', '.join(PYTHONS)}"
        return GpuprovError(what, seen, f"install it there (chroot {root} apt-get install python3)")
    output = "\n".join(strays[-6:]) or "\n".join(done.stderr.strip().splitlines()[-5:])
    seen = f"exit code {done.returncode}: {output or 'no output'}"
    step = "is it of this machine's architecture, and may this process mount (root, CAP_SYS_ADMIN)?"
    return GpuprovError(f"the run in {root} did not come to its end", seen, step)


def _examined(root: str) -> str:
    """Return the real path of a root. Raises GpuprovError for an invalid one: mounts must not leave it."""
    path = os.path.realpath(root)
    wrong = [one.name for one in (Path(path, name) for name in _FOLDERS) if one.is_symlink() or not one.is_dir()]
    # A bind mount of this machine's root has another path.
    own = not wrong and Path(path).samefile("/")
    if own or wrong:
        seen = "it is this machine's own" if own else f"no directory: {', '.join(wrong)}"
        step = "mount the image and name its root: --root /mnt/image; for this machine's own disk: --image"
        raise UsageError(f"{root} is no root file system of an image", seen, step)
    return path


def _running_in(path: str) -> str:
    """Return the first process of a container whose root this is, nothing where none runs; a chroot's shell is none."""
    for place in Path("/proc").iterdir():
        if not place.name.isdecimal():
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
            step = f"wait for its end, or look for it: fuser -v {_LOCKS}/{name}"
            raise GpuprovError(f"another gpuprov run works in {path}", f"it holds {_LOCKS}/{name}", step) from None
        # After the lock: the processes of another run look like a container's.
        if pid := _running_in(path):
            what = f"a system runs from {path}, and an image loses its identity (machine-id, SSH host keys)"
            raise UsageError(what, f"process {pid} is its first process", "stop that container first: ps -fp " + pid)
        os.set_inheritable(handle, True)
        yield
    finally:
        os.close(handle)


def _resolver(root: str) -> str:
    """Return the path of the root's resolv.conf below the root; "" if none can be mounted over it."""
    place = Path(root, "etc/resolv.conf")
    if not place.is_symlink():
        return "etc/resolv.conf" if place.is_file() else ""
    # /var/run is a link to /run.
    target = os.path.normpath(Path("/etc", place.readlink())).replace("/var/run/", "/run/", 1)
    return target.lstrip("/") if target.startswith("/run/") else ""
