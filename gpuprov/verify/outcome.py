"""How a check ends: with two words to show, or as failed with its reason; nothing about what is checked."""

from __future__ import annotations

from typing import Callable

from gpuprov.core.commands import Completed
from gpuprov.wire.errors import GpuprovError
from gpuprov.wire.events import CheckDone, Sink

_LONGEST_LINE = 400
# What a check that went well has to show: of the host, of the container.
Shown = tuple[str, str]


class Failed(Exception):  # noqa: N818 (carries a check's outcome)
    """Ends a check: why, and what host and container showed."""

    def __init__(self, reason: str, host: str = "", container: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.host = host
        self.container = container


class LeftOut(Exception):  # noqa: N818 (carries a check's outcome)
    """Ends a check that can't be made here, and says why: no failure."""


class Checks:
    """One verification: emits a CheckDone for each check, and knows whether all went well."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.good = True

    def check(self, name: str, do: Callable[[], Shown]) -> bool:
        """Run a check and say whether it went well; `do` returns what to show for host and container, or raises."""
        try:
            host, container = do()
        except LeftOut as left_out:
            self.skip((name,), str(left_out))
            return False
        except (Failed, GpuprovError) as error:
            failed = error if isinstance(error, Failed) else Failed(" ".join(str(error).split()))
            self.good = False
            self._sink(CheckDone(name, "failed", failed.host, failed.container, failed.reason))
            return False
        self._sink(CheckDone(name, "ok", host, container))
        return True

    def skip(self, names: tuple[str, ...], reason: str) -> None:
        """Say of each of these checks that it was left out, and why."""
        for name in names:
            self._sink(CheckDone(name, "skipped", reason=reason))


def telling_line(done: Completed) -> str:
    """Return what a command's end is due to: our own runtime's word, else the first error, else the first line."""
    said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["(silent)"]
    found = (line for mark in ("gpuprov:", "rror", "") for line in said if mark in line)
    return next(found).strip()[:_LONGEST_LINE]


def counted(number: int) -> str:
    """Return `1 GPU`, `2 GPUs`."""
    return f"{number} GPU" if number == 1 else f"{number} GPUs"
