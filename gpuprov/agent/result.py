"""The result of one host, as a value, and the one place that makes it of the events of a run. Pure."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Optional

from gpuprov.protocol.advisories import DRIVER, TOOLKIT, TOOLKIT_PACKAGE, Advisory, Vulnerabilities, vulnerabilities
from gpuprov.protocol.errors import ExitCode, Problem, worst
from gpuprov.protocol.events import (
    ChangeDone,
    ChangeStarted,
    CheckDone,
    CudaSurveyed,
    Event,
    FactsGathered,
    Finished,
    Note,
    Planned,
    PlannedChange,
)

MIG = "mig"
HostSink = Callable[[str, Event], None]
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
        return check_text(failed) if failed else self.summary


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


def check_text(check: CheckDone) -> str:
    """Return a check with its reason as text."""
    return f"{check.name}: {check.reason}" if check.reason else check.name


def overall_exit_code(results: Sequence[HostResult], ended_by: ExitCode | None = None) -> ExitCode:
    """Return the exit code of a run over all hosts; `ended_by`: the code of the signal that ended it."""
    return worst((*(result.exit_code for result in results), ended_by or ExitCode.DONE))


class Recorder:
    """Passes a host's events on and keeps what the result needs of them."""

    def __init__(self, host: str = "", sink: HostSink = lambda host, event: None) -> None:
        self._host = host
        self._sink = sink
        self._finished: Finished | None = None
        self._checks: list[CheckDone] = []
        self._made: dict[str, MadeChange] = {}
        self.planned: Planned | None = None
        self.facts: Mapping[str, Any] | None = None
        self.survey: Mapping[str, Any] | None = None
        self.warnings: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished):
            self._finished = event
        elif isinstance(event, CheckDone):
            self._checks.append(event)
        elif isinstance(event, Planned):
            self.planned = event
        elif isinstance(event, ChangeStarted):
            self._made[event.key] = MadeChange(event.key, self._step(event.key), event.summary)
        elif isinstance(event, ChangeDone):
            begun = self._made.get(event.key) or MadeChange(event.key, self._step(event.key), event.key)
            self._made[event.key] = replace(begun, seconds=event.seconds)
        elif isinstance(event, FactsGathered):
            self.facts = event.facts
        elif isinstance(event, CudaSurveyed):
            self.survey = event.survey
        elif isinstance(event, Note) and event.level == "warning":
            self.warnings.append(event.message)
        self._sink(self._host, event)

    def result(self, seconds: float = 0.0, again: str = "run the same command again") -> HostResult:
        """Return the result of the host, with the duration measured here."""
        no_end = Problem("the run ended without a result", "", again)
        last = self._finished or Finished(int(ExitCode.FAILED), problems=(no_end,))
        return HostResult(
            host=self._host,
            exit_code=_exit_code(last.exit_code),
            changed=last.changed,
            seconds=round(seconds, 1),
            problems=last.problems,
            summary=last.summary,
            versions=last.versions or (versions_of_facts(self.facts) if self.facts else {}),
            checks=tuple(self._checks),
            plan=self.planned.changes if self.planned else (),
            made=tuple(self._made.values()),
            facts=self.facts,
        )

    def _step(self, key: str) -> str:
        planned = self.planned.changes if self.planned else ()
        return next((change.step for change in planned if change.key == key), "")


# A host ends with these (docs/json.md); the others are a whole run's, and would be its code before all others.
_OF_A_HOST = (
    ExitCode.DONE, ExitCode.FAILED, ExitCode.USAGE, ExitCode.REBOOT_NEEDED, ExitCode.UNREACHABLE, ExitCode.INTERRUPTED,
)  # fmt: skip


def _exit_code(number: int) -> ExitCode:
    return ExitCode(number) if number in _OF_A_HOST else ExitCode.FAILED


def versions_of_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions in a host's facts, under a run's names; facts come from hosts and may have any form."""
    from gpuprov.facts.gpus import mig_layout  # only a run of `facts` has them

    places = {
        "os": ("os", "name"), "kernel": ("kernel", "release"), "driver": ("driver", "library_version"),
        "docker": ("docker", "version"), "gpus": ("gpus",), "toolkit": ("packages", "installed", TOOLKIT_PACKAGE),
    }  # fmt: skip
    found = {name: fact(facts, path) for name, path in places.items()}
    reported = facts.get("mig")
    gpus = [
        gpu
        for gpu in (reported if isinstance(reported, (list, tuple)) else ())
        if isinstance(gpu, Mapping) and isinstance(gpu.get("instances"), (list, tuple))
    ]
    mig = mig_layout((str(gpu.get("index")), [str(name) for name in gpu["instances"]]) for gpu in gpus)
    return {**found, MIG: mig} if mig else found


def fact(facts: Mapping[str, Any], path: tuple[str, ...]) -> str:
    """Return a fact as text, for a list its length; empty if it is missing."""
    value: Any = facts
    for key in path:
        value = value.get(key, "") if isinstance(value, Mapping) else ""
    return str(len(value)) if isinstance(value, (list, tuple)) else str(value or "")


def hosts_by_vulnerability(
    results: Sequence[HostResult], known: Sequence[Advisory]
) -> tuple[tuple[Vulnerabilities, tuple[str, ...]], ...]:
    """Return the known security holes of the hosts' drivers and toolkits, with the hosts, the worst first."""
    hosts: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for result in machines(results):
        for product, name in ((DRIVER, "driver"), (TOOLKIT, "toolkit")):
            hosts[product, str(result.versions.get(name, ""))].append(result.host)
    found = ((vulnerabilities(product, version, known), tuple(names)) for (product, version), names in hosts.items())
    rows = ((one, names) for one, names in found if one is not None)
    return tuple(sorted(rows, key=lambda row: (-row[0].score, row[0].product, row[0].version)))
