"""Proves that the kernel's half of a driver is there for a kernel: what DKMS and kmod say of it. Reads only."""

from __future__ import annotations

import re

from gpuprov.core.system import System
from gpuprov.wire.errors import GpuprovError


def prove_modules(system: System, version: str, *, dkms: bool) -> None:
    """Look for the modules of that version for the running kernel. Raises GpuprovError if they are not there.

    `dkms`: DKMS shall have built them. An installer's exit code proves neither.
    """
    kernel = system.kernel_release()
    if dkms:
        _prove_dkms(system, version, kernel)
    found = system.run(("modinfo", "-k", kernel, "-F", "version", "nvidia"))
    if found.stdout.strip() != version:
        raise GpuprovError(
            f"the installer reported success, but kernel {kernel} has no module nvidia of version {version}",
            found.evidence() if not found.ok else f"modinfo -k {kernel} nvidia: version {found.stdout.strip()}",
            f"which file is it? modinfo -k {kernel} -F filename nvidia; dkms status",
        )


def _prove_dkms(system: System, version: str, kernel: str) -> None:
    status = system.run(("dkms", "status"))
    states = dkms_states(status.stdout, version)
    if states.get(kernel) == "installed":
        return
    if not states:
        raise GpuprovError(
            "the driver is not registered with DKMS: the next kernel upgrade would lose it",
            status.evidence(),
            f"dkms install nvidia/{version}",
        )
    raise GpuprovError(
        f"DKMS knows the driver, but has not installed its modules for kernel {kernel}",
        status.stdout.strip(),
        f"dkms install nvidia/{version} -k {kernel}; see /var/lib/dkms/nvidia/{version}/build/make.log",
    )


def dkms_states(status: str, version: str) -> dict[str, str]:
    """Return kernel → state (built, installed) of a driver in what `dkms status` says; "" → added without a kernel.

    DKMS 2 writes `nvidia, 550.163.01, 5.10.0-32-amd64, x86_64: installed`, DKMS 3 a slash for the first comma. Words
    behind the state are warnings.
    """
    found = re.findall(rf"^nvidia(?:/|, ){re.escape(version)}(?:, ([^,\s]+), [^,\s]+)?: (\w+)", status, re.MULTILINE)
    return dict(found)
