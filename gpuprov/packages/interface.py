"""The interface of a package manager. No code outside this folder compares the name of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpuprov.core.changes import Change
from gpuprov.core.system import System
from gpuprov.machine.distros import Distribution
from gpuprov.packages.apt_packages import PackageFacts
from gpuprov.packages.package_lock import LOCK_SECONDS
from gpuprov.packages.past_kernels import Advice
from gpuprov.packages.rpm_repos import Host
from gpuprov.protocol.spec import HostSpec


@dataclass(frozen=True)
class Commands:
    """The commands that a user types; package names follow. `versions` shows what repositories have of a package.

    `script` installs a package from a shell script, with nobody to answer a question.
    """

    install: str
    reinstall: str
    remove: str
    versions: str
    hold: str
    script: str


class Bundle(Protocol):
    """A bundle on a host; `vendor_keys`: the fingerprints of the keys that signed its packages for rpm."""

    @property
    def vendor_keys(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Installation:
    """Packages that a host needs (`NAME` or `NAME=VERSION`), installed or not, and how to install the missing ones.

    `bundle`: the bundle that is their only source. `hold`: the packages to keep at their version; None leaves all holds
    as they are. `units`: to be enabled where packages do not enable what they bring. `advice`: the answer if no
    repository has a package. `unfiltered_repository`: a repository of gpuprov's whose packages no module stream hides.
    `limited`: a repository of gpuprov's (name) that gives the `limited_names` alone.
    """

    names: tuple[str, ...]
    lock_timeout: int = LOCK_SECONDS
    bundle: Bundle | None = None
    hold: tuple[str, ...] | None = None
    units: tuple[str, ...] = ()
    advice: Advice | None = None
    unfiltered_repository: str = ""
    limited: str = ""
    limited_names: tuple[str, ...] = ()


class PackageManager(Protocol):
    """A package manager.

    `confinement_packages`: what docker needs where AppArmor is on. `has_pin_packages`: NVIDIA has packages that pin the
    driver's version. `old_fabric_manager`: the package of the fabric manager before driver branch 580, {branch} stands
    for the branch; `any_release`: what follows a version to accept each release of it.
    """

    name: str
    commands: Commands
    confinement_packages: tuple[str, ...]
    has_pin_packages: bool
    old_fabric_manager: str
    any_release: str

    def gather(self, system: System) -> PackageFacts:
        """Return the installed and the held packages."""

    def lock_holder(self, system: System) -> str:
        """Return `NAME (pid N: COMMAND LINE)` of the process that uses the package manager now, or ""."""

    def missing(self, packages: PackageFacts, names: Sequence[str]) -> tuple[str, ...]:
        """Return those of `names` that are not installed, or not in the requested version."""

    def version_names(self, version: str) -> set[str]:
        """Return every form in which a user may write the version of a package in a repository."""

    def bundled_versions(self, version: str, architecture: str) -> set[str]:
        """Return the same forms for a package in a bundle."""

    def typed(self, name: str) -> str:
        """Return `NAME=VERSION` in the syntax of the command line."""

    def offered(
        self, system: System, names: Sequence[str], planned: Sequence[Change], lock_timeout: int
    ) -> Mapping[str, tuple[str, ...]]:
        """Return name → versions in the repositories, after the `planned` changes to these.

        Raises GpuprovError, as a refresh of the index does, if a repository can't be queried.
        """

    def plan_installation(self, packages: PackageFacts, wanted: Installation) -> tuple[Change, ...]:
        """Return one refresh and one installation of all that is missing, and the holds; nothing if all is there."""

    def unowned(self, system: System, paths: Sequence[str]) -> tuple[str, ...]:
        """Return those of the paths that no package owns."""

    def needed_by(self, system: System, names: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        """Return name → other installed packages that need it, except those in `names`."""

    def removal(self, names: tuple[str, ...], keep: tuple[str, ...], lock_timeout: int) -> Change:
        """Return the change that removes packages; the files of `keep` stay, and undo brings the packages back."""

    def plan_retired(self, host: Host, spec: HostSpec) -> tuple[Change, ...]:
        """Return the changes that remove what `repos.plan` leaves of nvidia-docker's repositories and key."""

    def hold_packages(self, row: Distribution) -> tuple[str, ...]:
        """Return the packages needed to hold packages on this distribution."""

    def open_bundle(self, system: System, repository_key: str) -> None:
        """Make the unpacked bundle, signed by this key (fingerprint), a source of packages."""
