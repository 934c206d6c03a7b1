"""Install a .run file: plan, inspect, unload the old driver, install, verify; and undo all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpuprov import driver_run
from gpuprov.cdi.discover import discover
from gpuprov.core.changes import Change, Json, NextAction, Tell, capture_path, restore_path
from gpuprov.core.commands import SYSTEM_PATH, Completed
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.places import CACHE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.driver import generations, installer, running_driver
from gpuprov.driver.kernel import brings_modules, prove_modules
from gpuprov.driver.supported_gpus import module_type as choose_modules
from gpuprov.driver.supported_gpus import read_supported_gpus
from gpuprov.driver.unload import Unloading, start_again, start_all_again, unload, unload_unused
from gpuprov.driver_run import INCOMPLETE_MARK, installs, require_digest, require_room
from gpuprov.facts.host import HostFacts
from gpuprov.facts.reboot_state import IN_USE_MARK
from gpuprov.machine.distros import distribution_of, kernel_compiler
from gpuprov.machine.machine import gather_os
from gpuprov.packages.registry import manager_of
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec

INSTALLER_LOG = "/var/log/nvidia-installer.log"
# The installer's own record of the installed files.
_INSTALLER_STATE = "/var/lib/nvidia/log"
# The file that it writes before it stops because of nouveau.
_INSTALLERS_BLACKLISTS = tuple(
    f"{folder}/nvidia-installer-disable-nouveau.conf" for folder in ("/etc/modprobe.d", "/usr/lib/modprobe.d")
)
# Compiling the kernel modules takes two to three minutes on two cores; slow machines and full disks take longer.
_INSTALLER_SECONDS = 3600
_UNINSTALL_SECONDS = 600
# A .run unpacks to at most about four times its size; the same again lands on the root file system.
_UNPACKED_RATIO = 5
_UNPACK = f"{CACHE_DIRECTORY}/unpack"
# The distributions' own libGL (Debian and Ubuntu; RHEL and SUSE). A libGL of an earlier .run does not count: the
# installer removes it before it checks.
_LIBGL_PACKAGES = ("libgl1", "libglvnd-glx")


def plan(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the installation; empty if the driver is complete and of the requested version."""
    if not installs(facts, spec):
        return ()
    way = running_driver.way(facts, spec)
    return (
        InstallDriver(
            version=spec.driver_version,
            path=driver_run.source(facts, spec)[1],
            sha256=driver_run.sha256(facts, spec),
            architecture=facts.architecture,
            kernel_modules=brings_modules(facts, spec),
            module_type=_module_type(facts, spec),
            replaces=facts.driver_installed_version,
            has_libgl=any(name in facts.packages.installed for name in _LIBGL_PACKAGES),
            signing_key=spec.module_signing_key,
            signing_certificate=spec.module_signing_certificate,
            unloading=way.unloading,
            keep_loaded=way.keep_loaded,
            gpu_device_ids=facts.gpu_device_ids,
            asked_module_type=spec.kernel_module_type,
            image_kernel=facts.kernel.release if facts.image is not None else "",
            without_systemd=facts.image is not None and facts.image.offline,
        ),
    )


def _module_type(facts: HostFacts, spec: HostSpec) -> str:
    # The installer would look for GPUs, and a machine that builds an image has none.
    choose = generations.module_type if facts.image is None else generations.settled_type
    return choose(facts.gpu_device_ids, spec.driver_version, spec.kernel_module_type)


