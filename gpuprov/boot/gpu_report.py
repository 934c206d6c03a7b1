"""Report GPU information and status for `gpuprov serve`; a child process queries NVML, at most once a second."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from gpuprov.cdi.discover import discover, missing_nodes
from gpuprov.cdi.nvml import run_child
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError

# Concurrent requests share one answer.
_FRESH_SECONDS = 1


class GpuReport:
    """Cached answers of NVML, at most one second old. Thread-safe."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._lock = threading.Lock()
        self._asked = 0.0
        self._document: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return `Version`, `Info` and `Status`. Raises GpuprovError if the driver does not answer."""
        with self._lock:
            if not self._document or self._system.now() - self._asked > _FRESH_SECONDS:
                self._document = _ask(self._system)
                self._asked = self._system.now()
            return self._document


def _ask(system: System) -> dict[str, Any]:
    driver = discover(system)
    # NVML would load the driver, and make device nodes.
    if not driver.kernel_version:
        raise GpuprovError("the NVIDIA driver is not loaded", "no /proc/driver/nvidia/version", "gpuprov doctor")
    missing = missing_nodes(driver)
    if missing:
        raise GpuprovError(f"the device node {missing[0].path} is missing", "", "nvidia-modprobe -u -c 0")
    library = next((one.path for one in driver.libraries if "/libnvidia-ml.so." in one.path), "")
    if not library:
        raise GpuprovError("there is no NVML on this host", "no libnvidia-ml.so.1", "gpuprov doctor")
    done = run_child(system, library, "gpuprov.boot.gpu_report_child")
    try:
        document = json.loads(done.stdout) if done.ok else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise GpuprovError("NVML does not answer", done.evidence(), "nvidia-smi; gpuprov doctor")
    return document


# -- as text, in the lines of nvidia-docker-plugin's /gpu/info and /gpu/status -----------------------------------------

_NONE = "N/A"
# (depth, heading, where the value is, its unit)
_INFO = (
    (1, "Model", ("Model",), ""), (1, "UUID", ("UUID",), ""), (1, "Path", ("Path",), ""),
    (1, "Family", ("Family",), ""), (1, "Arch", ("Arch",), ""), (1, "Cores", ("Cores",), ""),
    (1, "Power", ("Power",), "W"), (1, "CPU Affinity", ("CPUAffinity",), "NUMA node"),
    (1, "PCI", (), ""), (2, "Bus ID", ("PCI", "BusID"), ""), (2, "BAR1", ("PCI", "BAR1"), "MiB"),
    (2, "Bandwidth", ("PCI", "Bandwidth"), "MB/s"),
    (1, "Memory", (), ""), (2, "ECC", ("Memory", "ECC"), ""), (2, "Global", ("Memory", "Global"), "MiB"),
    (1, "Clocks", (), ""), (2, "Cores", ("Clocks", "Cores"), "MHz"), (2, "Memory", ("Clocks", "Memory"), "MHz"),
)  # fmt: skip
_STATUS = (
    (1, "Power", ("Power",), "W"), (1, "Temperature", ("Temperature",), "°C"),
    (1, "Utilization", (), ""), (2, "GPU", ("Utilization", "GPU"), "%"), (2, "Memory", ("Utilization", "Memory"), "%"),
    (2, "Encoder", ("Utilization", "Encoder"), "%"), (2, "Decoder", ("Utilization", "Decoder"), "%"),
    (1, "Memory", (), ""), (2, "Global", ("Memory", "GlobalUsed"), "MiB"),
    (2, "ECC Errors", ("Memory", "ECCErrors", "Global"), ""),
    (1, "PCI", (), ""), (2, "BAR1", ("PCI", "BAR1Used"), "MiB"), (2, "RX", ("PCI", "Throughput", "RX"), "MB/s"),
    (2, "TX", ("PCI", "Throughput", "TX"), "MB/s"),
    (1, "Clocks", (), ""), (2, "Cores", ("Clocks", "Cores"), "MHz"), (2, "Memory", ("Clocks", "Memory"), "MHz"),
)  # fmt: skip
_Rows = Sequence[tuple[int, str, tuple[str, ...], str]]


def info_text(report: Mapping[str, Any]) -> str:
    """Return the versions and the properties of each GPU."""
    version = report["Version"]
    head = [f"Driver version:         {version['Driver']}", f"Supported CUDA version: {version['CUDA']}"]
    return "\n".join([*head, *_devices(report["Info"], _INFO)]) + "\n"


def status_text(report: Mapping[str, Any]) -> str:
    """Return the current status of each GPU."""
    lines = []
    for number, gpu in enumerate(report["Status"]):
        lines += _device(number, gpu, _STATUS)
        processes = [f"    - PID: {one['PID']}  Memory: {one['MemoryUsed']} MiB" for one in gpu["Processes"]]
        lines += ["  Processes", *processes] if processes else ["  Processes: None"]
    return "\n".join(lines).lstrip("\n") + "\n"


def _devices(gpus: Sequence[Mapping[str, Any]], rows: _Rows) -> list[str]:
    return [line for number, gpu in enumerate(gpus) for line in _device(number, gpu, rows)]


def _device(number: int, gpu: Mapping[str, Any], rows: _Rows) -> list[str]:
    return ["", f"Device #{number}", *(_line(gpu, *row) for row in rows)]


def _line(gpu: Mapping[str, Any], depth: int, heading: str, place: tuple[str, ...], unit: str) -> str:
    indent = "  " * depth
    if not place:
        return f"{indent}{heading}"
    value: Any = gpu
    for name in place:
        value = value[name]
    shown = _NONE if value in (None, "") else f"{unit}{value}" if unit.startswith("NUMA") else f"{value} {unit}".strip()
    return f"{indent}{heading + ':':<{22 - len(indent)}}{shown}"
