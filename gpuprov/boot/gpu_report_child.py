"""Query NVML for `gpuprov serve` in a separate process, and print the result as JSON.

Names and units (W, MHz, MiB, MB/s) are those of nvidia-docker-plugin 1.0's REST interface. None means that NVML does
not report the value. Process names are left out: every user of the host can send requests.
"""

from __future__ import annotations

import json
import sys
from typing import Any

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
    driver = text(known(pynvml.nvmlSystemGetDriverVersion))
    document = {
        "Version": {"Driver": driver, "CUDA": f"{version // 1000}.{version % 1000 // 10}"},
        "Info": [_info(gpu) for gpu in gpus],
        "Status": [_status(gpu) for gpu in gpus],
    }
    sys.stdout.write(json.dumps(document))


def _get(gpu: Any, what: str, *more: Any, part: str | int = "", unit: int = 1) -> Any:
    """Return nvmlDeviceGet<what>, or a part of it, in units; None if NVML does not report it."""
    value = known(getattr(pynvml, f"nvmlDeviceGet{what}"), gpu, *more)
    if value is not None and part != "":
        value = value[part] if isinstance(part, int) else getattr(value, part)
    return value // unit if unit > 1 and value is not None else value


def _info(gpu: Any) -> dict[str, Any]:
    minor, ecc = _get(gpu, "MinorNumber"), _get(gpu, "EccMode", part=0)
    lane, width = _LANE.get(_get(gpu, "MaxPcieLinkGeneration")), _get(gpu, "MaxPcieLinkWidth")
    bus_id = text(_get(gpu, "PciInfo", part="busId"))
    return {
        "UUID": text(_get(gpu, "UUID")),
        "Path": f"/dev/nvidia{minor}" if minor is not None else "",
        "Model": text(_get(gpu, "Name")) or None,
        "Power": _get(gpu, "PowerManagementLimit", unit=1000),
        "CPUAffinity": _numa_node(bus_id),
        "PCI": {
            "BusID": bus_id,
            "BAR1": _get(gpu, "BAR1MemoryInfo", part="bar1Total", unit=_MIB),
            "Bandwidth": lane * width if lane and width else None,
        },
        "Clocks": _clocks(gpu, "MaxClockInfo"),
        # The plugin listed the GPUs that share a switch; `nvidia-smi topo -m` tells more.
        "Topology": None,
        "Family": _FAMILIES.get(_get(gpu, "Architecture")),
        "Arch": ".".join(map(str, _get(gpu, "CudaComputeCapability") or ())),
        "Cores": _get(gpu, "NumGpuCores"),
        # Values that only CUDA reports are None.
        "Memory": {
            "ECC": None if ecc is None else bool(ecc),
            "Global": _get(gpu, "MemoryInfo", part="total", unit=_MIB),
            "Shared": None, "Constant": None, "L2Cache": None, "Bandwidth": None,
        },
    }  # fmt: skip


def _status(gpu: Any) -> dict[str, Any]:
    places = {"L1Cache": pynvml.NVML_MEMORY_LOCATION_L1_CACHE, "L2Cache": pynvml.NVML_MEMORY_LOCATION_L2_CACHE,
              "Global": pynvml.NVML_MEMORY_LOCATION_DEVICE_MEMORY}  # fmt: skip
    errors = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    return {
        "Power": _get(gpu, "PowerUsage", unit=1000),
        "Temperature": _get(gpu, "Temperature", pynvml.NVML_TEMPERATURE_GPU),
        "Utilization": {
            "GPU": _get(gpu, "UtilizationRates", part="gpu"),
            "Memory": _get(gpu, "UtilizationRates", part="memory"),
            "Encoder": _get(gpu, "EncoderUtilization", part=0),
            "Decoder": _get(gpu, "DecoderUtilization", part=0),
        },
        "Memory": {
            "GlobalUsed": _get(gpu, "MemoryInfo", part="used", unit=_MIB),
            "ECCErrors": {name: _get(gpu, "MemoryErrorCounter", *errors, place) for name, place in places.items()},
        },
        "Clocks": _clocks(gpu, "ClockInfo"),
        "PCI": {
            "BAR1Used": _get(gpu, "BAR1MemoryInfo", part="bar1Used", unit=_MIB),
            "Throughput": {
                "RX": _get(gpu, "PcieThroughput", pynvml.NVML_PCIE_UTIL_RX_BYTES, unit=1000),
                "TX": _get(gpu, "PcieThroughput", pynvml.NVML_PCIE_UTIL_TX_BYTES, unit=1000),
            },
        },
        "Processes": [
            {"PID": one.pid, "Name": "", "MemoryUsed": one.usedGpuMemory and one.usedGpuMemory // _MIB}
            for one in _get(gpu, "ComputeRunningProcesses") or ()
        ],
    }


def _clocks(gpu: Any, what: str) -> dict[str, Any]:
    return {"Cores": _get(gpu, what, pynvml.NVML_CLOCK_SM), "Memory": _get(gpu, what, pynvml.NVML_CLOCK_MEM)}


def _numa_node(bus_id: str) -> int:
    """Return the NUMA node; 0, as the plugin did, if the kernel does not report one."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        with open(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node") as file:  # noqa: PTH123
            return max(int(file.read()), 0)
    except (OSError, ValueError):
        return 0
