"""A simulated GPU good enough for the genuine nvidia-smi, pynvml, driver discovery and a driver installation.

Nothing of NVIDIA's is in the repository: see `debian` for what is fetched at run time, and `cache` for where it goes.
Needed on the machine that builds: gcc, libc6-dev and a Debian mirror with trixie/non-free; on the hosts: nothing.

The stub libraries look at the device nodes, as the real ones do: a GPU exists where /dev/nvidiaN is 195:N and may be
opened (ENXIO counts as yes, EPERM of the device cgroup as no), the driver where /dev/nvidiactl is 195:255, CUDA where
/dev/nvidia-uvm is too. Then SIMGPU_<KEY> in the environment or `key=value` in /etc/simgpu.conf changes the rest:

    gpus            at most that many            driver_version, cuda_version   what the libraries claim to be
    error           NVML code that init returns  memory                         MiB, of every GPU
    mig             `all` or minor numbers: 0,3; without it, GPUs are divided that have nodes of instances

The .run fails on request: SIMRUN_FAIL=<word> in its environment, or the word in /etc/simrun.fail (words: at the top of
src/nvidia-installer.sh). SIMRUN_SLEEP is the length in seconds of `slow`.
"""

from .commands import BuildError
from .gpus import (
    CUDA_VERSION,
    DRIVER_VERSION,
    MAXIMUM_GPUS,
    DeviceNode,
    SimGpu,
    all_gpus,
    device_nodes,
    gpu,
    mig_nodes,
    mig_uuid,
)
from .kernel_sources import machine_sources, module_sources
from .kernel_tree import write_kernel_tree
from .libraries import build_libraries
from .runfile import build_run, install_tree, run_name

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
    "install_tree",
    "machine_sources",
    "mig_nodes",
    "mig_uuid",
    "module_sources",
    "run_name",
    "write_kernel_tree",
]
