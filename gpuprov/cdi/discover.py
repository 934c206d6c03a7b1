"""Discover the driver on a host: version, files, GPUs, device nodes. Reads only.

It does not use NVML, which has side effects: as root it makes device nodes and loads modules, and it takes seconds for
each GPU that no process keeps initialised. ask_nvml() adds the facts that only NVML knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from gpuprov.cdi import files, nvml
from gpuprov.core.files import FileStatus
from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass, replace

_PROC = "/proc/driver/nvidia"
# Sockets of services that programs in containers use. Not MPS's folder: the runtime looks at each start whether the
# daemon runs, which an engine that reads the specification itself can't.
_SOCKETS = ("/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket")
# The module's option for IMEX's channel 0. A driver that an initramfs loaded without the file has not made it.
IMEX_OPTION = "/etc/modprobe.d/gpuprov-imex.conf"
IMEX_CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"
# Device majors by their names in /proc/devices; NVIDIA's main one is registered, the others are dynamic.
NVIDIA_MAJOR = 195
_CONTROL_MINORS = {"/dev/nvidiactl": 255, "/dev/nvidia-modeset": 254}
_UVM_MINORS = {"/dev/nvidia-uvm": 0, "/dev/nvidia-uvm-tools": 1}
# As nvidia-modprobe makes them: only root may configure MIG, all users may use an instance.
_MIG_MODES = {"config": 0o400, "monitor": 0o444}
_MIG_ACCESS_MODE = 0o444
_NODE_MODE = 0o666  # the driver's default for DeviceFileMode


@dataclass(frozen=True)
class Node:
    """A device node of the driver, with its actual or expected mode and group."""

    path: str
    major: int
    minor: int
    mode: int = _NODE_MODE
    gid: int = 0


@dataclass(frozen=True)
class MigDevice:
    """A MIG device: its index on its GPU, the ids of its GPU and compute instance, its UUID, its capabilities.

    Only NVML knows UUIDs; the indices follow the order of the ids, as in NVML.
    """

    index: int
    gpu_instance: int
    compute_instance: int
    uuid: str = ""
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """A GPU that the loaded driver serves: its NVML index (PCI bus order), minor, UUID, bus id and model.

    `brand` and `compute_capability` come from NVML only, and are empty if it was not queried or failed. `drm_nodes` are
    the kernel's own nodes for rendering and display (/dev/dri/renderD128), if nvidia-drm is loaded. A GPU in MIG mode
    has `mig` devices and can't be used as a whole.
    """

    index: int
    minor: int
    uuid: str
    bus_id: str
    model: str
    brand: str = ""
    compute_capability: str = ""
    drm_nodes: tuple[Node, ...] = ()
    mig: tuple[MigDevice, ...] = ()


@dataclass(frozen=True)
class DriverFacts:
    """The driver on a host. `kernel_version`: of the loaded modules, `library_version`: of the libraries; "" if none.

    `cuda_version` comes from NVML, "" if it was not queried or failed. `nodes` are the expected device nodes,
    `capability_nodes` those of MIG capabilities. `present` are the nodes that exist with the right numbers. `closed`
    are those of them that fewer users may open than the driver specifies.
    """

    kernel_version: str = ""
    library_version: str = ""
    cuda_version: str = ""
    gpus: tuple[Gpu, ...] = ()
    libraries: tuple[files.Library, ...] = ()
    programs: tuple[files.DriverFile, ...] = ()
    configuration: tuple[files.DriverFile, ...] = ()
    firmware: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = ()
    capability_nodes: tuple[Node, ...] = ()
    present: tuple[str, ...] = ()
    closed: tuple[Node, ...] = ()


def discover(
    system: System, library_folders: Sequence[str] = (), configuration_folders: Sequence[str] = ()
) -> DriverFacts:
    """Return the driver on this host; opens no device and loads no library.

    The given folders are searched before the standard ones.
    """
    kernel_version = parse_kernel_version(system.read_text(f"{_PROC}/version") or "")
    libraries, library_version = files.find_libraries(system, library_folders)
    programs, configuration = files.find_programs_and_configuration(system, library_version, configuration_folders)
    gpus = _gpus(system) if kernel_version else ()
    nodes = driver_nodes(system, [gpu.minor for gpu in gpus])
    rights = capability_nodes(system, ("config", "monitor")) if gpus else ()
    rights += imex_channel(system) if gpus else ()
    rights += tuple(dict.fromkeys(node for gpu in gpus for device in gpu.mig for node in device.nodes))
    there = [(node, _status(system, node)) for node in (*nodes, *rights)]
    return DriverFacts(
        kernel_version=kernel_version,
        library_version=library_version,
        gpus=gpus,
        libraries=libraries,
        programs=programs,
        configuration=configuration,
        firmware=files.find_firmware(system, library_version),
        sockets=tuple(path for path in _SOCKETS if system.exists(path)),
        nodes=nodes,
        capability_nodes=rights,
        present=tuple(node.path for node, status in there if status),
        closed=tuple(node for node, status in there if status and node.mode & ~status.mode),
    )


def ask_nvml(system: System, driver: DriverFacts) -> DriverFacts:
    """Return the facts with what only NVML knows: UUIDs of idle GPUs, brands, compute capabilities, CUDA version.

    Queries NVML only if that has no side effects: the driver is complete and no node is missing. Other facts stay.
    """
    complete = {node.path for node in driver.nodes} <= set(driver.present)
    whole = driver.gpus and driver.kernel_version == driver.library_version and complete
    library = next((one.path for one in driver.libraries if "/libnvidia-ml.so." in one.path), "")
    answers, cuda_version = nvml.ask(system, library) if whole else ({}, "")
    gpus = tuple(_completed(gpu, answers.get(gpu.bus_id, nvml.GpuAnswer())) for gpu in driver.gpus)
    return replace(driver, gpus=gpus, cuda_version=cuda_version)


def missing_nodes(driver: DriverFacts) -> tuple[Node, ...]:
    """Return the nodes that the loaded driver needs and /dev lacks."""
    return tuple(node for node in (*driver.nodes, *driver.capability_nodes) if node.path not in driver.present)


def parse_kernel_version(text: str) -> str:
    """Return the version in /proc/driver/nvidia/version, of proprietary or open modules; "" if absent."""
    found = re.search(r"Kernel Module(?: for \w+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else ""


def _gpus(system: System) -> tuple[Gpu, ...]:
    """Return the GPUs in the order of NVML's indices, which is that of their PCI bus ids."""
    found: list[Gpu] = []
    for bus_id in sorted(system.list_directory(f"{_PROC}/gpus"), key=_bus_order):
        fields = parse_information(system.read_text(f"{_PROC}/gpus/{bus_id}/information") or "")
        minor = fields.get("Device Minor", "")
        # Question marks mean a GPU that was not initialised yet; an excluded one can't be used.
        if minor.isdecimal() and fields.get("GPU Excluded", "No") != "Yes":
            uuid = fields.get("GPU UUID", "")
            found.append(Gpu(
                len(found), int(minor), "" if "?" in uuid else uuid, bus_id, fields.get("Model", ""),
                drm_nodes=_drm_nodes(system, bus_id), mig=_mig_devices(system, int(minor)),
            ))  # fmt: skip
    return tuple(found)


