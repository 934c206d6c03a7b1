"""The one error that people see: what failed, on which evidence, and what to type next."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """What a gpuprov process returns; the README and `gpuprov --help` tell."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    REBOOT_NEEDED = 3
    UNREACHABLE = 4
    WOULD_CHANGE = 5


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a host or a request.

    `what` is one sentence; `evidence` is what was seen (a command with its exit code, a file with line and column, the
    decisive line of a log); `next_step` is what to do about it, best a command to type.
    """

    what: str
    evidence: str = ""
    next_step: str = ""

    def __str__(self) -> str:
        lines = [self.what]
        if self.evidence:
            lines += [
                f"  seen: {line}" if number == 0 else f"        {line}" for number, line in _numbered(self.evidence)
            ]
        if self.next_step:
            lines += [
                f"  next: {line}" if number == 0 else f"        {line}" for number, line in _numbered(self.next_step)
            ]
        return "\n".join(lines)


class GpuprovError(Exception):
    """Ends a run. Carries one or several problems, so that all can be fixed at once."""

    def __init__(
        self, what: str, evidence: str = "", next_step: str = "", *, exit_code: ExitCode = ExitCode.FAILED
    ) -> None:
        super().__init__(what)
        self.problems: tuple[Problem, ...] = (Problem(what, evidence, next_step),)
        self.exit_code = exit_code

    @classmethod
    def several(cls, problems: tuple[Problem, ...], *, exit_code: ExitCode = ExitCode.FAILED) -> GpuprovError:
        """Return one error for a non-empty tuple of problems."""
        error = cls(problems[0].what, exit_code=exit_code)
        error.problems = problems
        return error

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


_HINTS = {
    errno.ENOSPC: "make room: `df -h` shows which file system is full, then run the same command again",
    errno.EDQUOT: "make room: `quota` shows whose share of the file system is full, then run the same command again",
    errno.EROFS: "the file system is mounted read-only: `findmnt` shows it; remount it read-write",
    errno.EIO: "the disk can't be read or written: `dmesg` tells which, and why",
}


def from_os_error(what: str, error: OSError, next_step: str = "") -> GpuprovError:
    """Return what the operating system refused, as an error for people; `next_step` where there is none for all."""
    return GpuprovError(what, str(error), _HINTS.get(error.errno or 0, next_step))


def _numbered(text: str) -> list[tuple[int, str]]:
    return list(enumerate(text.rstrip("\n").splitlines()))
