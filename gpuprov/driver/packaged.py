"""A driver from packages: its pin or stream, a change of its version or branch, and loading its modules."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

from gpuprov.bundle.manifest import BundlePackage
from gpuprov.cdi.discover import discover
from gpuprov.core.changes import Change, Json, Jsons, NextAction, Tell, tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.places import FOLDER, KEPT_PACKAGES
from gpuprov.core.system import System
from gpuprov.driver import precompiled, running_driver
from gpuprov.facts.host import manager_on
from gpuprov.packages import dpkg, failures
from gpuprov.packages.apt import parse_madison
from gpuprov.packages.apt_changes import InstallPackages, present, stays
from gpuprov.packages.failures import finish_apt
from gpuprov.packages.interface import DRIVER_PACKAGES, require_answer
from gpuprov.packages.rpm import InstallRpmPackages, RpmManager, installed_rpms, package_name, run_rpm
from gpuprov.packages.rpm_locks import gather_locks
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError

_INSTALL_SECONDS = 600
_SIMULATE_SECONDS = 60
_ARCHIVES = "/var/cache/apt/archives"


def fits(version: str, wanted: str) -> bool:
    """Say whether the version of a driver's package is the wanted one, or of the wanted branch."""
    return re.match(rf"(\d+:)?{re.escape(wanted)}([.-]|$)", version) is not None


def driver_version(version: str) -> str:
    """Return the driver's version in a package's: 535.309.01 of 535.309.01-0+deb12u1; "" if there is none."""
    found = re.match(r"(?:\d+:)?(\d+(?:\.\d+)+)", version)
    return found[1] if found else ""


def _products(names: Iterable[str]) -> dict[str, re.Pattern[str]]:
    """Return what packages belong to (the driver, the toolkit), each with the pattern of its packages."""
    patterns = {"driver": DRIVER_PACKAGES, "toolkit": re.compile(r"(lib)?nvidia-container")}
    return {product: one for product, one in patterns.items() if any(map(one.match, names))}


def _what(names: Collection[str]) -> str:
    return f"the {' and '.join(_products(names))}'s packages"


class InstallDriverPackages(InstallPackages):
    """A change of the driver's or the toolkit's packages.

    Its undo installs their former versions again if apt can get them.
    """

    def way_back(self, system: System) -> tuple[str, ...]:
        patterns = _products(self.names).values()
        there = {name: version for name, version in present(system).items()
                 if any(pattern.match(name) for pattern in patterns)}  # fmt: skip
        asked = system.run(("apt-cache", "madison", *there), timeout=_SIMULATE_SECONDS) if there else None
        if asked is None or asked.unanswered:
            return ()
        offered = parse_madison(asked.stdout)
        lost = [
            f"{name}={version}" for name, version in there.items()
            if version not in offered.get(name.partition(":")[0], ()) and not _cached(system, name, version)
        ]  # fmt: skip
        return _way_back(there, lost, _first_of(there))

    @classmethod
    def restores(cls, system: System, before: Json, outcome: Json | None) -> tuple[str, ...]:
        former = _former(system, before, outcome)
        return (f"restores {_what(former)} ({_first_of(former)})",) if _words(system, former) else ()

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        dpkg.repair(system, tell_nobody, required=False)
        former = _former(system, before, outcome)
        words = _words(system, former)
        if words:
            done = dpkg.run_apt(system, ("install", "--allow-downgrades", "--purge", "--", *words), tell_nobody)
            finish_apt(done, f"{_what(former)} could not be installed again in their former version")
            _mark_used(system, words)
        super().undo(system, before, outcome)
        if words and "driver" in _products(former):
            running_driver.load_installed(system)

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        former, found = _former(system, before, outcome), outcome or cls.interrupted(system, before)
        if not _words(system, former):
            return super().irreversible(system, before, outcome, earlier)
        return stays({name: one for name, one in found.get("changed", {}).items() if name not in former})


def _former(system: System, before: Json, outcome: Json | None) -> dict[str, str]:
    """Return name → version of the driver's and the toolkit's packages that a change replaced or removed."""
    here = present(system)
    changed = (outcome or InstallPackages.interrupted(system, before)).get("changed", {})
    return {
        name: version
        for name, version in before.get("versions", {}).items()
        if _products((name,)) and here.get(name) != version and (name not in here or name in changed)
    }


