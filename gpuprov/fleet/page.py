"""A run as one HTML page: no script, nothing from elsewhere, no word from a host that is not escaped.

This module says what stands on the page (numbers, names, the shapes of drawings); page.html.j2 says how it looks.
"""

from __future__ import annotations

import collections
import math
import pkgutil
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jinja2
from markupsafe import Markup

from gpuprov.agent.result import MIG, HostResult, hosts_by_vulnerability, machines
from gpuprov.agent.site_tables import advisories_table
from gpuprov.fleet.grouping import (
    causes,
    command_of,
    drained,
    hosts_by_version,
    listed,
    mig_instances,
    shortened,
    state_of,
)
from gpuprov.fleet.history import Run, differences
from gpuprov.protocol.advisories import rows_of
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import CheckDone, PlannedChange
from gpuprov.protocol.versions import count_in
from gpuprov.protocol.words import counted, plain

_VERSION_NAMES = ("driver", "kernel", "docker", "os", "gpus")
_MOST_NAMED = 30
_MOST_VERSIONS = 8
_MOST_DETAILED = 60  # so many have a row each, whatever came of them
_MOST_ROWS = 150  # of hosts that are not done; the page stays below 1 MB
_MOST_PLANS = 30
_MOST_BINS = 24


def _template(name: str) -> str | None:
    """Return a template beside this module, which may lie in an archive."""
    content = pkgutil.get_data("gpuprov.fleet", name)
    return None if content is None else content.decode()


