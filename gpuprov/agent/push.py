"""Commands that a controller runs on a host to store agent and bundle and to run the agent; errors of a broken run.

Both ways to a host use it: `gpuprov --hosts`, and the action plugin of the playbooks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpuprov.agent.probe import Probe, account_problem, sudo_problem
from gpuprov.core.commands import Completed
from gpuprov.core.places import CACHE_DIRECTORY
from gpuprov.protocol.errors import Problem

# The eight newest agents stay, and what killed commands left counts as one. Folders are unpacked agents. A host that
# lacks a program for this, such as xargs, keeps all.
_PRUNE = '{ ( cd "$d" && ls -1tAp | grep -E "^[.]?agent-.*[^/]$" | tail -n +9 | xargs rm -f ) 2>/dev/null || :; }'
# $1: the digest. One line without single quotes, backslashes or exclamation marks: the login shell may be csh or fish.
STORE = (
    'umask 077; set -e; d="$HOME/.cache/gpuprov"; '
    'test -d "$HOME" || { echo there is no home directory "$HOME" >&2; exit 1; }; '
    'mkdir -p "$HOME/.cache"; mkdir -p -m 0700 "$d"; t="$d/.agent-$$"; '
    'cat > "$t" || { rm -f "$t"; exit 1; }; '
    'test "$(sha256sum < "$t" | cut -c1-64)" = "$1" || { rm -f "$t"; echo digest mismatch >&2; exit 1; }; '
    'mv -f "$t" "$d/agent-$1.pyz"; ' + _PRUNE
)
# Root takes the agent from the login user's home into its own, and runs only its own copy: a process of that user can
# replace a file in the home at any time, also by a FIFO, which would block an open, or by a link to a device.
# $1: the digest, $2: the Python, $3: the user's copy; more goes to the agent.
_RUN = (
    # Another user than root risks nothing: the agent itself says that the command must run as root.
    '[ "$(id -u)" = 0 ] || { p=$2; f=$3; shift 3; exec "$p" -I "$f" "$@"; }; '
    'umask 077; d=~root/.cache/gpuprov; f="$d/agent-$1.pyz"; t="$d/.agent-$$"; '
    'same() { test "$(sha256sum < "$1" | cut -c1-64)" = "$2"; }; '
    '{ test -f "$f" && same "$f" "$1"; } || { mkdir -p ~root/.cache && mkdir -p -m 0700 "$d" && '
    'timeout 60 dd if="$3" iflag=nofollow,nonblock bs=1048576 count=100 2>/dev/null > "$t" && '
    'same "$t" "$1" && mv -f "$t" "$f" && ' + _PRUNE + "; } || "
    '{ rm -f "$t"; echo "the stored agent is not the one that was sent" >&2; exit 126; }; '
    'p=$2; shift 3; exec "$p" -I "$f" "$@"'
)


def agent_command(probe: Probe, digest: str) -> tuple[str, ...]:
    """Return the command by which root runs the agent stored by STORE; its request goes to standard input."""
    assert probe.python is not None
    stored = f"{probe.cache}/agent-{digest}.pyz"
    if probe.uid == 0:
        return (probe.python.path, "-I", stored)
    return ("sh", "-c", _RUN, "sh", digest, probe.python.path, stored)


def unfinished_problem(
    done: Completed, strays: list[str], *, lost: bool = False, ended: str = "", by_ansible: bool = False
) -> Problem:
    """Return why a run ended without a result. `lost`: the connection broke; `ended`: how it ended, in words.

    `by_ansible`: Ansible dropped the line in which sudo names the refused command.
    """
    if lost:
        return Problem(
            "the connection to the host dropped during the run",
            done.stderr.strip().rpartition("\n")[2],
            "the agent on the host continues; run the same command again to get its result",
        )
    # If the connection itself becomes root, as Ansible's does, sudo's refusal replaces the agent's events.
    refused = sudo_problem("\n".join((done.stderr, *strays))) if done.returncode == 1 else None
    if refused is not None:
        return refused
    if by_ansible and done.returncode == 1 and not (done.stderr.strip() or strays):
        return Problem(
            "sudo on the host refuses this command, or it ended without a word",
            "exit code 1, no output: Ansible leaves out sudo's `Sorry, user … is not allowed to execute …`",
            "on the host, as the user of ansible_user: sudo -l shows what it may run",
        )  # fmt: skip
    if "ModuleNotFoundError" in done.stderr:
        return Problem(
            "the host's Python lacks a part of its standard library", ending(done, ended=ended),
            "install the distribution's full package python3 (on Debian and Ubuntu, python3-minimal is not enough)",
        )  # fmt: skip
    return Problem(
        "the agent ended without a result", ending(done, strays, ended=ended),
        "run the same command again; it resumes that run",
    )  # fmt: skip


def no_probe_problem(done: Completed, *, ended: str = "", user: str = "") -> tuple[Problem, bool]:
    """Return why a host accepted the login but did not answer the probe, and whether its account can't run commands."""
    found = account_problem(done, user)
    if found is not None:
        return found, True
    return Problem(
        "the host's shell does not answer as a shell should", ending(done, done.stdout.splitlines(), ended=ended),
        "is this a machine with a POSIX shell, and may this user run commands?",
    ), False  # fmt: skip


