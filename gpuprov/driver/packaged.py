"""A driver from packages: its pin or stream, a change of its version or branch, and loading its modules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gpuprov.cdi.discover import discover
from gpuprov.core.changes import Change, Json, NextAction, Tell
from gpuprov.core.system import System
from gpuprov.driver import precompiled, running_driver
from gpuprov.driver.source import DriverSource
from gpuprov.packages import dpkg, failures
from gpuprov.packages.apt_changes import InstallPackages
from gpuprov.packages.failures import finish_apt
from gpuprov.packages.interface import LOCK_SECONDS, tell_nobody
from gpuprov.packages.rpm_changes import InstallRpmPackages, added, installed_rpms, package_name, run_rpm
from gpuprov.protocol.errors import GpuprovError, Problem

_INSTALL_SECONDS = 600
_SIMULATE_SECONDS = 60
_ARCHIVES = "/var/cache/apt/archives"
# Names of the driver's packages in all branches and distributions (NVIDIA's Driver Installation Guide). They do not
# match the container toolkit, nor the CUDA toolkit's libraries, many of which begin with libnv.
_DRIVER_PACKAGES = re.compile(
    r"(?!.*(container|docker))((lib|kmod-|dkms-|xserver-xorg-video-|firmware-|xorg-x11-)?nvidia|cuda-drivers|libcuda1|"
    r"libnvcuvid|libnvoptix|libnvsdm|libxnvctrl|linux-(modules|objects|signatures)-nvidia)",
    re.IGNORECASE,
)


_CHANGE = "change the driver's packages"


def fits(version: str, wanted: str) -> bool:
    """Say whether the version of a driver's package is the wanted one, or of the wanted branch."""
    return re.match(rf"(\d+:)?{re.escape(wanted)}([.-]|$)", version) is not None


class _Restoring(InstallPackages):
    """A change of the driver's packages. Its undo installs their former versions again if apt can get them."""

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        lock_timeout = before.get("lock_timeout", LOCK_SECONDS)
        dpkg.repair(system, tell_nobody, lock_timeout)
        words = _words(system, _former(system, before, outcome))
        if words:
            command = ("install", "--allow-downgrades", "--purge", "--", *words)
            done = dpkg.run_apt(system, command, tell_nobody, lock_timeout=lock_timeout)
            finish_apt(done, "the driver's former packages could not be installed again")
        super().undo(system, before, outcome)
        if words:
            running_driver.load_installed(system)

    @classmethod
    def irreversible(
        cls, system: System, before: Json, outcome: Json | None, earlier: tuple[Json, ...]
    ) -> tuple[str, ...]:
        former = _former(system, before, outcome)
        return () if _words(system, former) else super().irreversible(system, before, outcome, earlier)


def _former(system: System, before: Json, outcome: Json | None) -> dict[str, str]:
    """Return name → version of the driver's packages that a change replaced or removed."""
    here = {one.name: one.version for one in dpkg.query(system) if one.present}
    changed = (outcome or InstallPackages.interrupted(system, before)).get("changed", {})
    return {
        name: version
        for name, version in before.get("versions", {}).items()
        if _DRIVER_PACKAGES.match(name) and here.get(name) != version and (name not in here or name in changed)
    }


def _words(system: System, former: Mapping[str, str]) -> tuple[str, ...]:
    """Return apt's words for these versions, from repositories or apt's cache; empty if it can't get them all."""
    by_version = tuple(f"{name}={version}" for name, version in former.items())
    by_file = tuple(_cached(system, *one) or f"{one[0]}={one[1]}" for one in former.items())
    for words in dict.fromkeys((by_version, by_file)):
        simulated = ("apt-get", "--simulate", "--yes", "--no-install-recommends", "--allow-downgrades", "install", "--")
        asked = system.run((*simulated, *words), timeout=_SIMULATE_SECONDS) if words else None
        if asked is not None and asked.ok and not foreign_removals(asked.stdout):
            return words
    return ()


def _cached(system: System, name: str, version: str) -> str:
    """Return the file that apt keeps of a package, "" if none."""
    start = f"{name.partition(':')[0]}_{version.replace(':', '%3a')}_"
    return next((f"{_ARCHIVES}/{file}" for file in system.list_directory(_ARCHIVES) if file.startswith(start)), "")


