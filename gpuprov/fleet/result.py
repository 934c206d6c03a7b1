"""HostResult: the result of one host, as a value; and its texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Optional

from gpuprov.protocol.errors import ExitCode, Problem, worst
from gpuprov.protocol.events import CheckDone, PlannedChange

# Written so because they are read at run time (protocol/codec.py), which Python 3.9 can't do with `X | None`.
_Seconds = Optional[float]
_Facts = Optional[Mapping[str, Any]]
DrainState = Literal["foreseen", "failed", "drained", "undrained"]


@dataclass(frozen=True)
class MadeChange:
    """A change and its duration; `seconds` is None if it did not finish."""

    key: str
    step: str
    summary: str
    seconds: _Seconds = None


@dataclass(frozen=True)
class Drain:
    """Whether a host was drained for the run (`--before-host`), and its state.

    `state`: `foreseen` with --check; `failed`: the command before the change failed, the host may be drained in part;
    `drained`: it still is; `undrained`: it has work again. `before` and `after` are the commands for this host, `since`
    is when it came to that state, `seconds` how long the drain lasted, at the end of the run where it goes on.
    """

    state: DrainState
    before: str
    after: str = ""
    since: str = ""
    seconds: float = 0.0

    @property
    def lasts(self) -> bool:
        """Say whether the host may still be drained, fully or partly."""
        return self.state in ("drained", "failed")


_Drain = Optional[Drain]


@dataclass(frozen=True)
class HostResult:
    """The result of one host. `changed` counts the changes made, or predicted with --check; `seconds` is wall time.

    `begun` is False if the run stopped before this host. `same_as`: another name of the same machine, which also has a
    result: values of machines are counted once.
    """

    host: str
    exit_code: ExitCode
    changed: int = 0
    seconds: float = 0.0
    problems: tuple[Problem, ...] = ()
    summary: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[CheckDone, ...] = ()
    plan: tuple[PlannedChange, ...] = ()
    made: tuple[MadeChange, ...] = ()
    facts: _Facts = None
    begun: bool = True
    same_as: str = ""
    drain: _Drain = None

    @property
    def has_failed(self) -> bool:
        return self.exit_code not in (ExitCode.DONE, ExitCode.REBOOT_NEEDED)

    @property
    def word(self) -> str:
        return _WORDS.get(self.exit_code, "failed") if self.begun else "not run"

    @property
    def reason(self) -> str:
        """The most informative sentence about the result."""
        if self.problems:
            return self.problems[0].what
        failed = next((check for check in self.checks if check.status == "failed"), None)
        return told(failed) if failed else self.summary


_WORDS = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed",
    ExitCode.USAGE: "refused",
    ExitCode.REBOOT_NEEDED: "reboot needed",
    ExitCode.UNREACHABLE: "unreachable",
    ExitCode.INTERRUPTED: "stopped",
}


def machines(results: Sequence[HostResult]) -> tuple[HostResult, ...]:
    """Return the results without duplicates of machines with several names."""
    return tuple(result for result in results if not result.same_as)


def told(check: CheckDone) -> str:
    """Return a check with its reason as text."""
    return f"{check.name}: {check.reason}" if check.reason else check.name


def overall_exit_code(results: Sequence[HostResult], ended_by: ExitCode | None = None) -> ExitCode:
    """Return the exit code of a run over all hosts; `ended_by`: the code of the signal that ended it."""
    return worst((*(result.exit_code for result in results), ended_by or ExitCode.DONE))
