"""The driver from NVIDIA's .run file: plan, fetch, install, prove; what the file itself is, runfile.py knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpuprov import generations, releases, runfile
from gpuprov.cdi.discover import discover
from gpuprov.changes import Change, Json, Tell, parent_of
from gpuprov.download import fetch, masked, published_sha256
from gpuprov.errors import GpuprovError
from gpuprov.facts import CACHE_DIRECTORY, HostFacts
from gpuprov.journal import STATE_DIRECTORY
from gpuprov.kernel import builds_modules
from gpuprov.spec import HostSpec
from gpuprov.system import Completed, System

# Stands while an installer runs: libraries found beside it may be half an installation, whatever their version.
INCOMPLETE_MARK = f"{STATE_DIRECTORY}/driver-incomplete"
INSTALLER_LOG = "/var/log/nvidia-installer.log"
# Compiling the kernel modules takes two to three minutes on two cores; slow machines and full disks take longer.
_INSTALLER_SECONDS = 3600
# A .run unpacks to at most about four times its size; the same again lands on the root file system.
_UNPACKED_RATIO = 5
_HEADER_BYTES = 8192
# The distributions' own libGL (Debian and Ubuntu; RHEL and SUSE). One that an earlier .run brought does not count: the
# installer takes it away before it looks.
_LIBGL_PACKAGES = ("libgl1", "libglvnd-glx")


def plan_download(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the download of the .run file; it comes before all else, so that a wrong URL or digest costs nothing."""
    source, path = _source(facts, spec)
    there = facts.downloads.get(path)
    sha256 = _sha256(facts, spec)
    if not installs(facts, spec) or source == path or (there and sha256 in ("", there)):
        return ()
    return (FetchRunfile(source, path, sha256),)


def plan(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the installation, or nothing where the driver is whole and of the asked version."""
    if not installs(facts, spec):
        return ()
    return (
        InstallDriver(
            version=spec.driver_version,
            path=_source(facts, spec)[1],
            sha256=_sha256(facts, spec),
            architecture=facts.architecture,
            kernel_modules=builds_modules(facts, spec),
            module_type=generations.module_type(facts.gpu_device_ids, spec.driver_version, spec.kernel_module_type),
            replaces=facts.driver_installed_version,
            has_libgl=any(name in facts.packages.installed for name in _LIBGL_PACKAGES),
            signing_key=spec.module_signing_key,
            signing_certificate=spec.module_signing_certificate,
        ),
    )


def _is_untouched(system: System, before: Json, outcome: Json | None) -> bool:
    """Say whether an installation failed before it did anything to the driver that it was to replace.

    Either it was not begun (the file was another, or too large for the disk), or the installer gave up, as it does when
    modules can't be built, before it took the old driver away: then the loader still finds that one.
    """
    if outcome is not None:
        return False
    found, version, replaced = discover(system).library_version, str(before["version"]), str(before.get("replaces", ""))
    if system.status(INCOMPLETE_MARK) is None:
        return found != version
    return found == replaced and replaced not in ("", version)


def _sha256(facts: HostFacts, spec: HostSpec) -> str:
    """Return the digest that is asked for, or known of NVIDIA's own file; nothing where one beside the file counts."""
    if spec.driver_sha256 or spec.driver_url:
        return spec.driver_sha256
    return releases.known_sha256(spec.driver_version, facts.architecture)


def _source(facts: HostFacts, spec: HostSpec) -> tuple[str, str]:
    """Return where the .run file comes from and where it lies on the host; the same if it is there already."""
    source = spec.driver_url or default_url(spec.driver_version, facts.architecture)
    return source, source if source.startswith("/") else f"{CACHE_DIRECTORY}/{source.rstrip('/').rpartition('/')[2]}"


def installs(facts: HostFacts, spec: HostSpec) -> bool:
    """Say whether the driver will be installed."""
    if spec.driver != "runfile":
        return False
    return facts.driver_installed_version != spec.driver_version or INCOMPLETE_MARK in facts.files


def default_url(version: str, architecture: str) -> str:
    """Return where NVIDIA publishes a driver with its SHA-256 beside it.

    Some data-centre releases are only at …/tesla/VERSION/, where no digest lies: for those both must be given.
    """
    return (
        f"https://us.download.nvidia.com/XFree86/Linux-{architecture}/{version}/"
        f"NVIDIA-Linux-{architecture}-{version}.run"
    )


@dataclass(frozen=True)
class FetchRunfile(Change):
    """The .run file shall lie in the cache, its digest right. A partial download is kept and gone on with."""

    url: str
    path: str
    sha256: str

    undo_when_interrupted: ClassVar[bool] = False

    def summary(self) -> str:
        return f"download {masked(self.url)}"

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,)

    def capture(self, system: System) -> Json:
        return {"path": self.path, "existed": system.exists(self.path)}

    def apply(self, system: System, tell: Tell) -> Json:
        digest = self.sha256 or published_sha256(system, self.url)
        if not digest:
            raise GpuprovError(
                "the driver's SHA-256 is not known, so a download could not be trusted",
                f"there is no {masked(self.url)}.sha256sum",
                "set gpuprov_driver_sha256 (sha256sum FILE, of a file that you trust)",
            )
        system.make_directory(parent_of(self.path), 0o700)
        fetch(system, self.url, self.path, sha256=digest, tell=tell)
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if not before["existed"]:
            system.remove(before["path"])


