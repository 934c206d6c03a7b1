"""Report GPU information and status for `gpuprov serve`; a child process queries NVML, at most once a second."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from gpuprov.cdi.discover import discover, missing_nodes
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError

# A GPU without a persistent client is initialised first: seconds for each.
_SECONDS = 60
# Concurrent requests share one answer.
_FRESH_SECONDS = 1
_CHILD = "import sys; sys.path[:0] = sys.argv[2:]; from gpuprov.boot.gpu_report_child import main; main(sys.argv[1])"


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
    folders = [folder for folder in sys.path if folder]
    done = system.run((sys.executable or "python3", "-I", "-c", _CHILD, library, *folders), timeout=_SECONDS)
    try:
        document = json.loads(done.stdout) if done.ok else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise GpuprovError("NVML does not answer", done.evidence(), "nvidia-smi; gpuprov doctor")
    return document
