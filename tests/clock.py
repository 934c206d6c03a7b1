"""A clock that a test puts forward: a time limit passes at an event, whatever time a busy machine takes."""

import time

import pytest


class Clock:
    """The module `time` for one module under test; `ahead` seconds before the machine's own.

    A second of sleep passes as `haste` seconds.
    """

    def __init__(self) -> None:
        self.ahead, self.haste = 0.0, 1

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self.ahead += seconds * (self.haste - 1)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def time(self) -> float:
        return time.time() + self.ahead


def clock_of(monkeypatch: pytest.MonkeyPatch, *modules: str) -> Clock:
    """Give these modules a clock of their own."""
    clock = Clock()
    for module in modules:
        monkeypatch.setattr(f"{module}.time", clock)
    return clock


def has_ended(pid: int) -> bool:
    """Say whether a process has ended, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
