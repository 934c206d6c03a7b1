"""The doctor's data about a host: the facts of every run, and additional evidence; and how its parts are read. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gpuprov.cdi.discover import DriverFacts
from gpuprov.checks.cuda.compatibility import Incompatibility
from gpuprov.checks.smi import exit_code
from gpuprov.engines.docker_unit import parse_show
from gpuprov.facts.host import HostFacts
from gpuprov.facts.kernels import InstalledKernel
from gpuprov.machine.pci import FOR_GUESTS, MARK, PciGpu
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec

# Where NVIDIA's GPU operator installs the toolkit on Kubernetes nodes.
OPERATORS_RUNTIME = "/usr/local/nvidia/toolkit/nvidia-container-runtime"
SPECIFICATION_FOLDERS = ("/etc/cdi", "/var/run/cdi")
# Where DKMS and Ubuntu keep the machine owner's key.
KEYS = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub")
# What a .run puts into /etc, in the installer's record of its files: 0 is a file, 1 a link.
VULKAN_AND_OPENCL = re.compile(r"(?m)^0: (/etc/(?:OpenCL|vulkan\w*)/[\w./-]+)$")
# Lines of the kernel's log that may explain why a GPU does not work.
_TELLING = re.compile(
    r"NVRM|nvidia|nouveau|NovaCore|nova[_-]core|Key was rejected|unavailable key|unsigned module|trusted key|Lockdown|"
    r"modprobe|DMAR: \[|AMD-Vi: Event|avc: +denied|apparmor=\"DENIED\"|BAR \d|devmem_alloc_pagemap|module_layout",
    re.IGNORECASE,
)
_MOST_LINES = 4000
_MOST_EVIDENCE = 6
# Time, host and program as written by dmesg and journalctl -k, thread or CPU (CONFIG_PRINTK_CALLER); the driver's own.
_PREFIX = re.compile(r"^(?:\[ *\+?[\d.]+\] *|\w{3} +\d+ [\d:]+ \S+ )?(?:kernel: *)?(?:\[ *[TC\d.]+\] *)?(?:NVRM: *)?")
# systemd's message before a start, and dockerd's first one, which a refused configuration file prevents; earlier lines
# belong to an earlier daemon.
_DOCKER_BEGINS = re.compile(r"^Starting (?:docker\.service|Docker Application)|Starting up")


UNIT_PROPERTIES = ("Id", "LoadState", "ActiveState", "Result", "UnitFileState")


@dataclass(frozen=True)
class Unit:
    """A systemd unit, with the properties of `systemctl show`."""

    load: str = ""
    active: str = ""
    result: str = ""
    enabled: str = ""


@dataclass(frozen=True)
class ModuleFile:
    """The driver's module as modinfo describes it; `signer` is "" for an unsigned one."""

    path: str = ""
    version: str = ""
    vermagic: str = ""
    signer: str = ""
    license: str = ""

    @property
    def name(self) -> str:
        """The module's name for modinfo: Debian calls it nvidia-current."""
        return self.path.rpartition("/")[2].partition(".")[0] or "nvidia"


@dataclass(frozen=True)
class Smi:
    """The output of `nvidia-smi -q -x`. `reason`: why it was not run; `path`: that of another one than the driver's."""

    returncode: int = 0
    text: str = ""
    reason: str = ""
    path: str = ""

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
class Loaded:
    """A container, and the problem with the driver libraries that its programs load; empty if there is none."""

    engine: str
    name: str
    findings: tuple[Incompatibility, ...] = ()


@dataclass(frozen=True)
class Containers:
    """The examined GPU containers, the number of others if known, and why they were not examined."""

    examined: tuple[Loaded, ...] = ()
    left: int = 0
    why: str = ""