def _words(system: System, former: Mapping[str, str]) -> tuple[str, ...]:
    """Return apt's words for these versions, from repositories or kept files; empty if it can't get them all."""
    by_version = tuple(f"{name}={version}" for name, version in former.items())
    by_file = tuple(_cached(system, *one) or f"{one[0]}={one[1]}" for one in former.items())
    for words in filter(None, dict.fromkeys((by_version, by_file))):
        simulated = (
            "apt-get", "--simulate", "--yes", *dpkg.NOTHING_ELSE, "--no-install-recommends", "--allow-downgrades",
            "--allow-change-held-packages", "install", "--",
        )  # fmt: skip
        asked = system.run((*simulated, *words), timeout=_SIMULATE_SECONDS)
        require_answer(asked, f"apt-get does not tell whether {_what(former)} can be installed again")
        if asked.ok and not foreign_removals(asked.stdout):
            return words
    return ()


def _cached(system: System, name: str, version: str) -> str:
    """Return the file that apt or gpuprov keeps of a package, "" if none."""
    start = f"{name.partition(':')[0]}_{version.replace(':', '%3a')}_"
    files = (f"{_ARCHIVES}/{file}" for file in system.list_directory(_ARCHIVES))
    return next((file for file in (*files, *_kept(system)) if file.rpartition("/")[2].startswith(start)), "")


def _kept(system: System) -> tuple[str, ...]:
    """Return the files of packages that gpuprov keeps."""
    folders = (f"{KEPT_PACKAGES}/{one}" for one in system.list_directory(KEPT_PACKAGES))
    return tuple(f"{folder}/{file}" for folder in folders for file in system.list_directory(folder))


def keep(system: System, packages: Iterable[BundlePackage]) -> None:
    """Keep the installed packages of the driver from the unpacked bundle, and the toolkit's with them.

    No repository may have them, and an undo of both at once needs all.
    """
    manager = manager_on(system)
    found = [one for one in packages if _products((one.name,)) and system.exists(f"{FOLDER}/{one.file}")]
    there = manager.gather(system) if found else None
    ours = [one for one in found if there and not manager.missing(there, (f"{one.name}={one.version}",))]
    # Some (libnvidia-egl-*, kernel modules) have another version than the driver.
    own = (driver_version(one.version) for one in ours if DRIVER_PACKAGES.match(one.name))
    versions = [*filter(None, own)]
    version = max(versions, key=versions.count, default="")
    for one in ours if version else ():
        system.make_directory(f"{KEPT_PACKAGES}/{version}", 0o700)
        # As apt names a file in its cache, and rpm a package.
        deb = f"{one.name}_{one.version.replace(':', '%3a')}_{one.architecture}.deb"
        rpm = f"{one.name}-{one.version.rpartition(':')[2]}.{one.architecture}.rpm"
        system.rename(f"{FOLDER}/{one.file}", f"{KEPT_PACKAGES}/{version}/{deb if manager.name == 'apt' else rpm}")


def _mark_used(system: System, words: Iterable[str]) -> None:
    """Make folders of kept packages that an undo has installed the newest: a later upgrade keeps them, not the undone.

    Their time of change counts (retention.py).
    """
    for folder in {word.rpartition("/")[0] for word in words if word.startswith(f"{KEPT_PACKAGES}/")}:
        with contextlib.suppress(GpuprovError, OSError):
            system.write(f"{folder}/used", b"")
            system.remove(f"{folder}/used")


def _way_back(names: Collection[str], lost: Sequence[str], versions: str) -> tuple[str, ...]:
    """Return how an undo restores the packages, or that it can't: nothing has those of `lost`."""
    if lost:
        return (f"way back: {_what(names)} can't be restored: no repository has {', '.join(lost)}",)
    return (f"way back: {_what(names)}, by version ({versions})",)


def _first_of(versions: Mapping[str, str]) -> str:
    name, version = next(iter(sorted(versions.items())))
    more = f" and {len(versions) - 1} more" if len(versions) > 1 else ""
    return f"{name}={version}{more}"


