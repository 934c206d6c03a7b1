"""Turn Ctrl-C and SIGTERM into a flag that the run checks between steps, so that it can clean up first."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Whether a stop was requested; `tell` gets a sentence at the first signal."""

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self._asked = threading.Event()
        self._tell = tell

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        """Request a stop."""
        self._asked.set()

    def wait(self, seconds: float) -> None:
        """Wait for that long, or until a stop is requested."""
        self._asked.wait(seconds)

    def pause(self, seconds: float) -> None:
        """Wait for that long even after a stop request: for the removal."""
        time.sleep(seconds)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals during the block."""

        def take(number: int, frame: FrameType | None) -> None:
            if not self._asked.is_set():
                self._asked.set()
                self._tell("stopping: the test pods are being removed")

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, take) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
