"""What dnf and zypper have in common: rpm's packages, keys and .repo files."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gpuprov.core.changes import Change, RemoveFile, WriteFile
from gpuprov.core.system import System
from gpuprov.machine.distros import Distribution
from gpuprov.packages import retired, rpm_bundle, rpm_locks, rpm_packages, rpm_remove, rpm_repos
from gpuprov.packages.apt_packages import PackageFacts, pinned
from gpuprov.packages.interface import Commands, Installation
from gpuprov.packages.keys import place_keys, with_placed_keys
from gpuprov.packages.pgp import armored
from gpuprov.packages.rpm_packages import InstallRpmPackages, RefreshRpmIndex
from gpuprov.packages.rpm_repos import Host, InstallRpmKey
from gpuprov.protocol.spec import HostSpec

QUERY_SECONDS = 600
NO_INDEX = "the package index could not be refreshed"
Versions = Mapping[str, tuple[str, ...]]


class RpmManager(ABC):
    """A package manager that uses rpm.

    `version_joint`: what stands between a name and the version that is asked for. `good_codes`: exit codes that mean
    success. `package_check`: the option of a .repo file that checks the signatures of packages. `repository_lines` and
    `bundle_lines`: further lines of a .repo file, and of a bundle's. `rebuilds`: a release ends in a number that counts
    how often the package was built. `login_in_url`: a .repo file has no other place for a login.
    `copied_directory`: where .repo files lie in a copy of the configuration.
    """

    name: str
    commands: Commands
    refresh: tuple[str, ...]
    install: tuple[str, ...]
    version_joint: str
    good_codes: tuple[int, ...] = (0,)
    repository_directory: str
    copied_directory: str
    package_check: str
    repository_lines: tuple[str, ...]
    login_in_url: bool
    bundle_lines: tuple[str, ...]
    bundle_options: tuple[str, ...]
    rebuilds: bool
    confinement_packages: tuple[str, ...] = ()
    has_pin_packages = False
    old_fabric_manager = "nvidia-fabric-manager"
    any_release = ""

    lock_holder = staticmethod(rpm_packages.rpm_lock_holder)
    repository_problems = rpm_repos.problems
    plan_repositories = rpm_repos.plan_repositories

    @abstractmethod
    def hold_tool(self, system: System) -> str:
        """Return the tool that holds packages, by its name in rpm_locks.LOCK_TOOLS."""

    @abstractmethod
    def limited(self, only: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]:
        """Return whether a repository that may give these packages alone (patterns) is enabled, and its lines."""

    @abstractmethod
    def with_limited(self, repository: str) -> tuple[str, ...]:
        """Return the options that make such a repository count for a command."""

    @abstractmethod
    def unfiltered(self, repository: str) -> tuple[str, ...]:
        """Return the options that show all packages of a repository, whatever module streams are enabled."""

    @abstractmethod
    def only_from(self, folder: str) -> tuple[str, ...]:
        """Return the options that make the .repo files in a folder the only ones, with the host's own cache."""

    @abstractmethod
    def only_from_copy(self, system: System, work: str, keys: Iterable[str]) -> tuple[str, ...]:
        """Return the options for a copy of the configuration below `work`, after making these key files trusted."""

    @abstractmethod
    def query(self, system: System, options: tuple[str, ...], names: Sequence[str], lock_timeout: int) -> Versions:
        """Return name → versions of what one set of repositories has."""

    @abstractmethod
    def hold_packages(self, row: Distribution) -> tuple[str, ...]:
        """Return the packages that holding needs on this distribution."""

    @abstractmethod
    def copies(self, folder: str, names: Sequence[str]) -> tuple[str, ...]:
        """Return the command that fetches installed packages (NAME-VERSION-RELEASE.ARCH) into a folder."""

    unowned = staticmethod(rpm_remove.unowned)
    needed_by = staticmethod(rpm_remove.needed_by)

    def removal(self, names: tuple[str, ...], keep: tuple[str, ...], lock_timeout: int) -> Change:
        return rpm_remove.RemoveRpms(self, names, keep, lock_timeout)

    def plan_retired(self, host: Host, spec: HostSpec) -> tuple[Change, ...]:
        changes = retired.plan_repo_files(host.files)
        fingerprint = spec.toolkit_key_fingerprint
        is_left = fingerprint in host.packages.trusted_keys and spec.toolkit != "nvidia"
        if is_left and not retired.needs_key(host.files):
            changes += (rpm_remove.RemoveRpmKey(fingerprint),)
        return changes

    def gather(self, system: System) -> PackageFacts:
        return rpm_packages.gather_packages(system, self)

    def missing(self, packages: PackageFacts, names: Iterable[str]) -> tuple[str, ...]:
        return rpm_packages.missing(packages, names, rebuilds=self.rebuilds)

    def version_names(self, version: str) -> set[str]:
        return rpm_packages.versions(version, rebuilds=self.rebuilds)

    def bundled_versions(self, version: str, architecture: str) -> set[str]:
        return self.version_names(f"{version}.{architecture}")

    def typed(self, name: str) -> str:
        return shlex.quote(name.replace("=", self.version_joint, 1))

    def offered(self, system: System, names: Sequence[str], planned: Sequence[Change], lock_timeout: int) -> Versions:
        place = f"{self.repository_directory}/"
        touched = [one for one in planned if isinstance(one, (WriteFile, RemoveFile)) and one.path.startswith(place)]
        if not touched:
            return self.query(system, (), names, lock_timeout)
        files = [one for one in touched if isinstance(one, WriteFile)]
        keys = [one for one in planned if isinstance(one, InstallRpmKey)]
        work = system.temporary_directory("/var/tmp")
        try:
            found = self.query(system, self._without(system, work, touched), names, lock_timeout)
            new = self.query(system, self._copy(system, work, files, keys), names, lock_timeout) if files else {}
        finally:
            system.remove_tree(work)
        return {name: (*found.get(name, ()), *new.get(name, ())) for name in {**found, **new}}

    def _without(self, system: System, work: str, touched: Sequence[WriteFile | RemoveFile]) -> tuple[str, ...]:
        """Return the options that leave out the host's repositories that the plan changes.

        One of them may be out of reach, and the plan corrects that.
        """
        folder, gone = f"{work}/host.d", {one.path for one in touched}
        system.make_directory(folder)
        for name in system.list_directory(self.repository_directory):
            path = f"{self.repository_directory}/{name}"
            content = None if path in gone else system.read_bytes(path)
            if content is not None:
                system.write(f"{folder}/{name}", content, mode=0o600)
        return self.only_from(folder)

    def _copy(
        self, system: System, work: str, files: Sequence[WriteFile], keys: Sequence[InstallRpmKey]
    ) -> tuple[str, ...]:
        """Write planned repositories below `work`; return the options that make these the only ones."""
        places = place_keys(system, work, keys, armored)
        folder = f"{work}/{self.copied_directory}"
        system.make_directory(folder)
        for file in files:
            content = with_placed_keys(file.content, places)
            system.write(f"{folder}/{file.path.rpartition('/')[2]}", content, mode=file.mode)
        named = {path for file in files for path in rpm_repos.key_files(file.content.decode())}
        return self.only_from_copy(system, work, sorted(places.get(path, path) for path in named))

    def plan_installation(self, packages: PackageFacts, wanted: Installation) -> tuple[Change, ...]:
        names = self.missing(packages, wanted.names)
        lift, hold = rpm_locks.plan(packages.locks, wanted.hold, pinned(names))
        if not names:
            return (*lift, *hold)
        options = self.unfiltered(wanted.unfiltered_repository) if wanted.unfiltered_repository else ()
        if wanted.bundle is not None:
            options = self.bundle_options
        more = self.with_limited(wanted.limited) if wanted.limited and wanted.bundle is None else ()
        apart = tuple(name for name in names if more and name in wanted.limited_names)
        together = tuple(name for name in names if name not in apart)
        return (
            *rpm_bundle.plan_keys(
                wanted.bundle.vendor_keys if wanted.bundle is not None else (), packages.trusted_keys
            ),
            *lift,
            *(self._installation(together, wanted, options) if together else ()),
            *(self._installation(apart, replace(wanted, units=()), more) if apart else ()),
            *hold,
        )

    def _installation(
        self, names: tuple[str, ...], wanted: Installation, options: tuple[str, ...]
    ) -> tuple[Change, ...]:
        return (
            RefreshRpmIndex(self, wanted.lock_timeout, options),
            InstallRpmPackages(self, names, wanted.units, wanted.lock_timeout, options, wanted.advice),
        )

    def open_bundle(self, system: System, repository_key: str) -> None:
        rpm_bundle.prepare(system, repository_key, rpm_bundle.source_text(self.bundle_lines))


def collected(pairs: Iterable[tuple[str, str]]) -> Versions:
    """Return name → versions from pairs of both."""
    found: dict[str, tuple[str, ...]] = {}
    for name, version in pairs:
        found[name] = (*found.get(name, ()), version)
    return found
