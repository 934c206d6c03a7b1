"""All CDI specifications on a host, as an engine sees them: which device comes from which file, and what is wrong.

Source: CDI's pkg/cdi/cache.go: a later folder wins over an earlier one; the same device twice in one folder is a
conflict, and then there is no such device; an invalid file is an error of its own, and the others load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuprov.cdi.documents import SUFFIXES, parse
from gpuprov.cdi.specification import Device, Specification
from gpuprov.cdi.validation import problems
from gpuprov.core.system import System
from gpuprov.wire.errors import GpuprovError

FOLDERS = ("/etc/cdi", "/var/run/cdi")


@dataclass(frozen=True)
class Found:
    """A device: what it is, in which specification, in which file."""

    device: Device
    specification: Specification
    path: str


@dataclass
class Registry:
    """Devices by qualified name, and errors by file; a folder that is missing is an error of the folder alone."""

    devices: dict[str, Found] = field(default_factory=dict)
    errors: dict[str, list[str]] = field(default_factory=dict)
    missing_folders: list[str] = field(default_factory=list)

    def add_error(self, path: str, text: str) -> None:
        """Note what is wrong with a file."""
        self.errors.setdefault(path, []).append(text)


def read_registry(system: System, folders: Sequence[str] = FOLDERS) -> Registry:
    """Return what the specifications in these folders say together."""
    registry = Registry()
    for folder in folders:
        if not system.exists(folder):
            registry.missing_folders.append(folder)
            continue
        _add(registry, _of_folder(system, folder, registry))
    return registry


def _of_folder(system: System, folder: str, registry: Registry) -> Mapping[str, Found]:
    found: dict[str, Found] = {}
    conflicts: set[str] = set()
    for name in sorted(system.list_directory(folder)):
        path = f"{folder}/{name}"
        if not name.endswith(SUFFIXES):
            continue
        specification = _read(system, path, registry)
        if specification is None:
            continue
        for device in specification.devices:
            qualified = f"{specification.kind}={device.name}"
            if qualified in found:
                conflicts.add(qualified)
                for one in (found[qualified].path, path):
                    registry.add_error(one, f"{qualified} stands in {found[qualified].path} and in {path}")
            else:
                found[qualified] = Found(device, specification, path)
    return {name: one for name, one in found.items() if name not in conflicts}


def _read(system: System, path: str, registry: Registry) -> Specification | None:
    try:
        specification = parse(system.read_bytes(path) or b"", path)
    except GpuprovError as error:
        registry.add_error(path, error.problems[0].evidence or error.problems[0].what)
        return None
    wrong = problems(specification)
    for text in wrong:
        registry.add_error(path, text)
    return None if wrong else specification


def _add(registry: Registry, found: Mapping[str, Found]) -> None:
    registry.devices.update(found)
