"""What a container asks for, read from its config.json; decides nothing about what there is.

The rules are those of NVIDIA's toolkit: annotations, volume mounts, environment, legacy images, privilege, swarm
resources, IMEX channels, MIG. Each that decides something says so in one sentence.
"""

from __future__ import annotations

from typing import Any

from . import driver_files
from .config import at, mounts_of
from .errors import Refused
from .files import normal_path
from .settings import SETTINGS_PATH, Settings
from .specification import kind_of

_MOUNT_ROOT = "/var/run/nvidia-container-devices/"
_DEVICES = "NVIDIA_VISIBLE_DEVICES"
_IMEX = "NVIDIA_IMEX_CHANNELS"
# `runtime.` says that the runtime shall find the device, which it does in any case.
VENDORS = ("nvidia.com", "runtime.nvidia.com")
_EXTRAS = ("GDS", "MOFED", "GDRCOPY", "NVSWITCH")
_TRUE = ("1", "t", "T", "true", "TRUE", "True")
# runtime-spec 1.0.0-rc1 to rc4 had a plain list of capabilities.
_FLAT_CAPABILITIES = ("1.0.0-rc1", "1.0.0-rc2", "1.0.0-rc3", "1.0.0-rc4")


class DeviceRequest:
    """A container's request. `devices` is None for a container that asks for no GPU, empty for `none` (files alone)."""

    def __init__(self, *, legacy: bool, privileged: bool) -> None:
        self.legacy = legacy
        self.privileged = privileged
        self.devices: list[str] | None = None
        self.by_annotation = False
        self.imex_channels: list[str] = []
        self.capabilities: frozenset[str] = frozenset()
        self.requirements: list[str] = []
        self.mig_config = ""
        self.mig_monitor = ""
        self.extras: list[str] = []
        self.decisions: list[str] = []


def parse_request(config: dict[str, Any], settings: Settings) -> DeviceRequest:
    """Return what the container asks for.

    Raises Refused where it asks for GPUs in a way that can't be: such a container must not start.
    """
    environment, malformed = _environment(config)
    # Images from before NVIDIA_REQUIRE_CUDA say what they need by CUDA_VERSION alone.
    legacy = bool(environment.get("CUDA_VERSION")) and not environment.get("NVIDIA_REQUIRE_CUDA")
    request = DeviceRequest(legacy=legacy, privileged=_is_privileged(config))
    request.devices = _devices(config, environment, settings, request)
    if request.devices is None:
        return request
    try:
        if malformed:
            what = f"the container's environment has an entry without '=': {malformed!r}"
            raise Refused(f"{what}: correct the image or the command")
        _refuse_other_kinds(request, settings)
        _add_mig(environment, request)
        request.imex_channels = _imex_channels(config, environment, settings, request)
        request.capabilities = _capabilities(environment, settings, request)
        request.requirements = _requirements(environment, settings, request)
        request.extras = [name.lower() for name in _EXTRAS if environment.get(f"NVIDIA_{name}") == "enabled"]
    except Refused as refused:
        refused.request = request
        raise
    return request


def _environment(config: dict[str, Any]) -> tuple[dict[str, str], str]:
    """Return the container's environment, the last of two entries with one name counting; and an entry without `=`."""
    found = {}
    malformed = ""
    for entry in at(config, list, "process", "env"):
        if isinstance(entry, str):
            name, equals, value = entry.partition("=")
            if equals:
                found[name] = value
            else:
                malformed = malformed or entry or " "
    return found, malformed


def _is_privileged(config: dict[str, Any]) -> bool:
    is_flat = str(config.get("ociVersion", "")).startswith(_FLAT_CAPABILITIES)
    place = ("process", "capabilities") if is_flat else ("process", "capabilities", "bounding")
    return "CAP_SYS_ADMIN" in at(config, list, *place)


def _devices(
    config: dict[str, Any], environment: dict[str, str], settings: Settings, request: DeviceRequest
) -> list[str] | None:
    annotated = _annotated_devices(config, settings)
    if annotated:
        request.by_annotation = True
        request.decisions.append("devices are named by annotations")
        return annotated
    named = [name for name in _mounts_below_root(config) if not name.startswith("imex/")]
    if named and not settings.accept_volume_mounts:
        request.decisions.append(
            "volume mounts that name devices don't count: accept-nvidia-visible-devices-as-volume-mounts is false"
        )
    elif named:
        dropped = [name for name in named if not _qualified(name)]
        if dropped:
            request.decisions.append(f"volume mounts that name no CDI device don't count: {', '.join(dropped)}")
        mounted = [_qualified(name) for name in named if name not in dropped]
        if mounted:
            request.decisions.append(f"devices are named by volume mounts below {_MOUNT_ROOT}")
            return mounted
    names = [name for name in settings.swarm_resources if name in environment] or [_DEVICES]
    asked = _listed([environment[name] for name in names if name in environment], legacy=request.legacy)
    if asked is None:
        state = "names no device" if any(name in environment for name in names) else "is not set"
        request.decisions.append(f"{' and '.join(names)} {state}")
        return None
    if not (request.privileged or settings.accept_envvar_when_unprivileged):
        request.decisions.append(
            f"{' and '.join(names)} don't count: the container is not privileged, and "
            "accept-nvidia-visible-devices-envvar-when-unprivileged is false"
        )
        return None
    if names[0] in environment:
        request.decisions.append(f"devices are named by {' and '.join(names)}")
    else:
        request.decisions.append("an image with CUDA_VERSION and no NVIDIA_REQUIRE_CUDA is a legacy image: all devices")
    return asked


