"""What a container asks for, read from its config.json; decides nothing about what there is.

The rules are those of NVIDIA's toolkit: environment, legacy images, privilege, volume mounts, swarm resources.
"""

from __future__ import annotations

import os

from . import driver_files
from .errors import Refused
from .settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MOUNT_ROOT = "/var/run/nvidia-container-devices"
_TRUE = ("1", "t", "T", "true", "TRUE", "True")


class Request:
    """A GPU container's request. `devices` as asked for; empty for driver files without a device (`none`)."""

    __slots__ = ("capabilities", "devices", "requirements")

    def __init__(self, devices: list[str], capabilities: frozenset[str], requirements: list[str]) -> None:
        self.devices = devices
        self.capabilities = capabilities
        self.requirements = requirements


def parse_request(config: dict[str, Any], settings: Settings) -> Request | None:
    """Return what the container asks for, or None for a container that asks for no GPU.

    Raises Refused where it asks in a way that can't be: such a container must not start.
    """
    environment = _environment(config)
    privileged = _is_privileged(config)
    legacy = _is_legacy(environment)
    devices = _devices(config, environment, settings, privileged=privileged, legacy=legacy)
    if devices is None:
        return None
    for name in ("NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES"):
        if environment.get(name) and not privileged:
            raise Refused(f"{name} is for privileged containers alone: add --cap-add SYS_ADMIN, or leave it out")
    capabilities = _capabilities(environment, settings, legacy=legacy)
    return Request(devices, capabilities, _requirements(environment, settings, legacy=legacy))


def _environment(config: dict[str, Any]) -> dict[str, str]:
    """Return the container's environment; the last of two entries with one name counts."""
    process = config.get("process")
    entries = process.get("env") if isinstance(process, dict) else None
    found = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, str):
            name, _, value = entry.partition("=")
            found[name] = value
    return found


def _is_legacy(environment: dict[str, str]) -> bool:
    """Images from before NVIDIA_REQUIRE_CUDA: they say what they need by CUDA_VERSION alone."""
    return bool(environment.get("CUDA_VERSION")) and not environment.get("NVIDIA_REQUIRE_CUDA")


def _is_privileged(config: dict[str, Any]) -> bool:
    process = config.get("process")
    capabilities = process.get("capabilities") if isinstance(process, dict) else None
    # runtime-spec 1.0.0-rc1 to rc4 had a plain list here.
    if isinstance(capabilities, dict):
        capabilities = capabilities.get("bounding")
    return isinstance(capabilities, list) and "CAP_SYS_ADMIN" in capabilities


def _devices(
    config: dict[str, Any], environment: dict[str, str], settings: Settings, *, privileged: bool, legacy: bool
) -> list[str] | None:
    if settings.accept_volume_mounts:
        mounted = _mounted_devices(config)
        if mounted:
            return mounted
    asked = _visible_devices(environment, settings, legacy=legacy)
    if asked is not None and not (privileged or settings.accept_envvar_when_unprivileged):
        return None
    return asked


def _mounted_devices(config: dict[str, Any]) -> list[str]:
    """Return the devices named by mounts of /dev/null below the agreed folder: a pod can't make these by itself."""
    found = []
    mounts = config.get("mounts")
    for mount in mounts if isinstance(mounts, list) else ():
        if not isinstance(mount, dict) or os.path.normpath(str(mount.get("source", ""))) != "/dev/null":
            continue
        destination = os.path.normpath(str(mount.get("destination", "")))
        name = destination[len(_MOUNT_ROOT) + 1 :] if destination.startswith(f"{_MOUNT_ROOT}/") else ""
        name = _qualified(name[len("cdi/") :]) if name.startswith("cdi/") else name
        if name and not name.startswith("imex/") and name not in found:
            found.append(name)
    return found


def _qualified(name: str) -> str:
    """Return VENDOR/CLASS=NAME for VENDOR/CLASS/NAME, that itself as it is, nothing for anything else."""
    if "=" in name:
        return name
    parts = name.split("/", 2)
    return f"{parts[0]}/{parts[1]}={parts[2]}" if len(parts) == 3 else ""


def _visible_devices(environment: dict[str, str], settings: Settings, *, legacy: bool) -> list[str] | None:
    names = [name for name in settings.swarm_resources if name in environment] or ["NVIDIA_VISIBLE_DEVICES"]
    values = [environment[name] for name in names if name in environment]
    if not values:
        return ["all"] if legacy else None
    items = [item.strip() for value in values for item in value.split(",")]
    items = [item for item in items if item]
    if not items or "void" in items:
        return None
    decisive = next((item for item in items if item in ("all", "none")), None)
    if decisive is None:
        return items
    return ["all"] if decisive == "all" else []


def _capabilities(environment: dict[str, str], settings: Settings, *, legacy: bool) -> frozenset[str]:
    supported = frozenset(settings.supported_capabilities)
    default = supported & frozenset(driver_files.DEFAULT)
    value = environment.get("NVIDIA_DRIVER_CAPABILITIES")
    if value is None:
        return supported if legacy else default
    if value == "":
        return default
    asked = frozenset(item.strip() for item in value.split(",") if item.strip())
    if "all" in asked:
        return supported
    refused = sorted(asked - supported)
    if refused:
        raise Refused(
            f"NVIDIA_DRIVER_CAPABILITIES asks for {', '.join(refused)}; this host gives {', '.join(sorted(supported))}"
        )
    return asked


def _requirements(environment: dict[str, str], settings: Settings, *, legacy: bool) -> list[str]:
    if settings.disable_require or environment.get("NVIDIA_DISABLE_REQUIRE") in _TRUE:
        return []
    found = [
        value
        for name, value in environment.items()
        if name.startswith("NVIDIA_REQUIRE_") and not name.startswith("NVIDIA_REQUIRE_JETPACK")
    ]
    if legacy:
        found.append(f"cuda>={_cuda_version(environment['CUDA_VERSION'])}")
    return found


def _cuda_version(text: str) -> str:
    """Return MAJOR.MINOR of a CUDA_VERSION. Raises Refused for anything but one to three numbers."""
    parts = text.removeprefix("v").split(".")
    if len(parts) > 3 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise Refused(f"the image's CUDA_VERSION={text} is no version: NVIDIA_DISABLE_REQUIRE=1 starts it all the same")
    return f"{int(parts[0])}.{int(parts[1]) if len(parts) > 1 else 0}"
