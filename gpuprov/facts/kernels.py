"""Whether the newest installed kernel has the driver, and later kernels will get their headers. Reads only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpuprov.core.system import System

# The module's name as NVIDIA's installer and DKMS give it, and as Debian's packages do, one for each of its branches.
_MODULE = re.compile(r"(?:^|/)(nvidia(?:-current|-tesla(?:-\d+)?)?)\.ko(?:\.\w+)?:", re.MULTILINE)
# Version, the distribution's number, flavour: 6.1.0-13-amd64, 6.12.48+deb13-cloud-amd64, 6.5.0-1014-aws.
_FLAVOUR = re.compile(r"\d[^-]*(?:-\d[^-]*)?-([a-z].*)")


@dataclass(frozen=True)
class InstalledKernel:
    """An installed kernel. `headers`: what building modules for it needs is installed; `module`: nvidia.ko exists."""

    release: str
    headers: bool
    module: bool


def gather_kernels(system: System) -> tuple[InstalledKernel, ...]:
    """Return the installed kernels, oldest first; a module folder without its kernel is ignored."""
    found = []
    for release in system.list_directory("/lib/modules"):
        folder = f"/lib/modules/{release}"
        if system.exists(f"/boot/vmlinuz-{release}") or system.exists(f"{folder}/vmlinuz"):
            headers = system.exists(f"{folder}/build/Makefile")
            found.append(InstalledKernel(release, headers, has_module(system.read_text(f"{folder}/modules.dep") or "")))
    return tuple(sorted(found, key=lambda kernel: _order(kernel.release)))


def has_module(modules_dep: str) -> bool:
    """Say whether a modules.dep lists NVIDIA's module."""
    return bool(module_name(modules_dep))


def module_name(modules_dep: str) -> str:
    """Return the name of NVIDIA's module in a modules.dep: nvidia, nvidia-current; nothing if it lists none."""
    found = _MODULE.search(modules_dep)
    return found[1] if found else ""


def newest(kernels: Iterable[InstalledKernel], running: str) -> InstalledKernel | None:
    """Return the newest kernel of the running one's flavour: others (-rt, -cloud) lie there for other reasons."""
    same = [kernel for kernel in kernels if flavour(kernel.release) == flavour(running)]
    return max(same, key=lambda kernel: _order(kernel.release), default=None)


def flavour(release: str) -> str:
    """Return `amd64` of 6.1.0-13-amd64; nothing where releases name none (RHEL's 5.14.0-427.el9.x86_64)."""
    found = _FLAVOUR.fullmatch(release)
    return found[1] if found else ""


def _order(release: str) -> tuple[tuple[int, str], ...]:
    parts = re.findall(r"\d+|[a-z]+", release)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


def fault(
    kernel: InstalledKernel, *, headers: tuple[str, ...], missing: tuple[str, ...], dkms: bool, compiled: str = ""
) -> str:
    """Return why the next booted kernel, or a later one, will lack the driver; "" if it will not.

    `headers`: packages with this kernel's headers; `missing`: those that bring headers with later kernels; `dkms`: DKMS
    builds the module; `compiled`: the package that would bring it, where modules are precompiled.
    """
    if compiled:
        lack = (
            f"kernel {kernel.release} has no NVIDIA module: install {compiled}, or boot an older one until there is one"
        )
        return "" if kernel.module else lack
    install = f"install {' '.join(headers)}" if headers else "install its headers"
    if not kernel.module and not kernel.headers:
        return (
            f"kernel {kernel.release} has no NVIDIA module, and no headers to build one: {install}"
            f"; dkms autoinstall -k {kernel.release}"
        )
    if not kernel.module and dkms:
        return f"kernel {kernel.release} has no NVIDIA module: dkms autoinstall -k {kernel.release}; dkms status"
    if not kernel.module:
        return (
            f"kernel {kernel.release} has no NVIDIA module, and DKMS does not build it: boot it, then run the .run "
            "again with dkms installed"
        )
    if dkms and missing:
        return f"the kernel after {kernel.release} will come without headers: install {' '.join(missing)}"
    return ""
