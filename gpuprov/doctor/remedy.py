"""What gpuprov itself can do about a finding, as data that a rule names; fix.py makes changes of it."""

from __future__ import annotations

from dataclasses import dataclass

# Kinds: steps of an installation's plan (`names`: which), the whole plan, the restart of units, the removal of files,
# the modes that the driver gives to device nodes, the loader's cache, the driver's kernel modules.
STEPS, WHOLE, UNITS, FILES, NODE_MODES, CACHE, MODULES = (
    "steps", "install", "restart", "remove", "node modes", "loader cache", "load modules",
)  # fmt: skip


@dataclass(frozen=True)
class Remedy:
    """One thing to do: its kind, and what it is done to (steps, units or paths)."""

    kind: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {', '.join(self.names)}" if self.names else self.kind


INSTALL = Remedy(WHOLE)
LOADER_CACHE = Remedy(CACHE)
LOAD_MODULES = Remedy(MODULES)


def steps(*names: str) -> Remedy:
    """Return the remedy that is these steps of an installation's plan."""
    return Remedy(STEPS, names)


def restart(unit: str) -> Remedy:
    """Return the restart of a unit."""
    return Remedy(UNITS, (unit,))


def remove(*paths: str) -> Remedy:
    """Return the removal of files."""
    return Remedy(FILES, paths)


def open_nodes(*paths: str) -> Remedy:
    """Return the setting of device nodes' modes."""
    return Remedy(NODE_MODES, paths)
