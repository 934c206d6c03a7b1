"""A run as one HTML page: no script, nothing from elsewhere, no word from a host that is not escaped.

This module says what stands on the page (numbers, names, the shapes of drawings); page.html.j2 says how it looks.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import pkgutil
import re
import statistics
from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from gpuprov.agent.result import MIG, HostResult, hosts_by_vulnerability, machines
from gpuprov.agent.site_tables import user_table
from gpuprov.fleet.grouping import DRAIN_STATES, causes, command_of, drained, listed, mig_instances, shortened, spreads
from gpuprov.fleet.history import Run, differences, driver_choices
from gpuprov.protocol.advisories import rows_of
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import PlannedChange
from gpuprov.protocol.tables import ADVISORIES
from gpuprov.protocol.versions import count_in
from gpuprov.protocol.words import counted, plain

_VERSION_NAMES = ("driver", "kernel", "docker", "os", "gpus")
_MOST_NAMED = 30
_MOST_VERSIONS = 8
_MOST_DETAILED = 60  # so many have a row each, whatever came of them
_MOST_ROWS = 150  # of hosts that are not done; the page stays below 1 MB
_MOST_PLANS = 30
_MOST_BINS = 24
_MOST_DRAWN = 16
_SLICES = 7  # of a GPU, as MIG divides it: 1g is one of them
# Colour never stands alone: each state has its word, and in the grid its width.
_STATES = {"done": "good", "reboot needed": "warn", "failed": "bad", "refused": "bad", "unreachable": "bad",
           "not run": "none", "stopped": "warn", "degraded": "warn", "unfit": "bad"}  # fmt: skip
_CHECK_STATES = {"ok": "good", "failed": "bad", "skipped": "warn"}
_FEW_HOSTS = 12  # so many have their names, and a bar for the time of each
_SOME_HOSTS = 150  # more have smaller squares
_SQUARE = 10  # units of the drawings


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
        # No control characters and not without end; Jinja escapes it.
        finalize=lambda value: value if isinstance(value, (Markup, int, float)) else shortened(plain(value)),
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {
        "counted": counted, "duration": _duration, "listed": lambda names, most=_MOST_NAMED: listed(names, most),
        "steps": _steps, "kind": lambda word: _STATES[word],
        "check_kind": lambda status: _CHECK_STATES.get(status, "bad"),
    }  # fmt: skip
    return environment.from_string((pkgutil.get_data("gpuprov.fleet", "page.html.j2") or b"").decode())


def render(run: Run, before: Run | None = None) -> str:
    """Return the page; the same runs give the same bytes. `before` is the run to compare with."""
    results = run.results
    rows = [one for one in results if len(results) <= _MOST_DETAILED or one.exit_code != ExitCode.DONE][:_MOST_ROWS]
    with_row = set(map(id, rows))
    others: dict[str, list[str]] = collections.defaultdict(list)
    for one in results:
        if id(one) not in with_row:
            others[one.word].append(one.host)
    counts = collections.Counter(result.word for result in results)
    versions = dict(spreads(results))
    return _template().render(
        run=run,
        title=f"gpuprov {run.command}{' --check' if run.check else ''}",
        where=(", ".join(run.inventory) or "this machine") + (f", limited to {run.limit}" if run.limit else ""),
        states=[(word, counts[word]) for word in _STATES if counts[word]],
        grid=_grid(results),
        causes=causes(results),
        vulnerabilities=hosts_by_vulnerability(results, rows_of(user_table(ADVISORIES))),
        drains=drained(results),
        choices=driver_choices(results, run.inventory)[:_MOST_PLANS],
        drain_states=DRAIN_STATES,
        command_of=command_of,
        reporting=sum(bool(result.versions) for result in machines(results)),
        # All that differs, or could.
        versions=[(name, versions[name]) for name in _VERSION_NAMES if name in versions],
        most_versions=_MOST_VERSIONS,
        durations=_durations([result for result in results if result.begun]),
        gpus=_gpus(results),
        plans=_plans(results) if run.check else (),
        before=before,
        changes=differences(before, run) if before else (),
        rows=rows,
        step_counts=_step_counts,
        others=others,
    )


def _duration(seconds: float) -> str:
    """Return `4.2 s`, `3 min 20 s`."""
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


def _steps(result: HostResult) -> dict[str, None]:
    return dict.fromkeys([change.step for change in result.plan] + [made.step for made in result.made])


def _step_counts(result: HostResult, step: str) -> str:
    """Return how far a host came with a step: changes made of those planned, and how long they took."""
    planned = sum(change.step == step for change in result.plan)
    made = [change for change in result.made if change.step == step]
    ended = [change.seconds for change in made if change.seconds is not None]
    time = f" in {_duration(sum(ended))}" if ended else ""
    return f"{len(ended)} of {max(planned, len(made))}{time}"


# -- GPUs, durations, plans, other hosts -----------------------------------------------------------------------------


def _gpus(results: Sequence[HostResult]) -> list[tuple[str, str, list[str], list[list[tuple[str, float, float]]]]]:
    """Return (number of GPUs, MIG layout, hosts, slices of each GPU's drawing) of hosts with the same GPUs."""
    hosts: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for result in machines(results):
        if result.versions.get("gpus"):
            hosts[result.versions["gpus"], result.versions.get(MIG, "")].append(result.host)
    ordered = sorted(hosts.items(), key=lambda item: -len(item[1]))[:_MOST_VERSIONS]
    found = []
    for (count, mig), names in ordered:
        instances = mig_instances(mig)
        number = min(count_in(count) or 0, _MOST_DRAWN)
        found.append((count, mig, names, [_slices(instances.get(index, ())) for index in range(number)]))
    return found


def _slices(profiles: Sequence[str]) -> list[tuple[str, float, float]]:
    """Return (profile, x, width) of MIG instances on a GPU 28 units wide: `3g.40gb` takes three sevenths."""
    found = []
    x = 0.0
    for profile in profiles[:_SLICES]:
        number = count_in(profile.partition("g")[0])
        width = 4.0 * min(1 if number is None else number, _SLICES)
        found.append((profile, x, round(width - 0.8, 1)))
        x += width
    return found


def _durations(began: Sequence[HostResult]) -> dict[str, Any]:
    """Return how long hosts took: a bar for each of few hosts, a histogram (label, count, height) of many."""
    if not began:
        return {}
    slowest = max(began, key=lambda result: result.seconds)
    seconds = [result.seconds for result in began]
    many = len(began) > _FEW_HOSTS
    return {
        "few": () if many else [(one.host, one.seconds, 100 * one.seconds / (slowest.seconds or 1)) for one in began],
        "bins": _bins(seconds, min(seconds), slowest.seconds) if many else (),
        "shortest": min(seconds), "median": statistics.median(seconds), "longest": slowest.seconds,
        "slowest": slowest.host,
    }  # fmt: skip


def _bins(seconds: Sequence[float], shortest: float, longest: float) -> list[tuple[str, int, float]]:
    number = min(_MOST_BINS, max(6, math.isqrt(len(seconds))))
    width = (longest - shortest) / number or 1.0
    counts = collections.Counter(min(int((value - shortest) / width), number - 1) for value in seconds)
    most = max(counts.values())
    return [
        (f"{_duration(shortest + width * index)} to {_duration(shortest + width * (index + 1))}", counts[index],
         round(100 * counts[index] / most, 2))
        for index in range(number)
    ]  # fmt: skip


def _plans(results: Sequence[HostResult]) -> list[tuple[tuple[PlannedChange, ...], list[str]]]:
    """Return each plan with the hosts that it is for, those of most hosts first."""
    hosts: dict[tuple[tuple[str, str], ...], tuple[tuple[PlannedChange, ...], list[str]]] = {}
    for result in results:
        key = tuple((change.step, change.summary) for change in result.plan)
        if not result.has_failed:
            hosts.setdefault(key, (result.plan, []))[1].append(result.host)
    return sorted(hosts.values(), key=lambda item: -len(item[1]))[:_MOST_PLANS]


# -- the grid --------------------------------------------------------------------------------------------------------


def _grid(results: Sequence[HostResult]) -> dict[str, Any]:
    """Return the grid of a run: a column for each host, a square for each of `names`; `size` is a class of the page.

    `racks` holds (name, columns), and a column (host, sentence, paths): (kind, path data) of its squares, from the top.
    """
    checks = dict.fromkeys(check.name for result in results for check in result.checks)
    steps = dict.fromkeys(step for result in results for step in _steps(result))
    names = ("result", *checks, *steps)
    by_rack: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = collections.defaultdict(list)
    racks = _racks([result.host for result in results])
    for result in results:
        states = {check.name: _CHECK_STATES.get(check.status, "bad") for check in reversed(result.checks)}
        kinds = [_STATES[result.word], *(states.get(name, "none") for name in checks),
                 *(_step_state(result, step) for step in steps)]  # fmt: skip
        reason = f": {result.reason}" if result.exit_code != ExitCode.DONE and result.reason else ""
        by_rack[racks[result.host]].append((result.host, f"{result.word}{reason}", _paths(kinds)))
    size = "few" if len(results) <= _FEW_HOSTS else "some" if len(results) <= _SOME_HOSTS else "many"
    return {"names": names, "size": size, "height": _SQUARE * len(names), "racks": list(by_rack.items())}


def _racks(hosts: Sequence[str]) -> dict[str, str]:
    """Return host → its rack: r12 of r12-gpu3; nothing for all where names do not tell of racks."""
    racks = {host: host.partition("-")[0] if re.match(r"[^-]*\d[^-]*-", host) else "" for host in hosts}
    names = set(racks.values())
    named_by_rack = len(names) > 1 and "" not in names and len(names) * 3 <= len(hosts)
    return racks if named_by_rack else dict.fromkeys(hosts, "")


def _paths(kinds: Sequence[str]) -> list[tuple[str, str]]:
    """Return each kind's squares as one path of vertical strokes, which the page's style dashes into squares."""
    paths: dict[str, str] = collections.defaultdict(str)
    begin = 0
    for kind, squares in itertools.groupby(kinds):
        number = len(list(squares))
        paths[kind] += f"M5 {_SQUARE * begin}v{_SQUARE * number - 1}"
        begin += number
    return list(paths.items())


def _step_state(result: HostResult, step: str) -> str:
    made = [change for change in result.made if change.step == step]
    if any(change.seconds is None for change in made):
        return "bad"
    return "good" if made else "warn" if any(change.step == step for change in result.plan) else "none"
