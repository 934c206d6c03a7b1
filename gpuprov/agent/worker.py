"""The second process of an agent: does the work and survives the end of the connection."""

from __future__ import annotations

import os
from typing import Callable

from gpuprov.protocol.events import ChangeStarted, Event, Sink
from gpuprov.protocol.request import Request

# A line that the caller may write after the request: stop, unless a change has begun.
STOP = "stop"


class StopFlag:
    """Whether a run is to stop; asked while it looks, and between two changes."""

    def __init__(self) -> None:
        self._requested = False
        self._unless_begun = False
        self._begun = False

    def set(self, *_: object) -> None:
        """Stop after the current change; a signal's handler."""
        self._requested = True

    def set_unless_begun(self, *_: object) -> None:
        """Stop if no change has begun."""
        self._unless_begun = True

    def watching(self, sink: Sink) -> Sink:
        """Return a sink that notes whether a change has begun."""

        def watched(event: Event) -> None:
            self._begun = self._begun or isinstance(event, ChangeStarted)
            sink(event)

        return watched

    def __call__(self) -> bool:
        return self._requested or (self._unless_begun and not self._begun)


def start_worker(request: Request, work: Callable[[Request, int], int]) -> tuple[int, int]:
    """Start a process that works on the request; return its id and the read end of the pipe for its events."""
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(reading)
        os._exit(work(request, writing))
    os.close(writing)
    return worker, reading
