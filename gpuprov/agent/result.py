"""The result of one host, as a value made of the events of a run, and results as metrics. Pure."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Optional, Union

from gpuprov.protocol import events
from gpuprov.protocol.advisories import DRIVER, TOOLKIT, Advisory, Vulnerabilities, vulnerabilities
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import ExitCode, Problem, worst
from gpuprov.protocol.events import CheckDone, Event, PlannedChange
from gpuprov.protocol.versions import count_in

MIG = "mig"
HostSink = Callable[[str, Event], None]
# Written so because they are read at run time (protocol/codec.py), which Python 3.9 can't do with `X | None`.
_Seconds = Optional[float]
_Facts = Optional[Mapping[str, Any]]
DrainState = Literal["foreseen", "failed", "drained", "undrained"]
# A host ends with these codes (docs/json.md); the others are a whole run's, and would be its code before all others.
_WORDS = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed",
    ExitCode.USAGE: "refused",
    ExitCode.REBOOT_NEEDED: "reboot needed",
    ExitCode.UNREACHABLE: "unreachable",
    ExitCode.INTERRUPTED: "stopped",
    ExitCode.DEGRADED: "degraded",
    ExitCode.UNFIT: "unfit",
}
_VERSIONS = ("os", "kernel", "driver", "toolkit", "docker")
MADE, PENDING = ("host_changes", "Changes made by the run"), ("host_changes_pending", "Changes foreseen by the run")
_Samples = Iterable[tuple[Mapping[str, str], Union[float, int, None]]]
# The format escapes only these in a label's value.
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


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
    rolled_back: events.RolledBack = ""
    choice: events.MaybeChosen = None
    health: tuple[events.HealthFound, ...] = ()
    measured: tuple[events.GpuMeasured, ...] = ()

    @property
    def has_failed(self) -> bool:
        return self.exit_code not in (ExitCode.DONE, ExitCode.DEGRADED, ExitCode.REBOOT_NEEDED)

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


def machines(results: Sequence[HostResult]) -> tuple[HostResult, ...]:
    """Return the results without duplicates of machines with several names."""
    return tuple(result for result in results if not result.same_as)


def check_text(check: CheckDone) -> str:
    """Return a check with its reason as text."""
    return f"{check.name}: {check.reason}" if check.reason else check.name


def overall_exit_code(results: Sequence[HostResult], ended_by: ExitCode | None = None) -> ExitCode:
    """Return the exit code of a run over all hosts; `ended_by`: the code of the signal that ended it."""
    return worst((*(result.exit_code for result in results), ended_by or ExitCode.DONE))


_KEPT = (events.Finished, CheckDone, events.HealthFound, events.GpuMeasured)


@dataclass
class Recorder:
    """Passes a host's events on and keeps what the result needs of them."""

    host: str = ""
    sink: HostSink = lambda host, event: None
    planned: events.Planned | None = None
    facts: Mapping[str, Any] | None = None
    survey: Mapping[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    _made: dict[str, MadeChange] = field(default_factory=dict)
    # Events of these types, all that came.
    _kept: dict[type[Event], list[Any]] = field(default_factory=lambda: {kind: [] for kind in _KEPT})

    def __call__(self, event: Event) -> None:
        if isinstance(event, _KEPT):
            self._kept[type(event)].append(event)
        elif isinstance(event, events.Started) and event.command == "verify":
            # After a rollback, what the host is like now.
            self._kept[CheckDone].clear()
        elif isinstance(event, events.Planned):
            self.planned = event
        elif isinstance(event, events.ChangeStarted):
            self._made[event.key] = MadeChange(event.key, self._step(event.key), event.summary)
        elif isinstance(event, events.ChangeDone):
            begun = self._made.get(event.key) or MadeChange(event.key, self._step(event.key), event.key)
            self._made[event.key] = replace(begun, seconds=event.seconds)
        elif isinstance(event, events.FactsGathered):
            self.facts = event.facts
        elif isinstance(event, events.CudaSurveyed):
            self.survey = event.survey
        elif isinstance(event, events.Note) and event.level == "warning":
            self.warnings.append(event.message)
        self.sink(self.host, event)

    def result(self, seconds: float = 0.0, again: str = "run the same command again") -> HostResult:
        """Return the result of the host, with the duration measured here."""
        no_end = Problem("the run ended without a result", "", again)
        nothing = events.Finished(int(ExitCode.FAILED), problems=(no_end,))
        last: events.Finished = (self._kept[events.Finished] or [nothing])[-1]
        return HostResult(
            host=self.host,
            exit_code=ExitCode(last.exit_code) if last.exit_code in _WORDS else ExitCode.FAILED,
            changed=last.changed,
            seconds=round(seconds, 1),
            problems=last.problems,
            summary=last.summary,
            versions=last.versions,
            checks=tuple(self._kept[CheckDone]),
            plan=self.planned.changes if self.planned else (),
            made=tuple(self._made.values()),
            facts=self.facts,
            rolled_back=last.rolled_back,
            health=tuple(self._kept[events.HealthFound]),
            measured=tuple(self._kept[events.GpuMeasured]),
            choice=self.planned.choice if self.planned else None,
        )

    def _step(self, key: str) -> str:
        planned = self.planned.changes if self.planned else ()
        return next((change.step for change in planned if change.key == key), "")


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


def metrics_text(
    command: str, results: Sequence[HostResult], known: Sequence[Advisory], *, ended: float, seconds: float,
    changes: tuple[str, str] | None,
) -> str:  # fmt: skip
    """Return the metrics of a run in Prometheus's text format.

    `ended`: seconds since the epoch. `known`: the advisories that count. `changes`: MADE, PENDING or nothing.
    """
    run = {"command": command}
    hosts = [({"host": one.host}, one) for one in results]
    once = [({"host": one.host}, one.versions) for one in machines(results)]
    gauges: list[tuple[str, str, _Samples]] = [
        ("run_timestamp_seconds", "End of the run, seconds since the epoch", [(run, ended)]),
        ("run_duration_seconds", "Wall time of the run", [(run, seconds)]),
        ("host_success", "1 if the run went well on this host",
         [(host, one.exit_code == ExitCode.DONE) for host, one in hosts]),
        ("host_exit_code", "The exit code of gpuprov for this host", [(host, one.exit_code) for host, one in hosts]),
        *([(*changes, [(host, one.changed) for host, one in hosts])] if changes else []),
        ("health_finding", "A finding of health: 1 degraded, 2 unfit",
         [({**host, "gpu": found.gpu, "uuid": found.uuid, "rule": found.rule}, 1 + (found.verdict == "unfit"))
          for host, one in hosts for found in one.health]),
        ("accept_figure", "A figure of a GPU that accept has measured: bytes/s, MHz, W, C",
         [({**host, "gpu": gpu.gpu, "uuid": gpu.uuid, "figure": name}, figure)
          for host, one in hosts for gpu in one.measured for name, figure in gpu.figures.items()]),
        ("check_success", "1 if this check of verify or health went well; skipped ones are missing",
         [({**host, "check": check.name}, check.status == "ok")
          for host, one in hosts for check in one.checks if check.status != "skipped"]),
        ("version_info", "What the host runs",
         [({**host, **{name: str(found.get(name, "")) for name in _VERSIONS}}, 1) for host, found in once if found]),
        ("gpus", "GPUs of the host", [(host, count_in(found.get("gpus", ""))) for host, found in once]),
        ("known_hole_score", "Worst CVSS score of the known holes in what the host runs",
         [({"host": host, "product": one.product, "version": one.version, "fixed_in": one.fixed_in}, one.score)
          for one, names in hosts_by_vulnerability(results, known) for host in names]),
    ]  # fmt: skip
    return "".join(_gauge(*one) for one in gauges)


def _gauge(name: str, text: str, samples: _Samples) -> str:
    # A host may send a name twice: the last value counts, for two lines with the same labels make the file invalid.
    values = {
        ",".join(f'{label}="{one.translate(_ESCAPED)}"' for label, one in sorted(labels.items())): float(value)
        for labels, value in samples
        if value is not None
    }
    lines = (f"gpuprov_{name}{{{labels}}} {value!r}\n" for labels, value in values.items())
    return f"# HELP gpuprov_{name} {text}\n# TYPE gpuprov_{name} gauge\n{''.join(lines)}"
