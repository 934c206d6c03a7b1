"""A simulated GPU good enough for the genuine nvidia-smi, pynvml, driver discovery and a driver installation.

Nothing of NVIDIA's is in the repository: see `debian` for what is fetched at run time, and `cache` for where it goes.
"""

from __future__ import annotations

from .commands import BuildError
from .gpus import CUDA_VERSION, DRIVER_VERSION, MAXIMUM_GPUS, DeviceNode, SimGpu, all_gpus, device_nodes, gpu
from .kernel_tree import write_kernel_tree
from .libraries import build_libraries
from .runfile import build_run, run_name

__all__ = [
    "CUDA_VERSION",
    "DRIVER_VERSION",
    "MAXIMUM_GPUS",
    "BuildError",
    "DeviceNode",
    "SimGpu",
    "all_gpus",
    "build_libraries",
    "build_run",
    "device_nodes",
    "gpu",
    "run_name",
    "write_kernel_tree",
]
