"""Which packages are not installed, with any package manager."""

from __future__ import annotations

from collections.abc import Iterable

from gpuprov.packaging import rpm_packages
from gpuprov.packaging.apt_packages import PackageFacts, missing


def not_installed(packages: PackageFacts, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of `names` that are not installed, or not in the version that is asked for, by whatever manager."""
    return (rpm_packages.missing if packages.manager in rpm_packages.MANAGERS else missing)(packages, names)
