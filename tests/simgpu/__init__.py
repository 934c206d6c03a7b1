"""A simulated GPU good enough for the genuine nvidia-smi, pynvml, driver discovery and a driver installation.

Nothing of NVIDIA's is in the repository: see `debian` for what is fetched at run time, and `cache` for where it goes.
"""

from __future__ import annotations

from .gpus import DRIVER_VERSION, DeviceNode, SimGpu, all_gpus, device_nodes, gpu
from .libraries import build_libraries

__all__ = [
    "DRIVER_VERSION",
    "DeviceNode",
    "SimGpu",
    "all_gpus",
    "build_libraries",
    "device_nodes",
    "gpu",
]
