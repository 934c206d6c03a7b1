"""A host of apt's with only what its repositories depend on, and what gpuprov plans and says about these."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from gpuprov import repos
from gpuprov.core.changes import Change, FileFact
from gpuprov.facts.host import HostFacts
from gpuprov.machine.distros import UNKNOWN, Distribution
from gpuprov.packages.apt import APT
from gpuprov.packages.interface import PackageFacts, PackageManager
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec


@dataclass(frozen=True)
class AptHost:
    """Those of HostFacts that repositories depend on."""

    files: Mapping[str, FileFact]
    architecture: str
    distribution: Distribution = UNKNOWN
    packages: PackageFacts = field(default_factory=lambda: PackageFacts("apt", {}))
    package_manager: PackageManager = APT
    write = HostFacts.write


def plan_repositories(files: Mapping[str, FileFact], spec: HostSpec, architecture: str) -> tuple[Change, ...]:
    return repos.plan(cast("HostFacts", AptHost(files, architecture)), spec)


def problems(files: Mapping[str, FileFact], spec: HostSpec, architecture: str) -> tuple[Problem, ...]:
    return tuple(repos.problems(cast("HostFacts", AptHost(files, architecture)), spec))
