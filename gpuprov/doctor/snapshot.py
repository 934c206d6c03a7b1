"""The doctor's data about a host: the facts of every run, and additional evidence. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuprov.cdi.discover import DriverFacts
from gpuprov.checks.smi import exit_code
from gpuprov.doctor.containers import Containers
from gpuprov.doctor.parse import ModuleFile, Unit
from gpuprov.facts.host import HostFacts
from gpuprov.facts.kernels import InstalledKernel
from gpuprov.machine.image_mark import MARK
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec

# Where NVIDIA's GPU operator installs the toolkit on Kubernetes nodes.
OPERATORS_RUNTIME = "/usr/local/nvidia/toolkit/nvidia-container-runtime"
SPECIFICATION_FOLDERS = ("/etc/cdi", "/var/run/cdi")
# Where DKMS and Ubuntu keep the machine owner's key.
KEYS = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub")


@dataclass(frozen=True)
class Smi:
    """The output of `nvidia-smi -q -x`. `reason`: why it was not run."""

    returncode: int = 0
    text: str = ""
    reason: str = ""

    @property
    def code(self) -> int:
        """The exit code as nvidia-smi's manual has it."""
        return exit_code(self.returncode)

    @property
    def is_report(self) -> bool:
        """Whether it succeeded and printed its report and nothing before it."""
        return self.returncode == 0 and self.text.lstrip().startswith("<")

    @property
    def first_line(self) -> str:
        return next((line.strip() for line in self.text.splitlines() if line.strip()), "(silent)")


@dataclass(frozen=True)
class OtherSmi:
    """An nvidia-smi that comes before the driver's own on the PATH."""

    path: str
    smi: Smi


@dataclass(frozen=True)
class Installed:
    """What the journals say of the bundled runtime: the journal of its last installation, gpuprov's version (empty if
    not recorded), the time, and path → SHA-256 of its files. `replaced`: the files that were there before it. `fault`:
    why the journals can't be read.
    """

    journal: str = ""
    version: str = ""
    time: float = 0.0
    files: Mapping[str, str] = field(default_factory=dict)
    replaced: frozenset[str] = frozenset()
    fault: Problem | None = None


@dataclass(frozen=True)
class HostSnapshot:
    """The data about a host that the rules examine.

    `kernel_log`: relevant lines of this boot; `docker_log`: of the daemon that runs or failed last. `node_errors`: node
    → why it does not open, only if nvidia-smi fails. `loader`: the loader's cache entries for NVML and CUDA. `texts`:
    path → text of small files. `there`: the watched paths that exist; `absent`: paths named by a configuration or a
    specification that do not exist. `modified`: path → time. `library_files`: driver library → its version.
    `installed`: what the journals say of the bundled runtime, None without any.
    `package_change`: the last change of the driver by a package manager; `driver_since`: who brought its files, when.
    `in_place`: missing node → what occupies its
    path, "" if nothing does. `open_run`: the interrupted change of a gpuprov run; `runs_now`: a run that holds the
    host's lock. `rootless`: sockets of users' own dockers
    whose files name no runtime nvidia and no CDI. `smi_path`: the nvidia-smi that was run; `other_smi`: one
    before it on the PATH. `docker_file_rewritten`: the runs whose docker configuration somebody has
    changed since. `preload_said`: the loader's message about /etc/ld.so.preload. `closed`: CDI folders and
    files that only root can read, with their modes. `gpus_lost`: the trouble that GPUs of the last green verification
    are missing; `memory_fault`: why what that saw is not trusted. `is_booted`: systemd runs, which is False in the root
    file system of an image. `containers`: libraries that running containers load.
    """

    host: HostFacts
    spec: HostSpec = field(default_factory=HostSpec)
    kernel_log: tuple[str, ...] = ()
    kernel_log_error: str = ""
    smi: Smi = field(default_factory=Smi)
    node_errors: Mapping[str, str] = field(default_factory=dict)
    module: ModuleFile = field(default_factory=ModuleFile)
    kernels: tuple[InstalledKernel, ...] = ()
    dkms: str = ""
    loader: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, Unit] = field(default_factory=dict)
    docker_log: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    there: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    modified: Mapping[str, float] = field(default_factory=dict)
    settings_fault: str = ""
    specification_fault: str = ""
    installed: Installed | None = None
    programs: Mapping[str, str] = field(default_factory=dict)
    library_files: Mapping[str, str] = field(default_factory=dict)
    package_change: tuple[str, ...] = ()
    driver_since: str = ""
    in_place: Mapping[str, str] = field(default_factory=dict)
    node_modes: Mapping[str, int] = field(default_factory=dict)
    links_missing: tuple[str, ...] = ()
    not_executable: Mapping[str, int] = field(default_factory=dict)
    open_run: str = ""
    docker_unit: str = ""
    rootless: tuple[str, ...] = ()
    runs_now: str = ""
    smi_path: str = ""
    smi_is_script: bool = False
    other_smi: OtherSmi | None = None
    preload_said: str = ""
    docker_file_rewritten: int = 0
    closed: Mapping[str, int] = field(default_factory=dict)
    selinux: str = ""
    container_use_devices: str = ""
    audit_log: tuple[str, ...] = ()
    containers: Containers = field(default_factory=Containers)
    gpus_lost: Problem | None = None
    memory_fault: str = ""
    is_booted: bool = True

    @property
    def driver(self) -> DriverFacts:
        return self.host.driver

    @property
    def lacks_gpus_yet(self) -> bool:
        """Whether it is a copy of an image that has never seen a GPU: what needs a GPU is unknown, not broken."""
        return MARK in self.host.files and not self.host.gpus and self.gpus_lost is None
