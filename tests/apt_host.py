"""A host of apt's with only what its repositories depend on, and what gpuprov plans and says about these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuprov import repos
from gpuprov.core.changes import Change, FileFact
from gpuprov.machine.distros import UNKNOWN, Distribution
from gpuprov.packages.apt import APT
from gpuprov.packages.interface import PackageFacts, PackageManager
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec


@dataclass(frozen=True)
class AptHost:
    """The facts that repositories depend on (gpuprov.repos.Host)."""

    files: Mapping[str, FileFact]
    architecture: str
    distribution: Distribution = UNKNOWN
    packages: PackageFacts = field(default_factory=lambda: PackageFacts("apt", {}))
    package_manager: PackageManager = APT


def plan_repositories(files: Mapping[str, FileFact], spec: HostSpec, architecture: str) -> tuple[Change, ...]:
    return repos.plan(AptHost(files, architecture), spec)


def problems(files: Mapping[str, FileFact], spec: HostSpec, architecture: str) -> tuple[Problem, ...]:
    return tuple(repos.problems(AptHost(files, architecture), spec))