@dataclass(frozen=True)
class InstallDriver(Change):
    """Install the driver of this version from a .run file on the host.

    `unloading`: how a loaded driver is unloaded first; `keep_loaded`: it stays loaded until a reboot loads the new one.
    `image_kernel`: the kernel of an image to build modules for, which are not loaded; `without_systemd`: systemd is
    absent.
    """

    version: str
    path: str
    sha256: str
    architecture: str
    kernel_modules: bool
    module_type: str = "auto"
    replaces: str = ""
    has_libgl: bool = False
    signing_key: str = ""
    signing_certificate: str = ""
    unloading: Unloading | None = None
    keep_loaded: bool = False
    gpu_device_ids: tuple[str, ...] = ()
    asked_module_type: str = "auto"
    image_kernel: str = ""
    without_systemd: bool = False

    # An interrupted installation is marked incomplete and repeated: uninstalling a partial one does not help.
    undo_when_interrupted: ClassVar[bool] = False
    executes: ClassVar[str] = CACHE_DIRECTORY
    bundle_part: ClassVar[str] = "driver"
    undo_disturbs: ClassVar[bool] = True

    @property
    def disturbs(self) -> bool:
        return self.unloading is not None or self.keep_loaded or bool(self.replaces)

    def summary(self) -> str:
        parts = "libraries and kernel modules" if self.kernel_modules else "libraries only"
        instead = f" instead of {self.replaces}" if self.replaces not in ("", self.version) else ""
        stops = (*self.unloading.containers, *self.unloading.units) if self.unloading is not None else ()
        meanwhile = f"; stopped meanwhile: {', '.join(stops)}" if stops else ""
        later = "; the loaded one stays until the reboot" if self.keep_loaded else ""
        return f"install NVIDIA driver {self.version} ({parts}){instead}{meanwhile}{later}"

    @property
    def key(self) -> str:
        return f"install NVIDIA driver {self.version}"

    def diff(self, system: System) -> str:
        return "\n".join(self.unloading.lines()) if self.unloading is not None else ""

    def capture(self, system: System) -> Json:
        return {
            "version": self.version,
            "replaces": self.replaces,
            "path": self.path,
            "kernel_modules": self.kernel_modules,
            "blacklists": [capture_path(system, path) for path in _INSTALLERS_BLACKLISTS],
        }

    def apply(self, system: System, tell: Tell) -> Json:
        header = self._inspect(system)
        require_room(system, self.path, _UNPACKED_RATIO, "/usr", "the driver")
        module_type = self._choose_modules(system, header) if self.kernel_modules else self.module_type
        if self.unloading is not None and not self._make_way(system, self.unloading, tell):
            # The next plan installs it beside the driver that can't be unloaded.
            return {"installed": False}
        system.make_directory(STATE_DIRECTORY, 0o700)
        system.write(INCOMPLETE_MARK, f"{self.version}\n".encode())
        done, dkms = self._install(system, module_type, tell)
        self._prove(system, done, dkms)
        start_again(system, tell)
        if self.unloading is not None and self.unloading.modules:
            self._prove_loaded(system)
        # The installer syncs nothing: after a power cut its files may be empty, and only this mark would show it.
        system.sync()
        system.remove(INCOMPLETE_MARK)
        if self.path.startswith(f"{CACHE_DIRECTORY}/"):
            system.remove(self.path)
        return {}

    def next_action(self, outcome: Json) -> NextAction:
        """Reboot before any change that needs the driver, if the old driver is still loaded."""
        return NextAction.PLAN_AGAIN if self.keep_loaded or not outcome.get("installed", True) else NextAction.CONTINUE

    def _make_way(self, system: System, wanted: Unloading, tell: Tell) -> bool:
        """Unload the loaded driver; say whether that succeeded, if a reboot may help instead."""
        try:
            unload(system, wanted, tell)
        except GpuprovError as error:
            if not wanted.boot_id:
                raise
            start_all_again(system, tell)
            tell(f"{error.problems[0].what}: a reboot is to bring the new one", 0, 0)
            system.write(IN_USE_MARK, f"{wanted.boot_id}\n".encode())
            return False
        return True

    def _choose_modules(self, system: System, header: installer.Header) -> str:
        """Return which modules to build, from the file's own list of GPUs; `module_type` if it has no answer."""
        chips = read_supported_gpus(system, self.path, header.skip)
        return choose_modules(self.gpu_device_ids, chips, self.asked_module_type, self.module_type)

    def _inspect(self, system: System) -> installer.Header:
        """Read the header before anything runs, and check file, version and architecture."""
        start = system.read_start(self.path, installer.HEADER_BYTES)
        if start is None:
            raise GpuprovError(f"there is no driver file {self.path} on this host", "", "check gpuprov_driver_url")
        require_digest(system, self.path, self.sha256, "the driver file", "gpuprov_driver_sha256")
        header = installer.parse_header(start.decode("latin-1"))
        if (header.version, header.architecture) != (self.version, self.architecture):
            raise GpuprovError(
                f"the driver file is {header.version} for {header.architecture}, "
                f"asked for is {self.version} for {self.architecture}",
                f"{self.path}: {header.label}",
                "correct gpuprov_driver_url or gpuprov_driver_version",
            )
        return header

    def _install(self, system: System, module_type: str, tell: Tell) -> tuple[Completed, bool]:
        dkms = self.kernel_modules and system.which("dkms") is not None
        # Always the same folder, root's own: what a killed run left there goes now.
        temporary = _UNPACK
        system.remove_tree(temporary)
        system.make_directory(temporary, 0o700)
        try:
            arguments = installer.install_arguments(
                self.version, kernel_modules=self.kernel_modules, module_type=module_type, dkms=dkms,
                has_libgl=self.has_libgl, keep_loaded=self.keep_loaded, image_kernel=self.image_kernel,
                without_systemd=self.without_systemd,
                temporary=temporary, log=INSTALLER_LOG, signing=(self.signing_key, self.signing_certificate),
            )  # fmt: skip
            # An old log must not be taken for this run's.
            system.remove(INSTALLER_LOG)
            command = ("sh", self.path, *arguments)
            env = _build_environment(system)
            done = system.run(
                command, timeout=_INSTALLER_SECONDS, env=env, on_line=lambda line: tell(line.strip(), 0, 0)
            )
        finally:
            system.remove_tree(temporary)
        return done, dkms

    def _prove(self, system: System, done: Completed, dkms: bool) -> None:
        """Verify the installation: the log, the libraries, the modules."""
        log, row = system.read_text(INSTALLER_LOG) or "", distribution_of(gather_os(system))
        initramfs = " ".join(row.initramfs) if row is not None else "dracut or update-initramfs"
        failure = installer.explain_failure(
            done.returncode,
            log,
            done.stdout + done.stderr,
            commands=manager_of(row).commands,
            initramfs=initramfs,
        )
        if failure is not None:
            what, line, next_step = failure
            raise GpuprovError(
                f"driver {self.version} was not installed: {what}",
                f"the installer exited {done.returncode}; {INSTALLER_LOG}: {line}",
                next_step,
            )
        found = discover(system).library_version
        if found != self.version:
            raise GpuprovError(
                f"the installer reported success, but driver {self.version} is missing",
                f"the loader finds libnvidia-ml.so of version {found or '(none)'}",
                f"see {INSTALLER_LOG}",
            )
        if self.kernel_modules:
            prove_modules(system, self.version, dkms=dkms)

    def _prove_loaded(self, system: System) -> None:
        loaded = discover(system).kernel_version
        if loaded != self.version:
            raise GpuprovError(
                f"driver {self.version} is installed, but the kernel runs {loaded or 'none'}",
                "/proc/driver/nvidia/version",
                "dmesg | grep -i nvrm tells why it was not loaded; then: modprobe nvidia",
            )

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Uninstall. A replaced driver can't be restored; no driver remains installed."""
        nothing_done = outcome is not None and not outcome.get("installed", True)
        if not nothing_done and not (outcome is None and _former_is_whole(system, before)):
            _uninstall(system, before)
        # An installation cut short by a full disk may lack its uninstaller: its remains must not look like a driver.
        if discover(system).library_version != before["version"]:
            system.remove(INCOMPLETE_MARK)
        for image in before.get("blacklists", ()):
            restore_path(system, image)
        start_all_again(system, lambda message, done, total: None)

    @classmethod
    def irreversible(
        cls, system: System, before: Json, outcome: Json | None, earlier: tuple[Json, ...]
    ) -> tuple[str, ...]:
        replaced, version = before.get("replaces", ""), before["version"]
        if replaced in ("", version, *(one["version"] for one in earlier)):
            return ()
        return (f"driver {replaced}, which {version} replaced, is not restored: no driver will remain installed",)