@dataclass(frozen=True)
class _InstallInstead(InstallDriverPackages):
    """An installation that removes the packages of `instead`."""

    instead: tuple[str, ...] = ()

    def capture(self, system: System) -> Json:
        return {**super().capture(system), "instead": list(self.instead)}

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        gone = tuple(f"package {name} is not restored" for name in before.get("instead", ()))
        gone = () if _words(system, _former(system, before, outcome)) else gone
        return (*gone, *super().irreversible(system, before, outcome, earlier))


@dataclass(frozen=True)
class SwitchPin(_InstallInstead):
    """Make apt keep the driver to another branch or version: one package of preferences replaces others."""

    def summary(self) -> str:
        return f"install {', '.join(self.names)} instead of {', '.join(self.instead)}"

    def _install(self, system: System, tell: Tell) -> None:
        # apt-get(8): a trailing dash removes a package.
        words = ("install", "--", *self.names, *(f"{name}-" for name in self.instead))
        done = dpkg.run_apt(system, words, tell, options=self.options)
        finish_apt(done, f"{', '.join(self.names)} could not be installed")


class ChangeDriver(Change):
    """A change of the driver's packages to another version or branch, newer or older."""

    names: tuple[str, ...]
    wanted: str
    disturbs = True
    key = "change the driver's packages"

    def summary(self) -> str:
        return f"{self.key} to {self.wanted} ({', '.join(self.names)}); it is loaded next"

    def next_action(self, outcome: Json) -> NextAction:
        """The rest of the plan was made for the replaced driver."""
        return NextAction.PLAN_AGAIN

    def _require_version(self, version: str, look: str) -> None:
        if not fits(version, self.wanted):
            what = f"the driver's packages are of {version or 'no driver'}, {self.wanted} is asked for"
            seen = "the package manager reported success; its repositories have nothing newer that fits"
            raise GpuprovError(what, seen, f"{look} shows what there is: set gpuprov_driver_version to one of these")


@dataclass(frozen=True)
class ChangeDriverPackages(ChangeDriver, _InstallInstead):
    """Do it with apt, whose preferences are already set."""

    wanted: str = ""

    def _install(self, system: System, tell: Tell) -> None:
        # apt-get(8): a trailing dash removes a package.
        words = ("install", "--allow-downgrades", "--", *self.names, *(f"{name}-" for name in self.instead))
        # A branch's packages may replace those of another; nothing else may be removed for them.
        what = f"the driver's packages could not be changed to {self.wanted}"
        asked = dpkg.run_apt(system, ("--simulate", *words), tell, options=self.options)
        finish_apt(asked, what)
        if strangers := foreign_removals(asked.stdout):
            seen = "\n".join(line for line in asked.stdout.splitlines() if line.startswith("Remv"))
            step = f"look at it: apt-get --simulate {' '.join(words)}; and do it by hand if it may be"
            raise GpuprovError(f"apt would take away {', '.join(strangers)} for driver {self.wanted}", seen, step)
        finish_apt(dpkg.run_apt(system, words, tell, options=self.options), what)
        versions = {one.name: one.version for one in dpkg.query(system)}
        name = self.names[0].partition("=")[0]
        self._require_version(versions.get(name, ""), f"apt-cache policy {name}")


@dataclass(frozen=True)
class SwitchBranch(ChangeDriverPackages):
    """Do the same if each branch has separate packages: those of `instead` are removed."""

    def summary(self) -> str:
        return f"{super().summary()}; remove {', '.join(self.instead)}" if self.instead else super().summary()

    def _install(self, system: System, tell: Tell) -> None:
        super()._install(system, tell)
        version = discover(system).library_version
        if not fits(version, self.wanted):
            raise GpuprovError(
                f"branch {self.wanted} of the driver is installed, but its libraries are not the ones that are loaded",
                f"libnvidia-ml.so.1 is of {version or 'no driver'}",
                "update-alternatives --display nvidia shows where the links lead; remove the packages of the other "
                "branch, then run the same command again",
            )


def foreign_removals(said: str) -> tuple[str, ...]:
    """Return the packages that `apt-get --simulate` would remove and that do not belong to a driver."""
    return tuple(name for name in re.findall(r"^Remv (\S+)", said, re.MULTILINE) if not DRIVER_PACKAGES.match(name))


