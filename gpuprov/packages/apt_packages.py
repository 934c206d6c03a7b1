"""Packages through apt: what is installed, what is missing, and the changes that install, hold and remove them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from gpuprov.core.changes import Change, Json, Tell, capture_path, restore_path
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.places import SOURCES_LIST
from gpuprov.core.system import System
from gpuprov.packages import dpkg
from gpuprov.packages.apt_failures import finish
from gpuprov.packages.apt_undo import conffiles_left, lasting_of_purge, purge, restore_conffiles
from gpuprov.packages.dpkg import lock_holder, repair
from gpuprov.packages.engine_packages import restarts_engine
from gpuprov.packages.package_lock import LOCK_SECONDS, tell_nobody
from gpuprov.packages.past_kernels import Advice
from gpuprov.packages.rpm_locks import HELD_LIST, NO_LOCKS, LockFacts
from gpuprov.protocol.errors import GpuprovError

__all__ = [
    "HELD_LIST", "LOCK_SECONDS", "HoldPackages", "InstallPackages", "PackageFacts", "RefreshPackageIndex",
    "gather_packages", "lock_holder", "missing", "parse_dpkg", "repair",
]  # fmt: skip
_REFRESH_SECONDS = 600
# dpkg runs the packages' scripts here.
_SCRIPTS = "/var/lib/dpkg/info"


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


def gather_packages(system: System) -> PackageFacts:
    """Return what is installed, by one query."""
    if system.which("apt-get") is None or system.which("dpkg-query") is None:
        return PackageFacts("", {})
    text = dpkg.query_text(system)
    found = dpkg.parse_query(text)
    packages = [one for one in found if one.whole]
    held = frozenset(one.name for one in packages if one.want == "hold")
    return PackageFacts(
        "apt",
        parse_dpkg(text),
        dpkg.own_architecture(text),
        frozenset(name for one in packages for name in one.provides),
        held,
        held & frozenset((system.read_text(HELD_LIST) or "").split()),
        unfinished={one.name: one.status for one in found if one.present and not one.whole},
    )


def parse_dpkg(text: str) -> Mapping[str, str]:
    """Return name → version of the packages that are wholly installed, from `STATUS NAME VERSION …` lines."""
    return {one.name: one.version for one in dpkg.parse_query(text) if one.whole}


def missing(packages: PackageFacts, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of `names` (`NAME[:ARCHITECTURE][=VERSION]`) that are not installed, or not in that version."""
    return tuple(dict.fromkeys(name for name in names if not _is_installed(packages, name)))


def _is_installed(packages: PackageFacts, name: str) -> bool:
    plain, _, version = name.partition("=")
    plain = own_name(packages, plain)
    found = packages.installed.get(plain)
    if found is None:
        return not version and plain in packages.provided
    # A version may be a pattern, as apt takes them (apt-get(8)): "550.163.01-*".
    return version == "" or fnmatchcase(found, version)


def own_name(packages: PackageFacts, name: str) -> str:
    """Return a package's name as dpkg's query gives it: without the architecture where that is the machine's own."""
    plain, _, architecture = name.partition(":")
    return plain if architecture in ("", "all", "native", packages.architecture) else name


