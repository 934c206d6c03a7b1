"""The driver and CUDA toolkits on a host: what is broken, what hides it, who has its devices open. Reads only."""

from __future__ import annotations

import contextlib
import re
import shlex
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Optional

from gpuprov.cdi.discover import NVIDIA_MAJOR, DriverFacts, parse_devices
from gpuprov.core.files import NO_FILE
from gpuprov.core.system import System
from gpuprov.machine.machine import gather_kernel
from gpuprov.packages.interface import Commands
from gpuprov.protocol.codec import json_at
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.runtime_hook.driver_files import disagreement, next_step

PRELOAD = "/etc/ld.so.preload"
ENVIRONMENT = "/etc/environment"
_NEEDED = ("libnvidia-ml.so", "libcuda.so")
# The ELF header of 64-bit files (gABI, "ELF Header"): where the section headers begin, their size and number.
_HEADER = struct.Struct("<16x24xQ10xHH2x")


@dataclass(frozen=True)
class HidingLibrary:
    """A library that programs load in place of the driver's.

    `paths`: the name by which the loader opens it, and what its links lead to. `hides`: the driver's own, "" for none
    yet. `reason`: what makes the loader take it, a file with its line where one says so. `package`: what owns it.
    `removable`: the paths whose removal makes the loader take another library. `foreign`: how a user other than root
    can replace their folder, "" if none can.
    """

    name: str
    paths: tuple[str, ...]
    version: str
    reason: str
    hides: str = ""
    package: str = ""
    fault: str = ""
    removable: tuple[str, ...] = ()
    foreign: str = ""

    @property
    def is_by_environment(self) -> bool:
        """Whether an environment variable makes the loader take it: this affects programs of logins only."""
        return self.reason.startswith(ENVIRONMENT)

    @property
    def is_configured(self) -> bool:
        """Whether a configuration line or a variable names the library: then remove that line, not the file."""
        return self.is_by_environment or self.reason.startswith(PRELOAD)

    @property
    def what(self) -> str:
        """The library in a sentence."""
        kind = self.fault or (f"of driver {self.version}" if self.version else "of an unknown driver")
        return f"{self.paths[0]} ({kind}) hides {self.hides or 'the driver' + chr(39) + 's ' + self.name}"

    def way_out(self, commands: Commands) -> str:
        """Return the command after which the loader takes another library."""
        word = self.reason.rpartition(" ")[2]
        if self.is_by_environment:
            return f"sed -i -E '/^\\s*(export\\s+)?{word}=/d' {ENVIRONMENT}  # then log in again"
        if self.reason.startswith(PRELOAD):
            return without_preload(word)
        if self.package:
            return f"{commands.remove} {self.package}; ldconfig"
        return f"rm {shlex.join(self.removable)}; ldconfig"


def without_preload(word: str) -> str:
    """Return the command that takes a library out of /etc/ld.so.preload; to sed, its name is only text."""
    literal = re.sub(r"[][\\*^$|]", r"\\\g<0>", word)
    return f"sed -i {shlex.quote(f's|{literal}||')} {PRELOAD}"


def damage(system: System, driver: DriverFacts) -> str:
    """Return what is wrong with the driver's files: a path and why; nothing if those that all need are whole."""
    if not driver.library_version:
        return ""
    for name in _NEEDED:
        path = next((one.path for one in driver.libraries if f"/{name}.{driver.library_version}" in one.path), "")
        fault = _broken(system, path) if path else f"no {name}.{driver.library_version}"
        if fault:
            return f"{path or 'the loader' + chr(39) + 's folders'}: {fault}"
    return "" if system.which("nvidia-smi") else "command -v nvidia-smi: nothing"


def _broken(system: System, path: str) -> str:
    """Return how a library's file is damaged, "" if it is not."""
    status, start = system.status(path), system.read_start(path, _HEADER.size)
    if status is None or start is None or len(start) < _HEADER.size:
        return "it is empty or too short to be a library"
    if not start.startswith(b"\x7fELF"):
        return "it is no library (invalid ELF header)"
    offset, size, number = _HEADER.unpack(start)
    return "its end is missing (file too short)" if offset + size * number > status.size else ""


_DEVICE = "/dev/nvidia"
# docker-ID.scope, /docker/ID, cri-containerd-ID.scope, crio-ID.scope, libpod-ID.scope, /kubepods/…/ID: 64 digits.
_CONTAINER = re.compile(r"/(?:[a-z-]+-)?([0-9a-f]{64})(?:\.scope)?(?=/|$)")
# The outermost: a service may have cgroups of its own choice below, and an LXC container those of its own services.
_UNIT = re.compile(r"(?:/[^/]+\.slice)*/([^/]+\.service)(?=/|$)")
_USERS = "/user.slice/"
_Numbers = set[tuple[int, Optional[int]]]
_LONGEST_COMMAND = 100