def _first_of(versions: Mapping[str, str]) -> str:
    name, version = next(iter(sorted(versions.items())))
    more = f" and {len(versions) - 1} more" if len(versions) > 1 else ""
    return f"{name}={version}{more}"


@dataclass(frozen=True)
class _InstallInstead(_Restoring):
    """An installation that removes the packages of `instead`."""

    instead: tuple[str, ...] = ()

    def capture(self, system: System) -> Json:
        return {**super().capture(system), "instead": list(self.instead)}

    @classmethod
    def irreversible(
        cls, system: System, before: Json, outcome: Json | None, earlier: tuple[Json, ...]
    ) -> tuple[str, ...]:
        gone = tuple(f"package {name} is not restored" for name in before["instead"])
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
        done = dpkg.run_apt(system, words, tell, lock_timeout=self.lock_timeout, options=self.options)
        finish_apt(done, f"{', '.join(self.names)} could not be installed")


@dataclass(frozen=True)
class ChangeDriverPackages(_Restoring):
    """Change the driver's packages to another version or branch, newer or older; apt's preferences are already set."""

    wanted: str = ""

    @property
    def disturbs(self) -> bool:
        return True

    def summary(self) -> str:
        return _change_to(self.wanted, self.names)

    @property
    def key(self) -> str:
        return _CHANGE

    def way_back(self, system: System) -> tuple[str, ...]:
        there = {
            one.name: one.version for one in dpkg.query(system) if one.present and _DRIVER_PACKAGES.match(one.name)
        }
        if not there:
            return ()
        said = system.run(("apt-cache", "madison", *there), timeout=_SIMULATE_SECONDS).stdout
        offered = {tuple(word.strip() for word in line.split("|")[:2]) for line in said.splitlines()}
        lost = [f"{name}={version}" for name, version in there.items()
                if (name.partition(":")[0], version) not in offered and not _cached(system, name, version)]  # fmt: skip
        if lost:
            return (f"way back: the driver's packages can't be restored: no repository has {', '.join(lost)}",)
        return (f"way back: the driver's packages, by version ({_first_of(there)})",)

    @classmethod
    def restores(cls, system: System, before: Json, outcome: Json | None) -> tuple[str, ...]:
        former = _former(system, before, outcome)
        return (f"restores the driver's packages ({_first_of(former)})",) if _words(system, former) else ()

    def next_action(self, outcome: Json) -> NextAction:
        """The rest of the plan was made for the replaced driver."""
        return NextAction.PLAN_AGAIN

    def _gone(self) -> tuple[str, ...]:
        """Return the packages that apt must remove, in apt's syntax (apt-get(8): with a trailing dash)."""
        return ()

    def _install(self, system: System, tell: Tell) -> None:
        words = ("install", "--allow-downgrades", "--", *self.names, *self._gone())
        # A branch's packages may replace those of another; nothing else may be removed for them.
        asked = dpkg.run_apt(system, ("--simulate", *words), tell, options=self.options, lock_timeout=self.lock_timeout)
        strangers = foreign_removals(asked.stdout)
        if strangers:
            raise GpuprovError(
                f"apt would take away {', '.join(strangers)} for driver {self.wanted}",
                "\n".join(line for line in asked.stdout.splitlines() if line.startswith("Remv")),
                f"look at it: apt-get --simulate {' '.join(words)}; and do it by hand if it may be",
            )
        done = dpkg.run_apt(system, words, tell, lock_timeout=self.lock_timeout, options=self.options)
        finish_apt(done, f"the driver's packages could not be changed to {self.wanted}")
        versions = {one.name: one.version for one in dpkg.query(system)}
        _require_version(versions.get(self.names[0], ""), self.wanted, f"apt-cache policy {self.names[0]}")


@dataclass(frozen=True)
class SwitchBranch(_InstallInstead, ChangeDriverPackages):
    """Do the same if each branch has separate packages: those of `instead` are removed."""

    def summary(self) -> str:
        return f"{super().summary()}; remove {', '.join(self.instead)}" if self.instead else super().summary()

    def _gone(self) -> tuple[str, ...]:
        return tuple(f"{name}-" for name in self.instead)

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
    names = re.findall(r"^Remv (\S+)", said, re.MULTILINE)
    return tuple(name for name in names if not _DRIVER_PACKAGES.match(name))


