"""The contents of the driver's small files: enough for a reader that parses them, nothing of NVIDIA's own text."""

import json

from .gpus import gpu

_SHELL_PROGRAMS = (
    "nvidia-bug-report.sh",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-debugdump",
    "nvidia-powerd",
    "nvidia-sleep.sh",
    "nvidia",
)
_PERSISTENCED = """#!/bin/sh
# Stands for nvidia-persistenced: stays in the background with its pid in the real place.
case " $* " in
*" --version "*) echo "nvidia-persistenced:  version @VERSION@"; exit 0 ;;
*" --help "*) echo "nvidia-persistenced [options]"; exit 0 ;;
esac
mkdir -p /run/nvidia-persistenced
sleep infinity > /dev/null 2>&1 &
echo $! > /run/nvidia-persistenced/nvidia-persistenced.pid
"""


def placeholder(name: str, version: str) -> str:
    """The content of the installed file with that name: a script, JSON, a unit, or one line of text."""
    if name == "nvidia-persistenced":
        return _PERSISTENCED.replace("@VERSION@", version)
    if name in _SHELL_PROGRAMS:
        return f'#!/bin/sh\n# Stands for {name} of the simulated driver.\necho "{name}: simulated, {version}"\n'
    if name == "nvidia.icd":
        return "libnvidia-opencl.so.1\n"
    if name.endswith(".json"):
        return json.dumps(_json(name, version), indent=4) + "\n"
    if name.endswith(".service"):
        action = name.removeprefix("nvidia-").removesuffix(".service")
        return (
            f"[Unit]\nDescription=NVIDIA system {action} actions\n\n"
            f'[Service]\nType=oneshot\nExecStart=/usr/bin/nvidia-sleep.sh "{action}"\n\n'
            f"[Install]\nRequiredBy=systemd-{action}.service\n"
        )
    return f"Simulated driver {version}: {name}\n"


def _json(name: str, version: str) -> dict[str, object]:
    icd: dict[str, object] = {"library_path": "libGLX_nvidia.so.0", "api_version": "1.3.277"}
    if name == "10_nvidia.json":
        return {"file_format_version": "1.0.0", "ICD": {"library_path": "libEGL_nvidia.so.0"}}
    if name == "nvidia_layers.json":
        layer = {
            "name": "VK_LAYER_NV_optimus",
            "type": "INSTANCE",
            "library_path": "libGLX_nvidia.so.0",
            "api_version": "1.3.277",
            "implementation_version": "1",
            "description": f"Simulated layer of driver {version}",
        }
        return {"file_format_version": "1.0.0", "layer": layer}
    return {"file_format_version": "1.0.0", "ICD": icd}


def supported_gpus() -> str:
    """supported-gpus.json in the real format: the simulated GPU, an old one without open modules, and a legacy one."""
    card = gpu(0)
    chips = [
        {
            "devid": f"0x{card.device_id:04X}",
            "subdevid": f"0x{card.subsystem_device_id:04X}",
            "subvendorid": f"0x{card.subsystem_vendor_id:04X}",
            "name": card.name,
            "features": ["dpycbcr420", "fp16", "gsp_proprietary_supported", "kernelopen", "mig", "vdpaufeaturesetL"],
        },
        {"devid": "0x1DB6", "name": "Tesla V100-PCIE-32GB", "features": ["fp16", "vdpaufeaturesetI"]},
        {"devid": "0x102D", "name": "Tesla K80", "legacybranch": "470.xx", "features": ["vdpaufeaturesetD"]},
    ]
    return json.dumps({"chips": chips}, indent=2) + "\n"
