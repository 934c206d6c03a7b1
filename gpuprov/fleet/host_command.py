"""Run the user's commands about one host on the controller, before and after the host is disturbed: no shell.

They come only from the command line: an inventory must not be able to run anything here.
"""

from __future__ import annotations

import os
import re
import selectors
import shlex
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuprov.core.commands import end_group
from gpuprov.fleet.target import HostTarget
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.words import counted, plain

# A name that can't become an option, a second argument or a control sequence; addresses of IPv6 included.
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]{0,252}\Z")
_PLACE = re.compile(r"\{([A-Za-z_]+)\}")
_PLACES = ("host", "address")
_KEPT_LINES = 5
_LONGEST_LINE = 300
_CHUNK = 1 << 15
# More than a pipe holds (pipe(7)): the last lines are those that say why.
_LAST_CHUNKS = 8
_PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class HostCommands:
    """What to run before a host is disturbed and after it is proved; empty means nothing."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    timeout: float = 1800.0


def parse_host_commands(before: str, after: str, timeout: float) -> HostCommands:
    """Return the commands from the command line. Raises GpuprovError (exit code 2) for an invalid one."""
    if after and not before:
        raise _usage("--after-host needs --before-host", "", "add --before-host 'kubectl drain {host} …'")
    return HostCommands(_parsed("--before-host", before), _parsed("--after-host", after), timeout)


def _parsed(option: str, text: str) -> tuple[str, ...]:
    if not text:
        return ()
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise _usage(f"{option} can't be split into arguments", f"{text}: {error}", "close its quotes") from None
    if not words:
        raise _usage(f"{option} names no command", repr(text), f"{option} 'kubectl cordon {{host}}'")
    wrong = [name for word in words for name in _PLACE.findall(word) if name not in _PLACES]
    if wrong:
        raise _usage(f"{option} has an unknown place {{{wrong[0]}}}", text, "write {host} or {address}")
    if shutil.which(words[0]) is None:
        raise _usage(
            f"{option}: there is no program {words[0]}", "it is looked for in PATH; no shell runs it",
            f"install it, or name its path; for shell syntax: {option} \"sh -c '… $1 …' sh {{host}}\"",
        )  # fmt: skip
    return words


def require_safe_hosts(commands: HostCommands, targets: Sequence[HostTarget]) -> None:
    """Raise GpuprovError (exit code 2) if a name can't be put into a command, or if the commands name no host."""
    for option, words in (("--before-host", commands.before), ("--after-host", commands.after)):
        named = {name for word in words for name in _PLACE.findall(word)}
        if words and not named and len(targets) > 1:
            raise _usage(
                f"{option} is the same for all {counted(len(targets), 'host')}", shlex.join(words),
                "put {host} where the name of the host belongs",
            )  # fmt: skip
        for target in targets:
            for name in sorted(named):
                value = _values(target)[name]
                if not _SAFE.match(value):
                    raise _usage(
                        f"the {name} of {plain(target.name)} can't be an argument of {option}", repr(value),
                        "a name has letters, digits and ._:%- alone, and does not begin with -",
                    )  # fmt: skip


def for_host(words: Sequence[str], target: HostTarget) -> tuple[str, ...]:
    """Return the command for this host; each placeholder is filled within its argument."""
    values = _values(target)
    return tuple(_PLACE.sub(lambda found: values[found[1]], word) for word in words)


def _values(target: HostTarget) -> dict[str, str]:
    return {"host": target.name, "address": target.address or target.name}


@dataclass(frozen=True)
class Ended:
    """The result of a command: `trouble` is empty on success; `output` has its last lines."""

    trouble: str = ""
    output: str = ""


def run_host_command(words: Sequence[str], timeout: float, stop: Callable[[], bool] = lambda: False) -> Ended:
    """Run a command to its end, its timeout, or until `stop` is true; then kill its whole process group.

    It has its own session, so Ctrl-C at the terminal does not reach it: the run decides what Ctrl-C ends.
    """
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        return Ended("it can't be started", str(error))
    out, err = _Tail(), _Tail()
    trouble = _watch(process, out, err, time.monotonic() + timeout, stop)
    if trouble is None:
        trouble = "" if process.returncode == 0 else _ending(process.returncode)
    elif not trouble:
        trouble = f"it took longer than {timeout:g} s"
    return Ended(trouble, err.text() or out.text())


def _watch(
    process: subprocess.Popen[bytes], out: _Tail, err: _Tail, deadline: float, stop: Callable[[], bool]
) -> str | None:
    """Read the process's output until it ends. Return None then; "" after its timeout; else why it was killed."""
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr, selectors.DefaultSelector() as pipes:
        for pipe, tail in ((process.stdout, out), (process.stderr, err)):
            os.set_blocking(pipe.fileno(), False)
            pipes.register(pipe, selectors.EVENT_READ, tail)
        while True:
            ended = process.poll() is not None
            for _ in range(_LAST_CHUNKS if ended else 1):
                _read(pipes, 0 if ended else _PAUSE_SECONDS)
            # A grandchild may keep the pipes open: what counts is the command's own end.
            if ended:
                return None
            if stop():
                end_group(process)
                return "it was stopped by Ctrl-C"
            if time.monotonic() > deadline:
                end_group(process)
                return ""


def _read(pipes: selectors.BaseSelector, seconds: float) -> None:
    if not pipes.get_map():
        time.sleep(seconds)
        return
    for key, _ in pipes.select(seconds):
        try:
            data = os.read(key.fd, _CHUNK)
        except BlockingIOError:
            continue
        if data:
            key.data.add(data)
        else:
            pipes.unregister(key.fileobj)


def _ending(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"killed by signal {-code}"


class _Tail:
    """The end of a process's output; it may print much more than is stored."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._rest = b""

    def add(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        self._lines.extend(line[:_LONGEST_LINE] for line in lines if line.strip())
        self._rest = rest[:_LONGEST_LINE]

    def text(self) -> str:
        lines = [*self._lines, *([self._rest] if self._rest.strip() else [])][-_KEPT_LINES:]
        return "\n".join(plain(line.decode("utf-8", "replace")) for line in lines)


def _usage(what: str, evidence: str, next_step: str) -> GpuprovError:
    return GpuprovError(what, evidence, next_step, exit_code=ExitCode.USAGE)
