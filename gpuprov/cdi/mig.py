"""MIG: the parts into which a GPU is divided, as the loaded driver shows them. Reads only, opens no device.

Source: nvidia-container-toolkit, internal/discover and go-nvlib (a device is the GPU's node and two capabilities).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuprov.cdi.nodes import Node, capability_nodes
from gpuprov.core.system import System

_CAPABILITIES = "/proc/driver/nvidia/capabilities"


@dataclass(frozen=True)
class MigDevice:
    """A MIG device: its number among its GPU's, the ids of its GPU and compute instance, its UUID, its capabilities.

    NVML alone knows UUIDs; the numbers count in the order of the ids, as NVML's do.
    """

    index: int
    gpu_instance: int
    compute_instance: int
    uuid: str = ""
    nodes: tuple[Node, ...] = ()


def find_mig_devices(system: System, minor: int) -> tuple[MigDevice, ...]:
    """Return the MIG devices of the GPU with that minor; none for one that is whole."""
    folder = f"{_CAPABILITIES}/gpu{minor}/mig"
    found = [
        (instance, compute)
        for instance in _numbers(system, folder, "gi")
        for compute in _numbers(system, f"{folder}/gi{instance}", "ci")
    ]
    return tuple(
        MigDevice(
            index, instance, compute,
            nodes=capability_nodes(
                system, (f"gpu{minor}/gi{instance}/access", f"gpu{minor}/gi{instance}/ci{compute}/access")
            ),
        )
        for index, (instance, compute) in enumerate(found)
    )  # fmt: skip


def _numbers(system: System, folder: str, prefix: str) -> list[int]:
    names = (re.fullmatch(prefix + r"(\d{1,3})", name) for name in system.list_directory(folder))
    return sorted(int(found[1]) for found in names if found)
