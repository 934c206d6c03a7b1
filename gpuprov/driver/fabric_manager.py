"""NVIDIA's fabric manager on machines with NVSwitches: the driver's exact version, from where, and running.

Without it CUDA answers 802, "system not yet initialized". Source: NVIDIA's Fabric Manager User Guide; package names as
in NVIDIA's CUDA repositories and its own driver containers.
"""

from __future__ import annotations

from typing import ClassVar

from gpuprov.core.changes import Change, Json, Tell, WriteFile
from gpuprov.core.commands import first_match
from gpuprov.core.system import System
from gpuprov.core.units import is_active, log_of
from gpuprov.driver.source import DriverSource
from gpuprov.facts.gpus import FABRIC_MODULES, FABRIC_PROGRAM, FABRIC_UNIT, FabricFacts, parse_version
from gpuprov.facts.host import manager_on
from gpuprov.packages.interface import Installation, PackageManager
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.models import Fabric, fabric_named
from gpuprov.protocol.tables import Tables

# The first branch whose package has no branch in its name.
PLAIN_NAME_SINCE = 580
_START_SECONDS = 300
# NVIDIA's repositories for RHEL 8 and 9 have it in the module stream of its driver's branch. A driver from a .run does
# not enable that stream, so dnf would not find it.
REPOSITORY = "gpuprov-cuda"


def packages(version: str, manager: PackageManager, facts: FabricFacts, tables: Tables) -> tuple[str, ...]:
    """Return the fabric manager's packages of that version, in this package manager's syntax."""
    branch = int(version.split(".")[0])
    old = manager.old_fabric_manager.format(branch=branch)
    name = "nvidia-fabricmanager" if branch >= PLAIN_NAME_SINCE else old
    return (f"{name}={version}{manager.any_release}", *(needs.packages if (needs := _needs(facts, tables)) else ()))


def _needs(facts: FabricFacts, tables: Tables) -> Fabric | None:
    """Return what the table says of switches behind adapters, if the switches are such."""
    return fabric_named("nvlsm", tables) if facts.managed else None


def fault(facts: FabricFacts, version: str) -> Problem | None:
    """Return why CUDA would end with error 802 with a driver of this version; None if the fabric manager serves it."""
    if facts.hidden:
        what = "this host's GPUs are joined by NVSwitches, and none is in sight: CUDA ends with error 802"
        step = (
            "modprobe -a mlx5_ib ib_umad && gpuprov install  # no such module: linux-modules-extra-$(uname -r); the "
            "fabric manager runs outside this guest: -e gpuprov_fabric_manager=preinstalled"
        )
        return Problem(what, facts.hidden, step)
    if facts.silent:
        what = "whether the fabric manager serves the driver is not known"
        return Problem(what, facts.silent, f"systemctl status {FABRIC_UNIT}; then run the same command again")
    if not facts.switches or not version:
        return None
    if facts.version != version:
        found = facts.version or "not installed"
        what = f"fabric manager is {found}, the driver is {version}: they must agree to the last digit"
        seen = f"{FABRIC_PROGRAM} --version: {found}; NVSwitches: {', '.join(facts.switches)}"
        return Problem(what, seen, f"install nvidia-fabricmanager {version}, or set gpuprov_fabric_manager: auto")
    if not facts.active:
        what = "the fabric manager does not run: CUDA ends with error 802"
        return Problem(
            what,
            f"systemctl is-active {FABRIC_UNIT}",
            f"systemctl enable --now {FABRIC_UNIT}; systemctl status {FABRIC_UNIT}",
        )
    return None


def wanted_version(driver: DriverSource) -> str:
    """Return the version that the fabric manager must have, "" if none is needed.

    In a system container the switches are the container host's, and of virtual GPUs the hypervisor's.
    """
    facts = driver.facts
    if not facts.fabric.switches or facts.kernel.container or facts.virtual_gpu:
        return ""
    return driver.version if "." in driver.version else facts.driver_installed_version


def comes_from_repository(driver: DriverSource) -> bool:
    """Say whether NVIDIA's repository is needed for it: to install it, and to update what came from there."""
    if driver.fabric_package():
        return False
    configured = any(path.rpartition("/")[2].startswith("gpuprov-cuda.") for path in driver.facts.files)
    return bool(wanted_packages(driver)) or (configured and bool(wanted_version(driver)))


