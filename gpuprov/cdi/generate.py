"""Generate the CDI specification of a driver. Pure: it contains only what the facts contain.

Each real file is a mount. One hook holds the links by which the loader finds a library (libcuda.so.1). Engines that
read CDI run the hook; gpuprov's own runtime reads the links from it and makes them without a process.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gpuprov.cdi import specification as cdi_format
from gpuprov.cdi.discover import DriverFacts, Gpu, Node, discover
from gpuprov.cdi.files import Library
from gpuprov.cdi.specification import Device, DeviceNode, Edits, Hook, Mount, Specification, parse_json, render_json
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook.driver_files import HOOK_PATH
from gpuprov.runtime_hook.requirements import cuda_version_of_driver, version_key
from gpuprov.runtime_hook.specification import HOST_FLAGS

# Where an installation writes it, and every boot keeps it up to date.
PATH = "/etc/cdi/nvidia.json"
# After this time the engine kills the hook and does not start the container; the hook gives up earlier.
_HOOK_SECONDS = 30
_SOCKET_OPTIONS = ("ro", "nosuid", "nodev", "noexec", "rbind", "rprivate")
_WORLD = 0o006  # read and write for others
# Facts about the host are arguments of the hook: annotations would need CDI 0.6.0, which podman 4 lacks.
_FLAGS = tuple(HOST_FLAGS)
# Facts that only NVML knows.
_OF_NVML = _FLAGS[1:]


def specification(driver: DriverFacts, known: Mapping[str, str] | None = None) -> Specification:
    """Return devices by index, UUID, PCI bus id, and `all`; the common edits hold what every container needs.

    A GPU in MIG mode appears only as its MIG devices (0:1 and their UUIDs): as a whole it can't compute. `known` are
    facts about the host (flag → value) that go before the driver's.
    """
    devices = [device for gpu in driver.gpus for device in _devices(driver, gpu)]
    if devices:
        devices.append(all_of(devices))
    gpu_nodes = {f"/dev/nvidia{gpu.minor}" for gpu in driver.gpus}
    control = _node_edits(tuple(node for node in driver.nodes if node.path not in gpu_nodes))
    hooks = _hooks(driver, {**_facts(driver), **(known or {})})
    common = replace(control, env=("NVIDIA_VISIBLE_DEVICES=void",), mounts=_mounts(driver), hooks=hooks)
    return Specification(tuple(devices), common, {})


def _devices(driver: DriverFacts, gpu: Gpu) -> list[Device]:
    """Return the CDI devices of a GPU: one device by several names, or one for each of its MIG devices."""
    (node,) = (node for node in driver.nodes if node.path == f"/dev/nvidia{gpu.minor}")
    if gpu.mig:
        parts = ((f"{gpu.index}:{part.index}", part.uuid, _node_edits((node, *part.nodes))) for part in gpu.mig)
        return [Device(name, edits) for number, uuid, edits in parts for name in (number, uuid) if name]
    # Includes the kernel's graphics nodes; the runtime adds them for graphics only. PCI bus ids allow pinning by slot.
    edits = _node_edits((node, *gpu.drm_nodes))
    return [Device(name, edits) for name in (str(gpu.index), gpu.uuid, gpu.bus_id.lower()) if name]


def chosen_devices(
    found: Specification, *, strategies: tuple[str, ...], ids: tuple[str, ...], no_all_device: bool
) -> tuple[Device, ...]:
    """Return the devices that have a name of the wanted kinds. Raises GpuprovError for an id that no device has.

    An id chooses a device by any of its names; `all` then means all chosen devices.
    """
    devices = [device for device in found.devices if device.name != "all"]
    whole = [device for device in found.devices if device.name == "all"]
    if ids and "all" not in ids:
        if unknown := sorted(set(ids) - {device.name for device in devices}):
            raise GpuprovError(f"there is no device {', '.join(unknown)}", "", "gpuprov cdi generate shows all names")
        chosen = [device.edits for device in devices if device.name in ids]
        devices = [device for device in devices if device.edits in chosen]
        whole = [all_of(devices)]
    if strategies:
        devices = [device for device in devices if _is_named(device.name, strategies)]
    if "type-index" in strategies and "index" not in strategies:
        devices = [replace(one, name=f"{_type(one.name)}{one.name}") for one in devices]
    return (*devices, *(() if no_all_device else whole))


def all_of(devices: Sequence[Device]) -> Device:
    """Return one device that combines all of these."""
    nodes = tuple(dict.fromkeys(node for device in devices for node in device.edits.device_nodes))
    gids = sorted({gid for device in devices for gid in device.edits.additional_gids})
    return Device("all", Edits(device_nodes=nodes, additional_gids=tuple(gids)))


def _type(name: str) -> str:
    return "gpu" if name.isdecimal() else "mig" if name.replace(":", "", 1).isdecimal() else ""


def _is_named(name: str, strategies: tuple[str, ...]) -> bool:
    if name.replace(":", "", 1).isdecimal():
        return "index" in strategies or "type-index" in strategies
    return name.startswith(("GPU-", "MIG-")) and "uuid" in strategies


def difference(content: bytes, driver: DriverFacts, *, any_version: bool = False) -> str:
    """Return how a specification's file differs from the driver, "" if it does not.

    If NVML was not queried, facts that only NVML knows are not compared. With `any_version`, another version of gpuprov
    may have written it: then the hook may have another form, and lack links under other names than the library's own.
    """
    wanted = specification(driver)
    if content == render_json(wanted):
        return ""
    try:
        found = parse_json(content)
    except GpuprovError as error:
        return error.problems[0].evidence
    if not driver.cuda_version:
        wanted = _with_answers(driver, found)
    if any_version and _links_suffice(found, wanted):
        wanted = replace(wanted, edits=replace(wanted.edits, hooks=found.edits.hooks))
        content = render_json(found)
    return "" if content == render_json(wanted) else _first_difference(found, wanted)


def updated(driver: DriverFacts, content: bytes) -> bytes:
    """Return a specification's file as it should be; if NVML did not answer, with its earlier answers in `content`."""
    wanted = specification(driver)
    with contextlib.suppress(GpuprovError):
        found = parse_json(content)
        if not driver.cuda_version and host_facts(found).get(_DRIVER) == driver.library_version:
            wanted = _with_answers(driver, found)
    return render_json(wanted)


