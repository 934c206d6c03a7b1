"""The one error that people see: what failed, on which evidence, and what to type next."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from gpuprov import __version__
from gpuprov.protocol.codec import Text
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.words import line


class ExitCode(IntEnum):
    """What a gpuprov process returns, the worst first: docs/fleets.md has the same table.

    128 + the signal's number is what a shell reports for a process that a signal ended.
    """

    TERMINATED = 143
    HUNG_UP = 129
    INTERRUPTED = 130
    USAGE = 2
    FAILED = 1
    UNFIT = 7
    UNREACHABLE = 4
    REBOOT_NEEDED = 3
    DEGRADED = 6
    WOULD_CHANGE = 5
    DONE = 0


def worst(codes: Iterable[ExitCode]) -> ExitCode:
    """Return the code of a run whose parts ended with these; the order of ExitCode decides."""
    found = set(codes)
    return next((code for code in ExitCode if code in found), ExitCode.DONE)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a host or a request.

    `what` is one sentence; `evidence` is what was seen (a command with its exit code, a file with line and column, the
    decisive line of a log); `next_step` is what to do about it, best a command to type.
    """

    what: Text
    evidence: Text = ""
    next_step: Text = ""

    def __str__(self) -> str:
        # Only `seen:` and `next:` begin a line of their own.
        parts = [self.what.replace("\n", "\n  ")]
        for name, text in (("seen", self.evidence), ("next", self.next_step)):
            if lines := text.rstrip("\n").splitlines():
                parts.append(f"  {name}: " + "\n        ".join(lines))
        return "\n".join(parts)


class GpuprovError(Exception):
    """Ends a run. Carries one or several problems, so that all can be fixed at once."""

    exit_code = ExitCode.FAILED

    def __init__(
        self, what: str, evidence: str = "", next_step: str = "", *, exit_code: ExitCode | None = None
    ) -> None:
        super().__init__(what)
        self.problems: tuple[Problem, ...] = (Problem(what, evidence, next_step),)
        self.exit_code = exit_code or self.exit_code

    @classmethod
    def several(cls, problems: tuple[Problem, ...], *, exit_code: ExitCode | None = None) -> GpuprovError:
        """Return one error for a non-empty tuple of problems, by default with the exit code of the class."""
        error = cls(problems[0].what)
        error.problems, error.exit_code = problems, exit_code or error.exit_code
        return error

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class UsageError(GpuprovError):
    """Ends a run before it begins: the call or the inventory is wrong (exit code 2)."""

    exit_code = ExitCode.USAGE


class LaterFormatError(UsageError):
    """A file of gpuprov's is intact, but a newer gpuprov made it."""


def require_format(
    data: Any, newest: int, name: str, origin: str, code: ExitCode = ExitCode.USAGE, step: str = ""
) -> None:
    """Raise LaterFormatError if the format of this data is a later one. `step`: what else helps."""
    found = data.get("format") if isinstance(data, Mapping) else None
    if isinstance(found, int) and found > newest:
        version = line(str(data.get("gpuprov", data.get("version", ""))))[:40]
        seen = f"{origin} has format {found}; this gpuprov ({__version__}) reads formats up to {newest}"
        wanted = f"gpuprov {version}, or a newer one" if version else "a newer gpuprov"
        step = f"run the command again with {wanted}{step}"
        raise LaterFormatError(f"a newer gpuprov made {name}", seen.strip(), step, exit_code=code)


class Stopped(Exception):  # noqa: N818 (a requested stop, not an error)
    """The run was asked to stop: the change in progress was finished, the next one was not begun.

    `left` names the changes that are not made.
    """

    def __init__(self, left: Sequence[str] = ()) -> None:
        super().__init__("stopped as asked")
        self.left = tuple(left)


MEMORY_STEP = (
    "`free -m` shows the memory, `ulimit -v -u` the limits of a shell (limits.conf; systemd: MemoryMax=); then run the "
    "same command again"
)
_HINTS = {
    errno.ENOMEM: MEMORY_STEP,
    errno.ENOSPC: "make room: `df -h` shows which is full (inodes: `df -i`), then run the same command again",
    errno.EDQUOT: "make room: `quota` shows whose share of the file system is full, then run the same command again",
    errno.EFBIG: "FAT takes no file of 4 GiB: use exFAT or ext4; `ulimit -f` shows a limit of the shell (limits.conf)",
    errno.EROFS: "the file system is mounted read-only: `findmnt` shows it; remount it read-write",
    errno.EIO: "the disk can't be read or written: `dmesg` tells which, and why",
}


def from_os_error(what: str, error: OSError, next_step: str = "") -> GpuprovError:
    """Return what the operating system refused, as an error for people; `next_step` where there is none for all."""
    return GpuprovError(what, str(error), _HINTS.get(error.errno or 0, next_step))


@contextlib.contextmanager
def os_errors(what: str, next_step: str = "") -> Iterator[None]:
    """Raise an OSError within the block as from_os_error has it."""
    try:
        yield
    except OSError as error:
        raise from_os_error(what, error, next_step) from None


def resource_problem(error: BaseException) -> Problem | None:
    """Return the problem if an exception says that memory, threads or room on a disk ran out, else None."""
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    if no_thread or isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM:
        return Problem("gpuprov ran out of memory", f"{error!r}", MEMORY_STEP)
    # Not EIO: a terminal that is gone has it too. tempfile finds no folder in a full or read-only /tmp.
    full = getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
    if isinstance(error, OSError) and (full or "temporary directory" in str(error)):
        step = (
            "make room in /tmp (`df -h /tmp`), lift a limit of the shell (`ulimit -f`), or name a folder that can be "
            "written: export TMPDIR=FOLDER"
        )
        return from_os_error("a file can't be written", error, step).problems[0]
    return None
