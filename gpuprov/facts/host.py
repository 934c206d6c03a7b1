"""HostFacts: what a machine is, gathered once before a plan; parsers are pure, nothing here changes anything."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gpuprov.bundle.manifest import BundleFacts
from gpuprov.cdi.discover import DriverFacts, discover
from gpuprov.cdi.generate import other_specifications
from gpuprov.core.changes import FileFact, WriteFile
from gpuprov.core.places import CACHE_DIRECTORY, STOPPED
from gpuprov.core.system import System
from gpuprov.engines import docker_proxy, known
from gpuprov.engines.docker import DockerFacts
from gpuprov.engines.docker import gather as gather_docker
from gpuprov.engines.known import EngineFacts
from gpuprov.engines.other_engines import gather as gather_engines
from gpuprov.facts import boot, gpus, kernels
from gpuprov.facts.boot import IN_USE_MARK, BootFacts, RebootFacts, gather_boot, gather_reboot
from gpuprov.facts.driver import OTHER_PROFILE, PROFILE, CudaFacts, HidingLibrary, RunningDriver, damage, gather_cuda
from gpuprov.facts.gpus import FABRIC_MODULES, Chips, FabricFacts, MigGpu, ServiceFacts, gather_fabric, gather_services
from gpuprov.facts.interpreter import Interpreter, bytecode_is_current, gather_interpreter
from gpuprov.facts.kernels import BLACKLIST, DRACUT_CONFIGURATION, ImageFacts, InitramfsFacts, gather_initramfs
from gpuprov.facts.leftovers import NVIDIA_DOCKER, Leftovers, gather_leftovers
from gpuprov.facts.watch import WatchFacts
from gpuprov.machine.distros import Distribution, distribution_of
from gpuprov.machine.machine import Kernel, OperatingSystem, gather_displays, gather_kernel, gather_kinds, gather_os
from gpuprov.machine.pci import PciGpu, gather_gpus, own_ids
from gpuprov.packages import retired
from gpuprov.packages.interface import PackageFacts, PackageManager, require_answer
from gpuprov.packages.keys import RPM_KEYS
from gpuprov.packages.managers import manager_of
from gpuprov.packages.sources import PinnedOut
from gpuprov.protocol.codec import as_json
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.models import model_of, name_of
from gpuprov.protocol.tables import PACKAGED, Tables
from gpuprov.runtime_hook import deploy
from gpuprov.runtime_hook.driver_files import HOOK_PATH

if TYPE_CHECKING:
    from gpuprov.packages.managers import Offers

# How DKMS signs what it builds, from its version 3 on (dkms(8), framework.conf).
DKMS_SIGNING = "/etc/dkms/framework.conf.d/gpuprov.conf"
# Which repositories the driver's packages may come from (apt_preferences(5)).
PREFERENCES = "/etc/apt/preferences.d/gpuprov-driver"
# Everything whose content plans look at lies here.
_MANAGED_FILES = (
    "/etc/apt/sources.list", retired.TRUSTED, BLACKLIST, DKMS_SIGNING, PREFERENCES, FABRIC_MODULES, *gpus.IMEX_FILES,
    DRACUT_CONFIGURATION, kernels.MODULE_OPTIONS, kernels.LOADED_OPTIONS, gpus.GRIDD_CONFIG, gpus.GRIDD_TEMPLATE,
    gpus.TOKEN, deploy.LAUNCHER_PATH, HOOK_PATH, deploy.NVIDIA_HOOK_PATH, NVIDIA_DOCKER, *boot.MANAGED,
    "/var/lib/gpuprov/driver-incomplete", IN_USE_MARK, STOPPED, PROFILE, OTHER_PROFILE, "/etc/dnf/dnf.conf",
    "/etc/dnf/modules.d/nvidia-driver.module", docker_proxy.DROP_IN,
)  # fmt: skip
_RUNTIME_DIRECTORIES = (deploy.LIBRARY_PATH, f"{deploy.LIBRARY_PATH}/runtime_hook")
_MANAGED_DIRECTORIES = (
    "/etc/apt/sources.list.d", "/etc/apt/keyrings", "/etc/apt/trusted.gpg.d", "/usr/share/keyrings",
    "/etc/yum.repos.d", "/etc/zypp/repos.d", RPM_KEYS,
    "/etc/cdi", "/etc/gpuprov", *_RUNTIME_DIRECTORIES,
)  # fmt: skip
# Of logins (apt_auth.conf(5)), only gpuprov's are read.
LOGINS = "/etc/apt/auth.conf.d"
_LARGEST_MANAGED_FILE = 4 << 20
# Where an installation writes; often file systems of their own.
_WRITTEN_PLACES = ("/etc", "/usr", "/var/lib", CACHE_DIRECTORY)


@dataclass(frozen=True)
class HostFacts:
    """The facts about a machine.

    `other_specifications`: path → the CDI specification for devices beside GPUs (GDS, NVSwitch, …). `downloads`: path →
    SHA-256 of files in the cache. `free_bytes`: place → free space on its file system. `displays`: running X servers, a
    sentence each. `clock`: seconds since 1970. `bundle`: replaces the network, if the installation has one. `running`:
    the loaded driver and its users, if another is to be installed. `mig`: how the GPUs are divided, if a layout is
    requested. `offers`: what the repositories have of the packages that a plan depends on, if they were queried.
    `upgrade`: whether the user asks for the newest driver of the branch that packages hold.
    `python`: the version that gathered the facts; `interpreter`: the Python of the deployed programs.
    `docker_began_first`: whether dockerd runs since before a run brought the hook of `--gpus`.
    `docker_proxy_in_use`: whether the running dockerd has the requested proxy, None if none runs. `served`: the
    GPUs in an available driver file, by device id. `kubernetes`: what makes it a Kubernetes node. `driver_damage`:
    missing or broken driver files. `has_module`: the running kernel has a module of the driver that it takes.
    `later_module`: so has a newer kernel, which the next boot runs. `cdi_folder_mode`: None if there is no
    /etc/cdi. `runtime_modes`: of the folders of gpuprov's container runtime. `hiding`: libraries that the loader
    takes in place of the driver's, if checked. `read_only`: places that an installation writes and that are mounted
    read-only → their mount. `pinned_out`: packages to install that apt's preferences exclude. `leftovers`: remains
    of nvidia-docker 1 and 2. `image`: the image that the disk becomes, if any. `watch`: the installed files of
    gpuprov_watch, for a run that plans. `kinds`: what special machine this is (machines.json) → what shows it.
    `tables`: what the run knows of GPUs, drivers and problems.
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
    interpreter: Interpreter
    bytecode_current: bool
    user_id: int
    free_bytes: Mapping[str, int]
    displays: tuple[str, ...]
    clock: int
    bundle: BundleFacts | None = None
    running: RunningDriver | None = None
    fabric: FabricFacts = field(default_factory=FabricFacts)
    services: ServiceFacts = field(default_factory=ServiceFacts)
    rdma_devices: tuple[str, ...] = ()
    imex: FabricFacts = field(default_factory=FabricFacts)
    mig: tuple[MigGpu, ...] = ()
    cuda: CudaFacts = field(default_factory=CudaFacts)
    offers: Offers | None = None
    upgrade: bool = False
    docker_proxy_in_use: bool | None = None
    docker_began_first: bool = False
    served: Chips = field(default_factory=dict)
    driver_damage: str = ""
    has_module: bool = True
    later_module: bool = False
    cdi_folder_mode: int | None = None
    runtime_modes: Mapping[str, int] = field(default_factory=dict)
    hiding: tuple[HidingLibrary, ...] = ()
    read_only: Mapping[str, str] = field(default_factory=dict)
    pinned_out: tuple[PinnedOut, ...] = ()
    kubernetes: tuple[str, ...] = ()
    leftovers: Leftovers = field(default_factory=Leftovers)
    image: ImageFacts | None = None
    watch: WatchFacts = field(default_factory=WatchFacts)
    kinds: Mapping[str, str] = field(default_factory=dict)
    tables: Tables = PACKAGED

    @cached_property
    def distribution(self) -> Distribution:
        """The row of the table of distributions, UNKNOWN if the distribution is not supported."""
        return distribution_of(self.os)

    @cached_property
    def package_manager(self) -> PackageManager:
        """The package manager that was found, else the distribution's."""
        return manager_of(self.distribution, self.packages.manager)

    def is_roots(self, path: str, content: bytes, mode: int = 0o644) -> bool:
        """Say whether root owns the file at this path, and it has this content and mode."""
        return path in self.files and self.files[path].is_roots(content, mode)

    def write(self, path: str, content: bytes, mode: int = 0o644) -> tuple[WriteFile, ...]:
        """Return the change that writes a file; nothing if it is there with this content and mode."""
        there = self.files.get(path)
        is_right = there is not None and (there.content, there.mode) == (content, mode)
        return () if is_right else (WriteFile(path, content, mode),)

    @property
    def gpu_device_ids(self) -> tuple[str, ...]:
        """The PCI device ids of the GPUs, which identify their generations; for an image, those of future GPUs."""
        if self.image is not None:
            return self.image.device_ids
        # The GRID driver alone serves virtual GPUs, and its version and modules are none that a table knows.
        return () if self.virtual_gpu else own_ids(self.gpus)

    @property
    def virtual_gpu(self) -> str:
        """What tells that this host's GPUs are virtual ones (NVIDIA vGPU), "" if nothing does."""
        models = ((one, model_of(one.device_id, self.tables)) for one in self.gpus)
        if found := next((one for one, model in models if model and one.subsystem in model.virtual), None):
            return f"GPU {found.bus_id}: {name_of(found.device_id, self.tables)}, PCI subsystem {found.subsystem}"
        return f"{gpus.GRIDD_TEMPLATE} is there" if gpus.GRIDD_TEMPLATE in self.files else ""

    @property
    def driver_removal(self) -> str:
        """The command that removes the driver's packages; those that gpuprov holds, a package manager does not."""
        remove = f"{self.package_manager.commands.remove} '*nvidia*'"
        return "gpuprov uninstall" if self.packages.driver_held else remove

    @property
    def driver_installed_version(self) -> str:
        """The version of the driver's libraries on disk, or nothing."""
        return self.driver.library_version

    @property
    def driver_loaded_version(self) -> str:
        """The version of the driver in the running kernel, or nothing."""
        return self.driver.kernel_version


