"""HostFacts: what a machine is, gathered once before a plan; parsers are pure, nothing here changes anything."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import distro

from gpuprov import boot_files
from gpuprov.boot_files import BootFacts, gather_boot
from gpuprov.bundle.manifest import BundleFacts
from gpuprov.cdi.discover import DriverFacts, discover
from gpuprov.cdi.other_devices import specifications
from gpuprov.distros import distribution_of
from gpuprov.driver.cuda_facts import CudaFacts, gather_cuda
from gpuprov.driver.fabric_manager import FabricFacts, gather_fabric
from gpuprov.driver.holders import RunningDriver
from gpuprov.driver.initramfs import BLACKLIST, DRACUT_CONFIGURATION, InitramfsFacts, gather_initramfs
from gpuprov.driver.mig import MigGpu
from gpuprov.driver.release import STOPPED
from gpuprov.engines.docker import DockerFacts
from gpuprov.engines.docker import gather as gather_docker
from gpuprov.engines.more import EngineFacts
from gpuprov.engines.more import gather as gather_engines
from gpuprov.packaging import packages_rpm, repos_rpm
from gpuprov.packaging.packages import PackageFacts, gather_packages
from gpuprov.reboot_state import IN_USE_MARK, RebootFacts, gather_reboot
from gpuprov.runtime_hook import deploy
from gpuprov.runtime_hook.driver_files import HOOK_PATH
from gpuprov.system import System

# PCI vendor and base class, from the PCI Code and ID Assignment Specification: 03 is a display controller
# (VGA 0300, 3D 0302, other 0380); NVIDIA's vendor number is 10de. Class 03 leaves out its audio and USB functions.
_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"
# UEFI specification, 3.3: the variable SecureBoot in the global name space; four bytes of attributes, then the value.
_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
# Linux, Documentation/admin-guide/LSM/apparmor.rst.
_APPARMOR = "/sys/module/apparmor/parameters/enabled"
# Everything whose content plans look at lies here.
_MANAGED_FILES = (
    "/etc/apt/sources.list",
    BLACKLIST,
    DRACUT_CONFIGURATION,
    deploy.LAUNCHER_PATH,
    HOOK_PATH,
    deploy.NVIDIA_HOOK_PATH,
    *boot_files.MANAGED,
    "/var/lib/gpuprov/driver-incomplete",
    IN_USE_MARK,
    STOPPED,
    "/etc/profile.d/gpuprov-cuda.sh",
    "/etc/dnf/modules.d/nvidia-driver.module",
)
_MANAGED_DIRECTORIES = (
    "/etc/apt/sources.list.d", "/etc/apt/keyrings", "/etc/apt/trusted.gpg.d", "/usr/share/keyrings",
    "/etc/yum.repos.d", "/etc/zypp/repos.d", repos_rpm.KEYS,
    "/etc/cdi", "/etc/gpuprov", deploy.LIBRARY_PATH, f"{deploy.LIBRARY_PATH}/runtime_hook",
)  # fmt: skip
_LARGEST_MANAGED_FILE = 4 << 20
CACHE_DIRECTORY = "/var/cache/gpuprov"
# Where an installation writes; often file systems of their own.
_WRITTEN_PLACES = ("/etc", "/usr", "/var/lib", CACHE_DIRECTORY)


@dataclass(frozen=True)
class OperatingSystem:
    """os-release(5): ID, VERSION_ID, VERSION_CODENAME, ID_LIKE, PRETTY_NAME; and UBUNTU_CODENAME of its derivatives."""

    id: str
    version: str
    codename: str
    like: tuple[str, ...]
    name: str
    ubuntu_codename: str = ""


@dataclass(frozen=True)
class Kernel:
    """The running kernel. `container`: the container manager this machine runs in (systemd-nspawn, lxc, …), or nothing.

    `secure_boot`: enabled, disabled, or no-efi. `loaded_modules` is empty where the kernel has no /proc/modules.
    `apparmor`: AppArmor is switched on.
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


@dataclass(frozen=True)
class PciGpu:
    """An NVIDIA display controller as the PCI bus shows it: `0000:17:00.0`, `2330`.

    `driver`: the kernel driver that it is bound to, by the name in /sys/bus/pci/drivers, or nothing.
    """

    bus_id: str
    device_id: str
    driver: str = ""