@dataclass(frozen=True)
class InstallDriverRpms(InstallRpmPackages):
    """The same with dnf and zypper."""

    def way_back(self, system: System) -> tuple[str, ...]:
        patterns = _products(self.names).values()
        former = sorted(one for one in installed_rpms(system) if any(pattern.match(one) for pattern in patterns))
        return _way_back(former, _not_offered(system, former), ", ".join(former)) if former else ()

    @classmethod
    def restores(cls, system: System, before: Json, outcome: Json | None) -> tuple[str, ...]:
        former = _former_rpms(system, before, outcome)
        return (f"restores {_what(former)} ({', '.join(former)})",) if former else ()

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        former = _former_rpms(system, before, outcome)
        if former:
            manager = _rpm_manager(system)
            words = _rpm_words(system, former)
            done = run_rpm(system, manager.exact(system, words, simulate=False), tell_nobody, _INSTALL_SECONDS)
            what = f"{_what(former)} could not be installed again in their former version"
            failures.finish_rpm(done, what, manager.good_codes)
            _mark_used(system, words)
        super().undo(system, before, outcome)
        if "driver" in _products(former):
            running_driver.load_installed(system)

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        lost = () if _former_rpms(system, before, outcome) else _gone_rpms(system, before, outcome)
        return (f"{_what(lost)} stay at their version: no repository has those of before",) if lost else ()


@dataclass(frozen=True)
class ChangeDriverRpms(ChangeDriver, InstallDriverRpms):
    """Do the same with dnf, where the enabled stream determines the available versions. Nothing is removed."""

    wanted: str = ""

    def _install(self, system: System, tell: Tell) -> None:
        names = sorted({package_name(one) for one in installed_rpms(system) if DRIVER_PACKAGES.match(one)})
        # dnf(8): to the newest version in the enabled streams, even if it is older than the installed one.
        command = (self.program.name, "-y", *self.options, "distro-sync", *names)
        done = run_rpm(system, command, tell, _INSTALL_SECONDS)
        failures.finish_rpm(done, f"the driver's packages could not be changed to {self.wanted}")
        version = self.program.gather(system).installed.get(self.names[0], "")
        self._require_version(version, f"{self.program.name} list --showduplicates {self.names[0]}")
        # Packages of compiled modules have the driver's version in their names, so no update removes them.
        driver = version.rpartition(":")[2].partition("-")[0]
        stale = sorted(one for one in installed_rpms(system) if precompiled.is_stale(package_name(one), driver))
        if stale:
            done = run_rpm(system, ("rpm", "-e", *stale), tell, _INSTALL_SECONDS)
            failures.finish_rpm(done, f"{', '.join(stale)} could not be removed")


def restoring(changes: Sequence[Change], installed: Iterable[str]) -> tuple[Change, ...]:
    """Return the changes, where an installation that replaces packages of driver or toolkit restores them."""
    ours = {name for name in installed if _products((name,))}
    kinds = {InstallRpmPackages: InstallDriverRpms, InstallPackages: InstallDriverPackages}
    names = ({name.partition("=")[0] for name in getattr(one, "names", ())} for one in changes)
    return tuple(kinds[type(one)](**vars(one)) if type(one) in kinds and ours & replaced else one
                 for one, replaced in zip(changes, names))  # fmt: skip


def _rpm_manager(system: System) -> RpmManager:
    manager = manager_on(system)
    assert isinstance(manager, RpmManager)
    return manager


def _gone_rpms(system: System, before: Json, outcome: Json | None) -> tuple[str, ...]:
    """Return the driver's and the toolkit's packages that the change replaced and that are not there."""
    there = installed_rpms(system)
    replaced = (outcome or {}).get("replaced", before["installed"])
    return tuple(one for one in replaced if _products((one,)) and one not in there)


