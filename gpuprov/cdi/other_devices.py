"""Devices beside GPUs with their own CDI kind: GDS, MOFED, GDRCopy, NVSwitch, IMEX channels, GPU management.

Source: nvidia-container-toolkit, internal/discover (gds.go, mofed.go, gdrcopy.go, nvswitch.go) and pkg/nvcdi.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from gpuprov.cdi.discover import discover
from gpuprov.cdi.generate import specification
from gpuprov.cdi.specification import Device, DeviceNode, Edits, Mount, Specification, render_json
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError

# Mode → kind; folder and names of its device nodes; files and folders that go with them.
MODES: dict[str, tuple[str, tuple[tuple[str, str], ...], tuple[str, ...]]] = {
    "gds": ("nvidia.com/gds", (("/dev", r"nvidia-fs\d*"),), ("/run/udev", "/etc/cufile.json")),
    "mofed": ("nvidia.com/mofed", (("/dev/infiniband", r"uverbs\d+|rdma_cm"),), ()),
    "gdrcopy": ("nvidia.com/gdrcopy", (("/dev", "gdrdrv"),), ()),
    "nvswitch": ("nvidia.com/nvswitch", (("/dev", r"nvidia-nvswitchctl|nvidia-nvswitch\d+"),), ()),
    "imex": ("nvidia.com/imex-channel", (("/dev/nvidia-caps-imex-channels", r"channel\d+"),), ()),
    "management": (
        "management.nvidia.com/gpu",
        (
            ("/dev", r"nvidia\d+|nvidiactl|nvidia-modeset|nvidia-uvm|nvidia-uvm-tools|nvidia-nvswitch\w+"),
            ("/dev/nvidia-caps", r"nvidia-cap\d+"), ("/dev/nvidia-caps-imex-channels", r"channel\d+"),
        ),
        (),
    ),
}  # fmt: skip
# What an installation writes by default; management devices are for cluster operators' tools.
_WRITTEN = ("gds", "mofed", "gdrcopy", "nvswitch", "imex")
_FOLDER = "/etc/cdi"
PATHS = tuple(f"{_FOLDER}/nvidia-{mode}.json" for mode in _WRITTEN)


def specifications(system: System) -> Mapping[str, bytes]:
    """Return path → content of the specifications for this host's other devices.

    A kind that another file already defines is skipped: engines reject a device that is defined twice.
    """
    found = {}
    for mode, path in zip(_WRITTEN, PATHS):
        kind, places, _ = MODES[mode]
        if any(True for _ in _nodes(system, places)) and not _is_elsewhere(system, kind, path):
            found[path] = render_json(specification_of(system, mode))
    return found


def _is_elsewhere(system: System, kind: str, path: str) -> bool:
    """Say whether another file has the kind. It searches the text, because hosts may lack a YAML parser."""
    named = re.compile(rf"""^\s*["']?kind["']?\s*:\s*["']?{re.escape(kind)}["']?\s*,?\s*$""", re.MULTILINE)
    others = (f"{_FOLDER}/{name}" for name in system.list_directory(_FOLDER))
    return any(named.search(system.read_text(other) or "") for other in others if other != path)


def specification_of(system: System, mode: str) -> Specification:
    """Return the specification of a mode. Raises GpuprovError if this host has no such device."""
    kind, places, files = MODES[mode]
    nodes = tuple(_nodes(system, places))
    if not nodes:
        looked = ", ".join(folder for folder, _ in places)
        raise GpuprovError(
            f"this host has nothing for {kind}",
            f"no such device node in {looked}",
            "load the kernel module that makes it; gpuprov doctor says what is missing",
        )
    mounts = tuple(Mount(path, path) for path in files if system.exists(path))
    if mode == "imex":
        devices = [Device(node.path.rpartition("channel")[2], Edits(device_nodes=(node,))) for node in nodes]
        return Specification((*devices, Device("all", Edits(device_nodes=nodes))), Edits(), {}, kind)
    common = specification(discover(system)).edits if mode == "management" else Edits()
    shared = Edits(env=("NVIDIA_VISIBLE_DEVICES=void",), mounts=common.mounts, hooks=common.hooks)
    return Specification((Device("all", Edits(device_nodes=nodes, mounts=mounts)),), shared, {}, kind)


def _nodes(system: System, places: tuple[tuple[str, str], ...]) -> Iterator[DeviceNode]:
    for folder, names in places:
        for name in sorted(system.list_directory(folder), key=_by_number):
            path = f"{folder}/{name}"
            status = system.status(path) if re.fullmatch(names, name) else None
            if status is not None and status.kind == "char":
                mode = None if status.mode & 0o006 == 0o006 else status.mode
                yield DeviceNode(path, status.major, status.minor, file_mode=mode, gid=status.gid or None)


def _by_number(name: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.*?)(\d*)", name)
    assert found is not None
    return found[1], int(found[2] or -1)
