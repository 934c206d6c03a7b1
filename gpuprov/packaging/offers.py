"""What the repositories of a host offer, those that are yet to be set up too; asked without changing the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuprov.core.changes import Change
from gpuprov.core.system import System
from gpuprov.packaging import apt_offers, rpm_offers
from gpuprov.packaging.package_lock import LOCK_SECONDS
from gpuprov.packaging.rpm_packages import MANAGERS, versions
from gpuprov.wire.errors import GpuprovError, Problem


@dataclass(frozen=True)
class Offers:
    """What was asked for, and the answer: package name → the versions that any repository has of it.

    `problems`: why the repositories could not be asked, or not all of them.
    """

    manager: str
    found: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def lacking(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of `names` (`NAME` or `NAME=VERSION`) that no repository has; none where nobody could ask."""
        return () if self.problems else tuple(name for name in names if not self._has(name))

    def _has(self, wanted: str) -> bool:
        name, _, version = wanted.partition("=")
        found = self.found.get(name, ())
        rebuilt = self.manager == "zypper"
        return bool(found) and (not version or any(version in versions(one, rebuilt=rebuilt) for one in found))


def ask(
    system: System, manager: str, names: Sequence[str], planned: Sequence[Change], lock_timeout: int = LOCK_SECONDS
) -> Offers:
    """Return what the repositories have of `names`, by the package manager's own means.

    `names` may be patterns (fnmatch(3)) where dnf is asked. `planned` are the changes of sources and keys that the host
    is to get first: they are made in a copy. apt's copy has an index of its own, brought up to date; dnf, yum and
    zypper keep the host's own cache as fresh as they are configured to, as with anything that they are asked.
    """
    plain = tuple(dict.fromkeys(name.partition("=")[0] for name in names))
    question = rpm_offers.ask if manager in MANAGERS else apt_offers.ask
    try:
        return Offers(manager, question(system, manager, plain, planned, lock_timeout))
    except GpuprovError as error:
        return Offers(manager, {}, error.problems)
