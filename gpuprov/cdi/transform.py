"""Move the paths of a whole CDI specification below another root. Pure.

Source: nvidia-container-toolkit, pkg/nvcdi/transform/root.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import replace

from gpuprov.cdi.specification import DeviceNode, Edits, Hook, Specification

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
