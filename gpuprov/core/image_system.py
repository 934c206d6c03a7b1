"""A machine whose disk becomes an image: its files and programs are used, but not its kernel and devices.

The running kernel belongs to the machine that builds the image. Its modules, GPUs and NVIDIA driver are not read. If
systemd does not run (a chroot, a container build), no unit is started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Callable

from gpuprov.core.commands import Completed
from gpuprov.core.system import System

# systemd runs as process 1 (sd_booted(3)).
BOOTED = "/run/systemd/system"
_BUILDERS = (
    "/proc/driver/nvidia", "/proc/devices", "/proc/modules", "/proc/sys/kernel/modules_disabled", "/proc/cmdline",
    "/proc/keys", "/sys/bus/pci", "/sys/class/infiniband", "/sys/class/drm", "/sys/module", "/sys/firmware/efi",
    "/dev/nvidia", "/run/systemd/container", "/run/.containerenv", "/.dockerenv",
)  # fmt: skip
# All paths below a device are ignored.
_NOWHERE = Path("/dev/null/hidden")
# systemctl(1) commands that need a running systemd. `enable`, `disable` and `is-enabled` work on files too.
_ONLINE = frozenset(
    ("start", "stop", "restart", "try-restart", "reload", "reload-or-restart", "daemon-reload", "reset-failed")
)
_ASKING = frozenset(("is-active", "is-failed", "show", "is-system-running"))
_NOT_ACTIVE = 3  # exit code of `systemctl is-active`


class ImageSystem(System):
    """A system whose files belong to an image.

    `kernel`: the release that its copies will boot; "" if it has no kernel.
    """

    def __init__(self, below: System, kernel: str) -> None:
        super().__init__(str(below.root))
        self.environment = below.environment
        self.proxy = below.proxy
        self.kernel = kernel
        self.offline = not below.exists(BOOTED)
        if self.offline:
            # Maintainer scripts and installers also call systemctl (systemctl(1), ENVIRONMENT.md).
            self.environment["SYSTEMD_OFFLINE"] = "1"

    def path(self, path: str) -> Path:
        return _NOWHERE if path.startswith(_BUILDERS) else super().path(path)

    def kernel_release(self) -> str:
        """Return the release of the kernel that the image's copies will boot."""
        return self.kernel

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 60,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> Completed:
        """Run a command; without systemd, commands that start, stop or query a unit do nothing."""
        if self.offline and argv[0] == "systemctl":
            verb = next((word for word in argv[1:] if not word.startswith("-")), "")
            if verb in _ONLINE:
                return Completed(tuple(argv), 0)
            if verb in _ASKING:
                return Completed(tuple(argv), _NOT_ACTIVE)
        return super().run(argv, timeout=timeout, stdin=stdin, env=env, on_line=on_line)