def _links_suffice(found: Specification, wanted: Specification) -> bool:
    """Say whether the found hook has the facts of the host, and by its links the loader finds each library."""
    if any(hook.path != HOOK_PATH or not hook.env for hook in found.edits.hooks):
        return False
    there, here = _files_of(found), _files_of(wanted)
    needed = {path for path, name in here.items() if path.rpartition("/")[2].split(".so")[0] == name.split(".so")[0]}
    same = all(there[path] == name for path, name in here.items() if path in there)
    return host_facts(found) == host_facts(wanted) and same and needed <= there.keys()


def _files_of(specification: Specification) -> dict[str, str]:
    """Return the links of the hook: path → name of the file that it leads to."""
    words = [word for hook in specification.edits.hooks for word in hook.args]
    pairs = (word.partition("::") for flag, word in zip(words, words[1:]) if flag == "--link")
    targets = {path: target for target, _, path in pairs}
    found = {}
    for path in targets:
        end = path
        for _ in targets:
            end = targets[end] if targets[end].startswith("/") else f"{end.rpartition('/')[0]}/{targets[end]}"
            if end not in targets:
                break
        found[path] = end.rpartition("/")[2]
    return found


def _with_answers(driver: DriverFacts, found: Specification) -> Specification:
    """Return the driver's specification, with the NVML facts recorded in `found`."""
    uuids = {device.edits: device.name for device in found.devices if device.name.startswith(("GPU-", "MIG-"))}
    known = {flag: value for flag, value in host_facts(found).items() if flag in _OF_NVML}
    return specification(replace(driver, gpus=tuple(_with_uuids(driver, gpu, uuids) for gpu in driver.gpus)), known)


def _with_uuids(driver: DriverFacts, gpu: Gpu, uuids: Mapping[Edits, str]) -> Gpu:
    edits = {device.name: device.edits for device in _devices(driver, gpu)}
    if not gpu.mig:
        return gpu if gpu.uuid else replace(gpu, uuid=uuids.get(edits[str(gpu.index)], ""))
    parts = (replace(part, uuid=uuids.get(edits[f"{gpu.index}:{part.index}"], "")) for part in gpu.mig)
    return replace(gpu, mig=tuple(parts))


def host_facts(specification: Specification) -> dict[str, str]:
    """Return the host's facts in the specification: flag → value, such as --host-driver-version."""
    arguments = [word for hook in specification.edits.hooks if hook.path == HOOK_PATH for word in hook.args]
    return {flag: value for flag, value in zip(arguments, arguments[1:]) if flag in _FLAGS}