def render(run: Run, before: Run | None = None) -> str:
    """Return the page; the same runs give the same bytes. `before` is the run to compare with."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined, finalize=_shown, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"counted": counted, "duration": _duration, "listed": _listed}
    results = run.results
    rows = _rows(results)
    return environment.get_template("page.html.j2").render(
        run=run,
        title=f"gpuprov {run.command}{' --check' if run.check else ''}",
        where=(", ".join(run.inventory) or "this machine") + (f", limited to {run.limit}" if run.limit else ""),
        states=_states(results),
        hosts=counted(len(results), "host"),
        grid=make_grid(results),
        causes=causes(results),
        vulnerabilities=hosts_by_vulnerability(results, rows_of(advisories_table())),
        drains=drained(results),
        state_of=state_of,
        command_of=command_of,
        versions=_versions(results),
        durations=_durations(results),
        gpus=_gpus(results),
        plans=_plans(results) if run.check else (),
        before=before,
        changes=differences(before, run) if before else (),
        rows=rows,
        others=_others(results, rows),
    )


def _shown(value: object) -> object:
    """Return what a template may show of a value: no control characters and not without end; Jinja escapes it."""
    return value if isinstance(value, (Markup, int, float)) else shortened(plain(value))


def _listed(names: Iterable[str], most: int = _MOST_NAMED) -> str:
    return listed(names, most)


def _duration(seconds: float) -> str:
    """Return `4.2 s`, `3 min 20 s`."""
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


@dataclass(frozen=True)
class State:
    """How many hosts ended in a word; `x` and `width` are its part of the bar, in percent."""

    word: str
    kind: str
    count: int
    x: float
    width: float


def _states(results: Sequence[HostResult]) -> tuple[State, ...]:
    counts = collections.Counter(result.word for result in results)
    made: list[State] = []
    x = 0.0
    for word, kind in STATES.items():
        if counts[word]:
            width = 100 * counts[word] / len(results)
            made.append(State(word, kind, counts[word], round(x, 3), round(width, 3)))
            x += width
    return tuple(made)


# -- versions, GPUs, durations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """One value and the hosts that have it; `width` is their part of all hosts, in percent."""

    value: str
    hosts: tuple[str, ...]
    width: float
    is_usual: bool = False


def _versions(results: Sequence[HostResult]) -> tuple[tuple[str, tuple[Bar, ...], int], ...]:
    """Return (name, bars, how many versions have no bar) of all that differs, or could."""
    reporting = [result for result in machines(results) if result.versions]
    names = [name for name in _VERSION_NAMES if any(result.versions.get(name) for result in reporting)]
    found = []
    for name in names:
        bars = [
            Bar(value, hosts, round(100 * len(hosts) / len(reporting), 2), number == 0)
            for number, (value, hosts) in enumerate(hosts_by_version(name, reporting))
        ]
        found.append((name, tuple(bars[:_MOST_VERSIONS]), len(bars[_MOST_VERSIONS:])))
    return tuple(found)


@dataclass(frozen=True)
class GpuLayout:
    """Hosts with the same GPUs: `gpus` holds, for each, its MIG instances as (profile, x, width) of its drawing."""

    count: str
    gpus: tuple[tuple[tuple[str, float, float], ...], ...]
    mig: str
    hosts: tuple[str, ...]


_MOST_DRAWN = 16
_SLICES = 7  # of a GPU, as MIG divides it: 1g is one of them


def _gpus(results: Sequence[HostResult]) -> tuple[GpuLayout, ...]:
    hosts: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for result in machines(results):
        if result.versions.get("gpus"):
            hosts[result.versions["gpus"], result.versions.get(MIG, "")].append(result.host)
    found = []
    for (count, mig), names in sorted(hosts.items(), key=lambda item: -len(item[1])):
        instances = mig_instances(mig)
        number = min(count_in(count) or 0, _MOST_DRAWN)
        gpus = tuple(_slices(instances.get(index, ())) for index in range(number))
        found.append(GpuLayout(count, gpus, mig, tuple(names)))
    return tuple(found[:_MOST_VERSIONS])


def _slices(profiles: Sequence[str]) -> tuple[tuple[str, float, float], ...]:
    """Return how MIG instances fill a GPU that is 28 units wide: `3g.40gb` takes three sevenths."""
    found = []
    x = 0.0
    for profile in profiles[:_SLICES]:
        digits = profile.partition("g")[0]
        number = count_in(digits)
        width = 4.0 * min(1 if number is None else number, _SLICES)
        found.append((profile, x, round(width - 0.8, 1)))
        x += width
    return tuple(found)


@dataclass(frozen=True)
class Durations:
    """How long hosts took: a bar for each of few hosts, a histogram of many; `bins` are (label, count, height)."""

    few: tuple[tuple[str, float, float], ...]
    bins: tuple[tuple[str, int, float], ...]
    shortest: float
    median: float
    longest: float
    slowest: str


def _durations(results: Sequence[HostResult]) -> Durations | None:
    began = [result for result in results if result.begun]
    if not began:
        return None
    slowest = max(began, key=lambda result: result.seconds)
    seconds = [result.seconds for result in began]
    shortest, longest = min(seconds), slowest.seconds
    few: tuple[tuple[str, float, float], ...] = ()
    bins: tuple[tuple[str, int, float], ...] = ()
    if len(began) <= FEW_HOSTS:
        few = tuple((one.host, one.seconds, round(100 * one.seconds / (longest or 1), 2)) for one in began)
    else:
        bins = _bins(seconds, shortest, longest)
    return Durations(few, bins, shortest, statistics.median(seconds), longest, slowest.host)


def _bins(seconds: Sequence[float], shortest: float, longest: float) -> tuple[tuple[str, int, float], ...]:
    number = min(_MOST_BINS, max(6, math.isqrt(len(seconds))))
    width = (longest - shortest) / number or 1.0
    counts = [0] * number
    for value in seconds:
        counts[min(int((value - shortest) / width), number - 1)] += 1
    most = max(counts)
    return tuple(
        (f"{_duration(shortest + width * index)} to {_duration(shortest + width * (index + 1))}", count,
         round(100 * count / most, 2))
        for index, count in enumerate(counts)
    )  # fmt: skip


# -- plans and hosts -------------------------------------------------------------------------------------------------


def _plans(results: Sequence[HostResult]) -> tuple[tuple[tuple[PlannedChange, ...], tuple[str, ...]], ...]:
    """Return each plan with the hosts that it is for, those of most hosts first."""
    hosts: dict[tuple[tuple[str, str], ...], tuple[tuple[PlannedChange, ...], list[str]]] = {}
    for result in results:
        key = tuple((change.step, change.summary) for change in result.plan)
        if not result.has_failed:
            hosts.setdefault(key, (result.plan, []))[1].append(result.host)
    ordered = sorted(hosts.values(), key=lambda item: -len(item[1]))
    return tuple((plan, tuple(names)) for plan, names in ordered[:_MOST_PLANS])


@dataclass(frozen=True)
class Row:
    """One host with all that came of it."""

    result: HostResult
    kind: str
    checks: tuple[tuple[CheckDone, str], ...]
    steps: tuple[tuple[str, str], ...]

    @property
    def has_more(self) -> bool:
        result = self.result
        return bool(self.checks or self.steps or result.versions or result.problems)


def _rows(results: Sequence[HostResult]) -> tuple[Row, ...]:
    """Return the hosts that have a row: all of few, of many those that are not done."""
    chosen = [result for result in results if len(results) <= _MOST_DETAILED or result.exit_code != ExitCode.DONE]
    return tuple(
        Row(
            result,
            STATES[result.word],
            tuple((check, CHECK_STATES.get(check.status, "bad")) for check in result.checks),
            tuple((step, _step_counts(result, step)) for step in steps_of(result)),
        )
        for result in chosen[:_MOST_ROWS]
    )


def _others(results: Sequence[HostResult], rows: Sequence[Row]) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Return (word, kind, hosts) of those that have no row."""
    with_row = {id(row.result) for row in rows}
    hosts: dict[str, list[str]] = collections.defaultdict(list)
    for result in results:
        if id(result) not in with_row:
            hosts[result.word].append(result.host)
    return tuple((word, STATES[word], tuple(names)) for word, names in hosts.items())


