"""The versions in a fleet, and the hosts that are exceptions. Pure."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuprov.facts.mig import mig_layout
from gpuprov.fleet.result import HostResult, machines
from gpuprov.protocol.advisories import DRIVER, TOOLKIT, TOOLKIT_PACKAGE, Advisory, Vulnerabilities, vulnerabilities

_ORDER = ("os", "kernel", "driver", "docker", "gpus")
_NONE = "none"
MIG = "mig"
_OF_GPU = re.compile(r"([0-9]{1,3}): ([\w.+, -]+)")


@dataclass(frozen=True)
class Spread:
    """One kind of version over the fleet: the usual one with its number of hosts, and the others with theirs."""

    name: str
    usual: str
    count: int
    others: tuple[tuple[str, tuple[str, ...]], ...]


def spreads(results: Sequence[HostResult]) -> tuple[Spread, ...]:
    """Return how versions spread over the hosts that reported theirs; empty if fewer than two did."""
    told = [result for result in machines(results) if result.versions]
    if len(told) < 2:
        return ()
    names = dict.fromkeys((*_ORDER, *(name for result in told for name in result.versions)))
    return tuple(_spread(name, told) for name in names if any(result.versions.get(name) for result in told))


def hosts_by_hole(
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


def _spread(name: str, results: Sequence[HostResult]) -> Spread:
    hosts: dict[str, list[str]] = collections.defaultdict(list)
    for result in results:
        hosts[str(result.versions.get(name) or _NONE)].append(result.host)
    (usual, first), *others = sorted(hosts.items(), key=lambda item: -len(item[1]))
    return Spread(name, usual, len(first), tuple((version, tuple(names)) for version, names in others))


def versions_of_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions in a host's facts, under a run's names; facts come from hosts and may have any form."""
    places = {
        "os": ("os", "name"), "kernel": ("kernel", "release"), "driver": ("driver", "library_version"),
        "docker": ("docker", "version"), "gpus": ("gpus",), "toolkit": ("packages", "installed", TOOLKIT_PACKAGE),
    }  # fmt: skip
    found = {name: fact(facts, path) for name, path in places.items()}
    told = facts.get("mig")
    gpus = [
        gpu
        for gpu in (told if isinstance(told, (list, tuple)) else ())
        if isinstance(gpu, Mapping) and isinstance(gpu.get("instances"), (list, tuple))
    ]
    mig = mig_layout((str(gpu.get("index")), [str(name) for name in gpu["instances"]]) for gpu in gpus)
    return {**found, MIG: mig} if mig else found


def mig_instances(text: str) -> dict[int, tuple[str, ...]]:
    """Return each GPU's MIG instances from the text that facts.mig.mig_layout makes; {} from any other."""
    return {int(index): tuple(names.split(", ")) for index, names in _OF_GPU.findall(text)}


def fact(facts: Mapping[str, Any], path: tuple[str, ...]) -> str:
    """Return a fact as text, for a list its length; empty if it is missing."""
    value: Any = facts
    for key in path:
        value = value.get(key, "") if isinstance(value, Mapping) else ""
    return str(len(value)) if isinstance(value, (list, tuple)) else str(value or "")