@dataclass(frozen=True)
class GpuHolder:
    """A process that has a GPU's device open; `unit` and `container` (its id) are what its cgroup tells, or nothing."""

    pid: int
    command: str
    device: str
    unit: str = ""
    container: str = ""

    def __str__(self) -> str:
        where = f"container {self.container[:12]}" if self.container else self.unit
        return f"process {self.pid} ({self.command}) has {self.device} open" + (f", in {where}" if where else "")


@dataclass(frozen=True)
class RunningDriver:
    """The loaded driver. `modules` are in the order of unloading, active `units` in the order of stopping.

    `containers`: id → name of docker's containers that use a GPU; `single_use`: the names of those that nothing starts
    again once they are stopped; `display_manager`: its unit's own name, if it runs.
    """

    version: str
    modules: tuple[str, ...]
    units: tuple[str, ...]
    containers: Mapping[str, str]
    display_manager: str
    holders: tuple[GpuHolder, ...]
    single_use: tuple[str, ...] = ()


def gather_holders(
    system: System, others: Iterable[str] = (), *, computing: bool = False, minors: Collection[int] = ()
) -> tuple[GpuHolder, ...]:  # fmt: skip
    """Return the processes that have one of the driver's devices open or mapped; `others`: more device nodes.

    `computing`: only those that may compute, for CUDA opens nvidia-uvm; programs that watch GPUs do not. `minors`: only
    those that have one of these GPUs open.

    The device's number decides: any user can have a file named /dev/nvidia0 in a mount namespace of their own.
    """
    majors = parse_devices(system.read_text("/proc/devices") or "")
    numbers: _Numbers = set() if computing else {(NVIDIA_MAJOR, None)}
    ours = "nvidia-uvm" if computing else "nvidia"
    numbers |= {(major, None) for name, major in majors.items() if name.startswith(ours)}
    nodes = (system.status(path) for path in others)
    numbers |= {(node.major, node.minor) for node in nodes if node is not None and node.kind == "char"}
    numbers = {(NVIDIA_MAJOR, minor) for minor in minors} or numbers
    pids = sorted(int(name) for name in system.list_directory("/proc") if name.isdecimal())
    return tuple(filter(None, (_holder(system, pid, numbers) for pid in pids if pid != system.own_pid())))


