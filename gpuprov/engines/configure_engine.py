"""The change that registers the runtime with an engine besides docker: its files, and one restart."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprov.core.changes import Change, Json, Tell, capture_path, restore_path, text_diff
from gpuprov.core.system import System
from gpuprov.engines.known import ENGINES, KnownEngine
from gpuprov.engines.runtime_entry import FileEdit
from gpuprov.protocol.errors import GpuprovError

_RESTART_SECONDS = 180
_LOG_LINES = "20"


@dataclass(frozen=True)
class ConfigureEngine(Change):
    """Register the runtime in the engine's files and make the running engine read them.

    `restart` is False for an engine that serves Kubernetes and may not be restarted: it reads them at its next start.
    Without `edits` the files are right, but the engine has not read them. `unit` runs it.
    """

    engine: str
    edits: tuple[FileEdit, ...]
    restart: bool = True
    unit: str = ""

    @property
    def key(self) -> str:
        return f"configure {self.engine}"

    def summary(self) -> str:
        known = ENGINES[self.engine]
        name = (self.unit or known.unit).removesuffix(".service")
        if not self.edits:
            return f"restart {name}: it runs and has not read its files ({_goes_on(known)})"
        written = f"write {', '.join(edit.path for edit in self.edits)}"
        if not name:
            return written
        if not self.restart:
            return f"{written} ({name} serves Kubernetes and is not restarted: type systemctl restart {name})"
        return f"{written} and restart {name} ({_goes_on(known)})"

    def diff(self, system: System) -> str:
        return "".join(text_diff(edit.path, system.read_bytes(edit.path), edit.after) for edit in self.edits)

    def capture(self, system: System) -> Json:
        files = [capture_path(system, edit.path) for edit in self.edits]
        # If it was not restarted, the undo does not restart it either.
        was_active = self.restart and _is_active(system, self._unit)
        return {"engine": self.engine, "files": files, "was_active": was_active, "unit": self._unit}

    def apply(self, system: System, tell: Tell) -> Json:
        from gpuprov.engines import configure

        before = self.capture(system)
        configure.write(system, self.edits)
        unit = self._unit
        # A stopped engine reads its files at its next start.
        if before["was_active"]:
            tell(f"restarting {unit}", 0, 0)
            trouble = _restart(system, unit)
            if trouble:
                self.undo(system, before, None)
                raise GpuprovError(
                    f"{self.engine} failed to start with its new configuration; the old one is back",
                    trouble,
                    f"fix what {self.engine} names, then run the same command again",
                )
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        for image in before["files"]:
            restore_path(system, image)
        if before["was_active"] and before["files"]:
            # Journals of older versions name no unit.
            _restart(system, before.get("unit") or ENGINES[before["engine"]].unit)

    @property
    def _unit(self) -> str:
        return self.unit or ENGINES[self.engine].unit


def _goes_on(known: KnownEngine) -> str:
    # Containers are children of their shims or conmon, not of the engine: they keep running.
    return "its pods go on; an API server in it does not answer meanwhile" if known.cluster else "its containers go on"


def _is_active(system: System, unit: str) -> bool:
    return bool(unit) and system.run(("systemctl", "is-active", "--quiet", unit)).ok


def _restart(system: System, unit: str) -> str:
    """Restart a unit; return what went wrong, or ""."""
    system.run(("systemctl", "reset-failed", unit))
    done = system.run(("systemctl", "restart", unit), timeout=_RESTART_SECONDS)
    if done.ok and _is_active(system, unit):
        return ""
    said = system.run(("journalctl", "--unit", unit, "--lines", _LOG_LINES, "--no-pager", "--output", "cat")).stdout
    lines = [line for line in said.splitlines() if "error" in line.lower() or "fail" in line.lower()]
    return "\n".join(lines[-3:]) or done.evidence(3)
