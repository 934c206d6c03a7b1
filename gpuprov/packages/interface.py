"""What gpuprov asks of a package manager, and what it knows about one: packages, installations, the lock."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Callable, ClassVar, Protocol

from gpuprov.core.changes import Change, Tell
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.machine.distros import Distribution
from gpuprov.packages.failures import Advice
from gpuprov.packages.rpm_locks import NO_LOCKS, LockFacts
from gpuprov.protocol.errors import GpuprovError

# Longer than unattended-upgrades usually takes.
LOCK_SECONDS = 300
_POLL_SECONDS = 0.5
INSTALL_SECONDS = 3600
REFRESH_SECONDS = 600
# Copies of removed packages, for a rollback.
COPIES = f"{STATE_DIRECTORY}/removed"
Versions = Mapping[str, tuple[str, ...]]
_ENGINES = re.compile(r"(docker|moby|containerd|runc|crun|cri-o|podman|nvidia-driver|nvidia-open|cuda-drivers)[^=]*=")


@dataclass(frozen=True)
class PackageFacts:
    """The package manager (apt, dnf, zypper, or nothing that is supported) and what is installed: name → version.

    `provided` are other names that installed packages answer to. apt: `held` are those that it will not touch,
    `held_here` those of them that gpuprov holds, `unfinished` name → status of packages whose installation was cut
    off; a name has its architecture behind it if that is not the machine's own. rpm: several versions of one name are
    parted by spaces; `trusted_keys` are the fingerprints of the keys that packages may be signed with, `locks` tells
    what is held, and by what.
    """

    manager: str
    installed: Mapping[str, str]
    architecture: str = ""
    provided: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    held_here: frozenset[str] = frozenset()
    trusted_keys: frozenset[str] = frozenset()
    locks: LockFacts = NO_LOCKS
    unfinished: Mapping[str, str] = field(default_factory=dict)


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


class PackageInstallation(Change):
    """The base class of the changes that install packages (`NAME` or `NAME=VERSION`)."""

    names: tuple[str, ...]

    # The next run finishes what a killed one began and then plans again: removing packages only to install them once
    # more would gain nothing and could fail.
    undo_when_interrupted: ClassVar[bool] = False
    uses_package_manager: ClassVar[bool] = True
    bundle_part: ClassVar[str] = "packages"
    undo_disturbs: ClassVar[bool] = True

    @property
    def disturbs(self) -> bool:
        return restarts_engine(self.names)


class PackageManager(Protocol):
    """A package manager.

    `confinement_packages`: what docker needs where AppArmor is on. `has_pin_packages`: NVIDIA has packages that pin the
    driver's version. `old_fabric_manager`: the package of the fabric manager before driver branch 580, {branch} stands
    for the branch; `any_release`: what follows a version to accept each release of it.
    """

    name: str
    commands: Commands
    confinement_packages: tuple[str, ...] = ()
    has_pin_packages: bool = False
    old_fabric_manager: str
    any_release: str = ""

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

    def offered(self, system: System, names: Sequence[str], planned: Sequence[Change], lock_timeout: int) -> Versions:
        """Return name → versions in the repositories, after the `planned` changes to these.

        Raises GpuprovError, as a refresh of the index does, if a repository can't be queried.
        """

    def plan_installation(self, packages: PackageFacts, wanted: Installation) -> tuple[Change, ...]:
        """Return one refresh and one installation of all that is missing, and the holds; nothing if all is there."""

    def unowned(self, system: System, paths: Sequence[str]) -> tuple[str, ...]:
        """Return those of the paths that no package owns."""

    def needed_by(self, system: System, names: Sequence[str]) -> Versions:
        """Return name → other installed packages that need it, except those in `names`."""

    def removal(self, names: tuple[str, ...], keep: tuple[str, ...], lock_timeout: int) -> Change:
        """Return the change that removes packages; the files of `keep` stay, and undo brings the packages back."""

    def hold_packages(self, row: Distribution) -> tuple[str, ...]:
        """Return the packages needed to hold packages on this distribution."""
        return ()

    def open_bundle(self, system: System, repository_key: str) -> None:
        """Make the unpacked bundle, signed by this key (fingerprint), a source of packages."""


def pinned(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names, without their versions, of those whose version is asked for."""
    return tuple(name.partition("=")[0] for name in names if "=" in name)


def restarts_engine(names: Iterable[str]) -> bool:
    """Say whether a package of an engine or of the driver is asked for in a version: it may replace the one that runs.

    A package without a version is only installed where it is missing, so nothing runs on it yet.
    """
    return any(_ENGINES.match(name) for name in names)


def lock_holder(system: System, locks: Iterable[str]) -> str:
    """Return `NAME (pid N: COMMAND LINE)` of the process that holds one of these locks (fcntl(2)), or nothing."""
    for path in locks:
        pid = system.lock_holder(path)
        if pid:
            name = (system.read_text(f"/proc/{pid}/comm") or "a process").strip()
            line = (system.read_text(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
            return f"{name} (pid {pid}{': ' + line if line else ''})"
        if pid == 0:
            return "a process that can't be seen from here"
    return ""


def wait_until_free(
    system: System, tell: Tell, holder: Callable[[System], str], lock_timeout: int, deadline: float | None = None
) -> None:
    """Wait until `holder` returns nothing. `deadline`: the end of the `lock_timeout` seconds, if they run already.

    Raises GpuprovError that names the holder.
    """
    deadline = system.now() + lock_timeout if deadline is None else deadline
    told = ""
    while found := holder(system):
        if system.now() > deadline:
            raise GpuprovError(
                "another program holds the package manager's lock",
                f"{found}; waited {lock_timeout} s for its end",
                "wait for it, or set gpuprov_lock_timeout (seconds) higher, then run the same command again",
            )
        if found != told:
            tell(f"waiting up to {lock_timeout} s for {found}, which holds the package manager's lock", 0, 0)
            told = found
        system.sleep(_POLL_SECONDS)


def tell_nobody(message: str, done: int, total: int) -> None:
    """Ignore progress: of a roll-back's commands, and of queries that their caller announces."""


def versions_by_name(pairs: Iterable[tuple[str, str]]) -> Versions:
    """Return name → versions from pairs of both."""
    found: dict[str, tuple[str, ...]] = {}
    for name, version in pairs:
        found[name] = (*found.get(name, ()), version)
    return found
