"""Choose devices of a specification by the kind of their names (index, UUID) or one by one. Pure.

Source: nvidia-container-toolkit, pkg/nvcdi/namer.go: the device name strategies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuprov.cdi.specification import Device, Edits, Specification
from gpuprov.protocol.errors import GpuprovError


def chosen_devices(
    found: Specification, *, strategies: tuple[str, ...], ids: tuple[str, ...], no_all_device: bool
) -> tuple[Device, ...]:
    """Return the devices that have a name of the wanted kinds. Raises GpuprovError for an id that no device has.

    An id chooses a device by any of its names; `all` then means all chosen devices.
    """
    devices = [device for device in found.devices if device.name != "all"]
    whole = [device for device in found.devices if device.name == "all"]
    if ids and "all" not in ids:
        unknown = sorted(set(ids) - {device.name for device in devices})
        if unknown:
            raise GpuprovError(f"there is no device {', '.join(unknown)}", "", "gpuprov cdi generate shows all names")
        chosen = [device.edits for device in devices if device.name in ids]
        devices = [device for device in devices if device.edits in chosen]
        whole = [all_of(devices)]
    if strategies:
        devices = [device for device in devices if _is_named(device.name, strategies)]
    if "type-index" in strategies and "index" not in strategies:
        devices = [replace(one, name=f"{_type(one.name)}{one.name}") for one in devices]
    return (*devices, *(() if no_all_device else whole))


def all_of(devices: Sequence[Device]) -> Device:
    """Return one device that combines all of these."""
    nodes = tuple(dict.fromkeys(node for device in devices for node in device.edits.device_nodes))
    gids = sorted({gid for device in devices for gid in device.edits.additional_gids})
    return Device("all", Edits(device_nodes=nodes, additional_gids=tuple(gids)))


def _type(name: str) -> str:
    if name.isdigit():
        return "gpu"
    return "mig" if name.replace(":", "", 1).isdigit() else ""


def _is_named(name: str, strategies: tuple[str, ...]) -> bool:
    by_index = name.replace(":", "").isdigit() and name.count(":") <= 1
    by_uuid = name.startswith(("GPU-", "MIG-"))
    wanted = ("index" in strategies or "type-index" in strategies, "uuid" in strategies)
    return (by_index and wanted[0]) or (by_uuid and wanted[1])