def _first_difference(found: Specification, wanted: Specification) -> str:
    if wrong := cdi_format.problems(found):
        return wrong[0]
    for flag in _FLAGS:
        theirs, ours = (host_facts(one).get(flag, "nothing") for one in (found, wanted))
        if theirs != ours:
            name = flag.removeprefix("--").removeprefix("host-")
            return f"{name}: the specification says {theirs}, the host has {ours}"
    there, here = ({device.name: device.edits for device in one.devices} for one in (found, wanted))
    if other := _first_other(there, here):
        return f"device {other}"
    if other := _first_other(*({mount.container_path: mount for mount in one.edits.mounts} for one in (found, wanted))):
        return other
    if found.edits.hooks != wanted.edits.hooks:
        return "the links are others"
    same_nodes = found.edits.device_nodes == wanted.edits.device_nodes
    return "its form is another" if same_nodes else "the control nodes are others"


def _first_other(there: Mapping[str, object], here: Mapping[str, object]) -> str:
    """Return the first name that does not mean the same in both, and how."""
    for name in (*here, *there):
        if there.get(name) != here.get(name):
            return f"{name} is {'missing' if name not in there else 'gone' if name not in here else 'another'}"
    return ""


def _node_edits(nodes: tuple[Node, ...]) -> Edits:
    """Return the nodes, and the groups that may open those that are not open to all users."""
    gids = sorted({node.gid for node in nodes if node.mode & _WORLD != _WORLD and node.gid})
    made = []
    for node in nodes:
        mode, gid = (None, None) if node.mode & _WORLD == _WORLD else (node.mode, node.gid)
        made.append(DeviceNode(node.path, major=node.major, minor=node.minor, file_mode=mode, gid=gid))
    return Edits(device_nodes=tuple(made), additional_gids=tuple(gids))


def _mounts(driver: DriverFacts) -> tuple[Mount, ...]:
    mounts = [Mount(library.path, _place(library)) for library in driver.libraries]
    mounts += [Mount(file.real_path, file.path) for file in (*driver.programs, *driver.configuration)]
    mounts += [Mount(path, path) for path in driver.firmware]
    mounts += [Mount(path, path, _SOCKET_OPTIONS) for path in driver.sockets]
    return tuple(mounts)


def _place(library: Library) -> str:
    """Return the path of a real file in containers: its own name, in a folder that loaders search."""
    file_name = library.path.rpartition("/")[2]
    return next((link for link in library.links if link.rpartition("/")[2] == file_name), library.path)


def _hooks(driver: DriverFacts, facts: Mapping[str, str]) -> tuple[Hook, ...]:
    """Return the one hook that makes the links; its `env` keeps the image's environment out (CVE-2025-23266)."""
    links = [pair for library in driver.libraries for pair in _links(library)]
    if not links:
        return ()
    words = [word for flag in _FLAGS if flag in facts for word in (flag, facts[flag])]
    words += [word for target, path in links for word in ("--link", f"{target}::{path}")]
    arguments = (HOOK_PATH.rpartition("/")[2], "createContainer", *words)
    return (Hook("createContainer", HOOK_PATH, arguments, ("PATH=/usr/bin:/bin",), _HOOK_SECONDS),)


def _links(library: Library) -> list[tuple[str, str]]:
    """Return (target, path) of each link: the soname to the file, the development link to the soname."""
    place = _place(library)
    folder, _, file_name = place.rpartition("/")
    names = {path: path.rpartition("/")[2] for path in library.links if path != place}
    sonames = sorted(name for path, name in names.items() if path.rpartition("/")[0] == folder and ".so." in name)
    found = []
    for path, name in sorted(names.items()):
        if path.rpartition("/")[0] != folder:
            # From another folder (gbm's back ends), the relative path to the file.
            found.append((place, path))
        else:
            found.append((sonames[0] if name.endswith(".so") and sonames else file_name, path))
    return found


def _facts(driver: DriverFacts) -> dict[str, str]:
    """Values that NVIDIA_REQUIRE_* is compared with at container start, without a query to a device."""
    version = driver.library_version
    capabilities = [gpu.compute_capability for gpu in driver.gpus]
    brands = {gpu.brand for gpu in driver.gpus}
    found = {
        "--host-driver-version": version,
        "--host-cuda-version": driver.cuda_version or (cuda_version_of_driver(version) if version else ""),
        # For unlike GPUs the minimum: an image's requirement must hold for any of them.
        "--gpu-architecture": min(capabilities, key=version_key) if capabilities and all(capabilities) else "",
        "--gpu-brand": brands.pop() if len(brands) == 1 else "",
    }
    return {flag: value for flag, value in found.items() if value}


