"""What the steps of one plan share: facts, specification, and what follows from the two, each worked out once."""

from collections.abc import Mapping
from functools import cached_property

from gpuprov import repos
from gpuprov.core.changes import Change
from gpuprov.driver.cuda_repository import NvidiaPackages
from gpuprov.driver.distribution import DistributionDriver
from gpuprov.driver.source import DriverSource, Preinstalled
from gpuprov.driver_run import RunFile
from gpuprov.facts.host import HostFacts
from gpuprov.machine.distros import ExtraRepository
from gpuprov.plan import migration, software
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.spec import HostSpec

# gpuprov_driver → the class that answers for it.
_SOURCES: Mapping[str, type[DriverSource]] = {
    "runfile": RunFile, "packages": NvidiaPackages, "distribution": DistributionDriver, "preinstalled": Preinstalled,
}  # fmt: skip


def source_of(facts: HostFacts, spec: HostSpec) -> DriverSource:
    """Return the source of a host's driver."""
    return _SOURCES[spec.driver](facts, spec)


@dataclass(frozen=True)
class PlanContext:
    """One host's facts and specification. `migration`: the changes that remove what nvidia-docker has left."""

    facts: HostFacts
    spec: HostSpec

    @cached_property
    def driver(self) -> DriverSource:
        """The source of the driver."""
        return source_of(self.facts, self.spec)

    @cached_property
    def wanted_packages(self) -> tuple[str, ...]:
        """The packages that the host needs, installed or not."""
        return software.wanted(self.driver)

    @property
    def lacking_packages(self) -> tuple[str, ...]:
        """Those that are not installed, or not in the version that is asked for."""
        return self.facts.package_manager.missing(self.facts.packages, self.wanted_packages)

    @property
    def package_changes(self) -> tuple[Change, ...]:
        """The installation of what is missing."""
        return software.plan(self.driver, self.wanted_packages)

    @cached_property
    def extra_repositories(self) -> tuple[ExtraRepository, ...]:
        """The repositories besides the distribution's and the site's."""
        return software.extra_repositories(self.driver)

    @cached_property
    def repository_changes(self) -> tuple[Change, ...]:
        """The changes of the host's repositories and keys; their packages can then be queried in advance."""
        # A host with a bundle reaches no repository: its sources stay as they are.
        return () if self.facts.bundle else repos.plan(self.facts, self.spec, self.extra_repositories)

    @cached_property
    def migration(self) -> tuple[Change, ...]:
        return migration.plan(self.facts, self.spec)

    @cached_property
    def migrated(self) -> HostFacts:
        """The facts after the migration."""
        return migration.without_removed(self.facts, self.spec, self.migration)
