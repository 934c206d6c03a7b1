"""The device nodes that a loaded driver needs, as nvidia-modprobe makes them, and which of them exist.

Source: nvidia-modprobe, modprobe-utils; Linux, Documentation/admin-guide/devices.rst (major 195 is registered).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuprov.core.files import FileStatus
from gpuprov.core.system import System

# Device majors by their names in /proc/devices; NVIDIA's main one is registered, the others are dynamic.
NVIDIA_MAJOR = 195
_CONTROL_MINORS = {"/dev/nvidiactl": 255, "/dev/nvidia-modeset": 254}
_UVM_MINORS = {"/dev/nvidia-uvm": 0, "/dev/nvidia-uvm-tools": 1}
# As nvidia-modprobe makes them: only root may configure MIG, all users may use an instance.
_MIG_MODES = {"config": 0o400, "monitor": 0o444}
_MIG_ACCESS_MODE = 0o444
_NODE_MODE = 0o666  # the driver's default for DeviceFileMode
_MIG_MINORS = "/proc/driver/nvidia-caps/mig-minors"
_MIG_LINE = re.compile(r"(config|monitor|gpu\d+/gi\d+(?:/ci\d+)?/access) (\d+)")


@dataclass(frozen=True)
class Node:
    """A device node of the driver, with its actual or expected mode and group."""

    path: str
    major: int
    minor: int
    mode: int = _NODE_MODE
    gid: int = 0


def parse_devices(text: str) -> Mapping[str, int]:
    """Return name → major of the character devices in /proc/devices (proc(5))."""
    rows = re.findall(r"^\s*(\d+) (\S+)$", text.partition("Block devices:")[0], re.MULTILINE)
    return {name: int(major) for major, name in rows}


def parse_information(text: str) -> Mapping[str, str]:
    """Return the fields of /proc/driver/nvidia/gpus/BUSID/information (or …/params): `Model`, `GPU UUID`, …"""
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def parse_mig_minors(text: str) -> Mapping[str, int]:
    """Return capability (`config`, `gpu0/gi1/ci0/access`) → minor, from mig-minors; other lines are ignored."""
    lines = (_MIG_LINE.fullmatch(line) for line in text.splitlines())
    return {found[1]: int(found[2]) for found in lines if found}


def driver_nodes(system: System, minors: Sequence[int]) -> tuple[Node, ...]:
    """Return the expected nodes for GPUs of these minors, with their mode and group."""
    params = parse_information(system.read_text("/proc/driver/nvidia/params") or "")
    modeset_loaded = system.exists("/sys/module/nvidia_modeset")
    majors = parse_devices(system.read_text("/proc/devices") or "")
    nodes = expected_nodes(minors, majors, modeset_loaded=modeset_loaded)
    if params.get("ModifyDeviceFiles") == "0":
        # The driver does not modify device files (ModifyDeviceFiles=0): udev's rules apply.
        return tuple(_as_it_is(system, node) for node in nodes)
    mode, gid = params.get("DeviceFileMode", ""), params.get("DeviceFileGID", "")
    return tuple(
        replace(node, mode=int(mode) if mode.isdigit() else node.mode, gid=int(gid) if gid.isdigit() else node.gid)
        for node in nodes
    )


def expected_nodes(
    minors: Sequence[int], majors: Mapping[str, int], *, modeset_loaded: bool = False
) -> tuple[Node, ...]:
    """Return the device nodes that GPUs of these minors need."""
    if not minors:
        return ()
    major = majors.get("nvidia", majors.get("nvidia-frontend", NVIDIA_MAJOR))
    nodes = [Node(f"/dev/nvidia{minor}", major, minor) for minor in minors]
    control = dict(_CONTROL_MINORS)
    # Before 550.40.07, /proc/devices has one name, nvidia-frontend, for all of them.
    if "nvidia-modeset" not in majors and not (modeset_loaded and "nvidia-frontend" in majors):
        del control["/dev/nvidia-modeset"]
    nodes += [Node(path, major, minor) for path, minor in control.items()]
    if "nvidia-uvm" in majors:
        nodes += [Node(path, majors["nvidia-uvm"], minor) for path, minor in _UVM_MINORS.items()]
    return tuple(nodes)


def capability_nodes(system: System, capabilities: Iterable[str]) -> tuple[Node, ...]:
    """Return the nodes of capabilities as mig-minors names them, without those that this driver lacks."""
    major = parse_devices(system.read_text("/proc/devices") or "").get("nvidia-caps")
    minors = parse_mig_minors(system.read_text(_MIG_MINORS) or "")
    if major is None:
        return ()
    return tuple(
        Node(f"/dev/nvidia-caps/nvidia-cap{minors[name]}", major, minors[name], _MIG_MODES.get(name, _MIG_ACCESS_MODE))
        for name in capabilities
        if name in minors
    )


def is_present(system: System, node: Node) -> bool:
    """Say whether the node's path holds exactly this device."""
    return _status(system, node) is not None


def is_closed(system: System, node: Node) -> bool:
    """Say whether the device exists but fewer users may open it than the driver specifies."""
    found = _status(system, node)
    return found is not None and bool(node.mode & ~found.mode)


def _as_it_is(system: System, node: Node) -> Node:
    found = _status(system, node)
    return node if found is None else replace(node, mode=found.mode, gid=found.gid)


def _status(system: System, node: Node) -> FileStatus | None:
    found = system.status(node.path)
    same = found is not None and (found.kind, found.major, found.minor) == ("char", node.major, node.minor)
    return found if same else None
