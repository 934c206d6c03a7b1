"""Processes that have a GPU open, as /proc shows them; reads only, and kills no process.

/proc/PID/fd shows open files, /proc/PID/maps what stays mapped after a close (proc(5)): either keeps the driver's
modules loaded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Optional

from gpuprov.cdi.nodes import NVIDIA_MAJOR, parse_devices
from gpuprov.core.system import System

_DEVICE = "/dev/nvidia"
# docker-ID.scope, /docker/ID, cri-containerd-ID.scope, crio-ID.scope, libpod-ID.scope, /kubepods/…/ID: 64 digits.
_CONTAINER = re.compile(r"/(?:[a-z-]+-)?([0-9a-f]{64})(?:\.scope)?(?=/|$)")
# The outermost: a service may have cgroups of its own choice below.
_UNIT = re.compile(r"/([^/]+\.service)(?=/|$)")
_USERS = "/user.slice/"
_Numbers = set[tuple[int, Optional[int]]]
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
    """Return the processes that have one of the driver's devices open or mapped; `others`: more device nodes.

    The device's number decides: any user can have a file named /dev/nvidia0 in a mount namespace of their own.
    """
    majors = parse_devices(system.read_text("/proc/devices") or "")
    numbers: _Numbers = {(NVIDIA_MAJOR, None)}
    numbers |= {(major, None) for name, major in majors.items() if name.startswith("nvidia")}
    nodes = (system.status(path) for path in others)
    numbers |= {(node.major, node.minor) for node in nodes if node is not None and node.kind == "char"}
    pids = sorted(int(name) for name in system.list_directory("/proc") if name.isdigit())
    found = (_holder(system, pid, numbers) for pid in pids if pid != system.own_pid())
    return tuple(one for one in found if one is not None)


def _holder(system: System, pid: int, numbers: _Numbers) -> GpuHolder | None:
    # A process may end while it is examined: then it holds nothing.
    with contextlib.suppress(OSError):
        device = next((path for place, path in _devices(system, pid) if _is_one_of(system, place, path, numbers)), "")
        if device:
            unit, container = parse_cgroup(system.read_text(f"/proc/{pid}/cgroup") or "")
            return GpuHolder(pid, _command(system, pid), device, unit, container)
    return None


def _devices(system: System, pid: int) -> Iterator[tuple[str, str]]:
    """Yield the links in /proc to what a process has open or mapped below /dev, with the paths that it sees."""
    for number in system.list_directory(f"/proc/{pid}/fd"):
        status = system.status(f"/proc/{pid}/fd/{number}")
        if status is not None and status.target.startswith("/dev/"):
            yield f"/proc/{pid}/fd/{number}", status.target
    for addresses, path in mapped_devices(system.read_text(f"/proc/{pid}/maps") or ""):
        yield f"/proc/{pid}/map_files/{addresses}", path


def _is_one_of(system: System, place: str, path: str, numbers: _Numbers) -> bool:
    try:
        found = system.device_number(place)
    except PermissionError:
        # In a container, what is mapped can't be examined (proc_pid_map_files(5)): its name must do.
        return path.startswith(_DEVICE)
    except OSError:
        return False
    return found is not None and not numbers.isdisjoint({found, (found[0], None)})


def mapped_devices(text: str) -> list[tuple[str, str]]:
    """Return addresses and path of each mapping below /dev in /proc/PID/maps."""
    return re.findall(r"^([0-9a-f]+-[0-9a-f]+) .*?\s(/dev/.*?)(?: \(deleted\))?$", text, re.MULTILINE)


def parse_cgroup(text: str) -> tuple[str, str]:
    """Return the system's service and the container's id that /proc/PID/cgroup tells (cgroups(7)), nothing for none.

    Below user.slice users name their own cgroups: there, no name says anything about a container or a service.
    """
    paths = [line.split(":", 2)[-1] for line in text.splitlines()]
    container = next(filter(None, (_CONTAINER.search(path.partition(_USERS)[0]) for path in paths)), None)
    units = [found[1] for found in map(_UNIT.search, paths) if found]
    return (units[-1] if units and not container else ""), (container[1] if container else "")


def _command(system: System, pid: int) -> str:
    words = (system.read_text(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
    words = words or (system.read_text(f"/proc/{pid}/comm") or "").strip()
    return words if len(words) <= _LONGEST_COMMAND else f"{words[:_LONGEST_COMMAND]}…"
