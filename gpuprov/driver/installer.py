"""Facts about NVIDIA's .run file: its header, its options by version, its failures. Pure; never runs one.

Sources: the published history of nvidia-installer (1.0-7182 to 590.48.01) and recorded runs of 550.163.01.
"""

from __future__ import annotations

import re

from gpuprov.core.commands import Failure, failures, first_match
from gpuprov.core.places import KEPT
from gpuprov.packages.interface import Commands
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.tables import RELEASES, packaged
from gpuprov.protocol.versions import version_numbers


@dataclass(frozen=True)
class Installation:
    """How a driver is installed from a .run file. `url`: where the file comes from; a path if it is on the host.

    `has_libgl`: the distribution's own libGL is installed. `signing_key`, `signing_certificate`: for the modules.
    """

    version: str
    url: str
    sha256: str
    architecture: str
    kernel_modules: bool
    module_type: str = "auto"
    has_libgl: bool = False
    signing_key: str = ""
    signing_certificate: str = ""

    @property
    def kept_path(self) -> str:
        """Where the file is kept for a later rollback."""
        return f"{KEPT}/{self.version}.run"

    def arguments(self, *, dkms: bool, temporary: str, log: str) -> tuple[str, ...]:
        """Return the installer's arguments for an unattended installation.

        `--tmpdir` and its value are two words: the stub ignores `--tmpdir=DIR`. It also expands its arguments again
        without quotes, so that no path may hold blanks. Raises GpuprovError if the driver has no such modules.
        """
        found = ["--tmpdir", temporary, "--silent", "--no-questions", "--ui=none", f"--log-file-name={log}"]
        if self.kernel_modules:
            found += ["--dkms"] if dkms and self.knows("--dkms") else []
            if self.module_type != "auto" and self.knows("--kernel-module-type"):
                found.append(f"--kernel-module-type={self.module_type}")
            elif self.module_type == "open" and not self.knows("-m=kernel-open"):
                what = f"driver {self.version} has no open kernel modules"
                step = "set gpuprov_kernel_module_type: proprietary, or a newer gpuprov_driver_version"
                raise GpuprovError(what, "they came with 470.42.01 (data-centre GPUs, 515 for all)", step)
            elif self.module_type == "open":
                found.append("-m=kernel-open")
            if self.signing_key and self.signing_certificate:
                found += [f"--module-signing-secret-key={self.signing_key}"]
                found += [f"--module-signing-public-key={self.signing_certificate}"]
        else:
            option = "--no-kernel-modules"
            found.append(option if self.knows(option) else "--no-kernel-module")
        # The distribution's libGL is not overwritten; without one, the installer's own is needed: its sanity check
        # fails on a missing libGL.so.1 even on a headless host, and with exit code 0.
        if self.knows("--install-libglvnd"):
            found.append("--no-install-libglvnd" if self.has_libgl else "--install-libglvnd")
        return tuple(found)

    def knows(self, option: str) -> bool:
        """Say whether the installer of this version knows an option."""
        return knows(self.version, option)


@dataclass(frozen=True)
class Header:
    """The header in the shell stub at the start of a .run; the payload begins at line `skip` (0: unknown)."""

    version: str
    architecture: str
    label: str
    skip: int = 0


# The header is within this many bytes.
HEADER_BYTES = 8192


def parse_header(text: str) -> Header:
    """Return a .run file's header from the text of its shell stub (its first few KiB), without running anything.

    Raises GpuprovError if this is no driver .run, and says what it seems to be.
    """
    if re.match(r"\s*<(!doctype|html)", text, re.IGNORECASE):
        raise GpuprovError("this is a web page, not a .run file", text[:80].strip(), "check gpuprov_driver_url")
    label = _assigned(text, "label")
    found = re.search(r"Linux-(?P<architecture>\w+)\s+(?P<version>\d{3,4}(\.\d+)+)", label)
    if not text.startswith("#!") or found is None:
        seen = f"it begins with {text[:40]!r} and its label is {label!r}"
        raise GpuprovError("this is no NVIDIA driver .run file", seen, "check gpuprov_driver_url")
    skip = _assigned(text, "skip")
    return Header(found["version"], found["architecture"], label, int(skip) if skip.isdecimal() else 0)


def _assigned(text: str, name: str) -> str:
    found = re.search(rf'^{name}="?([^"\n]*)"?$', text, re.MULTILINE)
    return found[1] if found else ""


def knows(version: str, option: str) -> bool:
    """Say whether the installer of that version knows an option; it stops at an unknown one, after a whole unpack."""
    return version_numbers(version) >= version_numbers(packaged(RELEASES)["installer_options"].get(option, "0"))


def explain_failure(
    returncode: int, log: str, output: str, *, commands: Commands, initramfs: str
) -> tuple[str, str, str] | None:
    """Return (what, decisive line, next step) if an installation failed, None if there is no sign of failure.

    `commands`: the host's package manager's. `initramfs`: the command that rebuilds the initramfs.

    Exit code 0 proves nothing: in silent mode the installer continues after errors. So the log is always read.
    """
    errors = [line for line in log.splitlines() if re.match(r"\s*ERROR:", line) or "sanity check failed" in line]
    if returncode == 0 and not errors:
        return None
    found = first_match("installer", f"{log}\n{output}".splitlines(), re.IGNORECASE)
    if found is not None:
        row, line = found
        own = {"install": commands.install, "remove": commands.remove, "initramfs": initramfs}
        return row.what, line.strip(), row.next_step.format(**own)
    unknown = Failure("the driver's installer reported errors", "see the log named above")
    row = next((one for one in failures("installer") if one.returncode == returncode), unknown)
    decisive = errors[0] if errors else (output.strip().splitlines() or [""])[-1]
    return row.what, decisive.strip(), row.next_step
