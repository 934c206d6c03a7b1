"""Engines besides docker, as `install` keeps them: containerd, CRI-O and podman told of the runtime.

What goes into their files is configure.py's, the same as for `gpuprov runtime configure`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuprov.core.changes import Change, Json, Tell, capture_path, restore_path, text_diff
from gpuprov.core.system import System
from gpuprov.engines.wish import FileEdit, Request, RuntimeWish
from gpuprov.wire.errors import GpuprovError, Problem

# Engine → its program, and the unit that reads its files when it starts; podman has none.
ENGINES = {
    "containerd": ("containerd", "containerd.service"),
    "crio": ("crio", "crio.service"),
    "podman": ("podman", ""),
}
_RESTART_SECONDS = 180
_LOG_LINES = "20"


@dataclass(frozen=True)
class EngineFacts:
    """An engine on a host. `edits`: what its files lack of the wished-for runtime; `problem`: why that can't be."""

    installed: bool = False
    edits: tuple[FileEdit, ...] = ()
    problem: Problem | None = None


def gather(system: System, wished: Mapping[str, str]) -> Mapping[str, EngineFacts]:
    """Return engine → facts, for the engines that are asked about with the runtime's path each."""
    return {engine: _gather(system, engine, path) for engine, path in wished.items()}


def _gather(system: System, engine: str, path: str) -> EngineFacts:
    if system.which(ENGINES[engine][0]) is None:
        return EngineFacts()
    # Here, because most hosts name no such engine, and TOML's editor costs as much as all of their facts.
    from gpuprov.engines import configure

    try:
        found = configure.configuration(system, Request(engine, RuntimeWish(path=path)))
    except GpuprovError as error:
        return EngineFacts(installed=True, problem=error.problems[0])
    return EngineFacts(installed=True, edits=tuple(edit for edit in found.edits if edit.changes))


def problems(facts: Mapping[str, EngineFacts]) -> tuple[Problem, ...]:
    """Return what keeps an engine from being configured."""
    missing = tuple(
        Problem(
            f"{engine} is not installed",
            f"there is no {ENGINES[engine][0]} on the PATH",
            f"install it, or take {engine} out of gpuprov_engines",
        )
        for engine, one in facts.items()
        if not one.installed
    )
    return (*missing, *(one.problem for one in facts.values() if one.problem is not None))


def plan(facts: Mapping[str, EngineFacts]) -> tuple[Change, ...]:
    """Return the changes of the engines' files, each with what makes the engine read them."""
    return tuple(ConfigureEngine(engine, one.edits) for engine, one in facts.items() if one.edits)


@dataclass(frozen=True)
class ConfigureEngine(Change):
    """An engine's files shall name the runtime, and the running engine shall have read them."""

    engine: str
    edits: tuple[FileEdit, ...]

    @property
    def key(self) -> str:
        return f"configure {self.engine}"

    def summary(self) -> str:
        unit = ENGINES[self.engine][1]
        # Their containers hang on processes of their own (shims, conmon), not on the engine.
        restart = f" and restart {unit.removesuffix('.service')} (its containers go on)" if unit else ""
        return f"write {', '.join(edit.path for edit in self.edits)}{restart}"

    def diff(self, system: System) -> str:
        return "".join(text_diff(edit.path, system.read_bytes(edit.path), edit.after) for edit in self.edits)

    def capture(self, system: System) -> Json:
        files = [capture_path(system, edit.path) for edit in self.edits]
        return {"engine": self.engine, "files": files, "was_active": _is_active(system, self.engine)}

    def apply(self, system: System, tell: Tell) -> Json:
        from gpuprov.engines import configure

        before = self.capture(system)
        configure.write(system, self.edits)
        unit = ENGINES[self.engine][1]
        # One that is stopped reads its files when somebody starts it.
        if before["was_active"]:
            tell(f"restarting {unit}", 0, 0)
            trouble = _restart(system, self.engine)
            if trouble:
                self.undo(system, before, None)
                raise GpuprovError(
                    f"{self.engine} did not come up with its new configuration; the old one is back",
                    trouble,
                    f"mend what {self.engine} names, then run the same command again",
                )
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        for image in before["files"]:
            restore_path(system, image)
        if before["was_active"]:
            _restart(system, before["engine"])


def _is_active(system: System, engine: str) -> bool:
    unit = ENGINES[engine][1]
    return bool(unit) and system.run(("systemctl", "is-active", "--quiet", unit)).ok


def _restart(system: System, engine: str) -> str:
    """Restart an engine; return what went wrong, or nothing."""
    unit = ENGINES[engine][1]
    system.run(("systemctl", "reset-failed", unit))
    done = system.run(("systemctl", "restart", unit), timeout=_RESTART_SECONDS)
    if done.ok and _is_active(system, engine):
        return ""
    said = system.run(("journalctl", "--unit", unit, "--lines", _LOG_LINES, "--no-pager", "--output", "cat")).stdout
    lines = [line for line in said.splitlines() if "error" in line.lower() or "fail" in line.lower()]
    return "\n".join(lines[-3:]) or done.evidence(3)