@dataclass(frozen=True)
class HostSnapshot:
    """The data about a host that the rules examine."""

    host: HostFacts
    spec: HostSpec = field(default_factory=HostSpec)
    kernel_log: tuple[str, ...] = ()  # relevant lines of this boot
    kernel_log_error: str = ""
    smi: Smi = field(default_factory=Smi)
    node_errors: Mapping[str, str] = field(default_factory=dict)  # node → why it does not open, if nvidia-smi fails
    module: ModuleFile = field(default_factory=ModuleFile)
    kernels: tuple[InstalledKernel, ...] = ()
    dkms: str = ""  # its status of the installed driver, not of an earlier one
    loader: Mapping[str, str] = field(default_factory=dict)  # the loader's cache entries for NVML and CUDA
    units: Mapping[str, Unit] = field(default_factory=dict)
    docker_log: tuple[str, ...] = ()  # of the daemon that runs or failed last
    fabric_log: tuple[str, ...] = ()  # the fabric manager's
    texts: Mapping[str, str] = field(default_factory=dict)  # path → text of small files
    there: frozenset[str] = frozenset()  # the watched paths that exist
    absent: frozenset[str] = frozenset()  # paths that a configuration or a specification names, and that do not exist
    modified: Mapping[str, float] = field(default_factory=dict)  # path → time
    settings_fault: str = ""
    specification_fault: str = ""
    installed: Installed | None = None  # what the journals say of the bundled runtime, None without any
    boot_changed: tuple[str, ...] = ()  # what a boot needs and somebody has changed
    programs: Mapping[str, str] = field(default_factory=dict)  # name → the first on the PATH
    broken: Mapping[str, str] = field(default_factory=dict)  # low-level runtime that does not run → its last words
    library_files: Mapping[str, str] = field(default_factory=dict)  # driver library → its version
    package_change: tuple[str, ...] = ()  # the last change of the driver by a package manager
    driver_since: str = ""  # who brought its files, when
    in_place: Mapping[str, str] = field(default_factory=dict)  # missing node → what occupies its path, "" if nothing
    node_modes: Mapping[str, int] = field(default_factory=dict)
    links_missing: tuple[str, ...] = ()
    not_executable: Mapping[str, int] = field(default_factory=dict)
    open_run: str = ""  # the interrupted change of a gpuprov run
    docker_unit: str = ""
    mount_namespaces: str = ""  # of each the first process
    rootless: tuple[str, ...] = ()  # sockets of users' own dockers whose files name no runtime nvidia and no CDI
    runs_now: str = ""  # a run that holds the host's lock
    smi_path: str = ""  # the nvidia-smi that was run
    smi_is_script: bool = False
    other_smi: Smi | None = None  # one before it on the PATH
    preload_message: str = ""  # the loader's message about /etc/ld.so.preload
    docker_file_rewritten: int = 0  # the runs whose docker configuration somebody has changed since
    closed: Mapping[str, int] = field(default_factory=dict)  # CDI folders and files that only root can read, with modes
    changeable: Mapping[str, str] = field(default_factory=dict)  # what others than root can change, owner and mode
    selinux: str = ""
    selinux_off: tuple[str, ...] = ()
    audit_log: tuple[str, ...] = ()
    containers: Containers = field(default_factory=Containers)  # libraries that running containers load
    gpus_lost: Problem | None = None  # GPUs of the last green verification are missing
    memory_fault: str = ""  # why what that verification saw is not trusted
    is_booted: bool = True  # systemd runs, which is False in the root file system of an image

    @property
    def driver(self) -> DriverFacts:
        return self.host.driver

    @property
    def lacks_gpus_yet(self) -> bool:
        """Whether it is a copy of an image that has never seen a GPU: what needs a GPU is unknown, not broken."""
        return MARK in self.host.files and not self.host.gpus and self.gpus_lost is None

    @property
    def own_gpus(self) -> tuple[PciGpu, ...]:
        """The GPUs that are not reserved for virtual machines."""
        return tuple(gpu for gpu in self.host.gpus if gpu.driver not in FOR_GUESTS)

    @property
    def serves_all(self) -> bool:
        """Whether nvidia-smi shows every GPU on the PCI bus that belongs to this machine itself."""
        is_report = not self.smi.reason and self.smi.returncode == 0
        return is_report and self.smi.text.count("<gpu id=") >= max(len(self.own_gpus), 1)


def telling_lines(log: str) -> tuple[str, ...]:
    """Return the lines of a kernel log about GPUs and their driver."""
    return tuple(filter(_TELLING.search, map(str.strip, log.splitlines()[-_MOST_LINES:])))


def docker_lines(log: str) -> tuple[str, ...]:
    """Return the log of the docker daemon that runs now or failed last."""
    lines = log.splitlines()
    begun = max((number for number, line in enumerate(lines) if _DOCKER_BEGINS.search(line)), default=0)
    return tuple(line.strip() for line in lines[begun:])


def parse_units(text: str) -> Mapping[str, Unit]:
    """Return name → unit from `systemctl show` of several units."""
    return {name: Unit(*("".join(one.get(key, ())) for key in UNIT_PROPERTIES[1:]))
            for name, one in parse_show(text).items()}  # fmt: skip


def parse_modinfo(text: str) -> ModuleFile:
    """Return the description of a module in modinfo's output (kmod)."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return ModuleFile(*(fields.get(name, "") for name in ("filename", "version", "vermagic", "signer", "license")))


def host_paths(specification: str) -> tuple[tuple[str, int], ...]:
    """Return (path on the host, line) of mounts and device nodes in a CDI specification's text, JSON or YAML."""
    # nvidia-ctk leaves out a hostPath that is the same. Rules on device nodes know of the driver's own.
    node = r"""- path:\s*["']?(?=/dev/dri/)(?![^"'\s]+["']?\s+hostPath)"""
    pattern = re.compile(rf"""(?:["']?hostPath["']?\s*:\s*["']?|{node})(/[^"'\s,}}]+)""")
    found: dict[str, int] = {}
    for match in pattern.finditer(specification):
        found.setdefault(match[1], specification.count("\n", 0, match.start(1)) + 1)
    return tuple(found.items())


def find_in_log(lines: Sequence[str], pattern: str) -> tuple[Mapping[str, str], tuple[str, ...]] | None:
    """Return the last match of a pattern: its named groups, and the lines.

    The driver splits its sentences over several lines, each with the prefix `NVRM:`: they are joined. A `.` of the
    pattern leads to no other line.
    """
    starts, text, is_drivers = [], "", False
    for line in map(str.strip, lines):
        said = _PREFIX.sub("", line)
        was_drivers, is_drivers = is_drivers, "NVRM:" in line[: len(line) - len(said)]
        text += " " if was_drivers and is_drivers else "\n"
        starts.append(len(text))
        text += said
    *_, found = (None, *re.finditer(pattern, text, re.IGNORECASE))
    if found is None:
        return None
    first, last = (max(n for n, start in enumerate(starts) if start <= place) for place in (found.start(), found.end()))
    named = {name: value or "?" for name, value in found.groupdict().items()}
    return named, tuple(lines[first : last + 1][:_MOST_EVIDENCE])


def lines_in_log(lines: Sequence[str], pattern: str) -> tuple[str, ...]:
    """Return the lines of the last match of a pattern."""
    found = find_in_log(lines, pattern)
    return found[1] if found is not None else ()


def lines_that_match(texts: Mapping[str, str], pattern: str) -> tuple[tuple[str, str], ...]:
    """Return (`file:line`, the line) of every line that matches a pattern."""
    compiled = re.compile(pattern)
    return tuple(
        (f"{path}:{number}", line.strip())
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if compiled.search(line)
    )
