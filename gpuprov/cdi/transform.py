"""Changes to a whole CDI specification: another root, no doubles, a fixed order, one device for all. Pure.

Source: nvidia-container-toolkit, pkg/nvcdi/transform: what tools built on it expect of these words.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from gpuprov.cdi.specification import Device, DeviceNode, Edits, Hook, Specification
from gpuprov.cdi.validation import is_device_name
from gpuprov.wire.errors import GpuprovError

_Item = TypeVar("_Item")
# Of these stages' hooks, path or arguments are the container's, not the host's.
_CONTAINER_PATH = ("startContainer",)
_CONTAINER_ARGUMENTS = ("createContainer", "startContainer")


def with_root(specification: Specification, source: str, target: str, *, relative_to: str = "host") -> Specification:
    """Return the specification with paths below `source` moved below `target`, the `host`'s or the `container`'s."""

    def moved(path: str) -> str:
        return _moved(path, source, target)

    change = _host_root if relative_to == "host" else _container_root
    return _each(specification, lambda edits: change(edits, moved))


def with_device_root(specification: Specification, root: str) -> Specification:
    """Return the specification with device nodes that lie, on the host, below `root`; in containers nothing changes."""

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


def deduplicated(specification: Specification) -> Specification:
    """Return the specification with no entity twice in one place."""
    return _each(specification, _unique_edits)


def _unique_edits(edits: Edits) -> Edits:
    return replace(
        edits,
        env=_unique(edits.env),
        device_nodes=_unique(edits.device_nodes),
        mounts=_unique(edits.mounts),
        hooks=_unique(edits.hooks),
        additional_gids=_unique(edits.additional_gids),
        net_devices=_unique(edits.net_devices),
    )


def _unique(items: tuple[_Item, ...]) -> tuple[_Item, ...]:
    return tuple(dict.fromkeys(items))


def simplified(specification: Specification) -> Specification:
    """Return the specification without what devices repeat of the common edits, but no device empty for it."""
    common = specification.edits

    def without(device: Device) -> Device:
        own = device.edits
        less = replace(
            own,
            env=_other(own.env, common.env),
            device_nodes=_other(own.device_nodes, common.device_nodes),
            mounts=_other(own.mounts, common.mounts),
            hooks=_other(own.hooks, common.hooks),
            additional_gids=_other(own.additional_gids, common.additional_gids),
            net_devices=_other(own.net_devices, common.net_devices),
        )
        return device if less == Edits() else replace(device, edits=less)

    return replace(specification, devices=tuple(without(device) for device in specification.devices))


def _other(items: tuple[_Item, ...], common: tuple[_Item, ...]) -> tuple[_Item, ...]:
    return tuple(item for item in items if item not in common)


def in_order(specification: Specification) -> Specification:
    """Return the specification with devices by name, nodes and mounts by depth and path; the rest keeps its order."""

    def ordered(edits: Edits) -> Edits:
        return replace(
            edits,
            device_nodes=tuple(sorted(edits.device_nodes, key=lambda one: _depth(one.path))),
            mounts=tuple(sorted(edits.mounts, key=lambda one: _depth(one.container_path))),
        )

    found = _each(specification, ordered)
    return replace(found, devices=tuple(sorted(found.devices, key=lambda one: one.name)))


def _depth(path: str) -> tuple[int, str]:
    return posixpath.normpath(path).count("/"), path


def with_merged_device(specification: Specification, name: str = "all", *, skip: bool = False) -> Specification:
    """Return the specification with one more device that is all the others together, simplified.

    Raises GpuprovError if there is a device of that name already, unless it shall be left as it is.
    """
    if not is_device_name(name):
        raise GpuprovError(f"{name!r} is no name for a device", "", "letters, digits and ._:- between them")
    if any(device.name == name for device in specification.devices):
        if skip:
            return specification
        raise GpuprovError(f"there is a device {name!r} already", "", "take another name")
    edits = Edits()
    for device in specification.devices:
        edits = appended(edits, device.edits)
    merged = Device(name, _unique_edits(edits))
    return simplified(replace(specification, devices=(*specification.devices, merged)))


def appended(first: Edits, second: Edits) -> Edits:
    """Return both edits as one; of Intel's RDT the last."""
    return Edits(
        env=first.env + second.env,
        device_nodes=first.device_nodes + second.device_nodes,
        mounts=first.mounts + second.mounts,
        hooks=first.hooks + second.hooks,
        additional_gids=first.additional_gids + second.additional_gids,
        net_devices=first.net_devices + second.net_devices,
        intel_rdt=second.intel_rdt or first.intel_rdt,
    )
