"""The package manager of a host, and what its repositories offer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpuprov.core.changes import Change
from gpuprov.core.system import System
from gpuprov.machine.distros import Distribution
from gpuprov.packages.apt import APT
from gpuprov.packages.dnf import DNF
from gpuprov.packages.interface import PackageManager
from gpuprov.packages.zypper import ZYPPER
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import GpuprovError, Problem

_MANAGERS: Mapping[str, PackageManager] = {"apt": APT, "dnf": DNF, "zypper": ZYPPER}


def manager_of(row: Distribution | None, name: str = "") -> PackageManager:
    """Return the package manager of this name, else that of a distribution; apt if neither tells."""
    return _MANAGERS.get(name or (row.package_manager if row is not None else ""), APT)


@dataclass(frozen=True)
class Offers:
    """Package name → its versions in the repositories, as reported by this package manager.

    `problems`: why a repository could not be queried.
    """

    manager: str
    found: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def lacking(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of `names` (`NAME` or `NAME=VERSION`) that no repository has; none if the query failed."""
        manager, lacking = manager_of(None, self.manager), []
        for wanted in names if not self.problems else ():
            name, _, version = wanted.partition("=")
            if not any(not version or version in manager.version_names(one) for one in self.found.get(name, ())):
                lacking.append(wanted)
        return tuple(lacking)


def ask(system: System, manager: PackageManager, names: Sequence[str], planned: Sequence[Change]) -> Offers:
    """Return what the repositories have of `names`, which may be patterns (fnmatch(3)) for dnf.

    `planned` are the planned changes of sources and keys: they are made in a copy. apt's copy has its own, refreshed
    index; dnf and zypper refresh the host's cache.
    """
    plain = tuple(dict.fromkeys(name.partition("=")[0] for name in names))
    try:
        return Offers(manager.name, manager.offered(system, plain, planned))
    except GpuprovError as error:
        return Offers(manager.name, {}, error.problems)
