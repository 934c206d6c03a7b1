"""Wait for a host that reboots: until it responds in another boot, and that boot has finished."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpuprov.fleet import remote
from gpuprov.fleet.options import SshSettings
from gpuprov.fleet.ssh import connected
from gpuprov.fleet.target import HostTarget
from gpuprov.protocol.errors import ExitCode, GpuprovError

if TYPE_CHECKING:
    from fabric import Connection

# Firmware that checks two terabytes of memory takes its time.
BOOT_SECONDS = 1800.0
_PAUSE_SECONDS = 2.0
_COMMAND_SECONDS = 20.0
# Engines that are still starting would look stopped, so the boot is waited for, with a limit. A system container that
# shuts down may briefly show the container host's boot id; systemd then reports another state, or none.
_BOOT_STATE = "timeout 300 systemctl is-system-running --wait >/dev/null; systemctl is-system-running"
_UP = ("initializing", "starting", "running", "degraded", "maintenance")
_BOOT_STATE_SECONDS = 330.0


def wait_for_boot(
    target: HostTarget,
    settings: SshSettings,
    left_boot: str,
    given_up: Callable[[], bool],
    *,
    patience: float = BOOT_SECONDS,
) -> None:
    """Return once the host is up in another boot than `left_boot`, docker and all.

    Raises GpuprovError, exit code 4, if it does not come back in `patience` seconds or the run is stopped.
    """
    deadline = time.monotonic() + patience
    seen = "it has not gone down"
    while time.monotonic() < deadline and not given_up():
        time.sleep(_PAUSE_SECONDS)
        try:
            with connected(target, settings) as connection:
                command = "cat /proc/sys/kernel/random/boot_id"
                boot_id = remote.run(connection, command, timeout=_COMMAND_SECONDS).stdout.strip()
                if boot_id not in ("", left_boot) and _is_up(connection):
                    return
                seen = "it answers, and is still in the boot before" if boot_id else seen
        except GpuprovError as error:
            seen = f"{error.problems[0].what}: {error.problems[0].evidence}"
    raise GpuprovError(
        "the host did not come back from its reboot" + (" before the run was stopped" if given_up() else ""),
        f"waited {patience:g} s; last: {seen}",
        "look at its console; once it is up, run the same command again: it goes on where it stopped",
        exit_code=ExitCode.UNREACHABLE,
    )


def _is_up(connection: Connection) -> bool:
    """Wait for the end of the boot and say whether the host responds."""
    return remote.run(connection, _BOOT_STATE, timeout=_BOOT_STATE_SECONDS).stdout.strip() in _UP
