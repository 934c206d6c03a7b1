"""A driver from NVIDIA's .run file: `RunFile` finds it, and `InstallDriver` installs, proves and removes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Callable, ClassVar

from gpuprov.cdi.discover import discover
from gpuprov.core.changes import Change, Json, Jsons, NextAction, Tell, capture_path, restore_paths, tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.places import CACHE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.driver import generations, installer, run_files, running_driver
from gpuprov.driver.installer import Installation
from gpuprov.driver.kernel import build_environment, prove_modules, require_sources
from gpuprov.driver.run_files import INCOMPLETE_MARK, UNPACK, FetchRunfile, local_path, require_digest, require_room
from gpuprov.driver.running_driver import Unloading, start_again, start_all_again, unload
from gpuprov.driver.source import DriverSource
from gpuprov.facts.boot import IN_USE_MARK
from gpuprov.facts.driver import INSTALLER_LOG
from gpuprov.machine.distros import distribution_of
from gpuprov.machine.machine import gather_os
from gpuprov.packages.managers import manager_of
from gpuprov.protocol.dataclass import asdict, dataclass, fields, replace
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.tables import Tables

# The file that it writes before it stops because of nouveau.
_INSTALLERS_BLACKLISTS = tuple(
    f"{folder}/nvidia-installer-disable-nouveau.conf" for folder in ("/etc/modprobe.d", "/usr/lib/modprobe.d")
)
# Compiling the kernel modules takes two to three minutes on two cores; slow machines and full disks take longer.
_INSTALLER_SECONDS = 3600
# A .run unpacks to at most about four times its size; the same again lands on the root file system.
_UNPACKED_RATIO = 5
# The distributions' own libGL (Debian and Ubuntu; RHEL and SUSE). A libGL of an earlier .run does not count: the
# installer removes it before it checks.
_LIBGL_PACKAGES = ("libgl1", "libglvnd-glx")
# The largest .run has 460 MB and unpacks to 1.8 GB; what it installs has about 1 GB.
_ROOM = {CACHE_DIRECTORY: 2400 << 20, "/usr": 1200 << 20}


def default_url(version: str, architecture: str, tables: Tables) -> str:
    """Return where NVIDIA publishes a driver with its SHA-256 beside it.

    Some data-centre releases are only at …/tesla/VERSION/, where no digest lies: for those both must be given.
    """
    return f"{tables.server(f'nvidia-driver-{architecture}')}/{run_files.release_path(version, architecture)}"


class RunFile(DriverSource):
    """NVIDIA's .run file on one host."""

    has_installer = True

    # -- the file ----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where the file comes from; a path if it is on the host already."""
        return self.spec.driver_url or default_url(self.spec.driver_version, self.facts.architecture, self.facts.tables)

    @property
    def path(self) -> str:
        """Where the file lies on the host once it is there."""
        return local_path(self.url)

    @property
    def sha256(self) -> str:
        """The digest that is asked for, or known of NVIDIA's own file: that holds wherever the file comes from.

        A path on the host is the administrator's own file. It is empty where the digest beside the file counts.
        """
        if self.spec.driver_sha256 or self.spec.driver_url.startswith("/"):
            return self.spec.driver_sha256
        return self.facts.tables.known_sha256(self.spec.driver_version, self.facts.architecture)

    def plan_download(self) -> tuple[Change, ...]:
        there = self.facts.downloads.get(self.path)
        if not self.installs or self.url == self.path or (there and self.sha256 in ("", there)):
            return ()
        return (FetchRunfile(self.url, self.path, self.sha256),)

    # -- versions ----------------------------------------------------------------------------------------------------

    @property
    def installs(self) -> bool:
        """Whether the driver will be installed: it is of another version, or lacks a file or this kernel's module."""
        facts = self.facts
        other = facts.driver_installed_version != self.spec.driver_version
        unbuilt = self.brings_modules and facts.image is None and not (facts.has_module or facts.driver_loaded_version)
        return other or unbuilt or bool(facts.driver_damage) or INCOMPLETE_MARK in facts.files

    @property
    def is_installed(self) -> bool:
        return super().is_installed and not self.installs

    @property
    def version(self) -> str:
        return self.spec.driver_version

    @property
    def coming_version(self) -> str:
        return self.spec.driver_version if self.installs else ""

    # -- problems ----------------------------------------------------------------------------------------------------

    def problems(self) -> tuple[Problem, ...]:
        return tuple(self._problems())

    def _problems(self) -> Iterator[Problem]:
        facts, spec, version = self.facts, self.spec, self.spec.driver_version
        # Libraries and kernel must match, in a container too, or NVML and CUDA fail (NVML error 18).
        loaded, is_outside = facts.driver_loaded_version, not self.brings_modules and facts.image is None
        if is_outside and not loaded:
            yield self.not_loaded_problem(f"driver {version}" if version else "the driver")
        elif is_outside and version not in ("", loaded):
            what = f"driver {version} is asked for, but {self.outside} runs {loaded}: the two must match"
            seen = "/proc/driver/nvidia/version"
            yield Problem(what, seen, f'set gpuprov_driver_version: "{loaded}", or update {self.outside}')
        if "." not in version or facts.driver_packaged:
            return  # plan/refusals.py has the problem
        if self.brings_modules:
            # By the list in the file if that is available; by its PCI id a GPU that the list does not know.
            ids, served = facts.gpu_device_ids, facts.served
            yield from generations.listed_problems(ids, served, spec.kernel_module_type)
            unlisted = [one for one in ids if one not in served]
            yield from generations.problems(unlisted, version, spec.kernel_module_type, facts.tables)
        if not self.installs:
            return
        # NVIDIA's own file has a known size; another file is checked after its download.
        for place, needed in _ROOM.items() if not spec.driver_url else ():
            free = facts.free_bytes.get(place, needed)
            if free < needed:
                what = f"not enough room on the file system of {place} for the driver"
                seen = f"{free // 2**20} MiB free, {needed // 2**20} MiB needed"
                yield Problem(what, seen, f"make room: df -h {place}")
        yield from running_driver.problems(self)

    # -- installation ------------------------------------------------------------------------------------------------

    def plan(self) -> tuple[Change, ...]:
        """Return the installation; empty if the driver is complete and of the requested version."""
        if not self.installs:
            return ()
        facts, spec, replacement = self.facts, self.spec, running_driver.replacement(self)
        # The installer would look for GPUs, and a machine that builds an image has none.
        choose = generations.module_type if facts.image is None else generations.settled_type
        return (
            InstallDriver(
                spec.driver_version,
                self.url,
                self.sha256,
                facts.architecture,
                self.brings_modules,
                module_type=choose(facts.gpu_device_ids, spec.driver_version, spec.kernel_module_type, facts.tables),
                replaces=facts.driver_installed_version,
                has_libgl=any(name in facts.packages.installed for name in _LIBGL_PACKAGES),
                signing_key=spec.module_signing_key,
                signing_certificate=spec.module_signing_certificate,
                unloading=replacement.unloading,
                keep_loaded=replacement.keep_loaded,
                gpu_device_ids=facts.gpu_device_ids,
                asked_module_type=spec.kernel_module_type,
                image_kernel=facts.kernel.release if facts.image is not None else "",
                keep=spec.keep_driver and facts.image is None,
                by_hand=self._reinstallation(choose),
                without_systemd=facts.image is not None and facts.image.offline,
            ),
        )

    def _reinstallation(self, choose: Callable[[Sequence[str], str, str, Tables], str]) -> Installation | None:
        """Return how a driver that no record describes can be installed again: its digest makes any download good."""
        facts, spec, version = self.facts, self.spec, self.facts.driver_installed_version
        digest = facts.tables.known_sha256(version, facts.architecture)
        if not digest or facts.bundle is not None:
            return None
        file, mirror = (version, facts.architecture), spec.driver_mirror
        url = run_files.url_on_mirror(mirror, *file) if mirror else default_url(*file, facts.tables)
        kind = choose(facts.gpu_device_ids, version, spec.kernel_module_type, facts.tables)
        has_libgl = any(name in facts.packages.installed for name in _LIBGL_PACKAGES)
        return Installation(version, url, digest, facts.architecture, self.brings_modules, kind, has_libgl)


