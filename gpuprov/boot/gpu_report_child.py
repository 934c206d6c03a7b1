"""Query NVML for `gpuprov serve` in a separate process, and print the result as JSON.

Names and units (W, MHz, MiB, MB/s) are those of nvidia-docker-plugin 1.0's REST interface. None means that NVML does
not report the value. Process names are left out: every user of the host can send requests.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Callable

import pynvml

from gpuprov.cdi.nvml_child import devices, known, text

_MIB = 1 << 20
# MB/s of one lane, by PCIe generation.
_LANE = {1: 250, 2: 500, 3: 985, 4: 1969, 5: 3938, 6: 7563}
# nvml.h, nvmlDeviceArchitecture_t.
_FAMILIES = {2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada", 9: "Hopper",
             10: "Blackwell"}  # fmt: skip


def main(library: str) -> None:
    """Print the report of the NVML at that path."""
    gpus = devices(library)
    version = known(pynvml.nvmlSystemGetCudaDriverVersion_v2) or 0
    document = {
        "Version": {
            "Driver": text(known(pynvml.nvmlSystemGetDriverVersion)),
            "CUDA": f"{version // 1000}.{version % 1000 // 10}",
        },
        "Info": [_info(gpu) for gpu in gpus],
        "Status": [_status(gpu) for gpu in gpus],
    }
    sys.stdout.write(json.dumps(document))


def _info(gpu: Any) -> dict[str, Any]:
    minor = known(pynvml.nvmlDeviceGetMinorNumber, gpu)
    pci = known(pynvml.nvmlDeviceGetPciInfo, gpu)
    generation, width = (
        known(one, gpu) for one in (pynvml.nvmlDeviceGetMaxPcieLinkGeneration, pynvml.nvmlDeviceGetMaxPcieLinkWidth)
    )
    capability = known(pynvml.nvmlDeviceGetCudaComputeCapability, gpu)
    ecc = known(pynvml.nvmlDeviceGetEccMode, gpu)
    return {
        "UUID": text(known(pynvml.nvmlDeviceGetUUID, gpu)),
        "Path": f"/dev/nvidia{minor}" if minor is not None else "",
        "Model": text(known(pynvml.nvmlDeviceGetName, gpu)) or None,
        "Power": _divided(known(pynvml.nvmlDeviceGetPowerManagementLimit, gpu), 1000),
        "CPUAffinity": _numa_node(text(pci.busId) if pci else ""),
        "PCI": {
            "BusID": text(pci.busId) if pci else "",
            "BAR1": _divided(_member(known(pynvml.nvmlDeviceGetBAR1MemoryInfo, gpu), "bar1Total"), _MIB),
            "Bandwidth": _LANE[generation] * width if generation in _LANE and width else None,
        },
        "Clocks": _clocks(pynvml.nvmlDeviceGetMaxClockInfo, gpu),
        # The plugin listed the GPUs that share a switch; `nvidia-smi topo -m` tells more.
        "Topology": None,
        "Family": _FAMILIES.get(known(pynvml.nvmlDeviceGetArchitecture, gpu)),
        "Arch": ".".join(str(number) for number in capability or ()),
        "Cores": known(pynvml.nvmlDeviceGetNumGpuCores, gpu),
        # Values that only CUDA reports are None.
        "Memory": {
            "ECC": bool(ecc[0]) if ecc else None,
            "Global": _divided(_member(known(pynvml.nvmlDeviceGetMemoryInfo, gpu), "total"), _MIB),
            "Shared": None, "Constant": None, "L2Cache": None, "Bandwidth": None,
        },
    }  # fmt: skip


def _status(gpu: Any) -> dict[str, Any]:
    rates = known(pynvml.nvmlDeviceGetUtilizationRates, gpu)
    encoder, decoder = (
        known(one, gpu) for one in (pynvml.nvmlDeviceGetEncoderUtilization, pynvml.nvmlDeviceGetDecoderUtilization)
    )
    kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    errors = [
        known(pynvml.nvmlDeviceGetMemoryErrorCounter, gpu, kind, pynvml.NVML_VOLATILE_ECC, place)
        for place in (pynvml.NVML_MEMORY_LOCATION_L1_CACHE, pynvml.NVML_MEMORY_LOCATION_L2_CACHE,
                      pynvml.NVML_MEMORY_LOCATION_DEVICE_MEMORY)
    ]  # fmt: skip
    received, sent = (
        _divided(known(pynvml.nvmlDeviceGetPcieThroughput, gpu, counter), 1000)
        for counter in (pynvml.NVML_PCIE_UTIL_RX_BYTES, pynvml.NVML_PCIE_UTIL_TX_BYTES)
    )
    return {
        "Power": _divided(known(pynvml.nvmlDeviceGetPowerUsage, gpu), 1000),
        "Temperature": known(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU),
        "Utilization": {
            "GPU": _member(rates, "gpu"), "Memory": _member(rates, "memory"),
            "Encoder": encoder[0] if encoder else None, "Decoder": decoder[0] if decoder else None,
        },
        "Memory": {
            "GlobalUsed": _divided(_member(known(pynvml.nvmlDeviceGetMemoryInfo, gpu), "used"), _MIB),
            "ECCErrors": dict(zip(("L1Cache", "L2Cache", "Global"), errors)),
        },
        "Clocks": _clocks(pynvml.nvmlDeviceGetClockInfo, gpu),
        "PCI": {
            "BAR1Used": _divided(_member(known(pynvml.nvmlDeviceGetBAR1MemoryInfo, gpu), "bar1Used"), _MIB),
            "Throughput": {"RX": received, "TX": sent},
        },
        "Processes": [
            {"PID": one.pid, "Name": "", "MemoryUsed": _divided(one.usedGpuMemory, _MIB)}
            for one in known(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu) or ()
        ],
    }  # fmt: skip


def _clocks(question: Callable[..., Any], gpu: Any) -> dict[str, Any]:
    return {
        "Cores": known(question, gpu, pynvml.NVML_CLOCK_SM),
        "Memory": known(question, gpu, pynvml.NVML_CLOCK_MEM),
    }


def _numa_node(bus_id: str) -> int:
    """Return the NUMA node; 0, as the plugin did, if the kernel does not report one."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        with open(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node") as file:  # noqa: PTH123
            return max(int(file.read()), 0)
    except (OSError, ValueError):
        return 0


def _member(structure: Any, name: str) -> Any:
    return None if structure is None else getattr(structure, name)


def _divided(value: Any, unit: int) -> Any:
    return None if value is None else value // unit
