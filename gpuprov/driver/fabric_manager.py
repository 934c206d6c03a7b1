"""NVIDIA's fabric manager on machines with NVSwitches: the driver's exact version, from where, and running.

Without it CUDA answers 802, "system not yet initialized". Source: NVIDIA's Fabric Manager User Guide; package names as
in NVIDIA's CUDA repositories and its own driver containers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpuprov.core.changes import Change, Json, Tell
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.driver.source import DriverSource
from gpuprov.facts.gpus import _PROGRAM, UNIT, FabricFacts, parse_version
from gpuprov.facts.host import manager_on
from gpuprov.packages.interface import Installation, PackageManager, pinned
from gpuprov.protocol.errors import GpuprovError, Problem

# The first branch whose package has no branch in its name.
_PLAIN_NAME_SINCE = 580
_START_SECONDS = 300
# NVIDIA's repositories for RHEL 8 and 9 have it in the module stream of its driver's branch. A driver from a .run does
# not enable that stream, so dnf would not find it.
_REPOSITORY = "gpuprov-cuda"


def packages(version: str, manager: PackageManager, facts: FabricFacts) -> tuple[str, ...]:
    """Return the fabric manager's packages of that version, in this package manager's syntax."""
    branch = int(version.split(".")[0])
    name = "nvidia-fabricmanager"
    if branch < _PLAIN_NAME_SINCE:
        name = manager.old_fabric_manager.format(branch=branch)
    return (f"{name}={version}{manager.any_release}", *(("nvlsm",) if facts.managed else ()))


def problems(facts: FabricFacts, version: str, *, ours: bool) -> tuple[Problem, ...]:
    """Return why CUDA would not work on these switches, if gpuprov does not install the fabric manager."""
    if ours or not facts.switches or not version or facts.version == version:
        return ()
    seen = f"{_PROGRAM} --version: {facts.version or 'not installed'}; NVSwitches: {', '.join(facts.switches)}"
    return (
        Problem(
            f"fabric manager and driver must be of one version, to the last digit: the driver will be {version}",
            seen,
            f"install nvidia-fabricmanager {version}, or set gpuprov_fabric_manager: auto",
        ),
    )


def wanted_version(driver: DriverSource) -> str:
    """Return the version that the fabric manager must have, "" if none is needed.

    In a system container the switches are the container host's.
    """
    facts = driver.facts
    if not facts.fabric.switches or facts.kernel.container:
        return ""
    return driver.version if "." in driver.version else facts.driver_installed_version


def installs_package(driver: DriverSource) -> bool:
    """Say whether the package comes from NVIDIA's repository."""
    version = wanted_version(driver)
    return bool(version) and driver.spec.fabric_manager == "auto" and driver.facts.fabric.version != version


def comes_from_repository(driver: DriverSource) -> bool:
    """Say whether NVIDIA's repository is needed for it: to install it, and to update what came from there."""
    if driver.fabric_package():
        return False
    configured = any(path.rpartition("/")[2].startswith("gpuprov-cuda.") for path in driver.facts.files)
    return installs_package(driver) or (configured and bool(wanted_version(driver)))


def held(driver: DriverSource) -> tuple[str, ...]:
    """Return the package to hold: an upgrade would part the fabric manager from the driver of a .run file."""
    version, spec, facts = wanted_version(driver), driver.spec, driver.facts
    if not (version and driver.has_installer and spec.hold_pinned) or spec.fabric_manager != "auto":
        return ()
    if facts.bundle is not None and facts.packages.locks.missing_plugin:
        return ()  # A bundle is not required to contain the plugin for it.
    return pinned(packages(version, facts.package_manager, facts.fabric))


def plan(driver: DriverSource, hold: tuple[str, ...] = ()) -> tuple[Change, ...]:
    """Return installation and start of the fabric manager, or nothing; to be done after its driver.

    `hold`: the other packages that gpuprov holds.
    """
    facts, spec, version = driver.facts, driver.spec, wanted_version(driver)
    if not version or spec.fabric_manager != "auto":
        return ()
    fabric = facts.fabric
    starts = facts.image is None
    running = (fabric.active or not starts) and fabric.enabled and fabric.version == version
    changes: tuple[Change, ...] = () if running else (RunFabricManager(version, starts),)
    names = wanted_packages(driver)
    if not names:
        return changes
    ours = held(driver)
    wanted = Installation(
        names, spec.lock_timeout, facts.bundle, hold=(*hold, *ours) if ours else None, unfiltered_repository=_REPOSITORY
    )
    return (*facts.package_manager.plan_installation(facts.packages, wanted), *changes)


def wanted_packages(driver: DriverSource) -> tuple[str, ...]:
    """Return the packages of the fabric manager that are to be installed."""
    if not installs_package(driver):
        return ()
    version, own, manager = wanted_version(driver), driver.fabric_package(), driver.facts.package_manager
    if own:
        return (f"{own}={version}{manager.any_release}",)
    return packages(version, manager, driver.facts.fabric)


def plan_problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return what prevents CUDA from working with this host's switches."""
    return problems(driver.facts.fabric, wanted_version(driver), ours=driver.spec.fabric_manager == "auto")


@dataclass(frozen=True)
class RunFabricManager(Change):
    """Require that the fabric manager of this version runs, now (unless `start` is False) and at each boot."""

    version: str
    start: bool = True

    undo_disturbs: ClassVar[bool] = True

    @property
    def disturbs(self) -> bool:
        return True

    def summary(self) -> str:
        return f"enable {'and start ' if self.start else ''}{UNIT} ({self.version})"

    @property
    def key(self) -> str:
        return f"run {UNIT}"

    def capture(self, system: System) -> Json:
        return {
            "enabled": system.run(("systemctl", "is-enabled", "--quiet", UNIT)).ok,
            "active": system.run(("systemctl", "is-active", "--quiet", UNIT)).ok,
        }

    def apply(self, system: System, tell: Tell) -> Json:
        told = system.run((_PROGRAM, "--version"), timeout=20)
        found = parse_version(told.stdout + told.stderr)
        if found != self.version:
            raise GpuprovError(
                f"fabric manager is {found or 'not installed'}, the driver is {self.version}: they must agree to the "
                "last digit",
                told.evidence(2),
                f"is nvidia-fabricmanager {self.version} in a repository of this host? "
                f"{manager_on(system).commands.versions} 'nvidia-fabric*'",
            )
        system.require(("systemctl", "enable", UNIT), f"{UNIT} can't be enabled", f"systemctl status {UNIT}")
        done = system.run(("systemctl", "restart", UNIT), timeout=_START_SECONDS) if self.start else told
        if self.start and not done.ok:
            raise GpuprovError(f"{UNIT} does not start", _why(system, done), f"systemctl status {UNIT}")
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if not before["active"]:
            system.run(("systemctl", "stop", UNIT), timeout=_START_SECONDS)
        if not before["enabled"]:
            system.run(("systemctl", "disable", UNIT))


def _why(system: System, done: Completed) -> str:
    said = system.run(("journalctl", "--no-pager", "--output=cat", "--lines=4", "--unit", UNIT)).stdout.strip()
    return f"{done.evidence(3)}\n{said}".strip()