def plan(driver: DriverSource) -> tuple[Change, ...]:
    """Return installation and start of the fabric manager, or nothing; to be done after its driver."""
    facts, spec, version = driver.facts, driver.spec, wanted_version(driver)
    if not version or spec.fabric_manager != "auto":
        return ()
    fabric = facts.fabric
    starts = facts.image is None
    running = (fabric.active or not starts) and fabric.enabled and fabric.version == version
    needs = _needs(fabric, facts.tables)
    modules = needs.modules if needs else ()
    changes: tuple[Change, ...] = () if running else (RunFabricManager(version, starts, modules),)
    text, there = "".join(f"{name}\n" for name in modules).encode(), facts.files.get(FABRIC_MODULES)
    if modules and (there is None or there.content != text):
        changes = (WriteFile(FABRIC_MODULES, text), *changes)
    names = wanted_packages(driver)
    if not names:
        return changes
    wanted = Installation(names, facts.bundle, unfiltered_repository=REPOSITORY)
    return (*facts.package_manager.plan_installation(facts.packages, wanted), *changes)


def wanted_packages(driver: DriverSource) -> tuple[str, ...]:
    """Return the packages of the fabric manager that are to be installed."""
    version, own, manager = wanted_version(driver), driver.fabric_package(), driver.facts.package_manager
    if not version or driver.spec.fabric_manager != "auto" or driver.facts.fabric.version == version:
        return ()
    if own:
        return (f"{own}={version}{manager.any_release}",)
    return packages(version, manager, driver.facts.fabric, driver.facts.tables)


def plan_problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return what prevents CUDA from working with this host's switches, if gpuprov does not install what they need."""
    facts, version = driver.facts.fabric, wanted_version(driver)
    if driver.spec.fabric_manager == "auto":
        problem = fault(facts, "") if not (driver.facts.kernel.container or driver.facts.virtual_gpu) else None
    else:
        problem = fault(replace(facts, hidden="", active=True), version)
    return (problem,) if problem else ()


@dataclass(frozen=True)
class RunFabricManager(Change):
    """Require that the fabric manager of this version runs, now (unless `start` is False) and at each boot."""

    version: str
    start: bool = True
    modules: tuple[str, ...] = ()

    undo_disturbs: ClassVar[bool] = True
    disturbs = True
    key = f"run {FABRIC_UNIT}"

    def summary(self) -> str:
        return f"enable {'and start ' if self.start else ''}{FABRIC_UNIT} ({self.version})"

    def capture(self, system: System) -> Json:
        return {"enabled": is_active(system, FABRIC_UNIT, "is-enabled"), "active": is_active(system, FABRIC_UNIT)}

    def apply(self, system: System, tell: Tell) -> Json:
        told = system.run((FABRIC_PROGRAM, "--version"), timeout=20)
        found = FabricFacts((FABRIC_UNIT,), version=parse_version(told.stdout + told.stderr), active=True)
        if problem := fault(found, self.version):
            look = f"{manager_on(system).commands.versions} 'nvidia-fabric*'"
            step = f"is nvidia-fabricmanager {self.version} in a repository of this host? {look}"
            raise GpuprovError(problem.what, told.evidence(2), step)
        if self.modules and self.start:
            system.run(("modprobe", "-a", *self.modules))
        system.require(
            ("systemctl", "enable", FABRIC_UNIT), f"{FABRIC_UNIT} can't be enabled", f"systemctl status {FABRIC_UNIT}"
        )
        done = system.run(("systemctl", "restart", FABRIC_UNIT), timeout=_START_SECONDS) if self.start else told
        if self.start and not done.ok:
            said = log_of(system, FABRIC_UNIT)
            seen = f"{done.evidence(3)}\n{said}".strip()
            known = first_match("fabric manager", said.splitlines())
            step = known[0].next_step if known else f"systemctl status {FABRIC_UNIT}"
            raise GpuprovError(f"{FABRIC_UNIT} does not start", seen, step)
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if not before["active"]:
            system.run(("systemctl", "stop", FABRIC_UNIT), timeout=_START_SECONDS)
        if not before["enabled"]:
            system.run(("systemctl", "disable", FABRIC_UNIT))
