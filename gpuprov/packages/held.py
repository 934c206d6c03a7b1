"""The list of the packages that gpuprov holds, for any package manager; gpuprov leaves the holds of others alone."""

from __future__ import annotations

from collections.abc import Iterable

from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.system import System

HELD_LIST = f"{STATE_DIRECTORY}/held"


def hold_summary(names: Iterable[str], release: Iterable[str]) -> str:
    """Return the sentence of a change that holds packages and releases others, for any package manager."""
    parts = (("hold ", ", ".join(names), " at this version"), ("no longer hold ", ", ".join(release), ""))
    return "; ".join(f"{before}{shown}{after}" for before, shown, after in parts if shown)


def write_held(system: System, names: Iterable[str], release: Iterable[str]) -> None:
    """Write down which packages gpuprov holds."""
    ours = {*read_held(system), *names} - {*release}
    system.make_directory(STATE_DIRECTORY, 0o700)
    system.write(HELD_LIST, "".join(f"{name}\n" for name in sorted(ours)).encode())


def read_held(system: System) -> frozenset[str]:
    """Return the packages that gpuprov holds."""
    return frozenset((system.read_text(HELD_LIST) or "").split())
