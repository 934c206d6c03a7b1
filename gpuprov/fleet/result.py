"""HostResult: what came of one host, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuprov.errors import ExitCode, Problem
from gpuprov.events import CheckDone, PlannedChange


@dataclass(frozen=True)
class HostResult:
    """What came of one host. `changed` counts the changes made, or foreseen with --check; `seconds` is wall time.

    `begun` is False where the run was stopped before this host's turn.
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
    facts: Mapping[str, Any] | None = None
    begun: bool = True

    @property
    def has_failed(self) -> bool:
        return self.exit_code not in (ExitCode.DONE, ExitCode.REBOOT_NEEDED)


# The worst that happened decides, and something to mend on a host weighs more than a host that is away.
_PRECEDENCE = (ExitCode.USAGE, ExitCode.FAILED, ExitCode.UNREACHABLE, ExitCode.REBOOT_NEEDED)


def overall_exit_code(results: tuple[HostResult, ...]) -> ExitCode:
    """Return the exit code of a run over all hosts; the precedence is 2, 1, 4, 3, 0."""
    codes = {result.exit_code for result in results}
    return next((code for code in _PRECEDENCE if code in codes), ExitCode.DONE)
