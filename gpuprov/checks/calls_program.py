"""Calls CUDA's driver API through ctypes, runs a small kernel, and prints one JSON object for each of the two.

It runs as `python3 -c SOURCE`, on hosts and in containers: it imports nothing of gpuprov, and any Python from 3.6 on
will do; cuda_checks.command puts calls_kernel.ptx before it. Arguments: `kernel` runs the kernel too; `own` ignores
the caller's CUDA_VISIBLE_DEVICES.
Source: NVIDIA, CUDA Driver API; PTX ISA 6.0. ptxas 12.9 and 13.5 compile the kernel for GPUs from Maxwell to Blackwell.
"""

import ctypes
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    KERNEL = b""  # calls_kernel.ptx

LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
# The libcuda of gpuprov's own tests exports this name: it computes nothing.
SIMULATED = "simgpu_computes_nothing"
VARIABLES = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD")
# Results that say that other programs use the GPU, and its compute modes: no memory is left; an exclusive mode.
BUSY = {2: (0, 1, 2, 3), 46: (1, 3)}
ATTRIBUTE_COMPUTE_MODE = 20
NOTHING: "dict[str, Any]" = {"version": 0, "uuids": [], "failed": None}
COUNT = 100003
THREADS = 256
FIRST = 7


class CallError(Exception):
    """A call that did not return 0; `result` is None if the library has no such function."""

    def __init__(self, name: str, result: Optional[int]) -> None:
        Exception.__init__(self, name)
        self.name = name
        self.result = result


def call(cuda: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Call a function of libcuda. Raises CallError."""
    try:
        function = getattr(cuda, name)
    except AttributeError:
        raise CallError(name, None) from None
    result = function(*arguments)
    if result != 0:
        raise CallError(name, result)


def failure(cuda: ctypes.CDLL, error: CallError) -> "dict[str, Any]":
    """Return a failed call as JSON values."""
    text = ctypes.c_char_p()
    if error.result is not None and hasattr(cuda, "cuGetErrorName"):
        cuda.cuGetErrorName(error.result, ctypes.byref(text))
    return {"call": error.name, "result": error.result, "name": (text.value or b"").decode("ascii", "replace")}


def loaded() -> "dict[str, str]":
    """Return the file of each library that is mapped into this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = [line.split(None, 5)[5].rstrip("\n") for line in file if line.count("/")]
    # Of several the first.
    pairs = [(name, path) for path in reversed(paths) for name in LIBRARIES]
    return {name: path for name, path in pairs if os.path.basename(path).startswith(name[:-1])}


def uuid_of(cuda: ctypes.CDLL, ordinal: int) -> str:
    """Return a GPU's UUID as nvidia-smi writes it; of a MIG device the newer call returns its own."""
    device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    call(cuda, "cuDeviceGet", ctypes.byref(device), ordinal)
    newer = hasattr(cuda, "cuDeviceGetUuid_v2")
    call(cuda, "cuDeviceGetUuid_v2" if newer else "cuDeviceGetUuid", ctypes.byref(found), device)
    digits = bytes(found).hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def described(cuda: ctypes.CDLL) -> "dict[str, Any]":
    """Return what the calls give: the version, each GPU's UUID, the first call that failed."""
    found: "dict[str, Any]" = {**NOTHING}
    number = ctypes.c_int()
    try:
        call(cuda, "cuDriverGetVersion", ctypes.byref(number))
        found["version"] = number.value
        call(cuda, "cuInit", 0)
        call(cuda, "cuDeviceGetCount", ctypes.byref(number))
        found["uuids"] = [uuid_of(cuda, ordinal) for ordinal in range(number.value)]
    except CallError as error:
        found["failed"] = failure(cuda, error)
    return found


def compute(cuda: ctypes.CDLL, ordinal: int) -> int:
    """Run the kernel on a GPU and return how many of its results are wrong. Raises CallError."""
    device, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call(cuda, "cuDeviceGet", ctypes.byref(device), ordinal)
    call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call(cuda, "cuCtxSetCurrent", context)
    call(cuda, "cuModuleLoadData", ctypes.byref(module), KERNEL)
    call(cuda, "cuModuleGetFunction", ctypes.byref(function), module, b"gpuprov_scale")
    numbers = (ctypes.c_uint32 * COUNT)(*range(FIRST, FIRST + COUNT))
    place, count, size = ctypes.c_uint64(), ctypes.c_uint32(COUNT), ctypes.c_size_t(ctypes.sizeof(numbers))
    call(cuda, "cuMemAlloc_v2", ctypes.byref(place), size)
    call(cuda, "cuMemcpyHtoD_v2", place, numbers, size)
    pointers = (ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in (place, count))
    blocks, arguments = (COUNT + THREADS - 1) // THREADS, (ctypes.c_void_p * 2)(*pointers)
    call(cuda, "cuLaunchKernel", function, blocks, 1, 1, THREADS, 1, 1, 0, None, arguments, None)
    call(cuda, "cuCtxSynchronize")
    call(cuda, "cuMemcpyDtoH_v2", numbers, place, size)
    call(cuda, "cuMemFree_v2", place)
    return sum(value != (FIRST + index) * 3 + index for index, value in enumerate(numbers))


def computed(cuda: ctypes.CDLL, count: int) -> "dict[str, Any]":
    """Return what the kernel gave on each GPU, or why it was left out."""
    if hasattr(cuda, SIMULATED):
        return {"left_out": "the GPUs are simulated and compute nothing", "gpus": []}
    found = []
    for ordinal in range(count):
        one: "dict[str, Any]" = {"gpu": ordinal, "wrong": 0, "of": COUNT, "failed": None, "busy": False}
        try:
            one["wrong"] = compute(cuda, ordinal)
        except CallError as error:
            mode = ctypes.c_int()
            cuda.cuDeviceGet(ctypes.byref(mode), ordinal)
            cuda.cuDeviceGetAttribute(ctypes.byref(mode), ATTRIBUTE_COMPUTE_MODE, mode)
            one["failed"] = failure(cuda, error)
            one["busy"] = mode.value in BUSY.get(error.result or 0, ())
        found.append(one)
    return {"left_out": "", "gpus": found}


def main(words: "list[str]") -> None:
    """Print what the calls give, then what the kernel gives."""
    if "own" in words:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    found: "dict[str, Any]" = {"faults": {}, "variables": {name: os.environ.get(name, "") for name in VARIABLES}}
    cuda: "Optional[ctypes.CDLL]" = None
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            cuda = library if name == LIBRARIES[0] else cuda
        except OSError as error:
            found["faults"][name] = str(error)
    found["loaded"] = loaded()
    found.update(described(cuda) if cuda is not None else NOTHING)
    print(json.dumps(found), flush=True)
    if "kernel" in words and cuda is not None and found["failed"] is None:
        print(json.dumps(computed(cuda, len(found["uuids"]))))


if __name__ == "__main__":
    main(sys.argv[1:])
