"""What gpuprov can do about a finding, as data that a rule names; fix.py converts it to changes."""

from __future__ import annotations

from dataclasses import dataclass

# Kinds: steps of an installation's plan (`names`), the whole plan, restart of units, removal of files, modes of device
# nodes as the driver sets them, the loader's cache, the driver's kernel modules.
STEPS, WHOLE, UNITS, FILES, NODE_MODES, CACHE, MODULES = (
    "steps", "install", "restart", "remove", "node modes", "loader cache", "load modules",
)  # fmt: skip


@dataclass(frozen=True)
class Remedy:
    """One remedy: its kind, and its subjects (steps, units or paths)."""

    kind: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {', '.join(self.names)}" if self.names else self.kind


INSTALL = Remedy(WHOLE)
LOADER_CACHE = Remedy(CACHE)
LOAD_MODULES = Remedy(MODULES)


def steps(*names: str) -> Remedy:
    """Return the remedy that runs these steps of an installation's plan."""
    return Remedy(STEPS, names)


def restart(unit: str) -> Remedy:
    """Return the remedy that restarts a unit."""
    return Remedy(UNITS, (unit,))


def remove(*paths: str) -> Remedy:
    """Return the remedy that removes files."""
    return Remedy(FILES, paths)


def open_nodes(*paths: str) -> Remedy:
    """Return the remedy that sets the modes of device nodes."""
    return Remedy(NODE_MODES, paths)
