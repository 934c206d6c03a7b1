"""What dnf and zypper have in common: rpm's packages, keys, .repo files and bundles."""

from __future__ import annotations

import re
import shlex
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gpuprov.core.changes import Change, RemoveFile, WriteFile
from gpuprov.core.places import FOLDER, KEYS, REPOSITORY, REPOSITORY_KEY
from gpuprov.core.system import System
from gpuprov.packages import rpm_locks
from gpuprov.packages.interface import Installation, PackageFacts, PackageManager, Versions, pinned
from gpuprov.packages.keys import armored, fingerprints, place_keys, with_placed_keys
from gpuprov.packages.rpm_changes import (
    InstallRpmKey,
    InstallRpmPackages,
    RefreshRpmIndex,
    RemoveRpms,
    RpmProgram,
    gather_keys,
    package_name,
    rpm_lock_holder,
)

QUERY_SECONDS = 600
NO_INDEX = "the package index could not be refreshed"
_QUERY = "%{NAME} %|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}.%{ARCH}[ %{PROVIDENAME}]\\n"
BUNDLE_SOURCES = f"{FOLDER}/repos.d"
_BUNDLE_KEY = f"{FOLDER}/key.asc"
# Where a key lies while rpm imports it.
_TAKEN = f"{FOLDER}/trusted"


class RpmManager(RpmProgram, PackageManager):
    """A package manager that uses rpm.

    `package_check`: the option of a .repo file that checks the signatures of packages. `repository_lines` and
    `bundle_lines`: further lines of a .repo file, and of a bundle's. `rebuilds`: a release ends in a number that counts
    how often the package was built. `login_in_url`: a .repo file has no other place for a login.
    `copied_directory`: where .repo files lie in a copy of the configuration.
    """

    repository_directory: str
    copied_directory: str
    package_check: str
    repository_lines: tuple[str, ...]
    login_in_url: bool
    bundle_lines: tuple[str, ...]
    bundle_options: tuple[str, ...]
    rebuilds: bool
    old_fabric_manager = "nvidia-fabric-manager"

    lock_holder = staticmethod(rpm_lock_holder)

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

    def removal(self, names: tuple[str, ...], keep: tuple[str, ...], lock_timeout: int) -> Change:
        return RemoveRpms(self, names, keep, lock_timeout)

    def gather(self, system: System) -> PackageFacts:
        """Return what is installed and which keys are trusted, by two queries.

        Raises GpuprovError if rpm's database can't be read: no plan may be based on it.
        """
        if system.which("rpm") is None or system.which(self.name) is None:
            return PackageFacts("", {})
        again = "rpm --rebuilddb; then run this again"
        done = system.require(("rpm", "-qa", "--queryformat", _QUERY), "rpm's database can't be read", again)
        installed, provided = parse_rpm(done.stdout)
        keys = frozenset(gather_keys(system))
        locks = rpm_locks.gather_locks(system, self.hold_tool(system))
        return PackageFacts(self.name, installed, provided=provided, trusted_keys=keys, locks=locks)

    def missing(self, packages: PackageFacts, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name in names if not self._is_installed(packages, name)))

    def _is_installed(self, packages: PackageFacts, wanted: str) -> bool:
        name, _, version = wanted.partition("=")
        found = packages.installed.get(name)
        if not version:
            return found is not None or name in packages.provided
        return any(version in self.version_names(one) for one in (found or "").split())

    def version_names(self, version: str) -> set[str]:
        """Return the forms of `EPOCH:VERSION-RELEASE.ARCH`: without its ends, and without the number of the build."""
        names = {version, version.rpartition(":")[2]}
        names |= {name.rpartition(".")[0] for name in names}
        names |= {name.rpartition("-")[0] for name in names}
        if self.rebuilds:
            names |= {name.rpartition(".")[0] for name in names if "-" in name}
        return names

    def unowned(self, system: System, paths: Sequence[str]) -> tuple[str, ...]:
        return tuple(path for path in paths if not system.run(("rpm", "--query", "--file", path)).ok)

    def needed_by(self, system: System, names: Sequence[str]) -> Versions:
        return {name: others for name in names if (others := _needing(system, name, names))}

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
        named = {path for file in files for path in _key_files(file.content.decode())}
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
            *plan_bundle_keys(wanted.bundle.vendor_keys if wanted.bundle is not None else (), packages.trusted_keys),
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
        """Write the source, and make rpm trust the bundle's key: zypper, and packages that it signs, need that."""
        key = system.read_bytes(f"{FOLDER}/{REPOSITORY_KEY}")
        if key is None:
            return
        system.make_directory(BUNDLE_SOURCES, 0o700)
        system.write(_BUNDLE_KEY, armored(key))
        system.write(f"{BUNDLE_SOURCES}/bundle.repo", bundle_source(self.bundle_lines).encode())
        system.require(("rpm", "--import", _BUNDLE_KEY), f"rpm can't import the key {repository_key}")


def parse_rpm(text: str) -> tuple[Mapping[str, str], frozenset[str]]:
    """Return name → versions, and the plain names that packages provide, from `NAME VERSION PROVIDED…` lines."""
    installed: dict[str, str] = {}
    provided: set[str] = set()
    for words in (line.split(" ") for line in text.splitlines()):
        if len(words) < 2 or words[0] == "gpg-pubkey":
            continue
        installed[words[0]] = f"{installed[words[0]]} {words[1]}" if words[0] in installed else words[1]
        # Users never name libraries, files and capabilities with brackets.
        provided.update(name for name in words[2:] if not re.search(r"[(/]", name))
    return installed, frozenset(provided - set(installed))


def _needing(system: System, name: str, names: Sequence[str]) -> tuple[str, ...]:
    if len(names) > 1 and system.run(("rpm", "--erase", "--test", *names)).ok:
        return ()
    said = system.run(("rpm", "--erase", "--test", name)).stderr
    others = {package_name(found) for found in re.findall(r"is needed by \(installed\) (\S+)", said)}
    return tuple(sorted(others - set(names)))


def _key_files(text: str) -> list[str]:
    """Return the key files that a .repo file names."""
    return re.findall(r"^gpgkey=file://(\S+)", text, re.MULTILINE)


def bundle_source(lines: Iterable[str]) -> str:
    """Return the repository as a .repo file with these further lines.

    The bundle's key signs the metadata; the keys of the vendors sign the packages.
    """
    head = (
        "[gpuprov-bundle]", "name=gpuprov bundle", f"baseurl=file://{FOLDER}/{REPOSITORY}", "enabled=1",
        "repo_gpgcheck=1", f"gpgkey=file://{_BUNDLE_KEY}", "gpgcheck=1",
    )  # fmt: skip
    return "".join(f"{line}\n" for line in (*head, *lines))


def plan_bundle_keys(vendor_keys: Iterable[str], trusted: frozenset[str]) -> tuple[Change, ...]:
    """Return the change that makes rpm trust the vendor keys of the bundle's packages."""
    return tuple(
        InstallRpmKey(f"{_TAKEN}/{one}.asc", f"file://{FOLDER}/{KEYS}/{one}.asc", one)
        for one in vendor_keys
        if one not in trusted
    )


def forget_bundle(system: System) -> None:
    """Remove a bundle's key from rpm again, if present, including the key of a killed run."""
    key = system.read_bytes(_BUNDLE_KEY)
    package = gather_keys(system).get(fingerprints(key)[0]) if key else None
    if package is not None:
        system.run(("rpm", "-e", package))