@dataclass(frozen=True)
class FileFact:
    """A file that plans look at."""

    content: bytes
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True)
class HostFacts:
    """What a machine is.

    `other_specifications`: path → the CDI specification that devices beside GPUs (GDS, NVSwitch, …) call for.
    `downloads`: path → SHA-256 of files that wait in the cache. `free_bytes`: place → free space on its file system.
    `displays`: X servers that run, a sentence each. `clock`: seconds since 1970.
    `bundle`: what stands in for the network, if the installation is given one. `running`: the loaded driver and its
    users, if another is to be installed. `mig`: how the GPUs are divided, if a layout is asked for.
    """

    os: OperatingSystem
    architecture: str
    kernel: Kernel
    initramfs: InitramfsFacts
    boot: BootFacts
    reboot: RebootFacts
    gpus: tuple[PciGpu, ...]
    driver: DriverFacts
    other_specifications: Mapping[str, bytes]
    driver_packaged: str
    packages: PackageFacts
    docker: DockerFacts
    engines: Mapping[str, EngineFacts]
    files: Mapping[str, FileFact]
    downloads: Mapping[str, str]
    python: str
    bytecode_current: bool
    user_id: int
    free_bytes: Mapping[str, int]
    displays: tuple[str, ...]
    clock: int
    bundle: BundleFacts | None = None
    running: RunningDriver | None = None
    fabric: FabricFacts = field(default_factory=FabricFacts)
    mig: tuple[MigGpu, ...] = ()
    cuda: CudaFacts = field(default_factory=CudaFacts)

    @property
    def gpu_device_ids(self) -> tuple[str, ...]:
        """The PCI device ids of the GPUs, which tell their generations."""
        return tuple(gpu.device_id for gpu in self.gpus)

    @property
    def driver_installed_version(self) -> str:
        """The version of the driver's libraries on disk, or nothing."""
        return self.driver.library_version

    @property
    def driver_loaded_version(self) -> str:
        """The version of the driver in the running kernel, or nothing."""
        return self.driver.kernel_version


def gather(system: System, engines: Mapping[str, str] | None = None) -> HostFacts:
    """Return the facts of a machine. Reads only; a few commands, each with a time limit.

    `engines`: engines besides docker to look at, each with the path of the runtime that it shall know.
    """
    os = gather_os(system)
    packages = gather_software(system, os)
    driver = discover(system)
    return HostFacts(
        os=os,
        architecture=system.architecture(),
        kernel=gather_kernel(system),
        initramfs=gather_initramfs(system),
        boot=gather_boot(system),
        reboot=gather_reboot(system),
        gpus=gather_gpus(system),
        driver=driver,
        other_specifications=specifications(system),
        driver_packaged=_driver_package(packages),
        packages=packages,
        docker=gather_docker(system),
        engines=gather_engines(system, engines or {}),
        files=gather_files(system),
        downloads=gather_downloads(system),
        python=".".join(str(part) for part in sys.version_info[:3]),
        bytecode_current=deploy.bytecode_is_current(str(system.path(f"{deploy.LIBRARY_PATH}/runtime_hook"))),
        user_id=system.user_id(),
        free_bytes={place: system.free_bytes(place) for place in _WRITTEN_PLACES},
        displays=gather_displays(system),
        clock=system.clock(),
        fabric=gather_fabric(system),
        cuda=gather_cuda(system),
    )


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
    )


def gather_software(system: System, os: OperatingSystem) -> PackageFacts:
    """Ask the distribution's own package manager: rpm can be installed on Debian too, and apt on Fedora."""
    row = distribution_of(os)
    if row is None or row.package_manager not in packages_rpm.MANAGERS:
        return gather_packages(system)
    return packages_rpm.gather_packages(system, row.package_manager)


def gather_kernel(system: System) -> Kernel:
    """Return what the running kernel is and whether it takes modules."""
    modules = system.read_text("/proc/modules")
    disabled = (system.read_text("/proc/sys/kernel/modules_disabled") or "0").strip() == "1"
    version = (system.read_text("/proc/version") or "").lower()
    return Kernel(
        release=system.kernel_release(),
        command_line=(system.read_text("/proc/cmdline") or "").strip(),
        takes_modules=modules is not None and not disabled,
        modules_disabled=disabled,
        loaded_modules=parse_modules(modules or ""),
        secure_boot=parse_secure_boot(system.read_bytes(_SECURE_BOOT), efi=system.exists("/sys/firmware/efi")),
        container=_container(system),
        wsl="microsoft" in version,
        apparmor=(system.read_text(_APPARMOR) or "").strip() == "Y",
    )


