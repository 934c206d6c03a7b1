"""What gpuprov asks of a package manager, and what it knows about one: packages, installations, the lock."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Callable, ClassVar, Protocol

from gpuprov.core.changes import Change, Tell
from gpuprov.core.commands import Completed
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.machine.distros import Distribution
from gpuprov.packages.failures import Advice
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import GpuprovError

_POLL_SECONDS = 0.5
INSTALL_SECONDS = 3600
REFRESH_SECONDS = 600
# The packages that gpuprov holds, with any package manager; gpuprov leaves the holds of others alone.
HELD_LIST = f"{STATE_DIRECTORY}/held"
Versions = Mapping[str, tuple[str, ...]]
# Names of the driver's packages in all branches and distributions (NVIDIA's Driver Installation Guide). They do not
# match the container toolkit, nor the CUDA toolkit's libraries, many of which begin with libnv.
DRIVER_PACKAGES = re.compile(
    r"(?!.*(container|docker))((lib|a?kmod-|dkms-|xserver-xorg-video-|firmware-|xorg-x11-(drv-)?)?nvidia|cuda-drivers|"
    r"libcuda1|libnvcuvid|libnvoptix|libnvsdm|nvlsm|libxnvctrl|linux-(modules|objects|signatures)-nvidia|nv-prefer-)",
    re.IGNORECASE,
)
# Of these, what is not the driver (CUDA, firmware of nouveau, repositories), or comes and goes with a kernel: that
# depends on the driver's exact version, and a hold would keep a new kernel from getting its modules.
_NOT_HELD = re.compile(
    r"nvidia-(cuda(?!-mps)|cudnn|nccl|nsight|profiler|visual|fs\b|gds|release|repo|driver-(pinning|local|assistant)|gpu-firmware)|"
    r"firmware-nvidia-graphics|linux-|nv-prefer-|kmod-nvidia-(open-)?\d|.*-dev\b",
    re.IGNORECASE,
)
# Packages of an engine or of the driver that are asked for in a version: each may replace the one that runs.
_ENGINES = re.compile(r"(docker|moby|containerd|runc|crun|cri-o|podman|nvidia-driver|nvidia-open|cuda-drivers)[^=]*=")


@dataclass(frozen=True)
class LockFacts:
    """Which tool holds rpm's packages (by its name in rpm_locks.LOCK_TOOLS), the path of its list, and what is in it.

    `missing_plugin`: the package that the tool needs and that is not installed.
    """

    tool: str = ""
    path: str = ""
    held: frozenset[str] = frozenset()
    held_here: frozenset[str] = frozenset()
    missing_plugin: tuple[str, ...] = ()


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
    locks: LockFacts = LockFacts()
    unfinished: Mapping[str, str] = field(default_factory=dict)

    @property
    def driver(self) -> frozenset[str]:
        """The driver's installed packages, which must be of one version."""
        return driver_set(self.installed)

    @property
    def driver_held(self) -> tuple[str, ...]:
        """Those of them that gpuprov holds."""
        return tuple(sorted(self.driver & (self.held_here | self.locks.held_here)))


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
    bundle: Bundle | None = None
    hold: tuple[str, ...] | None = None
    units: tuple[str, ...] = ()
    advice: Advice | None = None
    unfiltered_repository: str = ""
    limited: str = ""
    limited_names: tuple[str, ...] = ()


class IndexRefresh(Change):
    """The base class of the changes that fetch the current index of the repositories."""

    # A half-fetched index is fetched again; nothing to undo.
    undo_restores_files: ClassVar[bool] = True
    undo_when_interrupted: ClassVar[bool] = False
    uses_package_manager: ClassVar[bool] = True
    bundle_part: ClassVar[str] = "packages"


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
        # A package without a version is only installed where it is missing, so nothing runs on it yet.
        return any(_ENGINES.match(name) for name in self.names)


class PackageHold(Change):
    """The base class of the changes that hold packages (`names`) at their version, and no longer those of `release`.

    `driver`: and with them all of the driver's packages that are installed by then and that nobody holds.
    """

    names: tuple[str, ...]
    release: tuple[str, ...]
    driver: bool

    def summary(self) -> str:
        names = shortened(self.names)
        if self.driver:
            return f"hold the driver's packages at this version{f' ({names})' if names else ''}"
        parts = (("hold ", names, " at this version"), ("no longer hold ", shortened(self.release), ""))
        return "; ".join(f"{before}{names}{after}" for before, names, after in parts if names)


