"""Commands by which a controller stores agent and bundle, runs the agent, waits for a boot; errors of a broken run.

Both ways to a host use it: `gpuprov --hosts`, and the action plugin of the playbooks.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterable

from gpuprov.agent.probe import Probe, account_problem, sudo_problem
from gpuprov.core.commands import NOT_EXECUTABLE, Completed
from gpuprov.core.places import CACHE_DIRECTORY
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError, Problem, UsageError


def _script(name: str, **words: str) -> str:
    """Return a script of this folder as one line: the login shell that gets it quoted may be csh or fish.

    So it has no single quotes, backslashes or exclamation marks. `words`: what stands for the words of these names.
    """
    text = (pkgutil.get_data("gpuprov.agent", f"{name}.sh") or b"").decode()
    line = " ".join(one for one in text.splitlines() if not one.startswith("#"))
    return re.sub("[A-Z]{4,}", lambda word: words.get(word[0], word[0]), line)


_PRUNE = _script("prune")
_STORE, _RUN = _script("store", PRUNE=_PRUNE), _script("run", PRUNE=_PRUNE)
# Root can't read the user's copy, as on NFS: store_command is to give it its own.
UNREADABLE = 66
_ROOM = "is there room (df -h {0}; df -i {0})?"
NOT_STORED = ("the agent cannot be stored on the host", _ROOM.format("~ ~root") + " is ~/.cache/gpuprov writable?")


def store_command(digest: str, *, by_root: bool = False) -> tuple[str, ...]:
    """Return the command that stores the agent, which comes on standard input; `by_root`: in root's own home."""
    return ("sh", "-c", _STORE, "sh", digest, *(("root",) if by_root else ()))


def require(done: Completed, what: str, next_step: str) -> None:
    """Raise GpuprovError if a command has failed. Where it had a terminal, its errors are in its output."""
    if not done.ok:
        raise GpuprovError(what, ending(done, done.stdout.splitlines()), next_step)


def agent_command(probe: Probe, digest: str) -> tuple[str, ...]:
    """Return the command by which root runs the agent stored by store_command; its request goes to standard input."""
    assert probe.python is not None
    stored = f"{probe.cache}/agent-{digest}.pyz"
    if probe.uid == 0:
        return (probe.python.path, "-I", stored)
    return ("sh", "-c", _RUN, "sh", digest, probe.python.path, stored)


def unfinished_problem(done: Completed, strays: list[str], *, lost: bool = False, by_ansible: bool = False) -> Problem:
    """Return why a run ended without a result. `lost`: the connection broke.

    `by_ansible`: Ansible dropped the line in which sudo names the refused command.
    """
    if lost:
        seen = done.stderr.strip().rpartition("\n")[2]
        next_step = "the agent on the host continues; run the same command again to get its result"
        return Problem("the connection to the host dropped during the run", seen, next_step)
    # If the connection itself becomes root, as Ansible's does, sudo's refusal replaces the agent's events.
    refused = sudo_problem("\n".join((done.stderr, *strays))) if done.returncode in (1, NOT_EXECUTABLE) else None
    if refused is not None:
        return refused
    if by_ansible and done.returncode == 1 and not (done.stderr.strip() or strays):
        what = "sudo on the host refuses this command, or it ended without a word"
        seen = "exit code 1, no output: Ansible leaves out sudo's `Sorry, user … is not allowed to execute …`"
        return Problem(what, seen, "on the host, as the user of ansible_user: sudo -l shows what it may run")
    if "ModuleNotFoundError" in done.stderr:
        step = "install the distribution's full package python3 (on Debian and Ubuntu, python3-minimal is not enough)"
        return Problem("the host's Python lacks a part of its standard library", ending(done), step)
    step = "run the same command again; it resumes that run"
    return Problem("the agent ended without a result", ending(done, strays), step)


