"""Data about a library that the loader takes in place of the driver's, and about missing or broken driver files.

This module holds data and commands; gpuprov.checks.cuda.judgement finds out which library the loader takes.
"""

from __future__ import annotations

import shlex
import struct
from dataclasses import dataclass

from gpuprov.cdi.discover import DriverFacts
from gpuprov.core.system import System
from gpuprov.packages.interface import Commands

PRELOAD = "/etc/ld.so.preload"
ENVIRONMENT = "/etc/environment"
_NEEDED = ("libnvidia-ml.so", "libcuda.so")
# The ELF header of 64-bit files (gABI, "ELF Header"): where the section headers begin, their size and number.
_HEADER = struct.Struct("<16x24xQ10xHH2x")


@dataclass(frozen=True)
class HidingLibrary:
    """A library that programs load in place of the driver's.

    `paths`: the name by which the loader opens it, and what its links lead to. `hides`: the driver's own, "" for none
    yet. `reason`: what makes the loader take it, a file with its line where one says so. `package`: what owns it.
    `removable`: the paths whose removal makes the loader take another library. `foreign`: how a user other than root
    can replace their folder, "" if none can.
    """

    name: str
    paths: tuple[str, ...]
    version: str
    reason: str
    hides: str = ""
    package: str = ""
    fault: str = ""
    removable: tuple[str, ...] = ()
    foreign: str = ""

    @property
    def is_by_environment(self) -> bool:
        """Whether an environment variable makes the loader take it: this affects programs of logins only."""
        return self.reason.startswith(ENVIRONMENT)

    @property
    def is_configured(self) -> bool:
        """Whether a configuration line or a variable names the library: then remove that line, not the file."""
        return self.is_by_environment or self.reason.startswith(PRELOAD)

    @property
    def what(self) -> str:
        """The library in a sentence."""
        kind = self.fault or (f"of driver {self.version}" if self.version else "of an unknown driver")
        return f"{self.paths[0]} ({kind}) hides {self.hides or 'the driver' + chr(39) + 's ' + self.name}"

    def way_out(self, commands: Commands) -> str:
        """Return the command after which the loader takes another library."""
        if self.is_by_environment:
            variable = self.reason.rpartition(" ")[2]
            return f"sed -i '/^[[:space:]]*{variable}=/d' {ENVIRONMENT}  # then log in again"
        if self.reason.startswith(PRELOAD):
            word = self.reason.rpartition(" ")[2]
            return f"sed -i {shlex.quote(f's|{word}||')} {PRELOAD}"
        if self.package:
            return f"{commands.remove} {self.package}; ldconfig"
        return f"rm {shlex.join(self.removable)}; ldconfig"


def damage(system: System, driver: DriverFacts) -> str:
    """Return what is wrong with the driver's files: a path and why; nothing if those that all need are whole."""
    if not driver.library_version:
        return ""
    for name in _NEEDED:
        path = next((one.path for one in driver.libraries if f"/{name}.{driver.library_version}" in one.path), "")
        fault = _broken(system, path) if path else f"no {name}.{driver.library_version}"
        if fault:
            return f"{path or 'the loader' + chr(39) + 's folders'}: {fault}"
    has_smi = any(one.path.endswith("/nvidia-smi") for one in driver.programs)
    return "" if has_smi else "/usr/bin/nvidia-smi: No such file or directory"


def _broken(system: System, path: str) -> str:
    """Return how a library's file is damaged, "" if it is not."""
    status, start = system.status(path), system.read_start(path, _HEADER.size)
    if status is None or start is None or len(start) < _HEADER.size:
        return "it is empty or too short to be a library"
    if not start.startswith(b"\x7fELF"):
        return "it is no library (invalid ELF header)"
    offset, size, number = _HEADER.unpack(start)
    return "its end is missing (file too short)" if offset + size * number > status.size else ""
