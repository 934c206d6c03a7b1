"""Checks of `gpuprov verify` for what an option adds to a host beside its driver; a row each. Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Callable

from gpuprov.checks.outcome import Failed, Values
from gpuprov.core.system import System
from gpuprov.driver.nouveau import other_mode
from gpuprov.facts.kernels import LOADED_OPTIONS
from gpuprov.protocol.spec import HostSpec

Row = tuple[str, Callable[[], Values]]


def rows(system: System, spec: HostSpec) -> Iterator[Row]:
    """Yield name and check of each feature that the specification asks for."""
    if spec.coherent_memory:
        yield "coherent memory", lambda: _coherent_memory(system, spec.coherent_memory)


def _coherent_memory(system: System, asked: str) -> Values:
    for reason in other_mode(system.read_bytes(LOADED_OPTIONS), asked):
        raise Failed(f"{reason}; gpuprov install, which writes the option; systemctl reboot")
    return asked, ""