def pinned(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names, without their versions, of those whose version is asked for."""
    return tuple(name.partition("=")[0] for name in names if "=" in name)


def plan_holds(packages: PackageFacts, names: Iterable[str], lock_timeout: int = LOCK_SECONDS) -> tuple[Change, ...]:
    """Return the change that holds these packages, and releases others that gpuprov held before."""
    wanted = {own_name(packages, name) for name in names}
    hold, release = wanted - packages.held, packages.held_here - wanted
    return (HoldPackages(tuple(sorted(hold)), tuple(sorted(release)), lock_timeout),) if hold or release else ()


@dataclass(frozen=True)
class RefreshPackageIndex(Change):
    """Fetch the current index of the repositories; `options` are further options for apt."""

    lock_timeout: int = LOCK_SECONDS
    options: tuple[str, ...] = ()

    # A half-fetched index is fetched again; nothing to undo.
    undo_when_interrupted: ClassVar[bool] = False
    uses_package_manager: ClassVar[bool] = True
    executes: ClassVar[str] = _SCRIPTS
    bundle_part: ClassVar[str] = "packages"

    def summary(self) -> str:
        return "refresh the package index (apt-get update)"

    def apply(self, system: System, tell: Tell) -> Json:
        # Without the option, apt-get answers 0 even if no repository could be reached.
        command = ("-o", "APT::Update::Error-Mode=any", "update")
        done = dpkg.run_apt(
            system, command, tell, seconds=_REFRESH_SECONDS, lock_timeout=self.lock_timeout, options=self.options
        )
        finish(done, "the package index could not be refreshed")
        return {}


@dataclass(frozen=True)
class InstallPackages(Change):
    """Install these packages (`NAME[:ARCHITECTURE][=VERSION]`), and never remove another for them.

    `unhold`: those that are held in another version than the requested one; their hold is removed first. `options` are
    options for apt, such as those that make a bundle its only source. `advice` is the answer if no repository has a
    package.
    """

    names: tuple[str, ...]
    unhold: tuple[str, ...] = ()
    lock_timeout: int = LOCK_SECONDS
    options: tuple[str, ...] = ()
    advice: Advice | None = field(default=None, compare=False)

    # The next run finishes what a killed dpkg began and then plans again: removing packages only to install them once
    # more would gain nothing and could fail.
    undo_when_interrupted: ClassVar[bool] = False
    uses_package_manager: ClassVar[bool] = True
    executes: ClassVar[str] = _SCRIPTS
    bundle_part: ClassVar[str] = "packages"
    undo_disturbs: ClassVar[bool] = True

    @property
    def disturbs(self) -> bool:
        return restarts_engine(self.names)

    def summary(self) -> str:
        held = f" (taking the hold off {', '.join(self.unhold)})" if self.unhold else ""
        return f"install {', '.join(self.names)}{held}"

    @property
    def key(self) -> str:
        return f"install {', '.join(self.names)}"

    def capture(self, system: System) -> Json:
        packages = dpkg.query(system)
        return {
            "installed": sorted(one.name for one in packages if one.present),
            "versions": {one.name: one.version for one in packages if one.present},
            "left": conffiles_left(system, packages, self.names, self.options),
            "unhold": list(self.unhold),
            "lock_timeout": self.lock_timeout,
            "options": list(self.options),
        }

    def apply(self, system: System, tell: Tell) -> Json:
        repair(system, tell, self.lock_timeout, self.options)
        before = _present(system)
        if self.unhold:
            _mark(system, "unhold", self.unhold, tell, self.lock_timeout)
        self._install(system, tell)
        return _outcome(before, _present(system))

    def _install(self, system: System, tell: Tell) -> None:
        what = f"{', '.join(self.names)} could not be installed"
        # A version that is asked for may be an older one.
        older = ("--allow-downgrades",) if pinned(self.names) else ()
        words = ("install", "--no-remove", *older, "--", *self.names)
        done = dpkg.run_apt(system, words, tell, lock_timeout=self.lock_timeout, options=self.options)
        finish(done, what, self.advice)
        if dpkg.unfinished(system) or missing(gather_packages(system), self.names):
            # apt-get exits 0 despite a package that an earlier, killed run unpacked in part.
            repair(system, tell, self.lock_timeout, self.options)
        left = dpkg.unfinished(system)
        lacking = missing(gather_packages(system), self.names)
        if left or lacking:
            seen = [f"{name} is {status}" for name, status in left.items()]
            raise GpuprovError(
                f"{what}: apt-get reported success, but not all packages are installed",
                "dpkg-query: " + "; ".join([*seen, *(f"{name} is not installed" for name in lacking)]),
                "dpkg --audit tells what is wrong with a package; apt-get install --reinstall NAME often fixes it",
            )

    @classmethod
    def interrupted(cls, system: System, before: Json) -> Json:
        """Return the packages that are present now and were not before, complete or not."""
        versions = before.get("versions", dict.fromkeys(before["installed"], ""))
        return _outcome(versions, _present(system))

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Remove what this change added; keep what was there before, and what another package needs by now."""
        lock_timeout = before.get("lock_timeout", LOCK_SECONDS)
        added = (outcome or cls.interrupted(system, before))["added"]
        left: Mapping[str, Any] = before.get("left", {})
        # A bundle is unpacked during its run only; after it the host's own sources are the only ones.
        options = tuple(before.get("options", ())) if system.exists(SOURCES_LIST) else ()
        purge(system, added, tuple(left), lock_timeout, options)
        restore_conffiles(system, left, added)
        held_again = [name for name in before.get("unhold", ()) if name in _present(system)]
        if held_again:
            _mark(system, "hold", held_again, tell_nobody, lock_timeout)

    @classmethod
    def irreversible(
        cls, system: System, before: Json, outcome: Json | None, earlier: tuple[Json, ...]
    ) -> tuple[str, ...]:
        found = outcome or cls.interrupted(system, before)
        changed = tuple(
            f"{name} stays at {new}; before gpuprov it was {old}"
            for name, (old, new) in found.get("changed", {}).items()
        )
        return (*changed, *lasting_of_purge(system, found["added"], tuple(before.get("left", {}))))


@dataclass(frozen=True)
class HoldPackages(Change):
    """Hold these packages (`names`) at their version, and no longer hold those of `release`."""

    names: tuple[str, ...]
    release: tuple[str, ...] = ()
    lock_timeout: int = LOCK_SECONDS

    uses_package_manager: ClassVar[bool] = True
    executes: ClassVar[str] = _SCRIPTS

    def summary(self) -> str:
        parts = (("hold ", self.names, " at this version"), ("no longer hold ", self.release, ""))
        return "; ".join(f"{before}{', '.join(names)}{after}" for before, names, after in parts if names)

    def capture(self, system: System) -> Json:
        held = {one.name for one in dpkg.query(system) if one.want == "hold"}
        return {
            "held": sorted(held & {*self.names, *self.release}),
            "names": [*self.names, *self.release],
            "list": capture_path(system, HELD_LIST),
            "lock_timeout": self.lock_timeout,
        }

    def apply(self, system: System, tell: Tell) -> Json:
        for verb, names in (("hold", self.names), ("unhold", self.release)):
            if names:
                _mark(system, verb, names, tell, self.lock_timeout)
        ours = {*(system.read_text(HELD_LIST) or "").split(), *self.names} - {*self.release}
        system.make_directory(STATE_DIRECTORY, 0o700)
        system.write(HELD_LIST, "".join(f"{name}\n" for name in sorted(ours)).encode())
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        held, here = set(before["held"]), _present(system)
        for verb, names in (("hold", held), ("unhold", set(before["names"]) - held)):
            found = sorted(name for name in names if name in here)
            if found:
                _mark(system, verb, found, tell_nobody, before["lock_timeout"])
        restore_path(system, before["list"])


def _mark(system: System, verb: str, names: Iterable[str], tell: Tell, lock_timeout: int) -> None:
    done = dpkg.run_dpkg(system, ("apt-mark", verb, *names), tell, lock_timeout)
    finish(done, f"apt-mark {verb} {' '.join(names)} failed")


def _present(system: System) -> Mapping[str, str]:
    return {one.name: one.version for one in dpkg.query(system) if one.present}


def _outcome(before: Mapping[str, str], after: Mapping[str, str]) -> Json:
    """Return what an installation added, and what it changed to another version: name → old and new."""
    changed = {name: [old, after[name]] for name, old in before.items() if old and after.get(name, old) != old}
    return {"added": sorted(after.keys() - before.keys()), "changed": changed}
