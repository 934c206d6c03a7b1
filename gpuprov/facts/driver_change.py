"""Who changed the driver's files and when, from the logs of package managers and of NVIDIA's installer. Reads only."""

from __future__ import annotations

import re

from gpuprov.cdi.discover import DriverFacts
from gpuprov.core.files import NO_FILE
from gpuprov.core.system import System
from gpuprov.machine.machine import gather_kernel
from gpuprov.runtime_hook.freshness import disagreement, next_step

_INSTALLER_LOG = "/var/log/nvidia-installer.log"
_APT_HISTORY = "/var/log/apt/history.log"
_LOGS = {"/var/log/dpkg.log": "dpkg", "/var/log/dnf.rpm.log": "dnf", "/var/log/zypp/history": "zypper"}
# dpkg: `upgrade NAME OLD NEW`; dnf: `SUBDEBUG Upgraded: NAME`, `Upgrade: NAME`; zypper: `|install|NAME|VERSION|`.
_CHANGE = re.compile(
    r"[ |](upgrade|install|Upgrade:?|Upgraded:|Installed:)[ |]"
    r"(libnvidia|libcuda1|nvidia-|cuda-drivers|kmod-nvidia|xserver-xorg-video-nvidia)"
)
_TIME = re.compile(r"^(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)")


def package_change(system: System) -> tuple[str, ...]:
    """Return the last line about the driver in a package manager's log, as PATH:NUMBER:LINE; empty without one."""
    for path in _LOGS:
        last = ""
        try:
            with system.open(path) as file:
                # Line by line: zypper's log may be large.
                for number, content in enumerate(file, 1):
                    line = content.decode("utf-8", "replace").rstrip("\n")
                    last = f"{path}:{number}:{line}" if _CHANGE.search(line) else last
        except NO_FILE:
            continue
        return (last,) if last else ()
    return ()


def since(system: System, version: str) -> str:
    """Return ` since apt upgraded them (DATE)` if a log says that this version came so, else ""."""
    for line in package_change(system) if version else ():
        path, _, text = re.split(r":(\d+):", line, maxsplit=1)
        when = _TIME.match(text)
        if when and _has_version(text, version):
            by = "apt" if _LOGS[path] == "dpkg" and system.exists(_APT_HISTORY) else _LOGS[path]
            did = "upgraded" if "pgrade" in text else "installed"
            return f" since {by} {did} them ({when[1]} {when[2]})"
    log = system.read_text(_INSTALLER_LOG) or ""
    if (
        version
        and f"installer version: {version}\n" in log
        and (created := re.search(r"^creation time: (.+)$", log, re.MULTILINE))
    ):
        return f" since NVIDIA's installer wrote them ({created[1].strip()})"
    return ""


def _has_version(text: str, version: str) -> bool:
    return re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.])", text.split()[-1] if " " in text else text) is not None


def difference(system: System, driver: DriverFacts) -> str:
    """Return how the driver's files and the loaded module differ, since when, and what to do; "" if they agree."""
    files, module = driver.library_version, driver.kernel_version
    if not files or not module or files == module:
        return ""
    step = next_step(module, container=bool(gather_kernel(system).container))
    return f"{disagreement(files, module, since(system, files))}: {step}"
