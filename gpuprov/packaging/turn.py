"""Whose turn it is at a host's package manager, before a run begins that is going to need it."""

from __future__ import annotations

from gpuprov.core.changes import Tell
from gpuprov.core.system import System
from gpuprov.packaging import apt
from gpuprov.packaging.package_lock import wait_until_free
from gpuprov.packaging.rpm_packages import MANAGERS, rpm_lock_holder


def holder(system: System, manager: str) -> str:
    """Return `NAME (pid N: COMMAND LINE)` of who is at work with packages now, or nothing."""
    return rpm_lock_holder(system) if manager in MANAGERS else apt.lock_holder(system)


def wait_for(system: System, manager: str, lock_timeout: int, tell: Tell) -> None:
    """Wait until nobody is at work with packages. Raises GpuprovError, naming who is, after `lock_timeout` seconds.

    Changes wait for themselves too, for somebody may come in between.
    """
    wait_until_free(system, tell, lambda asked: holder(asked, manager), lock_timeout)
