"""Facts about MIG: how the GPUs are divided according to nvidia-smi; changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuprov.core.system import System

_SMI = "nvidia-smi"
_SMI_SECONDS = 120
_QUERY = ("--query-gpu=index,mig.mode.current,mig.mode.pending", "--format=csv,noheader")
# `|   0  MIG 3g.40gb           9        2          4:4     |`; a GPU instance's table has a placement at its end.
_INSTANCE = re.compile(r"^\|\s+(\d+)\s+MIG (\S+)\s+\d+\s+\d+\s+\d+:\d+\s*\|", re.MULTILINE)
# `|   0  MIG 1g.10gb       19     7/7        9.50 …`: free and total.
_PROFILE = re.compile(r"^\|\s+(\d+)\s+MIG (\S+)\s+\d+\s+\d+/(\d+)\s", re.MULTILINE)


@dataclass(frozen=True)
class MigGpu:
    """The MIG state of a GPU: `current` and `pending` are Enabled, Disabled, or [N/A] where it has none.

    `instances`: the profiles of its GPU instances, sorted. `most`: profile → how many an empty GPU has room for.
    """

    index: int
    current: str
    pending: str
    instances: tuple[str, ...] = ()
    most: Mapping[str, int] = field(default_factory=dict)


def mig_layout(gpus: Iterable[tuple[object, Sequence[str]]]) -> str:
    """Return (index, profiles of the instances) pairs as `0: 3g.40gb, 3g.40gb; 1: 7g.80gb`, for people and pages."""
    return "; ".join(f"{index}: {', '.join(instances)}" for index, instances in gpus if instances)


def gather_mig(system: System) -> tuple[MigGpu, ...]:
    """Return the GPUs of the loaded driver; none if nvidia-smi fails. Reads only."""
    modes = system.run((_SMI, *_QUERY), timeout=_SMI_SECONDS)
    if not modes.ok:
        return ()
    rows = parse_modes(modes.stdout)
    if not any(current == "Enabled" for _, current, _ in rows):
        return tuple(MigGpu(*row) for row in rows)
    instances = parse_instances(system.run((_SMI, "mig", "-lgi"), timeout=_SMI_SECONDS).stdout)
    most = parse_profiles(system.run((_SMI, "mig", "-lgip"), timeout=_SMI_SECONDS).stdout)
    return tuple(MigGpu(*row, instances.get(row[0], ()), most.get(row[0], {})) for row in rows)


def parse_modes(text: str) -> tuple[tuple[int, str, str], ...]:
    """Return (index, current mode, pending mode) of each GPU from `nvidia-smi --query-gpu=…`."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return tuple((int(row[0]), row[1], row[2]) for row in rows if len(row) == 3 and row[0].isdigit())


def parse_instances(text: str) -> Mapping[int, tuple[str, ...]]:
    """Return GPU → profiles of its GPU instances, sorted, from the table of `nvidia-smi mig -lgi`."""
    found: dict[int, list[str]] = {}
    for gpu, profile in _INSTANCE.findall(text):
        found.setdefault(int(gpu), []).append(profile)
    return {gpu: tuple(sorted(profiles)) for gpu, profiles in found.items()}


def parse_profiles(text: str) -> Mapping[int, Mapping[str, int]]:
    """Return GPU → profile → how many there is room for, from the table of `nvidia-smi mig -lgip`."""
    found: dict[int, dict[str, int]] = {}
    for gpu, profile, total in _PROFILE.findall(text):
        found.setdefault(int(gpu), {})[profile] = int(total)
    return found