def require_root(done: Completed, user: str) -> None:
    """Raise UsageError if Python can't open the login user's agent: a task becomes this user, who is not root."""
    if done.returncode == 2 and "can't open file" in done.stderr:
        step = "remove become_user from task, play and inventory (ansible_become_user), or set it to root"
        raise UsageError(f"the task becomes {user}, and gpuprov requires root", ending(done), step)


def no_probe_problem(done: Completed, user: str = "") -> tuple[Problem, bool]:
    """Return why a host accepted the login but did not answer the probe, and whether its account can't run commands."""
    if found := account_problem(done, user):
        return found, True
    return Problem(
        "the host's shell does not answer as a shell should", ending(done, done.stdout.splitlines()),
        "is this a machine with a POSIX shell, and may this user run commands?",
    ), False  # fmt: skip


def ending(done: Completed, output: list[str] | None = None) -> str:
    """Return how it ended (the exit code, if it has no word) and the last lines; the command is ours and long."""
    lines = (done.stderr.strip() or "\n".join(output or ()).strip()).splitlines()[-8:]
    return "\n".join([done.ended or f"exit code {done.returncode}", *lines])


# Firmware that checks two terabytes of memory takes its time.
BOOT_SECONDS = 1800.0
_BOOT_ID = "echo; cat /proc/sys/kernel/random/boot_id"
_BOOT_STATE = "echo; timeout 300 systemctl is-system-running --wait >/dev/null; systemctl is-system-running"
# Engines that are still starting would look stopped, so the boot is waited for, with a limit. A system container that
# shuts down may briefly show the container host's boot id; systemd then reports another state, or none.
_UP = ("initializing", "starting", "running", "degraded", "maintenance")


def not_up(left_boot: str, run: Callable[..., Completed]) -> str:
    """Return why a host is not yet up in another boot than `left_boot`, docker and all; "" if it is.

    `run` runs a command on the host, where a login shell may print before it.
    """
    boot = run(_BOOT_ID, timeout=20.0).stdout.split()[-1:]
    if boot in ([], [left_boot]):
        return "it answers, and is still in the boot before" if boot else "its connection broke"
    state = run(_BOOT_STATE, timeout=330.0).stdout.split()[-1:]
    return "" if state and state[0] in _UP else "it is in another boot, and not up yet"


# -- the bundle, where a host keeps it -----------------------------------------------------------------------------

_SIZE = re.compile(r"[0-9]{1,15}")

ASK_BUNDLE = _script("ask_bundle", CACHE=CACHE_DIRECTORY)
# The missing bytes come on standard input; or $3 is the file on the host to copy, whole.
STORE_BUNDLE = _script("store_bundle", CACHE=CACHE_DIRECTORY, TAKE='cat >> "$f.part"')
TAKE_BUNDLE = _script("store_bundle", CACHE=CACHE_DIRECTORY, TAKE='cat "$3" > "$f.part"')
NO_ROOM = ("the bundle can't be stored on the host", _ROOM.format(f"~ {CACHE_DIRECTORY}"))


@dataclass(frozen=True)
class BundlePlace:
    """A bundle of this digest and size, on any host."""

    digest: str
    size: int

    @property
    def name(self) -> str:
        return f"bundle-{self.digest[:32]}-{self.size}.tar"

    @property
    def path(self) -> str:
        return f"{CACHE_DIRECTORY}/{self.name}"

    def command(self, script: str, *arguments: str) -> tuple[str, ...]:
        """Return the words that run one of these scripts."""
        return ("sh", "-c", script, "sh", self.name, str(self.size), *arguments)


def parse_stored(lines: Iterable[str]) -> tuple[int, bool] | None:
    """Return how many bytes of a bundle a host has, and whether it is whole; None without an answer of ASK_BUNDLE."""
    for line in lines:
        word, _, size = line.strip().partition(" ")
        if word in ("whole", "part") and _SIZE.fullmatch(size):
            return int(size), word == "whole"
    return None