def _former_is_whole(system: System, before: Json) -> bool:
    """Say whether the driver to be replaced is still complete: most failures come before it is touched."""
    former = before.get("replaces", "")
    return former not in ("", before["version"]) and discover(system).library_version == former


def _uninstall(system: System, before: Json) -> None:
    """Run the installer's uninstaller; if its copy was not installed, use the .run."""
    program, path = system.which("nvidia-uninstall"), before.get("path", "")
    if program is not None:
        command: tuple[str, ...] = (program, "--silent")
    elif system.exists(_INSTALLER_STATE) and path and system.exists(path):
        system.make_directory(_UNPACK, 0o700)
        command = ("sh", path, "--tmpdir", _UNPACK, "--silent", "--uninstall")
    else:
        return
    # A partial uninstallation leaves no driver: the next installation must not mistake it for one.
    system.write(INCOMPLETE_MARK, f"{before['version']}\n".encode())
    system.run(command, timeout=_UNINSTALL_SECONDS)
    system.remove_tree(_UNPACK)
    # In a system container the modules are the container host's.
    if before.get("kernel_modules"):
        unload_unused(system)


def _build_environment(system: System) -> dict[str, str]:
    """Return the PATH with the compiler that built the running kernel first, if it is not the host's `gcc`."""
    row = distribution_of(gather_os(system))
    folder = kernel_compiler(row, system.kernel_release()) if row is not None else ""
    return {"PATH": f"{folder}:{SYSTEM_PATH}"} if folder and system.exists(folder) else {}