@dataclass(frozen=True)
class InstallDriver(Installation, Change):
    """Install the driver of this version from a .run file on the host.

    `unloading`: how a loaded driver is unloaded first; `keep_loaded`: it stays loaded until a reboot loads the new one.
    `keep`: whether its file stays on the host for a later rollback. `by_hand`: how the replaced driver can be installed
    again, if gpuprov did not install it.
    `image_kernel`: the kernel of an image to build modules for, which are not loaded; `without_systemd`: systemd is
    absent.
    """

    replaces: str = ""
    unloading: Unloading | None = None
    keep_loaded: bool = False
    gpu_device_ids: tuple[str, ...] = ()
    asked_module_type: str = "auto"
    image_kernel: str = ""
    without_systemd: bool = False
    keep: bool = False
    by_hand: Installation | None = None

    # An interrupted installation is marked incomplete and repeated: uninstalling a partial one does not help.
    undo_when_interrupted: ClassVar[bool] = False
    executes: ClassVar[str] = CACHE_DIRECTORY
    bundle_part: ClassVar[str] = "driver"
    undo_disturbs: ClassVar[bool] = True
    undo_goes_to_first: ClassVar[bool] = True  # an uninstall restores no driver between

    @property
    def disturbs(self) -> bool:
        return self.unloading is not None or self.keep_loaded or bool(self.replaces)

    @property
    def path(self) -> str:
        """Where the file lies on the host."""
        return local_path(self.url)

    def summary(self) -> str:
        parts = "libraries and kernel modules" if self.kernel_modules else "libraries only"
        instead = f" instead of {self.replaces}" if self.replaces not in ("", self.version) else ""
        meanwhile = self.unloading.meanwhile if self.unloading is not None else ""
        later = "; the loaded one stays until the reboot" if self.keep_loaded else ""
        return f"install NVIDIA driver {self.version} ({parts}){instead}{meanwhile}{later}"

    @property
    def key(self) -> str:
        return f"install NVIDIA driver {self.version}"

    def diff(self, system: System) -> str:
        return str(self.unloading) if self.unloading is not None else ""

    def capture(self, system: System) -> Json:
        return {
            "version": self.version,
            "replaces": self.replaces,
            "path": self.path,
            "kernel_modules": self.kernel_modules,
            "blacklists": [capture_path(system, path) for path in _INSTALLERS_BLACKLISTS],
            "record": capture_path(system, run_files.RECORD),
            "by_hand": asdict(self.by_hand) if self.by_hand is not None else None,
        }

    def apply(self, system: System, tell: Tell) -> Json:
        header = self.inspect(system)
        require_room(system, self.path, _UNPACKED_RATIO, "/usr", "the driver")
        # Before anything runs it: the file may lie where others can replace it.
        digest = self.sha256 or system.sha256(self.path)
        kind = self.module_type
        if self.kernel_modules:
            # The file's own list of GPUs decides, if it has an answer.
            chips = generations.read_supported_gpus(system, self.path, header.skip)
            kind = generations.listed_module_type(self.gpu_device_ids, chips, self.asked_module_type, kind)
            require_sources(system)
        if self.unloading is not None and not self._make_way(system, self.unloading, tell):
            # The next plan installs it beside the driver that can't be unloaded.
            return {"installed": False}
        system.make_directory(STATE_DIRECTORY, 0o700)
        system.write(INCOMPLETE_MARK, f"{self.version}\n".encode())
        self.install(system, kind, tell)
        start_again(system, tell)
        way = self.unloading
        if way is not None and way.modules and (loaded := discover(system).kernel_version) != self.version:
            what = f"driver {self.version} is installed, but the kernel runs {loaded or 'none'}"
            seen = "/proc/driver/nvidia/version"
            raise GpuprovError(what, seen, "dmesg | grep -i nvrm tells why it was not loaded; then: modprobe nvidia")
        # The installer syncs nothing: after a power cut its files may be empty, and only this mark would show it.
        system.sync()
        # How the driver was installed, and its file, so that another one can be undone.
        values = {one.name: getattr(self, one.name) for one in fields(Installation)}
        record = Installation(**{**values, "sha256": digest, "module_type": kind})
        run_files.record_installation(system, self.path, record, content=self.keep, replaces=self.replaces, tell=tell)
        system.remove(INCOMPLETE_MARK)
        if self.path.startswith(f"{CACHE_DIRECTORY}/"):
            system.remove(self.path)
        return {}

    def way_back(self, system: System) -> tuple[str, ...]:
        if self.replaces in ("", self.version):
            return ()
        former = run_files.recorded_installation(system, self.replaces) or self.by_hand
        return (f"way back: {run_files.restoration(system, self.replaces, former)[0]}",)

    @classmethod
    def restores(cls, system: System, before: Json, outcome: Json | None) -> tuple[str, ...]:
        former = run_files.replaced_installation(before)
        found, possible = run_files.restoration(system, before.get("replaces", ""), former)
        untouched = run_files.former_is_whole(system, before, outcome)
        return (f"restores {found}",) if former is not None and possible and not untouched else ()

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

    def inspect(self, system: System) -> installer.Header:
        """Read the header before anything runs, and check file, version and architecture."""
        start = system.read_start(self.path, installer.HEADER_BYTES)
        if start is None:
            raise GpuprovError(f"there is no driver file {self.path} on this host", "", "check gpuprov_driver_url")
        require_digest(system, self.path, self.sha256, "the driver file", "gpuprov_driver_sha256")
        header = installer.parse_header(start.decode("latin-1"))
        if (header.version, header.architecture) != (self.version, self.architecture):
            asked = f"{self.version} for {self.architecture}"
            what = f"the driver file is {header.version} for {header.architecture}, asked for is {asked}"
            step = "correct gpuprov_driver_url or gpuprov_driver_version"
            raise GpuprovError(what, f"{self.path}: {header.label}", step)
        return header

    def arguments(self, *, dkms: bool, temporary: str, log: str) -> tuple[str, ...]:
        found = [*super().arguments(dkms=dkms, temporary=temporary, log=log)]
        beside = ["--skip-module-load", "--allow-installation-with-running-driver"]
        if self.keep_loaded:
            found += beside
        if self.kernel_modules and self.image_kernel:
            # Look at nothing that the builder's machine runs or has loaded.
            found += [f"--kernel-name={self.image_kernel}", "--no-nouveau-check", "--no-x-check"]
            found += filter(self.knows, beside)
        if self.without_systemd and self.knows("--no-systemd"):
            found.append("--no-systemd")
        return tuple(found)

    def install(self, system: System, module_type: str, tell: Tell) -> None:
        """Run the installer, and verify what it installed. Raises GpuprovError."""
        dkms = self.kernel_modules and system.which("dkms") is not None
        arguments = replace(self, module_type=module_type).arguments(dkms=dkms, temporary=UNPACK, log=INSTALLER_LOG)
        # Always the same folder, root's own: what a killed run left there goes now.
        system.remove_tree(UNPACK)
        system.make_directory(UNPACK, 0o700)
        try:
            # An old log must not be taken for this run's.
            system.remove(INSTALLER_LOG)
            done = system.run(
                ("sh", self.path, *arguments), timeout=_INSTALLER_SECONDS, env=build_environment(system),
                on_line=lambda line: tell(line.strip(), 0, 0),
            )  # fmt: skip
        finally:
            system.remove_tree(UNPACK)
        self._prove(system, done, dkms)

    def _prove(self, system: System, done: Completed, dkms: bool) -> None:
        """Verify the installation: the log, the libraries, the modules."""
        log, row = system.read_text(INSTALLER_LOG) or "", distribution_of(gather_os(system))
        initramfs = " ".join(row.initramfs) or "dracut or update-initramfs"
        output, commands = done.stdout + done.stderr, manager_of(row).commands
        failure = installer.explain_failure(done.returncode, log, output, commands=commands, initramfs=initramfs)
        if failure is not None:
            what, line, next_step = failure
            what = f"driver {self.version} was not installed: {what}"
            raise GpuprovError(what, f"the installer exited {done.returncode}; {INSTALLER_LOG}: {line}", next_step)
        found = discover(system).library_version
        if found != self.version:
            what = f"the installer reported success, but driver {self.version} is missing"
            seen = f"the loader finds libnvidia-ml.so of version {found or '(none)'}"
            raise GpuprovError(what, seen, f"see {INSTALLER_LOG}")
        if self.kernel_modules:
            prove_modules(system, self.version, dkms=dkms)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Uninstall, and install the replaced driver again if its file can be had; else no driver remains installed.

        Raises GpuprovError if the uninstaller fails and the driver is still there.
        """
        failed = None
        if not (run_files.former_is_whole(system, before, outcome) or run_files.installed_by_others(system, before)):
            former = run_files.prepare_restoration(system, before)
            done = run_files.uninstall(system, before)
            if former is not None:
                _install_again(system, former)
            elif done is not None and not done.ok:
                failed = done
        # An installation cut short by a full disk may lack its uninstaller: its remains must not look like a driver.
        if discover(system).library_version != before["version"]:
            system.remove(INCOMPLETE_MARK)
        restore_paths(system, (*before.get("blacklists", ()), *filter(None, (before.get("record"),))))
        start_all_again(system, tell_nobody)
        if failed is not None and discover(system).library_version == before["version"]:
            what = f"driver {before['version']} could not be uninstalled, and is still there"
            step = "fix what it names (/var/log/nvidia-uninstall.log), then run the same command again"
            raise GpuprovError(what, failed.evidence(4), step)

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        if others := run_files.installed_by_others(system, before):
            return (f"driver {others} stays: gpuprov did not install it",)
        replaced, version = before.get("replaces", ""), before["version"]
        restored = replaced in ("", version, *(one["version"] for one in earlier))
        if restored or run_files.former_is_whole(system, before, outcome):
            return ()
        found, possible = run_files.restoration(system, replaced, run_files.replaced_installation(before))
        return () if possible else (f"{found}; no driver will remain installed",)


def _install_again(system: System, former: Installation) -> None:
    """Install the driver that was replaced, as it was installed; note a reboot if another one stays loaded."""
    loaded = discover(system).kernel_version if former.kernel_modules else ""
    change = InstallDriver(**{**asdict(former), "url": former.kept_path}, keep_loaded=bool(loaded))
    change.inspect(system)
    system.make_directory(STATE_DIRECTORY, 0o700)
    system.write(INCOMPLETE_MARK, f"{former.version}\n".encode())
    change.install(system, former.module_type, tell_nobody)
    system.sync()
    system.remove(INCOMPLETE_MARK)
    running_driver.note_other_driver(system, loaded, former.version)