def is_excluded(system: System, bus_id: str) -> bool:
    """Say whether the driver was told to leave this GPU out (NVreg_ExcludedGpus): NVML does not count it."""
    return parse_information(system.read_text(f"{_PROC}/gpus/{bus_id}/information") or "").get("GPU Excluded") == "Yes"


def _drm_nodes(system: System, bus_id: str) -> tuple[Node, ...]:
    nodes = []
    for name in system.list_directory(f"/sys/bus/pci/devices/{bus_id}/drm"):
        status = system.status(f"/dev/dri/{name}") if re.fullmatch(r"(card|renderD)\d+", name) else None
        if status is not None and status.kind == "char":
            nodes.append(Node(f"/dev/dri/{name}", status.major, status.minor, status.mode, status.gid))
    return tuple(nodes)


def _bus_order(bus_id: str) -> tuple[int, ...]:
    # By number: the PCI domain may have five digits (10000:e1:00.0 behind Intel's VMD).
    return tuple(int(part, 16) if re.fullmatch(r"[0-9a-fA-F]+", part) else -1 for part in re.split(r"[:.]", bus_id))


def _completed(gpu: Gpu, answer: nvml.GpuAnswer) -> Gpu:
    """Return the GPU with NVML's answer; a MIG device that only one of the two lists was just created or removed."""
    mig = tuple(replace(one, uuid=answer.mig.get((one.gpu_instance, one.compute_instance), "")) for one in gpu.mig)
    return replace(
        gpu, uuid=gpu.uuid or answer.uuid, brand=answer.brand, compute_capability=answer.compute_capability, mig=mig
    )


def _mig_devices(system: System, minor: int) -> tuple[MigDevice, ...]:
    """Return the MIG devices of the GPU with that minor; none for a GPU without MIG. Opens no device.

    Source: nvidia-container-toolkit, internal/discover and go-nvlib (a device is the GPU's node and two capabilities).
    """
    folder = f"{_PROC}/capabilities/gpu{minor}/mig"
    found: list[MigDevice] = []
    for instance in _numbers(system, folder, "gi"):
        for compute in _numbers(system, f"{folder}/gi{instance}", "ci"):
            rights = (f"gpu{minor}/gi{instance}/access", f"gpu{minor}/gi{instance}/ci{compute}/access")
            found.append(MigDevice(len(found), instance, compute, nodes=capability_nodes(system, rights)))
    return tuple(found)


def _numbers(system: System, folder: str, prefix: str) -> list[int]:
    names = (re.fullmatch(prefix + r"(\d{1,3})", name) for name in system.list_directory(folder))
    return sorted(int(found[1]) for found in names if found)


