"""Query the driver's own library (NVML) for facts about the GPUs; all other modules use this one.

A separate process (nvml_child.py) queries it: a driver that hangs or crashes takes only that process down, and a time
limit ends it. The answers are validated: the library may be broken or not NVIDIA's.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass, field

# A GPU without a persistent client is initialised first: seconds for each. Less than a boot waits (boot/etc).
_SECONDS = 60
_CHILD = "import sys; sys.path[:0] = sys.argv[2:]; from {} import main; main(sys.argv[1])"
_UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_VERSION = r"\d+\.\d+"
# By their numbers in nvml.h (nvmlBrandType_t), named as images name them in NVIDIA_REQUIRE_CUDA: `brand=geforcertx`.
_BRANDS = (
    "", "Quadro", "Tesla", "NVS", "Grid", "GeForce", "Titan", "NvidiavApps", "NvidiaVPC", "NvidiaVCS", "NvidiaVWS",
    "NvidiaCloudGaming", "QuadroRTX", "NvidiaRTX", "NVIDIA", "GeForceRTX", "TitanRTX",
)  # fmt: skip


@dataclass(frozen=True)
class GpuAnswer:
    """Facts about a GPU that only NVML knows; "" if it does not report them.

    `mig`: ids of GPU and compute instance → UUID of the MIG device. `recovery_action`: nvmlDeviceGpuRecoveryAction_t;
    `links`: its active NVLinks, None if it has none.
    """

    uuid: str = ""
    brand: str = ""
    compute_capability: str = ""
    mig: Mapping[tuple[int, int], str] = field(default_factory=dict)
    recovery_action: int | None = None
    links: int | None = None


def ask(system: System, library: str, seconds: float = _SECONDS) -> tuple[Mapping[str, GpuAnswer], str]:
    """Return PCI bus id → answer, and the driver's CUDA version; empty if NVML fails.

    `library` is the path of NVML, so that only this driver's library is loaded.
    """
    done = run_child(system, library, "gpuprov.cdi.nvml_child", seconds)
    return parse_answers(done.stdout) if done.ok else ({}, "")


def run_child(system: System, library: str, module: str, seconds: float = _SECONDS) -> Completed:
    """Run a module's main() with the path of NVML in a separate process."""
    folders = [folder for folder in sys.path if folder]
    words = (sys.executable or "python3", "-I", "-c", _CHILD.format(module), library, *folders)
    return system.run(words, timeout=seconds)


def parse_answers(text: str) -> tuple[Mapping[str, GpuAnswer], str]:
    """Return the result of ask() from the child's JSON; values of the wrong form are dropped."""
    try:
        document = json.loads(text)
        gpus = {sysfs_bus_id(str(one["bus_id"])): _answer(one) for one in document["gpus"]}
        return gpus, _matching(_VERSION, document["cuda_version"])
    except (ArithmeticError, LookupError, ValueError, TypeError, AttributeError, RecursionError):
        return {}, ""


def _answer(gpu: Mapping[str, Any]) -> GpuAnswer:
    brand = gpu["brand"]
    mig = {
        (int(one["gpu_instance"]), int(one["compute_instance"])): _matching(f"MIG-{_UUID}", one["uuid"])
        for one in gpu["mig"]
        # One that has just been removed tells no ids.
        if None not in (one["gpu_instance"], one["compute_instance"])
    }
    return GpuAnswer(
        _matching(f"GPU-{_UUID}", gpu["uuid"]),
        _BRANDS[brand] if isinstance(brand, int) and 0 <= brand < len(_BRANDS) else "",
        _matching(_VERSION, gpu["compute_capability"]),
        mig,
        *(value if isinstance(value := gpu.get(name), int) else None for name in ("recovery_action", "links")),
    )


def sysfs_bus_id(text: str) -> str:
    """Return a PCI bus id as the kernel writes it: NVML's 00000000:1B:00.0 becomes 0000:1b:00.0."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain.lstrip('0').zfill(4)}:{rest}"


def _matching(pattern: str, text: Any) -> str:
    """Return the text if it has that form, else ""."""
    return text if isinstance(text, str) and re.fullmatch(pattern, text) else ""
