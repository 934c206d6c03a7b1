"""The CDI specification as types, and as the JSON that engines read.

Source: github.com/cncf-tags/container-device-interface, SPEC.md. JSON and not YAML, because the runtime reads it at
every container start and Python's own parser for it costs least.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VENDOR_CLASS = "nvidia.com/gpu"


@dataclass(frozen=True)
class DeviceNode:
    """A device node to be made in the container; major and minor are those of the host's node."""

    path: str
    major: int
    minor: int
    permissions: str = "rw"


@dataclass(frozen=True)
class Mount:
    """A file of the host to be seen in the container."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "rbind", "rprivate")


@dataclass(frozen=True)
class Edits:
    """What a device, or all devices, bring into a container."""

    env: tuple[str, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()


@dataclass(frozen=True)
class Device:
    """A device that a container can ask for by name."""

    name: str
    edits: Edits


@dataclass(frozen=True)
class Specification:
    """A CDI specification of kind nvidia.com/gpu."""

    devices: tuple[Device, ...]
    edits: Edits
    annotations: Mapping[str, str]

    @property
    def version(self) -> str:
        """The lowest version that has what this specification uses (SPEC.md, "Released versions")."""
        if self.annotations:
            return "0.6.0"
        return "0.5.0" if any(not device.name[:1].isalpha() for device in self.devices) else "0.3.0"


def render_json(specification: Specification) -> bytes:
    """Return the specification as JSON; same specification, same bytes."""
    document: dict[str, Any] = {"cdiVersion": specification.version, "kind": VENDOR_CLASS}
    if specification.annotations:
        document["annotations"] = dict(sorted(specification.annotations.items()))
    document["devices"] = [
        {"name": device.name, "containerEdits": _edits(device.edits)} for device in specification.devices
    ]
    document["containerEdits"] = _edits(specification.edits)
    return (json.dumps(document, indent=1) + "\n").encode()


def _edits(edits: Edits) -> dict[str, Any]:
    nodes = [
        {"path": node.path, "type": "c", "major": node.major, "minor": node.minor, "permissions": node.permissions}
        for node in edits.device_nodes
    ]
    mounts = [
        {"hostPath": mount.host_path, "containerPath": mount.container_path, "options": list(mount.options)}
        for mount in edits.mounts
    ]
    parts: dict[str, Any] = {"env": list(edits.env), "deviceNodes": nodes, "mounts": mounts}
    return {name: part for name, part in parts.items() if part}
