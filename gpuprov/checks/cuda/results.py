"""The results of CUDA that say that the GPU can't be used: name, cause, evidence, remedy. Pure data.

Source: NVIDIA, CUDA Runtime API, "Data types used by CUDA Runtime" (cudaError), and CUDA Driver API (CUresult). Numbers
of both are the same since CUDA 10.1; 35 and 36 are the runtime's alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """A result. `codes`: its numbers, those of older releases first; `names`: the runtime's and the driver's."""

    codes: tuple[int, ...]
    names: tuple[str, ...]
    meaning: str
    cause: str
    evidence: str
    remedy: str


_LIBRARY = "gpuprov cuda CONTAINER: which libcuda.so.1 the program loads, and its version"
RESULTS = (
    Result(
        (3,), ("cudaErrorInitializationError", "CUDA_ERROR_NOT_INITIALIZED"),
        "CUDA is not initialized",
        "the program forked after it had used CUDA (multiprocessing with `fork`); or an earlier call of cuInit failed",
        "it fails only in child processes; in a new process, cuInit gives 0 or the result of the real cause",
        "start workers with `spawn` or `forkserver`, or use CUDA only after the fork; else see the other result",
    ),
    Result(
        (34,), ("cudaErrorStubLibrary", "CUDA_ERROR_STUB_LIBRARY"),
        "the library is a stub",
        "the program loads CUDA's stub of libcuda, which is for linking only, instead of the driver's library",
        _LIBRARY + "; the path of a stub has /stubs/ in it",
        "take folders named stubs out of LD_LIBRARY_PATH and out of /etc/ld.so.conf.d, then run ldconfig",
    ),
    Result(
        (35,), ("cudaErrorInsufficientDriver",),
        "the driver is too old for this CUDA runtime",
        "libcuda.so.1 is older than the runtime's major release needs; or no libcuda.so.1 can be loaded, so that the "
        "driver's version is 0: the container was started without GPUs, or the file is empty or broken",
        _LIBRARY + "; nvidia-smi shows the CUDA release of the host's driver",
        "start the container with GPUs; remove a libcuda that the image brings; update the driver or use an image for "
        "an older CUDA release",
    ),
    Result(
        (36,), ("cudaErrorCallRequiresNewerDriver",),
        "this call requires a newer driver",
        "the runtime is newer than the driver, of the same major release (minor version compatibility), and the "
        "program uses what only the newer driver has; or libcuda.so.1 is older than the host's driver",
        _LIBRARY + "; compare with the CUDA release of the image",
        "update the driver to the CUDA release of the image; remove an older libcuda from the image or LD_LIBRARY_PATH",
    ),
    Result(
        (38, 100), ("cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE"),
        "no GPU was found (38 until CUDA 10.0)",
        "the container has the libraries and no device nodes; CUDA_VISIBLE_DEVICES is empty or names no GPU; the "
        "kernel module serves no GPU",
        "ls /dev/nvidia* and echo $CUDA_VISIBLE_DEVICES in the container; nvidia-smi -L on the host",
        "start the container with --gpus all; unset CUDA_VISIBLE_DEVICES; gpuprov doctor for the host",
    ),
    Result(
        (101,), ("cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE"),
        "there is no GPU of this number",
        "the program uses a GPU's number on the host; in containers, and with CUDA_VISIBLE_DEVICES, they begin at 0",
        "nvidia-smi -L in the container, and CUDA_VISIBLE_DEVICES",
        "use numbers from 0 to the number of visible GPUs less one",
    ),
    Result(
        (209,), ("cudaErrorNoKernelImageForDevice", "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        "no kernel image for this GPU",
        "the program was built for other GPU generations, and has no PTX that the driver could compile for this one",
        "nvidia-smi --query-gpu=name,compute_cap --format=csv; torch.cuda.get_arch_list() in Python",
        "use a build for this compute capability: a newer one for a new GPU, an older one for an old GPU",
    ),
    Result(
        (222,), ("cudaErrorUnsupportedPtxVersion", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
        "the PTX is newer than the driver's compiler",
        "the program has PTX of a newer CUDA release than the driver's: minor version compatibility does not cover PTX",
        _LIBRARY + "; compare with the CUDA release that built the program",
        "update the driver; or build for the GPU itself (SASS) instead of PTX; or use the image's cuda-compat",
    ),
    Result(
        (302,), ("cudaErrorSharedObjectSymbolNotFound", "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND"),
        "a symbol is missing from a shared library",
        "libraries of different driver versions are mixed: libcuda.so.1 is older than what the program or another "
        "library of the driver asks it for",
        _LIBRARY + "; LD_DEBUG=symbols,bindings shows the symbol",
        "leave the driver's libraries in one version: remove those that the image brings",
    ),
    Result(
        (304,), ("cudaErrorOperatingSystem", "CUDA_ERROR_OPERATING_SYSTEM"),
        "the operating system refused a call",
        "a device node can't be opened or mapped: permissions, the device cgroup, a seccomp profile, or memory limits",
        "ls -l /dev/nvidia*; strace -f -e trace=openat,ioctl,mmap; dmesg | grep -i nvrm",
        "run as a user who may open the nodes; restart the container; raise its memory limits",
    ),
    Result(
        (802,), ("cudaErrorSystemNotReady", "CUDA_ERROR_SYSTEM_NOT_READY"),
        "the system is not ready",
        "the GPUs are joined by NVSwitches, and the fabric manager does not run, or is of another version",
        "systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A 3 Fabric",
        "gpuprov install, which installs the fabric manager of the driver's version and starts it",
    ),
    Result(
        (803,), ("cudaErrorSystemDriverMismatch", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        "libcuda and the kernel module do not fit together",
        "libcuda.so.1 is of another version than the loaded kernel module, and no newer cuda-compat: the image brings "
        "its own, or the driver was updated and the old module is still loaded",
        _LIBRARY + "; cat /proc/driver/nvidia/version",
        "remove the image's own libcuda, or the variable that makes it win; after an update of the driver, reboot",
    ),
    Result(
        (804,), ("cudaErrorCompatNotSupportedOnDevice", "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"),
        "forward compatibility is not supported on this GPU",
        "cuda-compat's libcuda is newer than the kernel module, and the GPU is no data center GPU",
        _LIBRARY + "; a path with /compat/ in it wins",
        "update the driver; or leave cuda-compat out: take its folder out of LD_LIBRARY_PATH and the loader's cache",
    ),
    Result(
        (999,), ("cudaErrorUnknown", "CUDA_ERROR_UNKNOWN"),
        "unknown error",
        "often /dev/nvidia-uvm is missing or can't be opened, or the module nvidia_uvm is of another version; also "
        "after suspend, or with a GPU that hangs",
        "ls -l /dev/nvidia-uvm in the container; lsmod | grep nvidia_uvm; dmesg | grep -i -e nvrm -e xid",
        "modprobe nvidia-uvm and gpuprov doctor on the host, then restart the container",
    ),
)  # fmt: skip


def result_of(text: str) -> Result | None:
    """Return the row of a number or a name, whatever its case; None if there is no such row."""
    wanted = text.strip().lower()
    return next(
        (one for one in RESULTS if wanted in (*map(str, one.codes), *(name.lower() for name in one.names))), None
    )
