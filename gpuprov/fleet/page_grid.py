"""The grid of a page: one column for each host, one square for each check or step; bad racks stand out. Pure."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuprov.agent.result import HostResult
from gpuprov.protocol.errors import ExitCode

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
    told = len(sizes) > 1 and "" not in sizes and len(sizes) * 3 <= len(hosts)
    return rack if told else lambda host: ""


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
