"""Runs that are killed or held at an event on their host (a journal's line, the command after it), and their repair."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.integration.test_install import etc, packages
from tests.lab import Host, cgroups
from tests.lab.fixtures import gpuprov
from tests.lab.host import Snapshot, differences

_AGENT = re.compile(rb"(agent-[0-9a-f]+|gpuprov-host)\.pyz")
_JOURNALS = "var/lib/gpuprov/runs"
_SECONDS = 180


def journal_lines(host: Host, word: str = "") -> int:
    """Return how many lines with this word all journals of a host have."""
    found = 0
    for path in (host.root / _JOURNALS).glob("*.jsonl"):
        with contextlib.suppress(FileNotFoundError):  # taken away by the end of an uninstall
            found += sum(word in line for line in path.read_text().splitlines())
    return found


def kill_at(
    host: Host, process: subprocess.Popen[str], lines: int, *, word: str = "", in_command: bool = False
) -> None:
    """Kill the agents on a host as soon as its journals have so many lines with this word.

    `in_command`: not before the agent has then begun a command, or written its next line. Looked at from outside,
    where a look takes a millisecond. Raises AssertionError if the run ends before.
    """
    _wait(process, lambda: journal_lines(host, word) >= lines)
    agents = _agents(host)
    if in_command:
        written = journal_lines(host)
        _wait(process, lambda: journal_lines(host) > written or any(_parent(pid) in agents for pid in _processes(host)))
    _signal(agents, signal.SIGKILL)


def kill_when(host: Host, process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Kill the agents on a host as soon as the condition holds. Raises AssertionError if the run ends before."""
    _wait(process, condition)
    _signal(_agents(host), signal.SIGKILL)


@contextlib.contextmanager
def held_at(host: Host, process: subprocess.Popen[str], lines: int) -> Iterator[None]:
    """Stop the agents on a host as soon as its journals have so many lines; they go on after the block."""
    _wait(process, lambda: journal_lines(host) >= lines)
    agents = _agents(host)
    _signal(agents, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(agents, signal.SIGCONT)


def require_undisturbed(host: Host, inventory: Path, undisturbed: tuple[Snapshot, str], told: str) -> None:
    """The host has the files and packages of an undisturbed run, and nothing is left to clean up or to do."""
    files, names = undisturbed
    assert differences(files, etc(host)) == set(), told
    assert packages(host) == names, told
    assert host.ssh("find / -xdev -name '.*.gpuprov' -not -path '/proc/*'").stdout == "", told
    assert f"{host.name}: 0 changes" in gpuprov("install", "--hosts", inventory).stdout, told


def _signal(agents: set[int], number: signal.Signals) -> None:
    assert agents, "there is no agent on the host"
    for pid in agents:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert process.poll() is None, f"the run ended before it could be killed: {process.communicate()[0]}"
        assert time.monotonic() < deadline, "the run did not come so far"
        time.sleep(0.001)


def _processes(host: Host) -> set[int]:
    found: set[int] = set()
    for path in cgroups.cgroup_directories(host.cgroup)[0].rglob("cgroup.procs"):
        with contextlib.suppress(OSError):  # a unit that has ended, or one with threads of its own
            found.update(map(int, path.read_text().split()))
    return found


def _agents(host: Host) -> set[int]:
    return {pid for pid in _processes(host) if _AGENT.search(_read(pid, "cmdline"))}


def _parent(pid: int) -> int:
    return int((_read(pid, "stat").rpartition(b")")[2].split() or [b"0", b"0"])[1])


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
