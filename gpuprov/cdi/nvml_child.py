"""Query NVML in a separate process and print its answers as JSON; no other code here loads the driver's library.

Values that a driver or a GPU does not report are left out; without NVML the process exits with its error number.
"""

import ctypes
import json
import sys
from collections.abc import Iterator
from typing import Any, Callable

import pynvml


def main(library: str) -> None:
    """Print the answers of the NVML at that path."""
    gpus = [found for device in devices(library) if (found := known(_gpu, device)) is not None]
    version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    sys.stdout.write(json.dumps({"cuda_version": f"{version // 1000}.{version % 1000 // 10}", "gpus": gpus}))


def devices(library: str) -> list[Any]:
    """Return the GPUs of the NVML at that path, without lost ones; exit with its error number if it does not start."""
    # Loaded first and by its path, so that pynvml, which loads it by name, gets this one.
    ctypes.CDLL(library)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        sys.exit(error.value)
    found = (known(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(pynvml.nvmlDeviceGetCount()))
    return [device for device in found if device is not None]


def _gpu(device: Any) -> dict[str, Any]:
    capability = known(pynvml.nvmlDeviceGetCudaComputeCapability, device)
    # pynvml reads a list, of which one may be known.
    action = known(pynvml.nvmlDeviceGetFieldValues, device, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    links = [known(pynvml.nvmlDeviceGetNvLinkState, device, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    states = [state for state in links if state is not None]
    return {
        "bus_id": text(pynvml.nvmlDeviceGetPciInfo(device).busId),
        "uuid": text(known(pynvml.nvmlDeviceGetUUID, device)),
        "brand": known(pynvml.nvmlDeviceGetBrand, device),
        "compute_capability": ".".join(str(number) for number in capability or ()),
        "mig": list(_mig_devices(device)),
        "recovery_action": action[0].value.uiVal if action and action[0].nvmlReturn == pynvml.NVML_SUCCESS else None,
        "links": sum(states) if states else None,
    }


def _mig_devices(device: Any) -> Iterator[dict[str, Any]]:
    for index in range(known(pynvml.nvmlDeviceGetMaxMigDeviceCount, device) or 0):
        part = known(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, device, index)
        if part is not None:
            yield {
                "gpu_instance": known(pynvml.nvmlDeviceGetGpuInstanceId, part),
                "compute_instance": known(pynvml.nvmlDeviceGetComputeInstanceId, part),
                "uuid": text(known(pynvml.nvmlDeviceGetUUID, part)),
            }


def known(question: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer, None if this driver or this GPU does not support the query."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def text(value: Any) -> str:
    """Return a text of NVML's, "" for none."""
    # Versions of pynvml differ in whether texts are bytes.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
