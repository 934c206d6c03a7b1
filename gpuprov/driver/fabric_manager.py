"""NVIDIA's fabric manager on machines with NVSwitches: the driver's exact version, running; plans nothing.

Without it CUDA answers 802, "system not yet initialized". Source: NVIDIA's Fabric Manager User Guide; package names as
in NVIDIA's CUDA repositories and its own driver containers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpuprov.core.changes import Change, Json, Tell
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.facts.fabric import _PROGRAM, UNIT, FabricFacts, parse_version
from gpuprov.facts.host import manager_on
from gpuprov.packages.interface import PackageManager
from gpuprov.protocol.errors import GpuprovError, Problem

# The first branch whose package has no branch in its name.
_PLAIN_NAME_SINCE = 580
_START_SECONDS = 300


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
