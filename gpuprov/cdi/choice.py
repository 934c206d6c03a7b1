"""Which devices of a specification are wanted, by the kinds of their names (index, UUID) or one by one. Pure.

Source: nvidia-container-toolkit, pkg/nvcdi/namer.go: the device name strategies.
"""

from __future__ import annotations

from dataclasses import replace

from gpuprov.cdi.specification import Device, Specification
from gpuprov.errors import GpuprovError


def chosen_devices(
    found: Specification, *, strategies: tuple[str, ...], ids: tuple[str, ...], no_all_device: bool
) -> tuple[Device, ...]:
    """Return the devices that go by the wanted kinds of names. Raises GpuprovError for an id that none has."""
    devices = [device for device in found.devices if not (no_all_device and device.name == "all")]
    if strategies:
        devices = [device for device in devices if _is_named(device.name, strategies)]
    if ids:
        unknown = sorted(set(ids) - {device.name for device in devices})
        if unknown:
            raise GpuprovError(f"there is no device {', '.join(unknown)}", "", "gpuprov cdi generate shows all names")
        devices = [device for device in devices if device.name in ids]
    if "type-index" in strategies and "index" not in strategies:
        devices = [replace(one, name=f"{_type(one.name)}{one.name}") for one in devices]
    return tuple(devices)


def _type(name: str) -> str:
    if name.isdigit():
        return "gpu"
    return "mig" if name.replace(":", "", 1).isdigit() else ""


def _is_named(name: str, strategies: tuple[str, ...]) -> bool:
    by_index = name.replace(":", "").isdigit() and name.count(":") <= 1
    by_uuid = name.startswith(("GPU-", "MIG-"))
    wanted = ("index" in strategies or "type-index" in strategies, "uuid" in strategies)
    return name == "all" or (by_index and wanted[0]) or (by_uuid and wanted[1])
