"""Changes that repair existing things: a mode, a stopped unit, the loader's cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpuprov.core.changes import Change, Json, Tell, capture_path, mode_heads, restore_path
from gpuprov.core.system import System
from gpuprov.core.units import is_active, log_of, restart, systemctl
from gpuprov.protocol.errors import GpuprovError

LOADER_CACHE = "/etc/ld.so.cache"
_LDCONFIG_SECONDS = 120


@dataclass(frozen=True)
class SetMode(Change):
    """Set the mode of a path; its content and its owner stay."""

    path: str
    mode: int

    def summary(self) -> str:
        return f"chmod {self.mode:04o} {self.path}"

    def diff(self, system: System) -> str:
        found = system.status(self.path)
        return "\n".join(mode_heads(self.path, found.mode, self.mode)) if found is not None else ""

    def capture(self, system: System) -> Json:
        found = system.status(self.path)
        return {"path": self.path, "mode": found.mode if found is not None else None}

    def apply(self, system: System, tell: Tell) -> Json:
        system.change_mode(self.path, self.mode)
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if before["mode"] is not None and system.status(before["path"]) is not None:
            system.change_mode(before["path"], before["mode"])


@dataclass(frozen=True)
class RestartUnit(Change):
    """Restart a unit, or start it if it does not run."""

    unit: str

    def summary(self) -> str:
        return f"restart {self.unit}"

    def capture(self, system: System) -> Json:
        return {"unit": self.unit, "was_active": is_active(system, self.unit)}

    def apply(self, system: System, tell: Tell) -> Json:
        if trouble := restart(system, self.unit):
            seen = f"{trouble}\n{log_of(system, self.unit)}".strip()
            raise GpuprovError(f"{self.unit} does not start", seen, f"systemctl status {self.unit}")
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Stop a unit that did not run before. A unit that ran keeps running: a restart can't be undone."""
        if not before["was_active"]:
            systemctl(system, "stop", before["unit"])


@dataclass(frozen=True)
class RefreshLoaderCache(Change):
    """Refresh the loader's cache so that it lists the present libraries."""

    undo_restores_files: ClassVar[bool] = True

    def summary(self) -> str:
        return f"write {LOADER_CACHE} (ldconfig)"

    def capture(self, system: System) -> Json:
        return capture_path(system, LOADER_CACHE)

    def apply(self, system: System, tell: Tell) -> Json:
        system.require(
            ("ldconfig",), "the loader's cache can't be written", "ldconfig -v shows where", timeout=_LDCONFIG_SECONDS
        )
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        restore_path(system, before)
