"""The events that a run reports: what the agent on a host sends to the controller.

Every event is a frozen dataclass; on the wire it is one JSON object a line, its class under the key `event`. A reader
skips events it does not know, so that an older controller can watch a newer agent. The annotation of a field is what it
may hold (codec.py), MOST how often the event may come in a run. docs/json.md documents each field; `gpuprov --json`
adds `schema` and `host` to each line, so no event has a field of these names.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Callable, Generic, Literal, Optional, TypeVar, Union, get_args

from gpuprov.protocol.codec import FORMER_NAME, Limit, Line, LongText, Name, Text, WrongDataError, dump, load
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.versions import version_numbers
from gpuprov.protocol.words import plain

Level = Literal["info", "warning", "debug"]
Status = Literal["ok", "failed", "skipped"]
# Works, but plan a repair; no new work.
Verdict = Literal["degraded", "unfit"]
# After --rollback-on-failure: verify is green again, it still fails, or the rollback failed.
RolledBack = Literal["", "verified", "not-verified", "failed"]
RebootNeed = Literal["no", "if-in-use", "yes", "by-hand"]
# What programs read with --json. It grows by one whenever a field changes its meaning or goes; new fields do not count.
SCHEMA = 1
_REBOOTS = {"no": "no", "if-in-use": "only if the loaded driver can't be unloaded", "yes": "yes",
            "by-hand": "yes, by hand"}  # fmt: skip


@dataclass(frozen=True)
class Started:
    """The agent runs."""

    version: Name
    command: Name
    pid: int


@dataclass(frozen=True)
class Note:
    """A sentence for the person who watches: `level` is info or warning."""

    message: Text
    level: Level = "info"


@dataclass(frozen=True)
class PlannedChange:
    """One change as the plan foresees it; `diff` is a unified diff where there is one, else empty.

    `diff_in_short`: a few lines to show instead of a long diff.
    `disturbs`: containers or processes on the GPUs may stop by it.
    """

    key: Line
    step: Name
    summary: Line
    diff: LongText = ""
    diff_in_short: Text = ""
    disturbs: bool = False


@dataclass(frozen=True)
class Upgrade:
    """An installed version that a plan replaces. `wanted`: a version, or of a driver's packages maybe a branch.

    `stops`: containers and units that it stops. `reboot`: also `if-in-use`, where the loaded driver must unload, and
    `by-hand`, where gpuprov may not reboot. `way_back`: how a rollback restores `installed`, or why it can't.
    """

    product: Literal["driver", "toolkit"]
    installed: Name
    wanted: Name
    stops: Annotated[tuple[Line, ...], Limit(1_000)] = ()
    reboot: RebootNeed = "no"
    way_back: Text = ""

    @property
    def sentence(self) -> str:
        """The upgrade in one sentence."""
        older = version_numbers(self.wanted) < version_numbers(self.installed)[: self.wanted.count(".") + 1]
        kind = "downgrade" if older else "upgrade"
        stops = ", ".join(self.stops) or "no container"
        what = f"{kind}: {self.product} {self.installed} → {self.wanted}; stops {stops}"
        return f"{what}; reboot: {_REBOOTS[self.reboot]}; way back: {self.way_back}"


@dataclass(frozen=True)
class ChosenDriver:
    """The driver of a host whose specification names no version, and why; `newer`: what the tables say today.

    `gpus`: the models that it is chosen for; empty where the driver of the running kernel decides.
    """

    gpus: Line
    driver: Name
    version: Name
    why: Line
    newer: Line = ""

    @property
    def can_be_named(self) -> bool:
        """Say whether an inventory can name it: it came from a .run file. A host sends it: no template is a version."""
        return bool(self.gpus) and self.driver == "runfile" and re.fullmatch("[0-9.]{3,20}", self.version) is not None


# Written so because it is read at run time (codec.py), which Python 3.9 can't do with `X | None`.
MaybeChosen = Optional[ChosenDriver]


@dataclass(frozen=True)
class Planned:
    """The whole plan, before anything is touched.

    `disturbs`: a change of the plan disturbs containers, or the undo of an earlier run's interrupted change.
    """

    changes: Annotated[tuple[PlannedChange, ...], Limit(2_000)]
    disturbs: bool = False
    upgrades: Annotated[tuple[Upgrade, ...], Limit(10)] = ()
    choice: MaybeChosen = None


@dataclass(frozen=True)
class ChangeStarted:
    """A change begins: number `index` (from 1) of `total`."""

    key: Line
    summary: Line
    index: int
    total: int


@dataclass(frozen=True)
class ChangeProgress:
    """Something worth showing within a change that takes long: a line, and done/total (bytes, say) where known."""

    key: Line
    message: Line
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class ChangeDone:
    """A change is made; `seconds` is how long it took."""

    key: Line
    seconds: float


@dataclass(frozen=True)
class FactsGathered:
    """The host's facts as plain JSON (`gpuprov facts`)."""

    facts: Mapping[Name, Any]


@dataclass(frozen=True)
class CheckDone:
    """One line of the verification: `status` is ok, failed or skipped; `reason` says why where it is not ok.

    `on_host` and `in_container` are what was measured there; `engine` is the container engine that it is about.
    """

    name: Name
    status: Status
    on_host: Line = field(default="", metadata={FORMER_NAME: "host"})
    in_container: Line = field(default="", metadata={FORMER_NAME: "container"})
    reason: Text = ""
    engine: Name = ""