@dataclass(frozen=True)
class ChangeDriverRpms(InstallRpmPackages):
    """Do the same with dnf, where the enabled stream determines the available versions. Nothing is removed."""

    wanted: str = ""

    @property
    def disturbs(self) -> bool:
        return True

    def summary(self) -> str:
        return _change_to(self.wanted, self.names)

    @property
    def key(self) -> str:
        return _CHANGE

    def apply(self, system: System, tell: Tell) -> Json:
        before = installed_rpms(system)
        names = sorted({package_name(one) for one in before if _DRIVER_PACKAGES.match(one)})
        # dnf(8): to the newest version in the enabled streams, even if it is older than the installed one.
        command = (self.program.name, "-y", *self.options, "distro-sync", *names)
        done = run_rpm(system, command, tell, _INSTALL_SECONDS, self.lock_timeout)
        failures.finish_rpm(done, f"the driver's packages could not be changed to {self.wanted}")
        version = self.program.gather(system).installed.get(self.names[0], "")
        _require_version(version, self.wanted, f"{self.program.name} list --showduplicates {self.names[0]}")
        self._drop_stale(system, tell, version.rpartition(":")[2].partition("-")[0])
        return {"added": sorted(added(before, installed_rpms(system)))}

    def next_action(self, outcome: Json) -> NextAction:
        """The rest of the plan was made for the replaced driver."""
        return NextAction.PLAN_AGAIN

    def _drop_stale(self, system: System, tell: Tell, driver: str) -> None:
        """Remove compiled modules of another driver: their packages have different names, so no update removes them."""
        stale = sorted(one for one in installed_rpms(system) if precompiled.is_stale(package_name(one), driver))
        if stale:
            done = run_rpm(system, ("rpm", "-e", *stale), tell, _INSTALL_SECONDS, self.lock_timeout)
            failures.finish_rpm(done, f"{', '.join(stale)} could not be removed")

    def way_back(self, system: System) -> tuple[str, ...]:
        former = sorted(one for one in installed_rpms(system) if _DRIVER_PACKAGES.match(one))
        if lost := _not_offered(system, former):
            return (f"way back: the driver's packages can't be restored: no repository has {', '.join(lost)}",)
        return (f"way back: the driver's packages, by version ({', '.join(former)})",) if former else ()

    @classmethod
    def restores(cls, system: System, before: Json, outcome: Json | None) -> tuple[str, ...]:
        former = _former_rpms(system, before)
        return (f"restores the driver's packages ({', '.join(former)})",) if former else ()

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        former = _former_rpms(system, before)
        if former:
            lock_timeout = before.get("lock_timeout", LOCK_SECONDS)
            done = run_rpm(system, (*_DNF, "-y", "install", *former), tell_nobody, _INSTALL_SECONDS, lock_timeout)
            failures.finish_rpm(done, "the driver's former packages could not be installed again")
        super().undo(system, before, outcome)
        if former:
            running_driver.load_installed(system)

    @classmethod
    def irreversible(
        cls, system: System, before: Json, outcome: Json | None, earlier: tuple[Json, ...]
    ) -> tuple[str, ...]:
        if _former_rpms(system, before):
            return ()
        return ("the driver's packages stay at their version: no repository has those of before",)


# Packages of another stream than the enabled one count too (dnf.conf(5), module_hotfixes).
_DNF = ("dnf", "--setopt=*.module_hotfixes=1", "--setopt=install_weak_deps=False", "--allowerasing")


def _former_rpms(system: System, before: Json) -> tuple[str, ...]:
    """Return the driver's packages that are gone since, if dnf can install all of them and removes no others for it."""
    there = installed_rpms(system)
    former = tuple(one for one in before["installed"] if _DRIVER_PACKAGES.match(one) and one not in there)
    if not former or _not_offered(system, former):
        return ()
    asked = system.run((*_DNF, "--assumeno", "install", *former), timeout=_SIMULATE_SECONDS)
    removed = "".join(re.findall(r"^Removing.*:\n((?: .*\n)+)", asked.stdout, re.MULTILINE))
    names = [line.split()[0] for line in removed.splitlines() if line[1:2] != " "]
    resolved = "Operation aborted" in asked.stdout + asked.stderr
    return former if resolved and all(_DRIVER_PACKAGES.match(name) for name in names) else ()