def _step_counts(result: HostResult, step: str) -> str:
    """Return how far a host came with a step: changes made of those planned, and how long they took."""
    planned = sum(change.step == step for change in result.plan)
    made = [change for change in result.made if change.step == step]
    ended = [change.seconds for change in made if change.seconds is not None]
    time = f" in {_duration(sum(ended))}" if ended else ""
    return f"{len(ended)} of {max(planned, len(made))}{time}"


# Colour never stands alone: each state has its word, and in the grid its width.
STATES = {"done": "good", "reboot needed": "warn", "failed": "bad", "refused": "bad", "unreachable": "bad",
           "not run": "none", "stopped": "warn"}  # fmt: skip
CHECK_STATES = {"ok": "good", "failed": "bad", "skipped": "warn"}
FEW_HOSTS = 12  # so many have their names, and a bar for the time of each
_SOME_HOSTS = 150  # more have smaller squares
_SQUARE = 10  # units of the drawings


@dataclass(frozen=True)
class Column:
    """One host of the grid: `paths` are (kind, path data) of its squares, from the top."""

    host: str
    sentence: str
    paths: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Grid:
    """One column for each host and one square for each of `names`; `size` is a class of the page."""

    names: tuple[str, ...]
    size: str
    height: int
    racks: tuple[tuple[str, tuple[Column, ...]], ...]


def make_grid(results: Sequence[HostResult]) -> Grid:
    """Return the grid of a run."""
    checks = dict.fromkeys(check.name for result in results for check in result.checks)
    steps = dict.fromkeys(step for result in results for step in steps_of(result))
    names = ("result", *checks, *steps)
    size = "few" if len(results) <= FEW_HOSTS else "some" if len(results) <= _SOME_HOSTS else "many"
    by_rack: dict[str, list[Column]] = {}
    racks = _racks([result.host for result in results])
    for result in results:
        kinds = [STATES[result.word], *(_check_state(result, name) for name in checks),
                 *(_step_state(result, step) for step in steps)]  # fmt: skip
        by_rack.setdefault(racks(result.host), []).append(Column(result.host, _sentence(result), _paths(kinds)))
    made = tuple((name, tuple(columns)) for name, columns in by_rack.items())
    return Grid(names, size, _SQUARE * len(names), made)


def _racks(hosts: Sequence[str]) -> Callable[[str], str]:
    """Return what names a host's rack: `r12-` of r12-gpu3; nothing for all where names do not tell of racks."""

    def rack(host: str) -> str:
        label, dash, _ = host.partition("-")
        return label if dash and any(map(str.isdecimal, label)) else ""

    sizes = collections.Counter(map(rack, hosts))
    named_by_rack = len(sizes) > 1 and "" not in sizes and len(sizes) * 3 <= len(hosts)
    return rack if named_by_rack else lambda host: ""


def _paths(kinds: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return each kind's squares as one path of vertical strokes, which the page's style dashes into squares."""
    paths: dict[str, str] = {}
    begin = 0
    for end in range(1, len(kinds) + 1):
        if end == len(kinds) or kinds[end] != kinds[begin]:
            length = _SQUARE * (end - begin) - 1
            paths[kinds[begin]] = f"{paths.get(kinds[begin], '')}M5 {_SQUARE * begin}v{length}"
            begin = end
    return tuple(paths.items())


def _sentence(result: HostResult) -> str:
    reason = result.reason if result.exit_code != ExitCode.DONE else ""
    return f"{result.word}: {reason}" if reason else result.word


def _check_state(result: HostResult, name: str) -> str:
    found = next((check.status for check in result.checks if check.name == name), None)
    return "none" if found is None else CHECK_STATES.get(found, "bad")


def _step_state(result: HostResult, step: str) -> str:
    made = [change for change in result.made if change.step == step]
    if any(change.seconds is None for change in made):
        return "bad"
    planned = any(change.step == step for change in result.plan)
    return "good" if made else "warn" if planned else "none"


def steps_of(result: HostResult) -> dict[str, None]:
    """Return the steps that were planned or begun on a host, in their order."""
    return dict.fromkeys([change.step for change in result.plan] + [made.step for made in result.made])