def ending(done: Completed, output: list[str] | None = None, *, ended: str = "") -> str:
    """Return how it ended (the exit code, if no word is given) and the last lines; the command is ours and long."""
    lines = (done.stderr.strip() or "\n".join(output or ())).splitlines()[-8:]
    return "\n".join([ended or f"exit code {done.returncode}", *lines])


# -- the bundle, where a host keeps it -----------------------------------------------------------------------------

_SIZE = re.compile(r"[0-9]{1,15}")

# All as root. $1: the bundle's name, $2: its size in bytes.
# Prints how many bytes are stored; a file that is too long counts as none.
ASK_BUNDLE = (
    f'f="{CACHE_DIRECTORY}/$1"; for p in "$f" "$f.part"; do '
    'if test -f "$p"; then n="$(stat -c %s "$p")"; '
    'if test "$n" -le "$2"; then if test "$p" = "$f"; then echo "whole $n"; else echo "part $n"; fi; exit 0; fi; '
    'rm -f "$p"; fi; done; echo "part 0"'
)
# Removes bundles of other digests: they are large, and none is in use while a new one is uploaded.
_KEEP = (
    'n="$(stat -c %s "$f.part")"; test "$n" = "$2" || { echo "$n of $2 bytes arrived" >&2; exit 1; }; '
    'mv -f "$f.part" "$f"; '
    'find "$d" -maxdepth 1 -type f -name "bundle-*.tar*" -not -name "$1" -exec rm -f {} +'
)
_BEGIN = f'umask 077; set -e; d={CACHE_DIRECTORY}; mkdir -p "$d"; f="$d/$1"; '
# The missing bytes come on standard input.
STORE_BUNDLE = f'{_BEGIN}cat >> "$f.part"; {_KEEP}'
# $3: the file on the host to copy, whole.
TAKE_BUNDLE = f'{_BEGIN}cat "$3" > "$f.part"; {_KEEP}'


@dataclass(frozen=True)
class Place:
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


@dataclass(frozen=True)
class There:
    """How many bytes of a bundle a host has, and whether they are complete and in place."""

    size: int
    whole: bool


def parse_there(lines: Iterable[str]) -> There | None:
    """Return the parsed output of ASK_BUNDLE, ignoring any login banner before it; None if there is none."""
    for line in lines:
        word, _, size = line.strip().partition(" ")
        if word in ("whole", "part") and _SIZE.fullmatch(size):
            return There(int(size), word == "whole")
    return None