@dataclass(frozen=True)
class CudaSurveyed:
    """Which libcuda programs load, as `gpuprov cuda --json` prints it."""

    survey: Mapping[Name, Any]


@dataclass(frozen=True)
class CauseFound:
    """One cause of the doctor's: `rank` 1 is the first to fix; `rule` is its name in docs/doctor.md.

    `confidence`: certain, likely, possible, or aside for a warning that prevents no container from
    using its GPUs. `follows`: the rule that explains this one, if it is a consequence. `remedy`: what `doctor --fix`
    does about it, nothing where a person must do the next step.
    """

    rank: int
    rule: Name
    area: Name
    what: Text
    evidence: Text
    next_step: Text
    confidence: Name
    follows: Name = ""
    remedy: Line = ""


@dataclass(frozen=True)
class HealthFound:
    """One finding of `health`. `rule`: its name in docs/health.md. `gpu`: its index, "" for what is of the host."""

    verdict: Verdict
    rule: Name
    gpu: Name
    uuid: Name
    what: Text
    evidence: Text
    next_step: Text


@dataclass(frozen=True)
class GpuMeasured:
    """The figures of a GPU that `accept` has measured: bytes a second, MHz, W, °C; docs/health.md names them.

    `gpu`: its index, "" for a command of the site's, which measures the host.
    """

    gpu: Name
    uuid: Name
    model: Name
    figures: Annotated[Mapping[Name, float], Limit(1_000)]


@dataclass(frozen=True)
class Finished:
    """The last event of every run. `exit_code`: errors.ExitCode; `changed`: changes made, or foreseen with --check.

    `left_boot`: the id of the boot that is about to end, where the host reboots now to go on afterwards.
    `rolled_back`: what became of a rollback after a failure; the controller says it.
    """

    exit_code: int
    changed: int = 0
    seconds: float = 0.0
    problems: Annotated[tuple[Problem, ...], Limit(1_000)] = ()
    summary: Line = ""
    # Longer than a name: the MIG layout of 8 GPUs with 7 instances each has 526 characters.
    versions: Annotated[Mapping[Name, Annotated[str, Limit(2_000)]], Limit(100)] = field(default_factory=dict)
    left_boot: Name = ""
    rolled_back: RolledBack = ""


Event = Union[
    Started, Note, Planned, ChangeStarted, ChangeProgress, ChangeDone, FactsGathered, CheckDone, CudaSurveyed,
    CauseFound, HealthFound, GpuMeasured, Finished,
]  # fmt: skip
Sink = Callable[[Event], None]
T = TypeVar("T")

_CLASSES: dict[str, type[Event]] = {cls.__name__: cls for cls in get_args(Event)}
# How often an event may come in a run; the others may come 10,000 times.
MOST: Mapping[type[Any], int] = {
    **dict.fromkeys((Started, Planned, FactsGathered, CudaSurveyed, Finished), 20), ChangeProgress: 1_000_000,
    **dict.fromkeys((CheckDone, GpuMeasured), 1_000), **dict.fromkeys((CauseFound, HealthFound), 2_000),
}  # fmt: skip
_MOST_STRAYS, _LONGEST_STRAY = 20, 400


def to_line(event: Event) -> str:
    """Return the event as one line of JSON, without the line end."""
    return dump(event, event=type(event).__name__)


@dataclass
class Kept(Generic[T]):
    """A sink that passes events on and keeps those of one class."""

    kind: type[T]
    sink: Sink = lambda event: None
    events: list[T] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if isinstance(event, self.kind):
            self.events.append(event)
        self.sink(event)


@dataclass
class EventReader:
    """Reads the lines of one run on one host, which is not trusted.

    `finished`: the last event, once it came. `strays`: the last lines that were no events.
    """

    finished: Finished | None = None
    strays: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=_MOST_STRAYS))
    _seen: collections.Counter[type[Any]] = field(default_factory=collections.Counter)

    def __call__(self, line: str) -> Event | None:
        """Return the event of a line, None for any other line (a login banner, an unknown event).

        Raises GpuprovError for an event that no agent sends, or sends so often: it is the failure of this host.
        """
        try:
            event = from_line(line)
        except WrongDataError as error:
            raise no_agent_sends(str(error)) from None
        if event is None:
            self.strays.append(line[:_LONGEST_STRAY])
            return None
        if isinstance(event, Finished):
            self.finished = event
        self._seen[type(event)] += 1
        most = MOST.get(type(event), 10_000)
        if self._seen[type(event)] > most:
            raise no_agent_sends(f"more than {most} events {type(event).__name__}")
        return event


def no_agent_sends(evidence: str) -> GpuprovError:
    """Return the error for data from a host that is not what an agent sends."""
    step = "do not trust this host before you know why: look at its Python, its shell and its root account"
    return GpuprovError("the host sends what gpuprov's agent never sends", plain(evidence)[:500], step)


def from_line(line: str) -> Event | None:
    """Return the event that a line holds, None for any other. Raises WrongDataError for wrong values."""
    try:
        data = json.loads(line)
    except RecursionError:
        raise WrongDataError("a line is nested too deep") from None
    except ValueError:
        return None
    cls = _CLASSES.get(str(data.get("event", ""))) if isinstance(data, dict) else None
    return None if cls is None else load(cls, data)
