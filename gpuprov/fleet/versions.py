"""The versions in a fleet, and the hosts that are exceptions. Pure."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpuprov.agent.result import HostResult, machines

_ORDER = ("os", "kernel", "driver", "docker", "gpus")
_NONE = "none"
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


def _spread(name: str, results: Sequence[HostResult]) -> Spread:
    hosts: dict[str, list[str]] = collections.defaultdict(list)
    for result in results:
        hosts[str(result.versions.get(name) or _NONE)].append(result.host)
    (usual, first), *others = sorted(hosts.items(), key=lambda item: -len(item[1]))
    return Spread(name, usual, len(first), tuple((version, tuple(names)) for version, names in others))


def mig_instances(text: str) -> dict[int, tuple[str, ...]]:
    """Return each GPU's MIG instances from the text that facts.mig.mig_layout makes; {} from any other."""
    return {int(index): tuple(names.split(", ")) for index, names in _OF_GPU.findall(text)}