def _holder(system: System, pid: int, numbers: _Numbers) -> GpuHolder | None:
    # A process may end while it is examined: then it holds nothing.
    with contextlib.suppress(OSError):
        device = next((path for place, path in _devices(system, pid) if _is_one_of(system, place, path, numbers)), "")
        if device:
            unit, container = parse_cgroup(system.read_text(f"/proc/{pid}/cgroup") or "")
            words = (system.read_text(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
            words = words or (system.read_text(f"/proc/{pid}/comm") or "").strip()
            command = words if len(words) <= _LONGEST_COMMAND else f"{words[:_LONGEST_COMMAND]}…"
            return GpuHolder(pid, command, device, unit, container) if system.exists(f"/proc/{pid}") else None
    return None


def _devices(system: System, pid: int) -> Iterator[tuple[str, str]]:
    """Yield the links in /proc to what a process has open or mapped below /dev, with the paths that it sees."""
    for number in system.list_directory(f"/proc/{pid}/fd"):
        status = system.status(f"/proc/{pid}/fd/{number}")
        if status is not None and status.target.startswith("/dev/"):
            yield f"/proc/{pid}/fd/{number}", status.target
    for addresses, path in mapped_devices(system.read_text(f"/proc/{pid}/maps") or ""):
        yield f"/proc/{pid}/map_files/{addresses}", path


def _is_one_of(system: System, place: str, path: str, numbers: _Numbers) -> bool:
    try:
        found = system.device_number(place)
    except PermissionError:
        # In a container, what is mapped can't be examined (proc_pid_map_files(5)): its name must do.
        return path.startswith(_DEVICE)
    except OSError:
        return False
    return found is not None and not numbers.isdisjoint({found, (found[0], None)})


def mapped_devices(text: str) -> list[tuple[str, str]]:
    """Return addresses and path of each mapping below /dev in /proc/PID/maps."""
    return re.findall(r"^([0-9a-f]+-[0-9a-f]+) .*?\s(/dev/.*?)(?: \(deleted\))?$", text, re.MULTILINE)


def parse_cgroup(text: str) -> tuple[str, str]:
    """Return the system's service and the container's id that /proc/PID/cgroup tells (cgroups(7)), nothing for none.

    Below user.slice users name their own cgroups: there, no name says anything about a container or a service.
    """
    paths = [line.split(":", 2)[-1] for line in text.splitlines()]
    container = next(filter(None, (_CONTAINER.search(path.partition(_USERS)[0]) for path in paths)), None)
    units = [found[1] for found in map(_UNIT.match, paths) if found]
    return (units[-1] if units and not container else ""), (container[1] if container else "")


# Adds a toolkit's programs to users' PATH; the second if the first is another program's.
PROFILE, OTHER_PROFILE = "/etc/profile.d/cuda.sh", "/etc/profile.d/gpuprov-cuda.sh"
_FOLDER = "/usr/local"


@dataclass(frozen=True)
class CudaFacts:
    """`toolkits`: folder → version of each whole one in /usr/local; `link`: what /usr/local/cuda leads to."""

    toolkits: Mapping[str, str] = field(default_factory=dict)
    link: str = ""


def gather_cuda(system: System) -> CudaFacts:
    """Return the facts, from the toolkits' own version.json."""
    folders = [f"{_FOLDER}/{name}" for name in system.list_directory(_FOLDER) if re.fullmatch(r"cuda-\d+\.\d+", name)]
    found = {folder: version_in(system, folder) for folder in folders if system.exists(f"{folder}/bin/nvcc")}
    link = system.status(f"{_FOLDER}/cuda")
    # A folder leads to itself.
    return CudaFacts(found, link.target or f"{_FOLDER}/cuda" if link is not None else "")


def version_in(system: System, folder: str) -> str:
    """Return the version that a toolkit reports, or ""."""
    return str(json_at(system.read_text(f"{folder}/version.json") or "", "cuda", "version") or "")


INSTALLER_LOG = "/var/log/nvidia-installer.log"
_APT_HISTORY = "/var/log/apt/history.log"
# dnf 5's log before that of a dnf 4 which the host had once.
_LOGS = {
    "/var/log/dpkg.log": "dpkg", "/var/log/dnf5.log": "dnf", "/var/log/dnf.rpm.log": "dnf",
    "/var/log/zypp/history": "zypper",
}  # fmt: skip
# dpkg: `upgrade NAME OLD NEW`; dnf 4: `SUBDEBUG Upgrade: NEW`, then `Upgraded: OLD`; dnf 5: `callback install start
# "NEW" total BYTES`; zypper: `|install|NAME|VERSION|`.
_CHANGE = re.compile(
    r"([ |](upgrade|install|Upgrade:|Installed:)[ |]|callback install start \")"
    r"(libnvidia|libcuda1|nvidia-|cuda-drivers|a?kmod-nvidia|xserver-xorg-video-nvidia|xorg-x11-drv-nvidia)"
)
_TIME = re.compile(r"^(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)")


def package_change(system: System) -> tuple[str, ...]:
    """Return the last line about the driver in a package manager's log, as PATH:NUMBER:LINE; empty without one."""
    for path in _LOGS:
        last = ""
        try:
            with system.open(path) as file:
                # Line by line: zypper's log may be large.
                for number, content in enumerate(file, 1):
                    line = content.decode("utf-8", "replace").rstrip("\n")
                    last = f"{path}:{number}:{line}" if _CHANGE.search(line) else last
        except NO_FILE:
            continue
        return (last,) if last else ()
    return ()


def since(system: System, version: str) -> str:
    """Return ` since apt upgraded them (DATE)` if a log says that this version came so, else ""."""
    for line in package_change(system) if version else ():
        path, _, text = re.split(r":(\d+):", line, maxsplit=1)
        when = _TIME.match(text)
        if when and re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.])", text.partition('" total')[0].split()[-1]):
            by = "apt" if _LOGS[path] == "dpkg" and system.exists(_APT_HISTORY) else _LOGS[path]
            did = "upgraded" if "pgrade" in text else "installed"
            return f" since {by} {did} them ({when[1]} {when[2]})"
    log = system.read_text(INSTALLER_LOG) or ""
    created = re.search(r"^creation time: (.+)$", log, re.MULTILINE)
    if version and created and f"installer version: {version}\n" in log:
        return f" since NVIDIA's installer wrote them ({created[1].strip()})"
    return ""


def version_difference(system: System, driver: DriverFacts) -> str:
    """Return how the driver's files and the loaded module differ, since when, and what to do; "" if they agree."""
    files, module = driver.library_version, driver.kernel_version
    if not files or not module or files == module:
        return ""
    step = next_step(module, container=bool(gather_kernel(system).container))
    return f"{disagreement(files, module, since(system, files))}: {step}"