_DRIVER = "--host-driver-version"


def in_short(path: str, before: bytes | None, after: bytes) -> str:
    """Return the driver's version and, for each kind of item, how many there are, are added, removed and changed.

    "" if either text is not a specification: then the full diff is shown.
    """
    try:
        old, new = Specification((), Edits(), {}) if before is None else parse_json(before), parse_json(after)
    except GpuprovError:
        return ""
    lines = [f"{path}{' (new)' if before is None else ''}"]
    was, will = (host_facts(one).get(_DRIVER, "none") for one in (old, new))
    lines.append(f"  driver version: {will}" if was in (will, "none") else f"  driver version: {was} → {will}")
    there, here = _things(old), _things(new)
    for kind in dict.fromkeys((*here, *there)):
        lines.append(f"  {kind}: {_counts(there.get(kind, {}), here.get(kind, {}))}")
    return "\n".join(lines)


def _things(one: Specification) -> dict[str, dict[str, object]]:
    """Return kind → name → what it is."""
    edits = one.every_edits
    found: dict[str, dict[str, object]] = {
        "devices": {device.name: device.edits for device in one.devices},
        "device nodes": {node.path: node for each in edits for node in each.device_nodes},
        "libraries": {}, "programs": {}, "other files": {},
        "hooks": {f"{hook.name} {' '.join(hook.args[:2])}": hook for hook in one.edits.hooks},
    }  # fmt: skip
    for mount in (mount for each in edits for mount in each.mounts):
        name = mount.container_path.rpartition("/")[2]
        is_program = mount.container_path.rpartition("/")[0].endswith("bin")
        kind = "libraries" if ".so" in name else "programs" if is_program else "other files"
        found[kind][mount.container_path] = mount
    return {kind: things for kind, things in found.items() if things}


def _counts(there: Mapping[str, object], here: Mapping[str, object]) -> str:
    added, removed = here.keys() - there.keys(), there.keys() - here.keys()
    changed = {name for name in here.keys() & there.keys() if here[name] != there[name]}
    counts = ((added, "added"), (removed, "removed"), (changed, "changed"))
    told = ", ".join(f"{len(names)} {word}" for names, word in counts if names)
    return f"{len(here)} ({told})" if told else f"{len(here)}"


# -- devices beside GPUs, each with a kind of its own: GDS, MOFED, GDRCopy, NVSwitch, IMEX channels, GPU management ----
# Source: nvidia-container-toolkit, internal/discover (gds.go, mofed.go, gdrcopy.go, nvswitch.go) and pkg/nvcdi.

# Mode → kind; folder and names of its device nodes; files and folders that go with them.
MODES: dict[str, tuple[str, tuple[tuple[str, str], ...], tuple[str, ...]]] = {
    "gds": ("nvidia.com/gds", (("/dev", r"nvidia-fs\d*"),), ("/run/udev", "/etc/cufile.json")),
    "mofed": ("nvidia.com/mofed", (("/dev/infiniband", r"uverbs\d+|rdma_cm"),), ()),
    "gdrcopy": ("nvidia.com/gdrcopy", (("/dev", "gdrdrv"),), ()),
    "nvswitch": ("nvidia.com/nvswitch", (("/dev", r"nvidia-nvswitchctl|nvidia-nvswitch\d+"),), ()),
    "imex": ("nvidia.com/imex-channel", (("/dev/nvidia-caps-imex-channels", r"channel\d+"),), ()),
    "management": (
        "management.nvidia.com/gpu",
        (
            ("/dev", r"nvidia\d+|nvidiactl|nvidia-modeset|nvidia-uvm|nvidia-uvm-tools|nvidia-nvswitch\w+"),
            ("/dev/nvidia-caps", r"nvidia-cap\d+"), ("/dev/nvidia-caps-imex-channels", r"channel\d+"),
        ),
        (),
    ),
}  # fmt: skip
# What an installation writes by default; management devices are for cluster operators' tools.
_WRITTEN = ("gds", "mofed", "gdrcopy", "nvswitch", "imex")
_FOLDER = "/etc/cdi"
OTHER_PATHS = tuple(f"{_FOLDER}/nvidia-{mode}.json" for mode in _WRITTEN)


def other_specifications(system: System) -> Mapping[str, bytes]:
    """Return path → content of the specifications for this host's other devices.

    A kind that another file already defines is skipped: engines reject a device that is defined twice.
    """
    found = {}
    for mode, path in zip(_WRITTEN, OTHER_PATHS):
        kind, places, _ = MODES[mode]
        if next(_nodes(system, places), None) and not _is_elsewhere(system, kind, path):
            found[path] = render_json(specification_of(system, mode))
    return found


