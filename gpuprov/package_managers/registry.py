"""The package managers by name."""

from __future__ import annotations

from collections.abc import Mapping

from gpuprov.bundle.manifest import Manifest
from gpuprov.machine.distros import Distribution, find_distribution
from gpuprov.package_managers.apt import APT
from gpuprov.package_managers.dnf import DNF
from gpuprov.package_managers.interface import PackageManager
from gpuprov.package_managers.zypper import ZYPPER

_MANAGERS: Mapping[str, PackageManager] = {"apt": APT, "dnf": DNF, "zypper": ZYPPER}


def manager_of(row: Distribution | None, name: str = "") -> PackageManager:
    """Return the package manager of this name, else that of a distribution; apt if neither tells."""
    return _MANAGERS.get(name or (row.package_manager if row is not None else ""), APT)


def bundle_manager(manifest: Manifest) -> PackageManager:
    """Return the package manager of the hosts that a bundle is for."""
    return manager_of(find_distribution(manifest.distribution, manifest.version))
