"""Run the user's commands about one host on the controller, before and after the host is disturbed: no shell.

They come only from the command line: an inventory must not be able to run anything here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuprov.core.commands import TIMED_OUT, run_command
from gpuprov.fleet.target import HostTarget
from gpuprov.protocol.errors import UsageError
from gpuprov.protocol.words import counted, plain

# A name that can't become an option, a second argument or a control sequence; addresses of IPv6 included.
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]{0,252}\Z")
_PLACE = re.compile(r"\{([A-Za-z_]+)\}")
_PLACES = ("host", "address")
_KEPT_LINES = 5
_LONGEST_LINE = 300
# Of each output: the last lines are those that say why.
_MOST_OUTPUT = 1 << 18


@dataclass(frozen=True)
class HostCommands:
    """What to run before a host is disturbed and after it is proved; empty means nothing."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    timeout: float = 1800.0


def parse_host_commands(before: str, after: str, timeout: float) -> HostCommands:
    """Return the commands from the command line. Raises GpuprovError (exit code 2) for an invalid one."""
    if after and not before:
        raise UsageError("--after-host needs --before-host", "", "add --before-host 'kubectl drain {host} …'")
    return HostCommands(_parsed("--before-host", before), _parsed("--after-host", after), timeout)


def _parsed(option: str, text: str) -> tuple[str, ...]:
    if not text:
        return ()
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} can't be split into arguments", f"{text}: {error}", "close its quotes") from None
    if not words:
        raise UsageError(f"{option} names no command", repr(text), f"{option} 'kubectl cordon {{host}}'")
    wrong = [name for word in words for name in _PLACE.findall(word) if name not in _PLACES]
    if wrong:
        raise UsageError(f"{option} has an unknown place {{{wrong[0]}}}", text, "write {host} or {address}")
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"{option}: there is no program {words[0]}", "it is looked for in PATH; no shell runs it",
            f"install it, or name its path; for shell syntax: {option} \"sh -c '… $1 …' sh {{host}}\"",
        )  # fmt: skip
    return words


def require_safe_hosts(commands: HostCommands, targets: Sequence[HostTarget]) -> None:
    """Raise GpuprovError (exit code 2) if a name can't be put into a command, or if the commands name no host."""
    for option, words in (("--before-host", commands.before), ("--after-host", commands.after)):
        named = {name for word in words for name in _PLACE.findall(word)}
        if words and not named and len(targets) > 1:
            raise UsageError(
                f"{option} is the same for all {counted(len(targets), 'host')}", shlex.join(words),
                "put {host} where the name of the host belongs",
            )  # fmt: skip
        for target in targets:
            for name in sorted(named):
                value = _values(target)[name]
                if not _SAFE.match(value):
                    raise UsageError(
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
    # The user's own language: an empty LC_ALL is as good as none.
    own = {"LC_ALL": "", **os.environ}
    done = run_command(
        words, timeout=timeout, stdin=b"", env=own, on_line=None, stop=stop, folder=None, most=_MOST_OUTPUT
    )
    trouble, stderr = _trouble(done.returncode), done.stderr
    if done.returncode == TIMED_OUT and (done.seconds >= timeout or stop()):
        trouble = f"it took longer than {timeout:g} s" if done.seconds >= timeout else "it was stopped by Ctrl-C"
        stderr = stderr.rpartition("\n")[0]  # run_command's own line is the last one
    return Ended(trouble, _last_lines(stderr) or _last_lines(done.stdout))


def _trouble(code: int) -> str:
    """Return how a command ended, "" for success; shells and run_command report a signal as 128 and its number."""
    return "" if code == 0 else f"killed by signal {code - 128}" if 128 < code < 193 else f"exit code {code}"


def _last_lines(text: str) -> str:
    lines = [line[:_LONGEST_LINE] for line in text.split("\n") if line.strip()]
    return "\n".join(map(plain, lines[-_KEPT_LINES:]))
