"""Which versions a fleet runs, and which hosts are the odd ones out. Pure."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuprov.fleet.result import HostResult
from gpuprov.wire.advisories import DRIVER, TOOLKIT, TOOLKIT_PACKAGE, Advisory, Holes, holes

_ORDER = ("os", "kernel", "driver", "docker", "gpus")
_NONE = "none"


@dataclass(frozen=True)
class Spread:
    """One kind of version over the fleet: the usual one with its number of hosts, and the others with theirs."""

    name: str
    usual: str
    count: int
    others: tuple[tuple[str, tuple[str, ...]], ...]


def spreads(results: Sequence[HostResult]) -> tuple[Spread, ...]:
    """Return how versions spread over the hosts that told theirs; empty if fewer than two did."""
    told = [result for result in results if result.versions]
    if len(told) < 2:
        return ()
    names = dict.fromkeys((*_ORDER, *(name for result in told for name in result.versions)))
    return tuple(_spread(name, told) for name in names if any(result.versions.get(name) for result in told))


def hosts_by_hole(
    results: Sequence[HostResult], known: Sequence[Advisory]
) -> tuple[tuple[Holes, tuple[str, ...]], ...]:
    """Return the known security holes of the hosts' drivers and toolkits, with the hosts, the worst first."""
    hosts: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for result in results:
        for product, name in ((DRIVER, "driver"), (TOOLKIT, "toolkit")):
            hosts[product, str(result.versions.get(name, ""))].append(result.host)
    found = ((holes(product, version, known), tuple(names)) for (product, version), names in hosts.items())
    rows = ((one, names) for one, names in found if one is not None)
    return tuple(sorted(rows, key=lambda row: (-row[0].score, row[0].product, row[0].version)))


def _spread(name: str, results: Sequence[HostResult]) -> Spread:
    hosts: dict[str, list[str]] = collections.defaultdict(list)
    for result in results:
        hosts[str(result.versions.get(name) or _NONE)].append(result.host)
    (usual, first), *others = sorted(hosts.items(), key=lambda item: -len(item[1]))
    return Spread(name, usual, len(first), tuple((version, tuple(names)) for version, names in others))


def versions_of_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions in a host's facts, under the names that a run uses; facts come from hosts: any shape may."""
    places = {
        "os": ("os", "name"), "kernel": ("kernel", "release"), "driver": ("driver_installed_version",),
        "docker": ("docker", "version"), "gpus": ("gpus",), "toolkit": ("packages", "installed", TOOLKIT_PACKAGE),
    }  # fmt: skip
    return {name: fact(facts, path) for name, path in places.items()}


def fact(facts: Mapping[str, Any], path: tuple[str, ...]) -> str:
    """Return a fact as text, of a list its length; empty if it is not there."""
    value: Any = facts
    for key in path:
        value = value.get(key, "") if isinstance(value, Mapping) else ""
    return str(len(value)) if isinstance(value, (list, tuple)) else str(value or "")
