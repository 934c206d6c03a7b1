"""The driver on a host as it is found there: version, files, GPUs, device nodes. Reads only.

It does not ask nvidia-smi, which is not innocent: as root it makes device nodes and loads modules, and takes seconds
for each GPU that nobody keeps initialised. What only nvidia-smi knows, ask_nvml() adds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuprov.cdi import nvidia_smi
from gpuprov.cdi.files import (
    DriverFile,
    Library,
    find_configuration,
    find_firmware,
    find_libraries,
    find_programs,
    find_x_modules,
)
from gpuprov.system import FileStatus, System

_PROC = "/proc/driver/nvidia"
# Sockets of services that programs in containers talk to; MPS has a folder of them.
_SOCKETS = ("/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket", "/tmp/nvidia-mps")
# Device majors by their names in /proc/devices; the driver's own 195 is registered (Documentation/admin-guide/devices).
NVIDIA_MAJOR = 195
_CONTROL_MINORS = {"/dev/nvidiactl": 255, "/dev/nvidia-modeset": 254}
_UVM_MINORS = {"/dev/nvidia-uvm": 0, "/dev/nvidia-uvm-tools": 1}
# As nvidia-modprobe makes them: to configure MIG is root's.
_MIG_MODES = {"config": 0o400, "monitor": 0o444}
_NODE_MODE = 0o666  # the driver's default for DeviceFileMode


@dataclass(frozen=True)
class Node:
    """A device node that the driver's devices call for, with the mode and the group that it has or ought to have."""

    path: str
    major: int
    minor: int
    mode: int = _NODE_MODE
    gid: int = 0


@dataclass(frozen=True)
class Gpu:
    """A GPU that the loaded driver serves: its number among NVML's (PCI bus order), minor, UUID, bus id and model.

    `brand` and `compute_capability` are known through NVML alone, and empty where it was not asked or does not answer.
    `drm_nodes` are the kernel's own nodes for rendering and display (/dev/dri/renderD128), where nvidia-drm is loaded.
    """

    index: int
    minor: int
    uuid: str
    bus_id: str
    model: str
    brand: str = ""
    compute_capability: str = ""
    drm_nodes: tuple[Node, ...] = ()


@dataclass(frozen=True)
class DriverFacts:
    """The driver on a host. `kernel_version`: of the loaded modules, `library_version`: of the libraries; "" if none.

    `cuda_version` is what NVML says, "" where it was not asked or does not answer. `nodes` are the device nodes that
    ought to be there, `capability_nodes` those of MIG's rights; `present` are those that are, with the right numbers.
    """

    kernel_version: str = ""
    library_version: str = ""
    cuda_version: str = ""
    gpus: tuple[Gpu, ...] = ()
    libraries: tuple[Library, ...] = ()
    programs: tuple[DriverFile, ...] = ()
    configuration: tuple[DriverFile, ...] = ()
    firmware: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = ()
    capability_nodes: tuple[Node, ...] = ()
    present: tuple[str, ...] = ()


def discover(system: System) -> DriverFacts:
    """Return what driver this host has; opens no device and loads no library."""
    kernel_version = parse_kernel_version(system.read_text(f"{_PROC}/version") or "")
    libraries, library_version = find_libraries(system)
    gpus = _gpus(system) if kernel_version else ()
    nodes = _nodes(system, gpus)
    capability_nodes = _capability_nodes(system) if gpus else ()
    return DriverFacts(
        kernel_version=kernel_version,
        library_version=library_version,
        gpus=gpus,
        libraries=libraries,
        programs=find_programs(system) if library_version else (),
        configuration=(
            (*find_configuration(system), *find_x_modules(system, library_version)) if library_version else ()
        ),
        firmware=find_firmware(system, library_version),
        sockets=tuple(path for path in _SOCKETS if system.exists(path)),
        nodes=nodes,
        capability_nodes=capability_nodes,
        present=tuple(node.path for node in (*nodes, *capability_nodes) if _status(system, node) is not None),
    )


def ask_nvml(system: System, driver: DriverFacts) -> DriverFacts:
    """Return the facts with what only NVML knows: UUIDs of sleeping GPUs, brands, compute capabilities, CUDA version.

    Runs nvidia-smi, where that makes nothing: the driver is whole and no node is missing. The rest stays as it is.
    """
    complete = {node.path for node in driver.nodes} <= set(driver.present)
    whole = driver.gpus and driver.kernel_version == driver.library_version and complete
    answers, cuda_version = nvidia_smi.ask(system) if whole else ({}, "")
    gpus = tuple(_completed(gpu, answers.get(gpu.bus_id, nvidia_smi.SmiFacts())) for gpu in driver.gpus)
    return replace(driver, gpus=gpus, cuda_version=cuda_version)