# -- device nodes, as nvidia-modprobe makes them -----------------------------------------------------------------------
# Source: nvidia-modprobe, modprobe-utils; Linux, Documentation/admin-guide/devices.rst (major 195 is registered).


# nvidia-modprobe loads the modules and makes the first nodes; without it modprobe loads them and we make all.
_LOADERS = (("nvidia-modprobe", "-u", "-c", "0"), ("modprobe", "-a", "nvidia", "nvidia-uvm"))


def load_driver(system: System) -> None:
    """Load nvidia and nvidia-uvm if nothing has yet; used at each boot and by the installation."""
    loader = next((words for words in _LOADERS if system.which(words[0])), None)
    if loader is not None and "nvidia-uvm" not in parse_devices(system.read_text("/proc/devices") or ""):
        system.run(loader, timeout=120)


def parse_devices(text: str) -> Mapping[str, int]:
    """Return name → major of the character devices in /proc/devices (proc(5))."""
    rows = re.findall(r"^\s*(\d+) (\S+)$", text.partition("Block devices:")[0], re.MULTILINE)
    return {name: int(major) for major, name in rows}


def parse_information(text: str) -> Mapping[str, str]:
    """Return the fields of /proc/driver/nvidia/gpus/BUSID/information (or …/params): `Model`, `GPU UUID`, …"""
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def parse_mig_minors(text: str) -> Mapping[str, int]:
    """Return capability (`config`, `gpu0/gi1/ci0/access`) → minor, from mig-minors; other lines are ignored."""
    rows = re.findall(r"^(config|monitor|gpu\d+/gi\d+(?:/ci\d+)?/access) (\d+)$", text, re.MULTILINE)
    return {name: int(minor) for name, minor in rows}


def driver_nodes(system: System, minors: Sequence[int]) -> tuple[Node, ...]:
    """Return the expected nodes for GPUs of these minors, with their mode and group."""
    params = parse_information(system.read_text("/proc/driver/nvidia/params") or "")
    majors = parse_devices(system.read_text("/proc/devices") or "")
    nodes = expected_nodes(minors, majors, modeset_loaded=system.exists("/sys/module/nvidia_modeset"))
    if params.get("ModifyDeviceFiles") == "0":
        # The driver does not modify device files (ModifyDeviceFiles=0): udev's rules apply.
        found = [(node, _status(system, node)) for node in nodes]
        return tuple(replace(node, mode=one.mode, gid=one.gid) if one else node for node, one in found)
    mode, gid = params.get("DeviceFileMode", ""), params.get("DeviceFileGID", "")
    return tuple(
        replace(node, mode=int(mode) if mode.isdecimal() else node.mode, gid=int(gid) if gid.isdigit() else node.gid)
        for node in nodes
    )


def expected_nodes(
    minors: Sequence[int], majors: Mapping[str, int], *, modeset_loaded: bool = False
) -> tuple[Node, ...]:
    """Return the device nodes that GPUs of these minors need."""
    if not minors:
        return ()
    major = majors.get("nvidia", majors.get("nvidia-frontend", NVIDIA_MAJOR))
    nodes = [Node(f"/dev/nvidia{minor}", major, minor) for minor in minors]
    control = dict(_CONTROL_MINORS)
    # Before 550.40.07, /proc/devices has one name, nvidia-frontend, for all of them.
    if "nvidia-modeset" not in majors and not (modeset_loaded and "nvidia-frontend" in majors):
        del control["/dev/nvidia-modeset"]
    nodes += [Node(path, major, minor) for path, minor in control.items()]
    if "nvidia-uvm" in majors:
        nodes += [Node(path, majors["nvidia-uvm"], minor) for path, minor in _UVM_MINORS.items()]
    return tuple(nodes)


def capability_nodes(system: System, capabilities: Iterable[str]) -> tuple[Node, ...]:
    """Return the nodes of capabilities as mig-minors names them, without those that this driver lacks."""
    major = parse_devices(system.read_text("/proc/devices") or "").get("nvidia-caps")
    minors = parse_mig_minors(system.read_text("/proc/driver/nvidia-caps/mig-minors") or "")
    if major is None:
        return ()
    return tuple(
        Node(f"/dev/nvidia-caps/nvidia-cap{minors[name]}", major, minors[name], _MIG_MODES.get(name, _MIG_ACCESS_MODE))
        for name in capabilities
        if name in minors
    )


def imex_channel(system: System) -> tuple[Node, ...]:
    """Return the node of IMEX's channel 0 if this host should have it and the driver has channels."""
    major = parse_devices(system.read_text("/proc/devices") or "").get("nvidia-caps-imex-channels")
    return (Node(IMEX_CHANNEL, major, 0),) if major is not None and system.exists(IMEX_OPTION) else ()


def _status(system: System, node: Node) -> FileStatus | None:
    """Return the status of the node's path if it holds exactly this device."""
    found = system.status(node.path)
    same = found is not None and (found.kind, found.major, found.minor) == ("char", node.major, node.minor)
    return found if same else None
