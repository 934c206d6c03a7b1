"""Facts about the machine: its operating system, its kernel, its displays, and whether it is of a special kind."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import distro

from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.tables import rows

# UEFI specification, 3.3: the variable SecureBoot in the global name space; four bytes of attributes, then the value.
_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
# Red Hat's, Ubuntu's and SUSE's kernels with large pages.
_LARGE_PAGES = re.compile(r"[-+]64kb?\b")
# Linux, Documentation/admin-guide/LSM/apparmor.rst.
_APPARMOR = "/sys/module/apparmor/parameters/enabled"
_CONTAINER_MARKS = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}


@dataclass(frozen=True)
class OperatingSystem:
    """os-release(5): ID, VERSION_ID, VERSION_CODENAME, ID_LIKE, PRETTY_NAME, VARIANT_ID; and UBUNTU_CODENAME."""

    id: str
    version: str
    codename: str
    like: tuple[str, ...]
    name: str
    ubuntu_codename: str = ""
    variant: str = ""


@dataclass(frozen=True)
class Kernel:
    """The running kernel. `container`: the container manager this machine runs in (systemd-nspawn, lxc, …), or nothing.

    `secure_boot`: enabled, disabled, or no-efi. `loaded_modules` is empty where the kernel has no /proc/modules.
    `apparmor`: AppArmor is switched on. `trusts_nvidia`: it takes modules that NVIDIA has signed.
    `page_size`: in bytes. `machine`: the DMI product name; EC2 writes the instance type there.
    """

    release: str
    command_line: str
    takes_modules: bool
    modules_disabled: bool
    loaded_modules: tuple[str, ...]
    secure_boot: str
    container: str
    wsl: bool
    apparmor: bool = False
    trusts_nvidia: bool = False
    page_size: int = 4096
    machine: str = ""

    def conditions(self) -> dict[str, Any]:
        """Return what known problems depend on (protocol/known_problems.py); an image's kernel does not run."""
        size = 65536 if _LARGE_PAGES.search(self.release) else self.page_size
        return {"kernel": self.release, "machine": self.machine, "modules": self.loaded_modules, "page_size": size}


@dataclass(frozen=True)
class MachineKind:
    """A kind of machine that is not a server with an ordinary distribution (machines.json), by any of its signs.

    `os`: os-release's ID, or ID:VARIANT_ID. `files`: one of them exists. `dmi`: the product name, and `kernel`: a part
    of /proc/version in lower case. `container`: container managers. `api_port`: it answers there in place of SSH.
    `served`: whether gpuprov installs there; "preinstalled": only beside the driver that the machine has.
    """

    name: str
    what: str
    next_step: str
    source: str
    served: Literal["yes", "preinstalled", "no"] = "no"
    os: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    dmi: str = ""
    kernel: str = ""
    container: tuple[str, ...] = ()
    api_port: int = 0

    def has_system(self, os: OperatingSystem) -> bool:
        """Say whether os-release names this kind."""
        return os.id in self.os or f"{os.id}:{os.variant}" in self.os


MACHINES: tuple[MachineKind, ...] = rows("machines", "machines", MachineKind)


def gather_kinds(system: System, os: OperatingSystem, kernel: Kernel) -> Mapping[str, str]:
    """Return the kinds that a machine is of: name → what shows it."""
    version = (system.read_text("/proc/version") or "").lower()
    found = {}
    for one in MACHINES:
        seen = [path for path in one.files if system.exists(path)]
        seen += [f"/etc/os-release: ID={os.id} VARIANT_ID={os.variant}"] if one.has_system(os) else []
        seen += [f"DMI product name: {kernel.machine}"] if one.dmi and one.dmi == kernel.machine else []
        seen += [f"kernel {kernel.release}"] if one.kernel and one.kernel in version else []
        seen += [f"container manager: {kernel.container}"] if kernel.container in one.container else []
        if seen:
            found[one.name] = seen[0]
    return found


def gather_os(system: System) -> OperatingSystem:
    """Return what os-release says."""
    found = distro.LinuxDistribution(
        include_lsb=False, include_uname=False, include_oslevel=False, root_dir=str(system.root)
    ).os_release_info()
    return OperatingSystem(
        id=found.get("id", ""),
        version=found.get("version_id", ""),
        codename=found.get("version_codename", ""),
        like=tuple(found.get("id_like", "").split()),
        name=found.get("pretty_name", found.get("id", "unknown")),
        ubuntu_codename=found.get("ubuntu_codename", ""),
        variant=found.get("variant_id", ""),
    )


def gather_kernel(system: System) -> Kernel:
    """Return what the running kernel is and whether it takes modules."""
    modules = system.read_text("/proc/modules")
    disabled = (system.read_text("/proc/sys/kernel/modules_disabled") or "0").strip() == "1"
    version = (system.read_text("/proc/version") or "").lower()
    # systemd records the container manager as process 1; docker and podman leave marker files.
    markers = (manager for path, manager in _CONTAINER_MARKS.items() if system.exists(path))
    container = (system.read_text("/run/systemd/container") or "").strip() or next(markers, "")
    secure_boot = "enabled" if (system.read_bytes(_SECURE_BOOT) or b"")[4:5] == b"\x01" else "disabled"
    return Kernel(
        release=system.kernel_release(),
        command_line=(system.read_text("/proc/cmdline") or "").strip(),
        takes_modules=modules is not None and not disabled,
        modules_disabled=disabled,
        loaded_modules=tuple(sorted(line.split()[0] for line in (modules or "").splitlines() if line.strip())),
        secure_boot=secure_boot if system.exists("/sys/firmware/efi") else "no-efi",
        container=container,
        wsl="microsoft" in version,
        apparmor=(system.read_text(_APPARMOR) or "").strip() == "Y",
        # /proc/keys (proc(5)): an asymmetric key whose description has this name.
        trusts_nvidia=re.search(r" asymmetri +[^\n]*\bNVIDIA\b", system.read_text("/proc/keys") or "") is not None,
        page_size=system.page_size(),
        machine=(system.read_text("/sys/class/dmi/id/product_name") or "").strip(),
    )


def gather_displays(system: System) -> tuple[str, ...]:
    """Return the X servers that run, by their lock files (Xserver(1)), as the driver's installer looks for them."""
    found = []
    for name in system.list_directory("/tmp"):
        display = re.fullmatch(r"\.X(\d+)-lock", name)
        # The server writes its process id, in eleven characters (Xserver, os/utils.c).
        pid = system.read_foreign(f"/tmp/{name}", 64).strip() if display else ""
        if display and pid.isdecimal() and system.exists(f"/proc/{pid}"):
            found.append(f"display :{display[1]} is process {pid}'s")
    return tuple(found)
