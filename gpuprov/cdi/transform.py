"""Choose devices of a CDI specification, or move its paths below another root. Pure.

Source: nvidia-container-toolkit, pkg/nvcdi/namer.go (the device name strategies), pkg/nvcdi/transform/root.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpuprov.cdi.specification import Device, DeviceNode, Edits, Hook, Specification
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


# The path or arguments of these stages' hooks belong to the container, not to the host.
_CONTAINER_PATH = ("startContainer",)
_CONTAINER_ARGUMENTS = ("createContainer", "startContainer")


def with_root(specification: Specification, source: str, target: str, *, relative_to: str = "host") -> Specification:
    """Return the specification with paths below `source` moved below `target`, for the `host` or the `container`."""

    def moved(path: str) -> str:
        return _moved(path, source, target)

    change = _host_root if relative_to == "host" else _container_root
    return _each(specification, lambda edits: change(edits, moved))


def with_device_root(specification: Specification, root: str) -> Specification:
    """Return the specification with the host's device nodes below `root`; paths in containers do not change."""

    def change(edits: Edits) -> Edits:
        nodes = ((one, _moved(one.path, "/", root)) for one in edits.device_nodes)
        return replace(
            edits,
            device_nodes=tuple(replace(one, host_path="" if path == one.path else path) for one, path in nodes),
        )

    return _each(specification, change)


def _moved(path: str, source: str, target: str) -> str:
    source = source.rstrip("/")
    if path != source and not path.startswith(f"{source}/"):
        return path
    return posixpath.normpath(f"{target}/{path[len(source) :]}").replace("//", "/")


def _each(specification: Specification, change: Callable[[Edits], Edits]) -> Specification:
    devices = tuple(replace(device, edits=change(device.edits)) for device in specification.devices)
    return replace(specification, devices=devices, edits=change(specification.edits))


def _host_root(edits: Edits, moved: Callable[[str], str]) -> Edits:
    def node(one: DeviceNode) -> DeviceNode:
        host = moved(one.host_path or one.path)
        return replace(one, host_path="" if host == one.path else host)

    def hook(one: Hook) -> Hook:
        path = one.path if one.name in _CONTAINER_PATH else moved(one.path)
        arguments = one.args if one.name in _CONTAINER_ARGUMENTS else _arguments(one.args, moved)
        return replace(one, path=path, args=arguments)

    return replace(
        edits,
        device_nodes=tuple(node(one) for one in edits.device_nodes),
        mounts=tuple(replace(one, host_path=moved(one.host_path)) for one in edits.mounts),
        hooks=tuple(hook(one) for one in edits.hooks),
    )


def _container_root(edits: Edits, moved: Callable[[str], str]) -> Edits:
    def hook(one: Hook) -> Hook:
        path = moved(one.path) if one.name in _CONTAINER_PATH else one.path
        arguments = _arguments(one.args, moved) if one.name in _CONTAINER_ARGUMENTS else one.args
        return replace(one, path=path, args=arguments)

    return replace(
        edits,
        device_nodes=tuple(replace(one, path=moved(one.path)) for one in edits.device_nodes),
        mounts=tuple(replace(one, container_path=moved(one.container_path)) for one in edits.mounts),
        hooks=tuple(hook(one) for one in edits.hooks),
    )


def _arguments(arguments: tuple[str, ...], moved: Callable[[str], str]) -> tuple[str, ...]:
    return tuple("::".join(moved(part) for part in argument.split("::")) for argument in arguments)
