"""systemd's units: whether one is active, how one is started and stopped, and what its log says of a failure."""

from __future__ import annotations

from gpuprov.core.changes import Change, Json, Tell
from gpuprov.core.device_rules import register_devices, require_systemd
from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError

# dockerd and nvidia-persistenced may take minutes to stop or to start.
_SECONDS = 180


def is_active(system: System, unit: str, verb: str = "is-active") -> bool:
    """Say whether a unit is active (`is-enabled`: enabled); False for no unit.

    Raises GpuprovError if systemd does not answer: what runs would be restarted, or stopped by an undo.
    """
    return bool(unit) and require_systemd(system.run(("systemctl", verb, "--quiet", unit)), f"about {unit}").ok


def systemctl(system: System, verb: str, *units: str, seconds: float = _SECONDS, alone: bool = False) -> str:
    """Run a command of systemctl; return its error, or "". `alone`: units that require these stay as they are."""
    options = ("--job-mode=ignore-requirements",) if alone else ()
    done = system.run(("systemctl", verb, *units, *options), timeout=seconds)
    return "" if done.ok else done.evidence(3)


def daemon_reload(system: System) -> None:
    """Make systemd read its units again, without taking the GPUs from running containers."""
    register_devices(system)
    systemctl(system, "daemon-reload")


def restart(system: System, unit: str) -> str:
    """Restart a unit; return systemctl's error, or ""."""
    # Without this, the start limit (StartLimitBurst) can block a unit that was started often.
    systemctl(system, "reset-failed", unit)
    return systemctl(system, "restart", unit)


def log_of(system: System, unit: str, lines: int = 4) -> str:
    """Return the last lines of a unit's log."""
    return system.run(("journalctl", "--no-pager", "--output=cat", f"--lines={lines}", "--unit", unit)).stdout.strip()


@dataclass(frozen=True)
class RestartUnit(Change):
    """Restart a unit, or start it if it does not run."""

    unit: str

    def summary(self) -> str:
        return f"restart {self.unit}"

    def capture(self, system: System) -> Json:
        return {"unit": self.unit, "was_active": is_active(system, self.unit)}

    def apply(self, system: System, tell: Tell) -> None:
        if trouble := restart(system, self.unit):
            seen = f"{trouble}\n{log_of(system, self.unit)}".strip()
            raise GpuprovError(f"{self.unit} does not start", seen, f"systemctl status {self.unit}")

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Stop a unit that did not run before. A unit that ran keeps running: a restart can't be undone."""
        if not before["was_active"]:
            systemctl(system, "stop", before["unit"])


@dataclass(frozen=True)
class RunUnits(Change):
    """Require that these units run, now (unless `start` is False) and at each boot."""

    units: tuple[str, ...]
    start: bool = True

    def summary(self) -> str:
        return f"enable {'and start ' if self.start else ''}{', '.join(self.units)}"

    def capture(self, system: System) -> Json:
        verbs = ("is-enabled", "is-active")
        return {unit: [verb for verb in verbs if is_active(system, unit, verb)] for unit in self.units}

    def apply(self, system: System, tell: Tell) -> None:
        for unit in self.units:
            system.require(("systemctl", "enable", unit), f"{unit} can't be enabled", f"systemctl status {unit}")
            if self.start:
                RestartUnit(unit).apply(system, tell)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        for unit, was in before.items():
            if "is-active" not in was:
                systemctl(system, "stop", unit)
            if "is-enabled" not in was:
                systemctl(system, "disable", unit)