def _former_rpms(system: System, before: Json, outcome: Json | None) -> tuple[str, ...]:
    """Return the same, if all of them can be had and no others go for it."""
    former, manager = _gone_rpms(system, before, outcome), _rpm_manager(system)
    if not former or _not_offered(system, former):
        return ()
    if {*map(package_name, former)} & gather_locks(system, manager.hold_tool(system)).held:
        # The undo of the hold comes first; until then, nothing can be simulated.
        return former
    asked = system.run(manager.exact(system, _rpm_words(system, former), simulate=True), timeout=_SIMULATE_SECONDS)
    what = f"{manager.name} does not tell whether {_what(former)} can be installed again"
    removed = manager.removed_by(require_answer(asked, what))
    return former if removed is not None and all(map(DRIVER_PACKAGES.match, removed)) else ()


def _rpm_words(system: System, packages: Sequence[str]) -> tuple[str, ...]:
    """Return the packages (NAME-VERSION-RELEASE.ARCH), or their kept files if gpuprov keeps all of them."""
    kept = {file.rpartition("/")[2].removesuffix(".rpm"): file for file in _kept(system)}
    return tuple(map(kept.__getitem__, packages)) if {*packages} <= {*kept} else tuple(packages)


def _not_offered(system: System, packages: Sequence[str]) -> tuple[str, ...]:
    """Return the packages that neither a repository nor gpuprov has; all if no repository could be asked."""
    manager = _rpm_manager(system)
    if _rpm_words(system, packages) != tuple(packages):
        return ()
    try:
        offered = manager.query(system, manager.unlocked(system), tuple(map(package_name, packages)))
    except GpuprovError:
        return tuple(packages)
    pairs = ((name, one) for name, found in offered.items() for one in found)
    there = {f"{name}-{version}" for name, one in pairs for version in manager.version_names(one)}
    return tuple(one for one in packages if one not in there)


@dataclass(frozen=True)
class EnableStream(Change):
    """Enable this stream of the module nvidia-driver (dnf(8), "Module Command")."""

    stream: str
    before: str = ""

    uses_package_manager: ClassVar[bool] = True

    def summary(self) -> str:
        instead = f" instead of {self.before}" if self.before else ""
        return f"enable stream nvidia-driver:{self.stream}{instead}"

    def capture(self, system: System) -> Json:
        return {"before": self.before}

    def apply(self, system: System, tell: Tell) -> None:
        if self.before:
            self._require(system, "reset", "nvidia-driver")
        self._require(system, "enable", f"nvidia-driver:{self.stream}")

    def _require(self, system: System, verb: str, name: str) -> None:
        next_step = "dnf module list nvidia-driver shows which streams there are"
        _dnf_module(system, verb, name).require(f"dnf can't {verb} {name}", next_step)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        _dnf_module(system, "reset", "nvidia-driver")
        if before["before"]:
            _dnf_module(system, "enable", f"nvidia-driver:{before['before']}")


def _dnf_module(system: System, verb: str, name: str) -> Completed:
    return system.run(("dnf", "-y", "module", verb, name), timeout=_INSTALL_SECONDS, env=system.proxy.environment)


@dataclass(frozen=True)
class LoadDriver(Change):
    """Load the installed driver's kernel modules, in the version of the libraries."""

    undo_when_interrupted: ClassVar[bool] = False

    def summary(self) -> str:
        return "load the driver's kernel modules (modprobe nvidia, nvidia-uvm)"

    def apply(self, system: System, tell: Tell) -> None:
        for module in ("nvidia", "nvidia-uvm"):
            done = system.run(("modprobe", module), timeout=120)
            if not done.ok:
                # The last lines about NVIDIA's modules in the kernel's log.
                lines = system.run(("dmesg",), timeout=10).stdout.splitlines()
                said = [line for line in lines if "NVRM" in line or "nvidia" in line.lower()][-4:]
                raise GpuprovError(
                    f"the kernel module {module} can't be loaded",
                    "\n".join((done.evidence(3), *said)),
                    "dkms status shows whether it was built for this kernel; nouveau or another driver on the GPU: "
                    "lspci -k -d 10de:",
                )
        found = discover(system)
        if found.kernel_version != found.library_version:
            what = f"the loaded driver is {found.kernel_version or 'none'}, its libraries are {found.library_version}"
            step = "reboot, so that the new modules are loaded; then run the same command again"
            raise GpuprovError(what, "/proc/driver/nvidia/version", step)