def parse_kernel_version(text: str) -> str:
    """Return the version in /proc/driver/nvidia/version, proprietary or open modules; nothing if there is none."""
    found = re.search(r"Kernel Module(?: for \w+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else ""


def parse_devices(text: str) -> Mapping[str, int]:
    """Return name → major of the character devices in /proc/devices (proc(5))."""
    rows = re.findall(r"^\s*(\d+) (\S+)$", text.partition("Block devices:")[0], re.MULTILINE)
    return {name: int(major) for major, name in rows}


def parse_information(text: str) -> Mapping[str, str]:
    """Return the fields of /proc/driver/nvidia/gpus/BUSID/information (or …/params): `Model`, `GPU UUID`, …"""
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def _gpus(system: System) -> tuple[Gpu, ...]:
    """Return the GPUs in the order of NVML's indices, which is that of their PCI bus ids."""
    found = []
    for bus_id in sorted(system.list_directory(f"{_PROC}/gpus"), key=_bus_order):
        fields = parse_information(system.read_text(f"{_PROC}/gpus/{bus_id}/information") or "")
        minor = fields.get("Device Minor", "")
        # Question marks stand for a GPU that was not initialised yet; an excluded one can't be used.
        if minor.isdigit() and fields.get("GPU Excluded", "No") != "Yes":
            uuid = fields.get("GPU UUID", "")
            found.append((bus_id, int(minor), "" if "?" in uuid else uuid, fields.get("Model", "")))
    return tuple(
        Gpu(index, minor, uuid, bus_id, model, drm_nodes=_drm_nodes(system, bus_id))
        for index, (bus_id, minor, uuid, model) in enumerate(found)
    )


def _drm_nodes(system: System, bus_id: str) -> tuple[Node, ...]:
    nodes = []
    for name in system.list_directory(f"/sys/bus/pci/devices/{bus_id}/drm"):
        status = system.status(f"/dev/dri/{name}") if re.fullmatch(r"(card|renderD)\d+", name) else None
        if status is not None and status.kind == "char":
            nodes.append(Node(f"/dev/dri/{name}", status.major, status.minor, status.mode, status.gid))
    return tuple(nodes)


def _bus_order(bus_id: str) -> tuple[int, ...]:
    # By number: the PCI domain may have five digits (10000:e1:00.0 behind Intel's VMD).
    parts = re.split(r"[:.]", bus_id)
    return tuple(int(part, 16) if re.fullmatch(r"[0-9a-fA-F]+", part) else -1 for part in parts)


def _completed(gpu: Gpu, answer: nvidia_smi.SmiFacts) -> Gpu:
    uuid = gpu.uuid or answer.uuid
    return replace(gpu, uuid=uuid, brand=answer.brand, compute_capability=answer.compute_capability)


def _nodes(system: System, gpus: tuple[Gpu, ...]) -> tuple[Node, ...]:
    """Return the nodes that ought to be there, with their mode and group."""
    params = parse_information(system.read_text(f"{_PROC}/params") or "")
    modeset_loaded = system.exists("/sys/module/nvidia_modeset")
    majors = parse_devices(system.read_text("/proc/devices") or "")
    nodes = expected_nodes(gpus, majors, modeset_loaded=modeset_loaded)
    if params.get("ModifyDeviceFiles") == "0":
        # The driver keeps its hands off: udev's rules hold.
        return tuple(_as_it_is(system, node) for node in nodes)
    mode, gid = params.get("DeviceFileMode", ""), params.get("DeviceFileGID", "")
    return tuple(
        replace(node, mode=int(mode) if mode.isdigit() else node.mode, gid=int(gid) if gid.isdigit() else node.gid)
        for node in nodes
    )


def _capability_nodes(system: System) -> tuple[Node, ...]:
    """Return the nodes of the rights to configure and to monitor MIG; those of instances come with the instances."""
    major = parse_devices(system.read_text("/proc/devices") or "").get("nvidia-caps")
    minors = system.read_text("/proc/driver/nvidia-caps/mig-minors") or ""
    found = dict(re.findall(r"^(config|monitor) (\d+)$", minors, re.MULTILINE))
    if major is None:
        return ()
    return tuple(
        Node(f"/dev/nvidia-caps/nvidia-cap{found[name]}", major, int(found[name]), mode)
        for name, mode in _MIG_MODES.items()
        if name in found
    )


def expected_nodes(
    gpus: tuple[Gpu, ...], majors: Mapping[str, int], *, modeset_loaded: bool = False
) -> tuple[Node, ...]:
    """Return the device nodes that these GPUs call for, as nvidia-modprobe would make them."""
    if not gpus:
        return ()
    major = majors.get("nvidia", majors.get("nvidia-frontend", NVIDIA_MAJOR))
    nodes = [Node(f"/dev/nvidia{gpu.minor}", major, gpu.minor) for gpu in gpus]
    control = dict(_CONTROL_MINORS)
    # Before 550.40.07 one name, nvidia-frontend, stands in /proc/devices for all of them.
    if "nvidia-modeset" not in majors and not (modeset_loaded and "nvidia-frontend" in majors):
        del control["/dev/nvidia-modeset"]
    nodes += [Node(path, major, minor) for path, minor in control.items()]
    if "nvidia-uvm" in majors:
        nodes += [Node(path, majors["nvidia-uvm"], minor) for path, minor in _UVM_MINORS.items()]
    return tuple(nodes)


def _as_it_is(system: System, node: Node) -> Node:
    found = _status(system, node)
    return node if found is None else replace(node, mode=found.mode, gid=found.gid)


def _status(system: System, node: Node) -> FileStatus | None:
    """Return what lies at the node's path, None if it is not that very device."""
    found = system.status(node.path)
    same = found is not None and (found.kind, found.major, found.minor) == ("char", node.major, node.minor)
    return found if same else None


__all__ = [
    "DriverFacts", "DriverFile", "Gpu", "Library", "Node", "ask_nvml", "discover", "expected_nodes", "parse_devices",
    "parse_information", "parse_kernel_version",
]  # fmt: skip