def gather(system: System, engines: Iterable[str] = ()) -> HostFacts:
    """Return the facts of a machine. Reads only; a few commands, each with a time limit.

    `engines`: the engines besides docker to look at.
    """
    # docker takes as long to answer as all other questions together.
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(gather_docker, system)
        os = gather_os(system)
        # The distribution's own package manager: rpm can be installed on Debian too, and apt on Fedora.
        manager = manager_of(distribution_of(os))
        packages = manager.gather(system)
        driver = discover(system)
        files = gather_files(system)
        interpreter = gather_interpreter(system, _deployed_python(files))
        docker = asked.result()
    kernel = gather_kernel(system)
    later = kernels.newest(kernels.gather_kernels(system), kernel.release)
    cached = [f"{CACHE_DIRECTORY}/{name}" for name in system.list_directory(CACHE_DIRECTORY)]
    return HostFacts(
        os=os,
        architecture=system.architecture(),
        kernel=kernel,
        initramfs=gather_initramfs(system),
        boot=gather_boot(system),
        reboot=gather_reboot(system),
        gpus=gather_gpus(system),
        driver=driver,
        other_specifications=other_specifications(system),
        driver_packaged=driver_package(packages),
        packages=packages,
        docker=docker,
        engines=gather_engines(system, engines),
        files=files,
        # There is one only between its download and the end of its installation.
        downloads={path: system.sha256(path) for path in cached if path.endswith(".run")},
        python=".".join(str(part) for part in sys.version_info[:3]),
        interpreter=interpreter,
        bytecode_current=bytecode_is_current(system, interpreter, f"{deploy.LIBRARY_PATH}/runtime_hook"),
        user_id=system.user_id(),
        free_bytes={place: system.free_bytes(place) for place in _WRITTEN_PLACES},
        displays=gather_displays(system),
        clock=system.clock(),
        fabric=gather_fabric(system),
        services=gather_services(system),
        rdma_devices=system.list_directory("/sys/class/infiniband"),
        imex=gpus.gather_imex(system),
        cuda=gather_cuda(system),
        driver_damage=damage(system, driver),
        has_module=_has_module(system, kernel, driver),
        later_module=later is not None
        and later.release != kernel.release
        and _has_module(system, replace(kernel, release=later.release), driver),
        runtime_modes={path: found.mode for path in _RUNTIME_DIRECTORIES if (found := system.status(path))},
        cdi_folder_mode=folder.mode if (folder := system.status("/etc/cdi")) else None,
        read_only=read_only_places(system.read_text("/proc/self/mountinfo") or ""),
        kubernetes=known.kubernetes_programs(system),
        kinds=gather_kinds(system, os, kernel),
        leftovers=gather_leftovers(system, packages, docker, manager),
        tables=system.tables,
    )