class PackageRemoval(Change):
    """The base class of the changes that remove packages; the files of `keep` stay as they are."""

    names: tuple[str, ...]
    keep: tuple[str, ...]

    uses_package_manager: ClassVar[bool] = True
    # What a rollback installs them from.
    restored_from: ClassVar[str] = "copies"

    def summary(self) -> str:
        kept = f"; {', '.join(self.keep)} stays" if self.keep else ""
        return f"{self.key} (a rollback installs them again from {self.restored_from}){kept}"

    @property
    def key(self) -> str:
        return f"remove {', '.join(self.names)}"


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
        return self.version_names(version)

    def typed(self, name: str) -> str:
        """Return `NAME=VERSION` in the syntax of the command line."""

    def offered(self, system: System, names: Sequence[str], planned: Sequence[Change]) -> Versions:
        """Return name → versions in the repositories, after the `planned` changes to these.

        Raises GpuprovError, as a refresh of the index does, if a repository can't be queried.
        """

    def plan_installation(self, packages: PackageFacts, wanted: Installation) -> tuple[Change, ...]:
        """Return one refresh and one installation of all that is missing, and the holds; nothing if all is there."""

    def hold_driver(self, packages: PackageFacts, hold: bool, coming: bool) -> tuple[Change, ...]:
        """Return the change that holds the driver's packages, or releases those that gpuprov holds.

        `coming`: changes before this one install some of them.
        """

    def unowned(self, system: System, paths: Sequence[str]) -> tuple[str, ...]:
        """Return those of the paths that no package owns."""

    def needed_by(self, system: System, names: Sequence[str]) -> Versions:
        """Return name → other installed packages that need it, except those in `names`."""

    def removal(self, names: tuple[str, ...], keep: tuple[str, ...]) -> Change:
        """Return the change that removes packages; the files of `keep` stay, and undo brings the packages back."""

    def hold_packages(self, row: Distribution) -> tuple[str, ...]:
        """Return the packages needed to hold packages on this distribution."""
        return ()

    def open_bundle(self, system: System, repository_key: str) -> None:
        """Make the unpacked bundle, signed by this key (fingerprint), a source of packages."""


def require_answer(done: Completed, what: str) -> Completed:
    """Return it. Raises GpuprovError if it was killed or took too long: an undo or a migration takes that for a no."""
    if done.unanswered:
        raise GpuprovError(what, done.evidence(4), "run the same command again")
    return done


def driver_set(names: Iterable[str]) -> frozenset[str]:
    """Return those of the names that are packages of the driver, to be held as one."""
    return frozenset(name for name in names if DRIVER_PACKAGES.match(name) and not _NOT_HELD.match(name))


def shortened(names: Sequence[str]) -> str:
    """Return names for a sentence, the first six if there are more than seven."""
    more = f" and {len(names) - 6} more" if len(names) > 7 else ""
    return ", ".join(names[:6] if more else names) + more


def pinned(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names, without their versions, of those whose version is asked for."""
    return tuple(name.partition("=")[0] for name in names if "=" in name)


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


def wait_until_free(system: System, tell: Tell, holder: Callable[[System], str], deadline: float | None = None) -> None:
    """Wait until `holder` returns nothing. `deadline`: the end of its patience, if that has begun.

    Raises GpuprovError that names the holder.
    """
    seconds = system.lock_timeout
    deadline = system.now() + seconds if deadline is None else deadline
    told = ""
    while found := holder(system):
        if system.now() > deadline:
            what, seen = "another program holds the package manager's lock", f"{found}; waited {seconds} s for its end"
            step = "wait for it, or set gpuprov_lock_timeout (seconds) higher, then run the same command again"
            raise GpuprovError(what, seen, step)
        if found != told:
            tell(f"waiting up to {seconds} s for {found}, which holds the package manager's lock", 0, 0)
            told = found
        system.sleep(_POLL_SECONDS)


def reporter(pattern: str, tell: Tell) -> Callable[[str], None]:
    """Return what reports each line of a program that begins with a pattern."""
    return lambda line: tell(" ".join(line.split()), 0, 0) if re.match(pattern, line) else None


def versions_by_name(pairs: Iterable[tuple[str, str]]) -> Versions:
    """Return name → versions from pairs of both."""
    found: dict[str, tuple[str, ...]] = {}
    for name, version in pairs:
        found[name] = (*found.get(name, ()), version)
    return found


def write_held(system: System, names: Iterable[str], release: Iterable[str]) -> None:
    """Write down which packages gpuprov holds."""
    ours = {*read_held(system), *names} - {*release}
    system.make_directory(STATE_DIRECTORY, 0o700)
    system.write(HELD_LIST, "".join(f"{name}\n" for name in sorted(ours)).encode())


def read_held(system: System) -> frozenset[str]:
    """Return the packages that gpuprov holds."""
    return frozenset((system.read_text(HELD_LIST) or "").split())
