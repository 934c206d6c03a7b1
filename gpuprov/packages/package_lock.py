"""The locks of package managers: which process holds one, and waiting until it is free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Callable

from gpuprov.core.changes import Tell
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError

# Longer than unattended-upgrades usually takes.
LOCK_SECONDS = 300
_POLL_SECONDS = 0.5


def lock_holder(system: System, locks: Iterable[str]) -> str:
    """Return `NAME (pid N: COMMAND LINE)` of the process that holds one of these locks (fcntl(2)), or nothing."""
    for path in locks:
        pid = system.lock_holder(path)
        if pid:
            name = (system.read_text(f"/proc/{pid}/comm") or "a process").strip()
            line = (system.read_text(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
            return f"{name} (pid {pid}{': ' + line if line else ''})"
        if pid == 0:
            return "a process that can't be seen from here"
    return ""


def wait_until_free(
    system: System, tell: Tell, holder: Callable[[System], str], lock_timeout: int, deadline: float | None = None
) -> None:
    """Wait until `holder` returns nothing. `deadline`: the end of the `lock_timeout` seconds, if they run already.

    Raises GpuprovError that names the holder.
    """
    deadline = system.now() + lock_timeout if deadline is None else deadline
    told = ""
    while found := holder(system):
        if system.now() > deadline:
            raise GpuprovError(
                "another program holds the package manager's lock",
                f"{found}; waited {lock_timeout} s for its end",
                "wait for it, or set gpuprov_lock_timeout (seconds) higher, then run the same command again",
            )
        if found != told:
            tell(f"waiting up to {lock_timeout} s for {found}, which holds the package manager's lock", 0, 0)
            told = found
        system.sleep(_POLL_SECONDS)


def tell_nobody(message: str, done: int, total: int) -> None:
    """Ignore progress: of a roll-back's commands, and of queries that their caller announces."""
