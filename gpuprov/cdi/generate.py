"""Generate the CDI specification of a driver. Pure: it contains only what the facts contain.

Each real file is a mount. One hook holds the links by which the loader finds a library (libcuda.so.1). Engines that
read CDI run the hook; gpuprov's own runtime reads the links from it and makes them without a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpuprov.cdi.discover import DriverFacts, Gpu
from gpuprov.cdi.files import Library
from gpuprov.cdi.nodes import Node
from gpuprov.cdi.specification import (
    Device,
    DeviceNode,
    Edits,
    Hook,
    Mount,
    Specification,
    parse_json,
    problems,
    render_json,
)
from gpuprov.cdi.transform import all_of
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook.driver_files import HOOK_PATH
from gpuprov.runtime_hook.requirements import cuda_version_of_driver, version_key

# Where an installation writes it, and every boot keeps it up to date.
PATH = "/etc/cdi/nvidia.json"
# After this time the engine kills the hook and does not start the container; the hook gives up earlier.
_HOOK_SECONDS = 30
_SOCKET_OPTIONS = ("ro", "nosuid", "nodev", "noexec", "rbind", "rprivate")
_WORLD = 0o006  # read and write for others
# Facts about the host are arguments of the hook: annotations would need CDI 0.6.0, which podman 4 lacks.
_FLAGS = ("--host-driver-version", "--host-cuda-version", "--gpu-architecture", "--gpu-brand")
# Facts that only NVML knows.
_OF_NVML = _FLAGS[1:]


def specification(driver: DriverFacts) -> Specification:
    """Return devices by index, UUID, PCI bus id, and `all`; the common edits hold what every container needs.

    A GPU in MIG mode appears only as its MIG devices (0:1 and their UUIDs): as a whole it can't compute.
    """
    devices = [device for gpu in driver.gpus for device in _devices(driver, gpu)]
    if devices:
        devices.append(all_of(devices))
    gpu_nodes = {f"/dev/nvidia{gpu.minor}" for gpu in driver.gpus}
    control = _node_edits(tuple(node for node in driver.nodes if node.path not in gpu_nodes))
    common = replace(
        control, env=("NVIDIA_VISIBLE_DEVICES=void",), mounts=_mounts(driver), hooks=_hooks(driver)
    )  # fmt: skip
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


def _links_suffice(found: Specification, wanted: Specification) -> bool:
    """Say whether the found hook has the facts of the host, and by its links the loader finds each library."""
    if any(hook.path != HOOK_PATH or not hook.env for hook in found.edits.hooks):
        return False
    there, here = _files_of(found), _files_of(wanted)
    needed = {path for path, name in here.items() if _stem(path.rpartition("/")[2]) == _stem(name)}
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


def _stem(name: str) -> str:
    return name.partition(".so")[0]


def _with_answers(driver: DriverFacts, found: Specification) -> Specification:
    """Return the driver's specification, with the NVML facts recorded in `found`."""
    uuids = {device.edits: device.name for device in found.devices if device.name.startswith(("GPU-", "MIG-"))}
    gpus = tuple(_with_uuids(driver, gpu, uuids) for gpu in driver.gpus)
    wanted = specification(replace(driver, gpus=gpus))
    known = {flag: value for flag, value in host_facts(found).items() if flag in _OF_NVML}
    hooks = tuple(
        replace(hook, args=_with_facts(hook.args, {**host_facts(wanted), **known})) for hook in wanted.edits.hooks
    )
    return replace(wanted, edits=replace(wanted.edits, hooks=hooks))


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


def _with_facts(arguments: tuple[str, ...], facts: Mapping[str, str]) -> tuple[str, ...]:
    links = [word for place, word in enumerate(arguments) if "--link" in arguments[max(0, place - 1) : place + 1]]
    told = [word for flag in _FLAGS if flag in facts for word in (flag, facts[flag])]
    return (*arguments[:2], *told, *links)


def _first_difference(found: Specification, wanted: Specification) -> str:
    wrong = problems(found)
    if wrong:
        return wrong[0]
    for flag in _FLAGS:
        theirs, ours = (host_facts(one).get(flag, "nothing") for one in (found, wanted))
        if theirs != ours:
            name = flag.removeprefix("--").removeprefix("host-")
            return f"{name}: the specification says {theirs}, the host has {ours}"
    there, here = ({device.name: device.edits for device in one.devices} for one in (found, wanted))
    for name in (*here, *there):
        if there.get(name) != here.get(name):
            return f"device {name} is {'missing' if name not in there else 'gone' if name not in here else 'another'}"
    return _first_different_edit(found.edits, wanted.edits) or "its form is another"


def _first_different_edit(found: Edits, wanted: Edits) -> str:
    there = {mount.container_path: mount for mount in found.mounts}
    here = {mount.container_path: mount for mount in wanted.mounts}
    for path in (*here, *there):
        if there.get(path) != here.get(path):
            return f"{path} is {'missing' if path not in there else 'gone' if path not in here else 'another'}"
    if found.hooks != wanted.hooks:
        return "the links are others"
    if found.device_nodes != wanted.device_nodes:
        return "the control nodes are others"
    return ""


def _node_edits(nodes: tuple[Node, ...]) -> Edits:
    """Return the nodes, and the groups that may open those that are not open to all users."""
    gids = sorted({node.gid for node in nodes if not _is_open(node) and node.gid})
    return Edits(device_nodes=tuple(_device_node(node) for node in nodes), additional_gids=tuple(gids))


def _device_node(node: Node) -> DeviceNode:
    plain = DeviceNode(node.path, node.major, node.minor)
    return plain if _is_open(node) else replace(plain, file_mode=node.mode, gid=node.gid)


def _is_open(node: Node) -> bool:
    return node.mode & _WORLD == _WORLD


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


def _hooks(driver: DriverFacts) -> tuple[Hook, ...]:
    """Return the one hook that makes the links; its `env` keeps the image's environment out (CVE-2025-23266)."""
    links = [pair for library in driver.libraries for pair in _links(library)]
    if not links:
        return ()
    words = [word for target, path in links for word in ("--link", f"{target}::{path}")]
    arguments = _with_facts((HOOK_PATH.rpartition("/")[2], "createContainer", *words), _facts(driver))
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


_EMPTY = Specification((), Edits(), {})
_DRIVER = "--host-driver-version"


def in_short(path: str, before: bytes | None, after: bytes) -> str:
    """Return the driver's version and, for each kind of item, how many there are, are added, removed and changed.

    "" if either text is not a specification: then the full diff is shown.
    """
    try:
        old, new = _EMPTY if before is None else parse_json(before), parse_json(after)
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