def _not_offered(system: System, packages: Sequence[str]) -> tuple[str, ...]:
    """Return the packages (NAME-VERSION-RELEASE.ARCH) that no repository has."""
    form = "%{name}-%{version}-%{release}.%{arch}\n"
    asked = system.run((*_DNF[:2], "-q", "repoquery", "--qf", form, *packages), timeout=_SIMULATE_SECONDS)
    return tuple(one for one in packages if one not in asked.stdout.split())


def _change_to(wanted: str, names: tuple[str, ...]) -> str:
    return f"{_CHANGE} to {wanted} ({', '.join(names)}); it is loaded next"


def _require_version(version: str, wanted: str, look: str) -> None:
    if not fits(version, wanted):
        raise GpuprovError(
            f"the driver's packages are of {version or 'no driver'}, {wanted} is asked for",
            "the package manager reported success; its repositories have nothing newer that fits",
            f"{look} shows what there is: set gpuprov_driver_version to one of these",
        )


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

    def apply(self, system: System, tell: Tell) -> Json:
        if self.before:
            self._dnf(system, "reset", "nvidia-driver")
        self._dnf(system, "enable", f"nvidia-driver:{self.stream}")
        return {}

    def _dnf(self, system: System, verb: str, name: str) -> None:
        command = ("dnf", "-y", "module", verb, name)
        done = system.run(command, timeout=_INSTALL_SECONDS, env=system.proxy.environment)
        if not done.ok:
            next_step = "dnf module list nvidia-driver shows which streams there are"
            raise GpuprovError(f"dnf can't {verb} {name}", done.evidence(), next_step)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        system.run(("dnf", "-y", "module", "reset", "nvidia-driver"), timeout=_INSTALL_SECONDS)
        if before["before"]:
            name = f"nvidia-driver:{before['before']}"
            system.run(("dnf", "-y", "module", "enable", name), timeout=_INSTALL_SECONDS)


@dataclass(frozen=True)
class LoadDriver(Change):
    """Load the installed driver's kernel modules, in the version of the libraries."""

    undo_when_interrupted: ClassVar[bool] = False

    def summary(self) -> str:
        return "load the driver's kernel modules (modprobe nvidia, nvidia-uvm)"

    def apply(self, system: System, tell: Tell) -> Json:
        for module in ("nvidia", "nvidia-uvm"):
            done = system.run(("modprobe", module), timeout=120)
            if not done.ok:
                raise GpuprovError(
                    f"the kernel module {module} can't be loaded",
                    f"{done.evidence(3)}\n{_kernel_says(system)}".strip(),
                    "dkms status shows whether it was built for this kernel; nouveau or another driver on the GPU: "
                    "lspci -k -d 10de:",
                )
        found = discover(system)
        if found.kernel_version != found.library_version:
            raise GpuprovError(
                f"the loaded driver is {found.kernel_version or 'none'}, its libraries are {found.library_version}",
                "/proc/driver/nvidia/version",
                "reboot, so that the new modules are loaded; then run the same command again",
            )
        return {}


def _kernel_says(system: System) -> str:
    """Return the last lines about NVIDIA's modules in the kernel's log."""
    lines = system.run(("dmesg",), timeout=10).stdout.splitlines()
    return "\n".join([line for line in lines if "NVRM" in line or "nvidia" in line.lower()][-4:])


class PackagedDriver(DriverSource):
    """A driver from packages on one host: NVIDIA's or the distribution's."""

    def problems(self) -> tuple[Problem, ...]:
        return running_driver.problems(self)

    def run_file_problems(self) -> tuple[Problem, ...]:
        """Return why packages can't be installed over a driver from a .run."""
        if not self.facts.driver_installed_version or self.facts.driver_packaged:
            return ()
        return (
            Problem(
                f"driver {self.facts.driver_installed_version} on this host comes from a .run; packages would break "
                "both",
                "its libraries belong to no package",
                "remove it first: nvidia-uninstall; or keep it: gpuprov_driver: preinstalled",
            ),
        )

    def plan(self) -> tuple[Change, ...]:
        """Return the loading of a driver whose packages were just installed, or are installed and not loaded."""
        # An image's modules are loaded when it boots.
        if not self.brings_modules or self.facts.image is not None:
            return ()
        there, loaded = self.facts.driver_installed_version, self.facts.driver_loaded_version
        return () if there and loaded else (LoadDriver(),)
