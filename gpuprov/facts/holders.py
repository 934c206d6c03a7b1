"""Processes that have a GPU open, as /proc shows them; reads only, and kills no process.

/proc/PID/fd shows open files, /proc/PID/maps what stays mapped after a close (proc(5)): either keeps the driver's
modules loaded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuprov.core.system import System

_DEVICE = "/dev/nvidia"
# docker-ID.scope, /docker/ID, cri-containerd-ID.scope, crio-ID.scope, libpod-ID.scope, /kubepods/…/ID: 64 digits.
_CONTAINER = re.compile(r"([0-9a-f]{64})")
_UNIT = re.compile(r"/([^/]+\.service)(?=/|$)")
_LONGEST_COMMAND = 100


@dataclass(frozen=True)
class GpuHolder:
    """A process that has a GPU's device open; `unit` and `container` (its id) are what its cgroup tells, or nothing."""

    pid: int
    command: str
    device: str
    unit: str = ""
    container: str = ""

    def __str__(self) -> str:
        where = f"container {self.container[:12]}" if self.container else self.unit
        return f"process {self.pid} ({self.command}) has {self.device} open" + (f", in {where}" if where else "")


@dataclass(frozen=True)
class RunningDriver:
    """The loaded driver. `modules` are in the order of unloading, active `units` in the order of stopping.

    `containers`: id → name of docker's containers that use a GPU; `display_manager`: its unit's own name, if it runs.
    """

    version: str
    modules: tuple[str, ...]
    units: tuple[str, ...]
    containers: Mapping[str, str]
    display_manager: str
    holders: tuple[GpuHolder, ...]


def gather_holders(system: System, others: Iterable[str] = ()) -> tuple[GpuHolder, ...]:
    """Return the processes that have one of the driver's devices open or mapped; `others`: more device nodes."""
    devices = frozenset(others)
    pids = sorted(int(name) for name in system.list_directory("/proc") if name.isdigit())
    found = (_holder(system, pid, devices) for pid in pids if pid != system.own_pid())
    return tuple(one for one in found if one is not None)


def _holder(system: System, pid: int, others: frozenset[str]) -> GpuHolder | None:
    # A process may end while it is examined: then it holds nothing.
    with contextlib.suppress(OSError):
        device = _open_device(system, pid, others) or mapped_device(system.read_text(f"/proc/{pid}/maps") or "")
        if device:
            unit, container = parse_cgroup(system.read_text(f"/proc/{pid}/cgroup") or "")
            return GpuHolder(pid, _command(system, pid), device, unit, container)
    return None


def _open_device(system: System, pid: int, others: frozenset[str]) -> str:
    for number in system.list_directory(f"/proc/{pid}/fd"):
        status = system.status(f"/proc/{pid}/fd/{number}")
        if status is not None and (status.target.startswith(_DEVICE) or status.target in others):
            return status.target
    return ""


def mapped_device(text: str) -> str:
    """Return the first of the driver's devices among the mappings in /proc/PID/maps, or nothing."""
    found = re.search(rf"\s({_DEVICE}\S*)", text)
    return found[1] if found else ""


def parse_cgroup(text: str) -> tuple[str, str]:
    """Return the systemd service and the container's id that /proc/PID/cgroup tells (cgroups(7)), nothing for none."""
    container = _CONTAINER.search(text)
    units = _UNIT.findall(text)
    return (units[-1] if units and not container else ""), (container[1] if container else "")


def _command(system: System, pid: int) -> str:
    words = (system.read_text(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
    words = words or (system.read_text(f"/proc/{pid}/comm") or "").strip()
    return words if len(words) <= _LONGEST_COMMAND else f"{words[:_LONGEST_COMMAND]}…"
