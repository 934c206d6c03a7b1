"""Recorder: relay a host's events and build its result from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpuprov.fleet.result import HostResult, MadeChange
from gpuprov.fleet.versions import versions_of_facts
from gpuprov.protocol.errors import ExitCode, Problem
from gpuprov.protocol.events import ChangeDone, ChangeStarted, CheckDone, Event, FactsGathered, Finished, Planned

HostSink = Callable[[str, Event], None]


class Recorder:
    """Passes a host's events on and keeps what the result needs of them."""

    def __init__(self, host: str, sink: HostSink) -> None:
        self._host = host
        self._sink = sink
        self._finished: Finished | None = None
        self._checks: list[CheckDone] = []
        self._made: dict[str, MadeChange] = {}
        self._planned: Planned | None = None
        self._facts: FactsGathered | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished):
            self._finished = event
        elif isinstance(event, CheckDone):
            self._checks.append(event)
        elif isinstance(event, Planned):
            self._planned = event
        elif isinstance(event, ChangeStarted):
            self._made[event.key] = MadeChange(event.key, self._step(event.key), event.summary)
        elif isinstance(event, ChangeDone) and event.key in self._made:
            self._made[event.key] = replace(self._made[event.key], seconds=event.seconds)
        elif isinstance(event, FactsGathered):
            self._facts = event
        self._sink(self._host, event)

    def result(self, seconds: float) -> HostResult:
        """Return the result of the host, with the duration measured here."""
        last = self._finished or Finished(
            int(ExitCode.FAILED),
            problems=(Problem("the run ended without a result", "", "run the same command again"),),
        )
        return HostResult(
            host=self._host,
            exit_code=_exit_code(last.exit_code),
            changed=last.changed,
            seconds=round(seconds, 1),
            problems=last.problems,
            summary=last.summary,
            versions=last.versions or (versions_of_facts(self._facts.facts) if self._facts else {}),
            checks=tuple(self._checks),
            plan=self._planned.changes if self._planned else (),
            made=tuple(self._made.values()),
            facts=self._facts.facts if self._facts else None,
        )

    def _step(self, key: str) -> str:
        planned = self._planned.changes if self._planned else ()
        return next((change.step for change in planned if change.key == key), "")


# A host ends with these (docs/json.md); the others are a whole run's, and would be its code before all others.
_OF_A_HOST = (
    ExitCode.DONE, ExitCode.FAILED, ExitCode.USAGE, ExitCode.REBOOT_NEEDED, ExitCode.UNREACHABLE, ExitCode.INTERRUPTED,
)  # fmt: skip


def _exit_code(number: int) -> ExitCode:
    return ExitCode(number) if number in _OF_A_HOST else ExitCode.FAILED
