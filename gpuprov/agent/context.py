"""The context of a run: one request on one machine, with what all parts of the run need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from gpuprov.bundle.open import OpenBundle
from gpuprov.core.system import System
from gpuprov.protocol.events import Level, Note, Sink
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec

StopRequested = Callable[[], bool]


@dataclass(frozen=True)
class RunContext:
    """A request, its parsed spec, and the machine that it is carried out on.

    `sink` receives the events; `stop_requested` is asked between two changes; `bundle` replaces the network if given.
    """

    request: Request
    spec: HostSpec
    system: System
    sink: Sink
    stop_requested: StopRequested = lambda: False
    bundle: OpenBundle | None = None

    def note(self, message: str, level: Level = "info") -> None:
        """Tell the user one sentence."""
        self.sink(Note(message, level))
