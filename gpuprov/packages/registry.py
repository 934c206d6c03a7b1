"""The package managers by name."""

from __future__ import annotations

from collections.abc import Mapping

from gpuprov.machine.distros import Distribution
from gpuprov.packages.apt import APT
from gpuprov.packages.dnf import DNF
from gpuprov.packages.interface import PackageManager
from gpuprov.packages.zypper import ZYPPER

_MANAGERS: Mapping[str, PackageManager] = {"apt": APT, "dnf": DNF, "zypper": ZYPPER}


def manager_of(row: Distribution | None, name: str = "") -> PackageManager:
    """Return the package manager of this name, else that of a distribution; apt if neither tells."""
    return _MANAGERS.get(name or (row.package_manager if row is not None else ""), APT)
