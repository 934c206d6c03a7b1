"""Read all CDI specifications on a host as an engine does: the file of each device, and the errors.

Source: CDI's pkg/cdi/cache.go: a later folder wins over an earlier one; the same device twice in one folder is a
conflict, and then there is no such device; an invalid file is an error of its own, and the others load.
"""

import copy
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gpuprov.cdi.specification import SUFFIXES, Device, Specification, parse, problems, render_json
from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook.edits import apply_edits, merge_edits
from gpuprov.runtime_hook.errors import Refused

FOLDERS = ("/etc/cdi", "/var/run/cdi")


@dataclass(frozen=True)
class RegisteredDevice:
    """A device: what it is, in which specification, in which file."""

    device: Device
    specification: Specification
    path: str


@dataclass
class Registry:
    """Devices by qualified name, and errors by file; a missing folder has neither."""

    devices: dict[str, RegisteredDevice] = field(default_factory=dict)
    errors: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def read_registry(system: System, folders: Sequence[str] = FOLDERS) -> Registry:
    """Return the combined content of the specifications in these folders."""
    registry = Registry()
    for folder in folders:
        registry.devices.update(_of_folder(system, folder, registry))
    return registry


def _of_folder(system: System, folder: str, registry: Registry) -> Mapping[str, RegisteredDevice]:
    found: dict[str, RegisteredDevice] = {}
    conflicts: set[str] = set()
    for name in sorted(system.list_directory(folder)):
        path = f"{folder}/{name}"
        if not name.endswith(SUFFIXES):
            continue
        try:
            specification = parse(system.read_bytes(path) or b"", path)
            wrong = problems(specification)
        except GpuprovError as error:
            wrong = (error.problems[0].evidence or error.problems[0].what,)
        if wrong:
            registry.errors[path] += wrong
            continue
        for device in specification.devices:
            qualified = f"{specification.kind}={device.name}"
            if qualified in found:
                conflicts.add(qualified)
                for one in (found[qualified].path, path):
                    registry.errors[one].append(f"{qualified} stands in {found[qualified].path} and in {path}")
            else:
                found[qualified] = RegisteredDevice(device, specification, path)
    return {name: one for name, one in found.items() if name not in conflicts}


def inject(config: dict[str, Any], names: Sequence[str], registry: Registry) -> dict[str, Any]:
    """Return the configuration with the devices (qualified names), each specification's common edits once before them.

    Raises GpuprovError that lists every device missing from the specifications; then nothing is injected.
    """
    if missing := [name for name in names if name not in registry.devices]:
        there = ", ".join(sorted(registry.devices)) or "none"
        raise GpuprovError(f"there is no CDI device {', '.join(missing)}", f"there are {there}", "gpuprov cdi list")
    parts: list[dict[str, Any]] = []
    begun: set[str] = set()
    for name in names:
        found = registry.devices[name]
        document = json.loads(render_json(found.specification))
        if found.path not in begun:
            begun.add(found.path)
            parts.append(document.get("containerEdits") or {})
        parts += [one["containerEdits"] for one in document["devices"] if one["name"] == found.device.name]
    try:
        edited = copy.deepcopy(config)
        apply_edits(edited, merge_edits(parts), idmap=True)
    except (Refused, RecursionError) as refused:
        reason = "nested too deeply" if isinstance(refused, RecursionError) else str(refused)
        step = "give a config.json as engines write it, such as that of `runc spec`"
        raise GpuprovError("the devices can't be put into this configuration", reason, step) from None
    return edited