def _annotated_devices(config: dict[str, Any], settings: Settings) -> list[str]:
    pairs = sorted(at(config, dict, "annotations").items())
    values = [value for key, value in pairs if key.startswith(settings.annotation_prefixes) and isinstance(value, str)]
    return [name for value in values for name in value.split(",")]


def _mounts_below_root(config: dict[str, Any]) -> list[str]:
    """Return what is named by mounts of /dev/null below the agreed folder: a pod can't make these by itself."""
    found: dict[str, None] = {}
    for mount in mounts_of(config):
        destination = normal_path(str(mount.get("destination", "")))
        if destination.startswith(_MOUNT_ROOT) and normal_path(str(mount.get("source", ""))) == "/dev/null":
            found[destination[len(_MOUNT_ROOT) :]] = None
    return list(found)


def _qualified(name: str) -> str:
    """Return VENDOR/CLASS=NAME for cdi/VENDOR/CLASS/NAME, nothing for another cdi/…, any other name as it is."""
    if not name.startswith("cdi/"):
        return name
    name = name[len("cdi/") :]
    kind, equals, device = name.partition("=")
    if equals and device and "/" in kind.strip("/"):
        return name
    parts = name.split("/", 2)
    return f"{parts[0]}/{parts[1]}={parts[2]}" if len(parts) == 3 else ""


def _listed(values: list[str], *, legacy: bool) -> list[str] | None:
    """Return the devices that variables' values list: none at all is None, `none` is the empty list."""
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


def _refuse_other_kinds(request: DeviceRequest, settings: Settings) -> None:
    """An image, or the user who starts it, may name NVIDIA's devices only, not those of other vendors.

    Annotations come from the engine, so they may name any kind.
    """
    if request.by_annotation:
        return
    allowed = ("", settings.default_kind, *settings.requestable_kinds)
    for name in request.devices or ():
        kind = kind_of(name)
        if kind.partition("/")[0] not in VENDORS and kind not in allowed:
            what = f"the container itself asks for {name}, and may name devices of nvidia.com alone"
            cure = f"use the engine's --device {name}, or add {kind} to modes.cdi.requestable-kinds in {SETTINGS_PATH}"
            raise Refused(f"{what}: {cure}")


def _add_mig(environment: dict[str, str], request: DeviceRequest) -> None:
    request.mig_config = environment.get("NVIDIA_MIG_CONFIG_DEVICES", "")
    request.mig_monitor = environment.get("NVIDIA_MIG_MONITOR_DEVICES", "")
    for name, value in (("CONFIG", request.mig_config), ("MONITOR", request.mig_monitor)):
        if value and not request.privileged:
            what = f"NVIDIA_MIG_{name}_DEVICES is for privileged containers alone"
            raise Refused(f"{what}: add --cap-add SYS_ADMIN, or drop it")


def _imex_channels(
    config: dict[str, Any], environment: dict[str, str], settings: Settings, request: DeviceRequest
) -> list[str]:
    if settings.ignore_imex:
        request.decisions.append("IMEX channels don't count: ignore-imex-channel-requests is true")
        return []
    if settings.accept_volume_mounts:
        mounted = [name[len("imex/") :] for name in _mounts_below_root(config) if name.startswith("imex/")]
        if mounted:
            request.decisions.append("IMEX channels are named by volume mounts")
            return mounted
    if _IMEX not in environment or not (request.privileged or settings.accept_envvar_when_unprivileged):
        return []
    listed = _listed([environment[_IMEX]], legacy=False) or []
    if listed != ["all"]:
        return listed
    request.decisions.append(f"{_IMEX}=all is no channel: channels are given by number")
    return []


def _capabilities(environment: dict[str, str], settings: Settings, request: DeviceRequest) -> frozenset[str]:
    supported = frozenset(settings.supported_capabilities)
    default = supported & frozenset(driver_files.DEFAULT)
    value = environment.get("NVIDIA_DRIVER_CAPABILITIES")
    if not value:
        legacy = request.legacy and value is None
        given = "all for a legacy image" if legacy else "the default"
        request.decisions.append(f"NVIDIA_DRIVER_CAPABILITIES is not set: {given}")
        return supported if legacy else default
    asked = frozenset(item.strip() for item in value.split(",") if item.strip())
    if "all" in asked:
        return supported
    refused = sorted(asked - supported)
    if refused:
        gives = ", ".join(sorted(supported))
        raise Refused(f"NVIDIA_DRIVER_CAPABILITIES asks for {', '.join(refused)}; this host gives {gives}")
    return asked


def _requirements(environment: dict[str, str], settings: Settings, request: DeviceRequest) -> list[str]:
    if settings.disable_require or environment.get("NVIDIA_DISABLE_REQUIRE") in _TRUE:
        by = "disable-require" if settings.disable_require else "NVIDIA_DISABLE_REQUIRE"
        request.decisions.append(f"requirements are not checked: {by}")
        return []
    found = [
        value
        for name, value in environment.items()
        if name.startswith("NVIDIA_REQUIRE_") and not name.startswith("NVIDIA_REQUIRE_JETPACK")
    ]
    if request.legacy:
        found.append(f"cuda>={_cuda_version(environment['CUDA_VERSION'])}")
    return found


def _cuda_version(text: str) -> str:
    """Return MAJOR.MINOR of a CUDA_VERSION. Raises Refused for anything but one to three numbers."""
    parts = text.removeprefix("v").split(".")
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 4000]
    if len(parts) > 3 or len(numbers) != len(parts) or max(numbers[:2]) >= 1 << 32:
        raise Refused(f"the image's CUDA_VERSION={text} is no version: NVIDIA_DISABLE_REQUIRE=1 starts it all the same")
    return f"{numbers[0]}.{numbers[1] if len(numbers) > 1 else 0}"