def _has_module(system: System, kernel: Kernel, driver: DriverFacts) -> bool:
    """Say whether a kernel has a module of NVIDIA's that it takes: with Secure Boot, a signed one.

    If another driver is loaded than is installed, it must be the installed one's.
    """
    name, what = kernels.module_of(system, kernel.release), "modinfo does not tell of the driver's module"
    if name and driver.kernel_version not in ("", driver.library_version):
        version = require_answer(system.run(("modinfo", "-k", kernel.release, "-F", "version", name)), what).stdout
        if version.strip() != driver.library_version:
            return False
    if not name or kernel.secure_boot != "enabled":
        return bool(name)
    said = require_answer(system.run(("modinfo", "-k", kernel.release, name)), what).stdout
    return re.search(r"^sig(ner|_id):\s*\S", said, re.MULTILINE) is not None


def read_only_places(mountinfo: str) -> Mapping[str, str]:
    """Return the written places on read-only mounts, of /proc/self/mountinfo (proc(5)): place → the mount."""
    # Of several mounts at one place the last one counts. After an error a file system is read-only while its mounts are
    # not.
    mounts = {words[4]: f"{words[5]},{words[-1]}" for words in map(str.split, mountinfo.splitlines()) if len(words) > 9}
    found = {}
    for place in _WRITTEN_PLACES:
        above = [one for one in mounts if one == "/" or place == one or place.startswith(f"{one}/")]
        mount = max(above, key=len, default="")
        if mount and "ro" in mounts[mount].split(","):
            found[place] = f"{mount} ({mounts[mount]})"
    return found