def _is_elsewhere(system: System, kind: str, path: str) -> bool:
    """Say whether another file has the kind. It searches the text, because hosts may lack a YAML parser.

    The text may be JSON in one line. Engines read no file with another suffix.
    """
    name = rf"""["']?kind["']?\s*:\s*["']?{re.escape(kind)}["']?"""
    named = re.compile(rf"(?:^|[{{,])\s*{name}\s*(?:$|[,}}]|\s#)", re.MULTILINE)
    others = (f"{_FOLDER}/{name}" for name in system.list_directory(_FOLDER) if name.endswith(cdi_format.SUFFIXES))
    return any(named.search(system.read_text(other) or "") for other in others if other != path)


def specification_of(system: System, mode: str) -> Specification:
    """Return the specification of a mode. Raises GpuprovError if this host has no such device."""
    if mode == "wsl":
        return _wsl(system)
    kind, places, files = MODES[mode]
    nodes = tuple(_nodes(system, places))
    if not nodes:
        looked = ", ".join(folder for folder, _ in places)
        step = "load the kernel module that makes it; gpuprov doctor says what is missing"
        raise GpuprovError(f"this host has nothing for {kind}", f"no such device node in {looked}", step)
    mounts = tuple(Mount(path, path) for path in files if system.exists(path))
    if mode == "imex":
        devices = [Device(node.path.rpartition("channel")[2], Edits(device_nodes=(node,))) for node in nodes]
        return Specification((*devices, Device("all", Edits(device_nodes=nodes))), Edits(), {}, kind)
    common = specification(discover(system)).edits if mode == "management" else Edits()
    shared = Edits(env=("NVIDIA_VISIBLE_DEVICES=void",), mounts=common.mounts, hooks=common.hooks)
    return Specification((Device("all", Edits(device_nodes=nodes, mounts=mounts)),), shared, {}, kind)


def _nodes(system: System, places: tuple[tuple[str, str], ...]) -> Iterator[DeviceNode]:
    for folder, names in places:
        for name in sorted(system.list_directory(folder), key=_by_number):
            path = f"{folder}/{name}"
            status = system.status(path) if re.fullmatch(names, name) else None
            if status is not None and status.kind == "char":
                mode = None if status.mode & _WORLD == _WORLD else status.mode
                yield DeviceNode(path, major=status.major, minor=status.minor, file_mode=mode, gid=status.gid or None)


def _by_number(name: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.*?)(\d*)", name)
    assert found is not None
    return found[1], int(found[2] or -1)


# Windows mounts its driver into WSL: in `lib` what programs load, in `drivers` the files that these load in turn.
# Source: nvidia-container-toolkit, pkg/nvcdi/driver-wsl.go.
WSL_DEVICE = "/dev/dxg"
_WSL = "/usr/lib/wsl"


def _wsl(system: System) -> Specification:
    """Return the device `all` of WSL: its node, Windows' driver, and the libraries in folders that loaders search.

    It has no hook, so an engine that reads CDI needs nothing of gpuprov's. Raises GpuprovError without a GPU.
    """
    status, folder = system.status(WSL_DEVICE), f"{_WSL}/lib"
    names = sorted(system.list_directory(folder))
    if status is None or status.kind != "char" or "libcuda.so.1" not in names:
        lacks = f"{folder}/libcuda.so.1" if status is not None else WSL_DEVICE
        step = "wsl --update; wsl --shutdown  # in Windows, with NVIDIA's driver for Windows installed there"
        raise GpuprovError("Windows gives this WSL no GPU", f"there is no {lacks}", step)
    loaders = (f"/usr/lib/{system.architecture()}-linux-gnu", "/usr/lib64")
    mounts = [Mount(path, path) for path in (folder, f"{_WSL}/drivers")]
    mounts += [Mount(f"{folder}/{name}", f"{place}/{name}") for name in names if ".so" in name for place in loaders]
    mounts += [Mount(f"{folder}/{name}", f"/usr/bin/{name}") for name in names if name == "nvidia-smi"]
    node = DeviceNode(WSL_DEVICE, major=status.major, minor=status.minor)
    shared = Edits(env=("NVIDIA_VISIBLE_DEVICES=void",), mounts=tuple(mounts))
    return Specification((Device("all", Edits(device_nodes=(node,))),), shared, {})
