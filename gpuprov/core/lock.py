"""Allow one run at a time on a host. The lock names its holder; after a kill, it lasts until the run's children end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from typing import Callable

from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError, os_errors

LOCK_PATH = "/run/gpuprov.lock"


@dataclass(frozen=True)
class LockHolder:
    """The holder of the lock. `alive` is False if that run was killed and only one of its commands still runs."""

    pid: int
    command: str
    since: str
    alive: bool
    step: str = ""

    def __str__(self) -> str:
        return f"pid {self.pid}: gpuprov {self.command}, since {self.since}" + (f", {self.step}" if self.step else "")


@contextlib.contextmanager
def host_lock(
    system: System, *, pid: int, command: str, since: str, wait_seconds: int, tell: Callable[[str], None]
) -> Iterator[Callable[[str], None]]:
    """Hold the host's lock during the block; yield a function that notes there what the run does now.

    If another living run holds it, raise GpuprovError at once and name it. A command of a killed run (apt-get, the
    installer) may still work: wait for its end, up to `wait_seconds`, because two at once would damage the host. Such
    commands inherit the lock, so it shows that they still run.
    """
    with os_errors(f"the lock {LOCK_PATH} can't be opened", f"ls -ld {LOCK_PATH}"):
        opened = system.open_private(LOCK_PATH)
    with opened as file:
        _acquire(system, file.fileno(), wait_seconds, tell)
        # Children inherit the descriptor and hold the lock as long as they live.
        os.set_inheritable(file.fileno(), True)

        def note(step: str) -> None:
            text = json.dumps({"pid": pid, "command": command, "since": since, "step": step})
            # In one write, so that a reader sees no half of it.
            os.pwrite(file.fileno(), text.encode(), 0)
            os.ftruncate(file.fileno(), len(text))

        note("")
        yield note


@contextlib.contextmanager
def try_lock(system: System) -> Iterator[bool]:
    """Hold the lock during the block if it is free; yield whether it was acquired.

    For short work of a second or two: it writes no holder into the file, and a run that starts meanwhile waits.
    """
    with system.open_private(LOCK_PATH) as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _acquire(system: System, descriptor: int, wait_seconds: int, tell: Callable[[str], None]) -> None:
    deadline = system.now() + wait_seconds
    told = False
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        holder = read_holder(system)
        if holder is not None and holder.alive:
            what = "another gpuprov run holds this host"
            raise GpuprovError(what, f"{holder}", "wait for its end, or look at it: ps -fp " + str(holder.pid))
        openers = _openers(system)
        if others := {pid: f"{text} of user {uid}" for pid, (uid, text) in openers.items() if uid != 0}:
            # An earlier version left the lock file open to all: this process is no run of ours.
            seen = f"{', '.join(others.values())} has {LOCK_PATH} open"
            step = f"end it: kill {' '.join(map(str, others))}"
            raise GpuprovError("a process that is not root's keeps this host locked", seen, step)
        left = ", ".join(text for _, text in openers.values()) or "a command"
        if system.now() > deadline:
            seen = f"{left}; waited {wait_seconds} s for its end"
            step = "wait for it, then run the same command again"
            raise GpuprovError("a command of an earlier, killed run still goes on", seen, step)
        if not told:
            tell(f"waiting for what an earlier, killed run left running: {left}")
            told = True
        system.sleep(0.2)


def read_holder(system: System) -> LockHolder | None:
    """Return the holder last written into the lock file, or None if it can't be read.

    It is alive if that process still has the file open: its process id may have been reused.
    """
    try:
        data = json.loads(system.read_text(LOCK_PATH) or "")
        pid, command, since = int(data["pid"]), str(data["command"]), str(data["since"])
        step = str(data.get("step", ""))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    stat = system.read_text(f"/proc/{pid}/stat")
    # proc(5): the state letter follows the name, which is in parentheses and may hold anything. A zombie is dead.
    is_running = stat is not None and stat.rpartition(")")[2].split()[0] not in ("Z", "X")
    return LockHolder(pid, command, since, alive=is_running and _has_open(system, pid), step=step)


def other_run(system: System) -> LockHolder | None:
    """Return the other gpuprov run that is alive on this host, or None."""
    holder = read_holder(system)
    return holder if holder is not None and holder.alive and holder.pid != system.own_pid() else None


def _openers(system: System) -> dict[int, tuple[int, str]]:
    """Return the processes that have the lock file open, except this one: process id → user id, name."""
    found = {}
    for pid in (int(name) for name in system.list_directory("/proc") if name.isdecimal()):
        if pid != system.own_pid() and _has_open(system, pid):
            status = system.status(f"/proc/{pid}")
            name = (system.read_text(f"/proc/{pid}/comm") or "?").strip()
            found[pid] = (status.uid if status else 0, f"{name} (pid {pid})")
    return found


def _has_open(system: System, pid: int) -> bool:
    real = str(system.path(LOCK_PATH).resolve())
    with contextlib.suppress(OSError):
        return any(str(entry.readlink()) == real for entry in system.path(f"/proc/{pid}/fd").iterdir())
    return False
