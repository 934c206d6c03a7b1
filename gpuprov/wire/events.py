"""The events that a run reports: what the agent on a host sends to the controller.

Every event is a frozen dataclass; on the wire it is one JSON object a line, its class under the key `event`. A reader
skips events it does not know, so that an older controller can watch a newer agent. docs/json.md documents each field;
`gpuprov --json` adds `schema` and `host` to each line, so no event has a field of these names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Callable, Union, get_args

from gpuprov.wire.errors import Problem

# What programs read with --json. It grows by one whenever a field changes its meaning or goes; new fields do not count.
SCHEMA = 1


@dataclass(frozen=True)
class Started:
    """The agent runs."""

    version: str
    command: str
    pid: int


@dataclass(frozen=True)
class Note:
    """A sentence for the person who watches: `level` is info or warning."""

    message: str
    level: str = "info"


@dataclass(frozen=True)
class PlannedChange:
    """One change as the plan foresees it; `diff` is a unified diff where there is one, else empty.

    `diff_in_short`: a few lines to show instead of a long diff.
    """

    key: str
    step: str
    summary: str
    diff: str = ""
    diff_in_short: str = ""


@dataclass(frozen=True)
class Planned:
    """The whole plan, before anything is touched."""

    changes: tuple[PlannedChange, ...]


@dataclass(frozen=True)
class ChangeStarted:
    """A change begins: number `index` (from 1) of `total`."""

    key: str
    summary: str
    index: int
    total: int


@dataclass(frozen=True)
class ChangeProgress:
    """Something worth showing within a change that takes long: a line, and done/total (bytes, say) where known."""

    key: str
    message: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class ChangeDone:
    """A change is made; `seconds` is how long it took."""

    key: str
    seconds: float


@dataclass(frozen=True)
class FactsGathered:
    """The host's facts as plain JSON (`gpuprov facts`)."""

    facts: Mapping[str, Any]


@dataclass(frozen=True)
class CheckDone:
    """One line of the verification: `status` is ok, failed or skipped; `reason` says why where it is not ok.

    `on_host` and `in_container` are what was measured there; `engine` is the container engine that it is about.
    """

    name: str
    status: str
    on_host: str = ""
    in_container: str = ""
    reason: str = ""
    engine: str = ""


@dataclass(frozen=True)
class CudaSurveyed:
    """Which libcuda programs load, as `gpuprov cuda --json` prints it."""

    survey: Mapping[str, Any]


@dataclass(frozen=True)
class CauseFound:
    """One cause of the doctor's: `rank` 1 is the first to fix; `rule` is its name in docs/doctor.md.

    `confidence`: certain, likely, possible, or aside for a warning that prevents no container from
    using its GPUs. `follows`: the rule that explains this one, if it is a consequence. `remedy`: what `doctor --fix`
    does about it, nothing where a person must do the next step.
    """

    rank: int
    rule: str
    area: str
    what: str
    evidence: str
    next_step: str
    confidence: str
    follows: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Finished:
    """The last event of every run. `exit_code`: errors.ExitCode; `changed`: changes made, or foreseen with --check.

    `left_boot`: the id of the boot that is about to end, where the host reboots now to go on afterwards.
    """

    exit_code: int
    changed: int = 0
    seconds: float = 0.0
    problems: tuple[Problem, ...] = ()
    summary: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    left_boot: str = ""


Event = Union[
    Started, Note, Planned, ChangeStarted, ChangeProgress, ChangeDone, FactsGathered, CheckDone, CudaSurveyed,
    CauseFound, Finished,
]  # fmt: skip
Sink = Callable[[Event], None]

_CLASSES: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Event)}
_NESTED: dict[str, type[Any]] = {"changes": PlannedChange, "problems": Problem}


def to_line(event: Event) -> str:
    """Return the event as one line of JSON, without the line end."""
    return json.dumps({"event": type(event).__name__, **asdict(event)}, separators=(",", ":"), ensure_ascii=True)


def from_line(line: str) -> Event | None:
    """Return the event that a line holds, or None for anything else (a login banner, an unknown event).

    What comes from a host is not trusted: wrong types make the line "anything else".
    """
    try:
        data = json.loads(line, parse_constant=finite, parse_float=finite)
    except (ValueError, RecursionError):
        return None
    cls = _CLASSES.get(str(data.pop("event", ""))) if isinstance(data, dict) else None
    if cls is None:
        return None
    known = {f.name for f in fields(cls)}
    try:
        values = {key: _decode(key, value) for key, value in data.items() if key in known}
        event: Event = cls(**values)
    except TypeError:
        return None
    return event if _well_typed(event) else None


def finite(text: str) -> float:
    """Return a JSON number. Raises ValueError for NaN, Infinity and 1e999: no report can count with these."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number that JSON has")
    return number


def _decode(key: str, value: Any) -> Any:
    nested = _NESTED.get(key)
    if nested is None:
        return value
    return tuple(nested(**item) for item in value)


_TYPES: dict[str, tuple[type[Any], ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
}


_TOO_LARGE = 1 << 62


def _well_typed(value: Any) -> bool:
    """Say whether every field of the dataclass holds what its annotation names."""
    for f in fields(value):
        item = getattr(value, f.name)
        expected = _TYPES.get(str(f.type))
        if expected is not None and not isinstance(item, expected):
            return False
        # Beyond these, arithmetic on times and counts fails.
        if isinstance(item, (int, float)) and abs(item) >= _TOO_LARGE:
            return False
        # In Python a bool is an int; on the wire it is not.
        if isinstance(item, bool) and bool not in (expected or (bool,)):
            return False
        if str(f.type).startswith("Mapping") and not isinstance(item, Mapping):
            return False
        if isinstance(item, tuple) and not all(_well_typed(part) for part in item):
            return False
    return True
