"""The packages in the repositories of a host, including repositories that a plan adds; the host is not changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuprov.core.changes import Change
from gpuprov.core.system import System
from gpuprov.packages.interface import PackageManager
from gpuprov.packages.package_lock import LOCK_SECONDS
from gpuprov.packages.registry import manager_of
from gpuprov.protocol.errors import GpuprovError, Problem


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
        return () if self.problems else tuple(name for name in names if not self._has(name))

    def _has(self, wanted: str) -> bool:
        name, _, version = wanted.partition("=")
        found, manager = self.found.get(name, ()), manager_of(None, self.manager)
        return bool(found) and (not version or any(version in manager.version_names(one) for one in found))


def ask(
    system: System,
    manager: PackageManager,
    names: Sequence[str],
    planned: Sequence[Change],
    lock_timeout: int = LOCK_SECONDS,
) -> Offers:
    """Return what the repositories have of `names`, which may be patterns (fnmatch(3)) for dnf.

    `planned` are the planned changes of sources and keys: they are made in a copy. apt's copy has its own, refreshed
    index; dnf and zypper keep the host's cache as fresh as they are configured to.
    """
    plain = tuple(dict.fromkeys(name.partition("=")[0] for name in names))
    try:
        return Offers(manager.name, manager.offered(system, plain, planned, lock_timeout))
    except GpuprovError as error:
        return Offers(manager.name, {}, error.problems)
