"""The driver on a host as it is found there: version, libraries, programs, GPUs, device nodes. Reads only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpuprov.system import System

_PROC = "/proc/driver/nvidia"
# Where libraries lie: Debian's multiarch folders, then those of RHEL and SUSE. The first with the driver counts.
LIBRARY_DIRECTORIES = (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib",
)  # fmt: skip
_PROGRAMS = (
    "nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server",
)  # fmt: skip
_PROGRAM_DIRECTORIES = ("/usr/bin", "/usr/sbin")
_SOCKETS = (
    ("/run/nvidia-persistenced/socket", "/run/nvidia-persistenced/socket"),
    ("/run/nvidia-fabricmanager/socket", "/run/nvidia-fabricmanager/socket"),
)
_NAME = re.compile(r"(?P<stem>lib[\w+.-]*?\.so)(?:\.(?P<version>[\d.]+))?")
# Device majors by their names in /proc/devices; the driver's own 195 is registered (Documentation/admin-guide/devices).
NVIDIA_MAJOR = 195
_CONTROL_MINORS = {"/dev/nvidiactl": 255, "/dev/nvidia-modeset": 254}
_UVM_MINORS = {"/dev/nvidia-uvm": 0, "/dev/nvidia-uvm-tools": 1}


@dataclass(frozen=True)
class Gpu:
    """A GPU that the loaded driver serves: its number among NVML's (PCI bus order), minor, UUID, bus id and model."""

    index: int
    minor: int
    uuid: str
    bus_id: str
    model: str


@dataclass(frozen=True)
class Library:
    """A driver library: the real file, and the names (soname, development link) that lead to it in its folder."""

    path: str
    links: tuple[str, ...]


@dataclass(frozen=True)
class Node:
    """A device node that the driver's devices call for."""

    path: str
    major: int
    minor: int


@dataclass(frozen=True)
class DriverFacts:
    """The driver on a host. `kernel_version`: of the loaded modules, `library_version`: of the libraries; "" if none.

    `nodes` are the device nodes that ought to be there, `present` those that are, with the right numbers.
    """

    kernel_version: str = ""
    library_version: str = ""
    gpus: tuple[Gpu, ...] = ()
    libraries: tuple[Library, ...] = ()
    programs: tuple[str, ...] = ()
    firmware: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = ()
    present: tuple[str, ...] = ()


def discover(system: System) -> DriverFacts:
    """Return what driver this host has; opens no device and loads no library."""
    kernel_version = parse_kernel_version(system.read_text(f"{_PROC}/version") or "")
    directory, library_version = _find_libraries(system)
    gpus = _gpus(system) if kernel_version else ()
    nodes = expected_nodes(gpus, parse_devices(system.read_text("/proc/devices") or "")) if kernel_version else ()
    firmware = f"/lib/firmware/nvidia/{library_version}"
    return DriverFacts(
        kernel_version=kernel_version,
        library_version=library_version,
        gpus=gpus,
        libraries=_libraries(system, directory, library_version) if directory else (),
        programs=_programs(system) if directory else (),
        firmware=tuple(f"{firmware}/{name}" for name in system.list_directory(firmware)) if library_version else (),
        sockets=tuple(path for path, _ in _SOCKETS if system.exists(path)),
        nodes=nodes,
        present=tuple(node.path for node in nodes if _is_there(system, node)),
    )


def parse_kernel_version(text: str) -> str:
    """Return the version in /proc/driver/nvidia/version, proprietary or open modules; nothing if there is none."""
    found = re.search(r"Kernel Module(?: for \w+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else ""


def parse_devices(text: str) -> Mapping[str, int]:
    """Return name → major of the character devices in /proc/devices (proc(5))."""
    rows = re.findall(r"^\s*(\d+) (\S+)$", text.partition("Block devices:")[0], re.MULTILINE)
    return {name: int(major) for major, name in rows}


def parse_information(text: str) -> Mapping[str, str]:
    """Return the fields of /proc/driver/nvidia/gpus/BUSID/information: `Model`, `GPU UUID`, `Device Minor`, …"""
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def _gpus(system: System) -> tuple[Gpu, ...]:
    """Return the GPUs in the order of NVML's indices, which is that of their PCI bus ids."""
    found = []
    for bus_id in system.list_directory(f"{_PROC}/gpus"):
        fields = parse_information(system.read_text(f"{_PROC}/gpus/{bus_id}/information") or "")
        minor = fields.get("Device Minor", "")
        # Question marks stand for a GPU that was not initialised yet; an excluded one can't be used.
        if minor.isdigit() and fields.get("GPU Excluded", "No") != "Yes":
            uuid = fields.get("GPU UUID", "")
            found.append((bus_id, int(minor), "" if "?" in uuid else uuid, fields.get("Model", "")))
    return tuple(
        Gpu(index, minor, uuid, bus_id, model) for index, (bus_id, minor, uuid, model) in enumerate(sorted(found))
    )


def expected_nodes(gpus: tuple[Gpu, ...], majors: Mapping[str, int]) -> tuple[Node, ...]:
    """Return the device nodes that these GPUs call for, as nvidia-modprobe would make them."""
    major = majors.get("nvidia", majors.get("nvidia-frontend", NVIDIA_MAJOR))
    nodes = [Node(f"/dev/nvidia{gpu.minor}", major, gpu.minor) for gpu in gpus]
    control = dict(_CONTROL_MINORS)
    if "nvidia-modeset" not in majors:
        del control["/dev/nvidia-modeset"]
    nodes += [Node(path, major, minor) for path, minor in control.items()] if gpus else []
    if gpus and "nvidia-uvm" in majors:
        nodes += [Node(path, majors["nvidia-uvm"], minor) for path, minor in _UVM_MINORS.items()]
    return tuple(nodes)


def _is_there(system: System, node: Node) -> bool:
    found = system.status(node.path)
    return found is not None and (found.kind, found.major, found.minor) == ("char", node.major, node.minor)


def _find_libraries(system: System) -> tuple[str, str]:
    """Return the folder of the driver's libraries and their version, by NVML: every driver has that."""
    for directory in LIBRARY_DIRECTORIES:
        real = system.real_path(f"{directory}/libnvidia-ml.so.1")
        found = re.search(r"\.so\.(\d{3,4}(?:\.\d+)+)$", real)
        if found and system.exists(real):
            return directory, found[1]
    return "", ""


def _libraries(system: System, directory: str, version: str) -> tuple[Library, ...]:
    """Return the libraries of that very version, with the links in `directory` that end at each, over any hops."""
    links: dict[str, list[str]] = {}
    for name in system.list_directory(directory):
        match = _NAME.fullmatch(name)
        if match is None or not re.match(r"lib(nv|cuda|GLX_nv|EGL_nv|GLES|vdpau_nv)", name):
            continue
        path = f"{directory}/{name}"
        real = system.real_path(path)
        if real.endswith(f".so.{version}") or _has_own_version(name):
            links.setdefault(real, [])
            if real != path:
                links[real].append(path)
    return tuple(Library(real, tuple(sorted(names))) for real, names in sorted(links.items()) if system.exists(real))


def _has_own_version(name: str) -> bool:
    """Say whether it is one of the driver's libraries that count on their own: libnvidia-egl-gbm.so.1.1.1."""
    return re.match(r"libnvidia-(egl-(gbm|wayland2?|xcb|xlib)|nvvm70|api)\.so", name) is not None


def _programs(system: System) -> tuple[str, ...]:
    return tuple(
        f"{directory}/{name}"
        for directory in _PROGRAM_DIRECTORIES
        for name in _PROGRAMS
        if system.exists(f"{directory}/{name}")
    )
