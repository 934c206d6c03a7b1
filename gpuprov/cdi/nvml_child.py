"""Query NVML in a separate process and print its answers as JSON; no other code here loads the driver's library.

Values that a driver or a GPU does not report are left out; without NVML the process exits with its error number.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any, Callable

import pynvml


def main(library: str) -> None:
    """Print the answers of the NVML at that path."""
    # Loaded first and by its path, so that pynvml, which loads it by name, gets this one.
    ctypes.CDLL(library)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        sys.exit(error.value)
    gpus = [_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
    version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    sys.stdout.write(json.dumps({"cuda_version": f"{version // 1000}.{version % 1000 // 10}", "gpus": gpus}))


def _gpu(device: Any) -> dict[str, Any]:
    capability = _known(pynvml.nvmlDeviceGetCudaComputeCapability, device)
    return {
        "bus_id": _text(pynvml.nvmlDeviceGetPciInfo(device).busId),
        "uuid": _text(_known(pynvml.nvmlDeviceGetUUID, device)),
        "brand": _known(pynvml.nvmlDeviceGetBrand, device),
        "compute_capability": ".".join(str(number) for number in capability or ()),
        "mig": list(_mig_devices(device)),
    }


def _mig_devices(device: Any) -> list[dict[str, Any]]:
    found = []
    for index in range(_known(pynvml.nvmlDeviceGetMaxMigDeviceCount, device) or 0):
        part = _known(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, device, index)
        if part is not None:
            found.append(
                {
                    "gpu_instance": _known(pynvml.nvmlDeviceGetGpuInstanceId, part),
                    "compute_instance": _known(pynvml.nvmlDeviceGetComputeInstanceId, part),
                    "uuid": _text(_known(pynvml.nvmlDeviceGetUUID, part)),
                }
            )
    return found


def _known(question: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer, None if this driver or this GPU does not support the query."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _text(value: Any) -> str:
    # Versions of pynvml differ in whether texts are bytes.
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value or ""