def recorded_python(system: System) -> str:
    """Return the Python that gpuprov's deployed programs use or would use; "" if none is suitable."""
    return gather_interpreter(system, _deployed_python(gather_files(system))).path


def _deployed_python(files: Mapping[str, FileFact]) -> str:
    """Return the Python that the deployed programs name; with NVIDIA's toolkit only the boot units are gpuprov's."""
    launcher, unit = files.get(deploy.LAUNCHER_PATH), files.get(f"{boot.UNITS}/{boot.NODES}")
    named = deploy.python_of(launcher.content) if launcher else ""
    return named or (boot.python_of(unit.content) if unit else "")


def manager_on(system: System) -> PackageManager:
    """Return the package manager of the distribution that a system reports, for commands in messages."""
    return manager_of(distribution_of(gather_os(system)))


def driver_package(packages: PackageFacts) -> str:
    """Return the distribution's or NVIDIA's own driver package, if one is installed: a .run must not go over it."""
    prefixes = (
        "libnvidia-compute-", "nvidia-kernel-", "nvidia-driver", "libnvidia-ml", "cuda-drivers", "nvidia-open",
        # NVIDIA's and RPM Fusion's for rpm; SUSE's.
        "kmod-nvidia", "akmod-nvidia", "xorg-x11-drv-nvidia", "nvidia-compute-G", "nvidia-gl-G", "nvidia-video-G",
    )  # fmt: skip
    return next((name for name in sorted(packages.driver) if name.startswith(prefixes)), "")


def gather_files(system: System) -> Mapping[str, FileFact]:
    """Return the files that plans examine."""
    listed = [f"{folder}/{name}" for folder in _MANAGED_DIRECTORIES for name in system.list_directory(folder)]
    listed += [f"{LOGINS}/{name}" for name in system.list_directory(LOGINS) if name.startswith("gpuprov-")]
    found = {}
    for path in (*_MANAGED_FILES, *listed):
        status = system.status(path)
        if status and status.kind == "link" and path not in (NVIDIA_DOCKER, deploy.NVIDIA_HOOK_PATH):
            status = system.status(system.real_path(path))  # files are read, and written, there
        if status is None:
            continue
        # A link, or a program too large to be gpuprov's, exists too and belongs to others.
        is_others = path == NVIDIA_DOCKER or (path == deploy.NVIDIA_HOOK_PATH and status.kind != "directory")
        content = b"" if is_others else None
        if status.kind == "file" and status.size <= _LARGEST_MANAGED_FILE:
            content = system.read_bytes(path)
        if content is not None:
            found[path] = FileFact(content, status.mode, status.uid, status.gid)
    return found


def facts_to_json(facts: HostFacts) -> dict[str, Any]:
    """Return the facts as JSON values: only the paths of files, only the number of installed packages."""
    data: dict[str, Any] = as_json(facts)
    data["files"] = sorted(facts.files)
    del data["served"], data["tables"]
    for name, engine in facts.engines.items():
        data["engines"][name]["files"] = sorted(engine.files)
    data["other_specifications"] = sorted(facts.other_specifications)
    data["packages"] = {"manager": facts.packages.manager, "installed": len(facts.packages.installed)}
    return data