@dataclass(frozen=True)
class InstallDriver(Change):
    """The driver of this version shall be installed from a .run file on the host."""

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

    # What was cut off is marked incomplete and installed again over itself: uninstalling half of it helps nobody.
    undo_when_interrupted: ClassVar[bool] = False

    def summary(self) -> str:
        parts = "libraries and kernel modules" if self.kernel_modules else "libraries only"
        instead = f" instead of {self.replaces}" if self.replaces not in ("", self.version) else ""
        return f"install NVIDIA driver {self.version} ({parts}){instead}"

    def capture(self, system: System) -> Json:
        return {"version": self.version, "replaces": self.replaces}

    def apply(self, system: System, tell: Tell) -> Json:
        self._inspect(system)
        self._require_space(system)
        system.make_directory(STATE_DIRECTORY, 0o700)
        system.write(INCOMPLETE_MARK, f"{self.version}\n".encode())
        done, dkms = self._install(system, tell)
        self._prove(system, done, dkms)
        # The installer syncs nothing: after a power cut its files may be empty, and only the mark would tell.
        system.sync()
        system.remove(INCOMPLETE_MARK)
        if self.path.startswith(f"{CACHE_DIRECTORY}/"):
            system.remove(self.path)
        return {}

    def _inspect(self, system: System) -> None:
        """Read the header before anything runs: right file, right version, right architecture."""
        start = system.read_start(self.path, _HEADER_BYTES)
        if start is None:
            raise GpuprovError(f"there is no driver file {self.path} on this host", "", "check gpuprov_driver_url")
        if self.sha256 and (digest := system.sha256(self.path)) != self.sha256:
            raise GpuprovError(
                "the driver file is not the one that was asked for",
                f"{self.path} has SHA-256 {digest}, gpuprov_driver_sha256 is {self.sha256}",
                "get the file anew, or correct the digest",
            )
        header = runfile.parse_header(start.decode("latin-1"))
        if (header.version, header.architecture) != (self.version, self.architecture):
            raise GpuprovError(
                f"the driver file is {header.version} for {header.architecture}, "
                f"asked for is {self.version} for {self.architecture}",
                f"{self.path}: {header.label}",
                "correct gpuprov_driver_url or gpuprov_driver_version",
            )

    def _require_space(self, system: System) -> None:
        """A full disk shows up as exit code 15 or a SIGBUS in the middle: look before."""
        found = system.status(self.path)
        need = (found.size if found else 0) * _UNPACKED_RATIO
        for place in (CACHE_DIRECTORY, "/usr"):
            free = system.free_bytes(place)
            if free < need:
                raise GpuprovError(
                    f"not enough room on the file system of {place} to install the driver",
                    f"{free // 2**20} MiB free, {need // 2**20} MiB needed",
                    f"make room: df -h {place}",
                )

    def _install(self, system: System, tell: Tell) -> tuple[Completed, bool]:
        dkms = self.kernel_modules and system.which("dkms") is not None
        # Always the same folder, root's own: what a killed run left there goes now.
        temporary = f"{CACHE_DIRECTORY}/unpack"
        system.remove_tree(temporary)
        system.make_directory(temporary, 0o700)
        try:
            arguments = runfile.install_arguments(
                self.version, kernel_modules=self.kernel_modules, module_type=self.module_type, dkms=dkms,
                has_libgl=self.has_libgl,
                temporary=temporary, log=INSTALLER_LOG, signing=(self.signing_key, self.signing_certificate),
            )  # fmt: skip
            # An old log must not be taken for this run's.
            system.remove(INSTALLER_LOG)
            command = ("sh", self.path, *arguments)
            done = system.run(command, timeout=_INSTALLER_SECONDS, on_line=lambda line: tell(line.strip(), 0, 0))
        finally:
            system.remove_tree(temporary)
        return done, dkms

    def _prove(self, system: System, done: Completed, dkms: bool) -> None:
        """Look for oneself: the log, the libraries, DKMS, nvidia-smi."""
        failure = runfile.explain_failure(
            done.returncode, system.read_text(INSTALLER_LOG) or "", done.stdout + done.stderr
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
                f"the installer reported success, but driver {self.version} is not there",
                f"the loader finds libnvidia-ml.so of version {found or '(none)'}",
                f"see {INSTALLER_LOG}",
            )
        if dkms:
            self._prove_dkms(system)

    def _prove_dkms(self, system: System) -> None:
        status = system.run(("dkms", "status"))
        if f"nvidia/{self.version}" not in status.stdout and f"nvidia, {self.version}" not in status.stdout:
            raise GpuprovError(
                "the driver is not registered with DKMS: the next kernel upgrade would lose it",
                status.evidence(),
                f"dkms install nvidia/{self.version}",
            )

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Uninstall. A driver that was replaced can't be brought back; its place is left empty."""
        uninstaller = system.which("nvidia-uninstall")
        if uninstaller is not None and not _is_untouched(system, before, outcome):
            # Half an uninstallation is no driver: the next installation must not take it for one.
            system.write(INCOMPLETE_MARK, f"{before['version']}\n".encode())
            system.run((uninstaller, "--silent"), timeout=600)
        # Cut short by a full disk, an installation may lack its uninstaller: what is left must not pass for a driver.
        if discover(system).library_version != before["version"]:
            system.remove(INCOMPLETE_MARK)

    @classmethod
    def lasting(cls, system: System, before: Json, outcome: Json | None, earlier: tuple[Json, ...]) -> tuple[str, ...]:
        replaced, version = before.get("replaces", ""), before["version"]
        if replaced in ("", version, *(one["version"] for one in earlier)):
            return ()
        return (f"driver {replaced}, which {version} replaced, does not come back: no driver will be installed",)