def parse_modules(text: str) -> tuple[str, ...]:
    """Return the module names in /proc/modules (proc(5)), sorted."""
    return tuple(sorted(line.split()[0] for line in text.splitlines() if line.strip()))


def parse_secure_boot(variable: bytes | None, *, efi: bool) -> str:
    """Return enabled, disabled or no-efi from the content of the efivars file."""
    if not efi:
        return "no-efi"
    return "enabled" if variable is not None and variable[4:5] == b"\x01" else "disabled"


def _container(system: System) -> str:
    """Return the container manager: systemd writes it down as process 1; docker and podman leave marker files."""
    named = (system.read_text("/run/systemd/container") or "").strip()
    if named:
        return named
    markers = (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"))
    return next((manager for path, manager in markers if system.exists(path)), "")


def gather_gpus(system: System) -> tuple[PciGpu, ...]:
    """Return NVIDIA's display controllers on the PCI bus, in bus order."""
    base = "/sys/bus/pci/devices"
    found = []
    for bus_id in system.list_directory(base):
        vendor, kind, device = (
            (system.read_text(f"{base}/{bus_id}/{name}") or "").strip() for name in ("vendor", "class", "device")
        )
        if vendor == _NVIDIA_VENDOR and kind.startswith(_DISPLAY_CLASS):
            link = system.status(f"{base}/{bus_id}/driver")
            driver = link.target.rpartition("/")[2] if link is not None else ""
            found.append(PciGpu(bus_id, device[2:] if device.startswith("0x") else device, driver))
    return tuple(found)


def gather_displays(system: System) -> tuple[str, ...]:
    """Return the X servers that run, by their lock files (Xserver(1)), as the driver's installer looks for them."""
    found = []
    for name in system.list_directory("/tmp"):
        display = re.fullmatch(r"\.X(\d+)-lock", name)
        pid = (system.read_text(f"/tmp/{name}") or "").strip() if display else ""
        if display and pid.isdigit() and system.exists(f"/proc/{pid}"):
            found.append(f"display :{display[1]} is process {pid}'s")
    return tuple(found)


def _driver_package(packages: PackageFacts) -> str:
    """Return the distribution's or NVIDIA's own driver package, if one is installed: a .run must not go over it."""
    prefixes = (
        "libnvidia-compute-", "nvidia-kernel-", "nvidia-driver", "libnvidia-ml", "cuda-drivers", "nvidia-open",
        # NVIDIA's and RPM Fusion's for rpm; SUSE's.
        "kmod-nvidia", "akmod-nvidia", "xorg-x11-drv-nvidia", "nvidia-compute-G", "nvidia-gl-G", "nvidia-video-G",
    )  # fmt: skip
    return next((name for name in sorted(packages.installed) if name.startswith(prefixes)), "")


def gather_files(system: System) -> Mapping[str, FileFact]:
    """Return the files that plans look at."""
    listed = [f"{folder}/{name}" for folder in _MANAGED_DIRECTORIES for name in system.list_directory(folder)]
    found = {}
    for path in (*_MANAGED_FILES, *listed):
        status = system.status(path)
        if status is None:
            continue
        if status.kind == "file" and status.size <= _LARGEST_MANAGED_FILE:
            content = system.read_bytes(path)
            if content is not None:
                found[path] = FileFact(content, status.mode, status.uid, status.gid)
        elif path == deploy.NVIDIA_HOOK_PATH:
            # A link, or a program too large to be ours, is there all the same, and NVIDIA's.
            found[path] = FileFact(b"", status.mode, status.uid, status.gid)
    return found


def gather_downloads(system: System) -> Mapping[str, str]:
    """Return the .run files in the cache: there is one only between its download and the end of its installation."""
    names = (name for name in system.list_directory(CACHE_DIRECTORY) if name.endswith(".run"))
    return {path: system.sha256(path) for path in (f"{CACHE_DIRECTORY}/{name}" for name in names)}


def facts_to_json(facts: HostFacts) -> dict[str, Any]:
    """Return the facts as plain JSON values for people and programs: files by digest, installed packages left out."""
    data: dict[str, Any] = _plain(facts)
    data["files"] = sorted(facts.files)
    data["other_specifications"] = sorted(facts.other_specifications)
    data["packages"] = {"manager": facts.packages.manager, "installed": len(facts.packages.installed)}
    return data


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value
