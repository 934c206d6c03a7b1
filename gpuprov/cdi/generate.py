"""The CDI specification of a driver. Pure: what is not in the facts is not in the specification.

No hooks: each link by which the loader finds a library (libcuda.so.1) is a mount of its own, of the same file. So a
container start needs no process of ours in engines that read CDI themselves, and nothing is written into it.
"""

from __future__ import annotations

from gpuprov.cdi.discover import DriverFacts, Node
from gpuprov.cdi.specification import Device, DeviceNode, Edits, Mount, Specification
from gpuprov.runtime_hook.requirements import cuda_version_of_driver

_SOCKET_OPTIONS = ("ro", "nosuid", "nodev", "noexec", "rbind", "rprivate")
ANNOTATION_PREFIX = "gpuprov.io/"


def specification(driver: DriverFacts) -> Specification:
    """Return devices by index, UUID, PCI bus id, and `all`; what every container needs stands in the common edits."""
    by_path = {node.path: node for node in driver.nodes}
    devices = []
    for gpu in driver.gpus:
        node = by_path[f"/dev/nvidia{gpu.minor}"]
        edits = Edits(device_nodes=(_device_node(node),))
        # PCI bus ids too: people pin GPUs by their slot.
        devices += [Device(name, edits) for name in (str(gpu.index), gpu.uuid, gpu.bus_id.lower()) if name]
    own = tuple(by_path[f"/dev/nvidia{gpu.minor}"] for gpu in driver.gpus)
    if own:
        devices.append(Device("all", Edits(device_nodes=tuple(_device_node(node) for node in own))))
    control = tuple(_device_node(node) for node in driver.nodes if node not in own)
    edits = Edits(env=("NVIDIA_VISIBLE_DEVICES=void",), device_nodes=control, mounts=_mounts(driver))
    return Specification(tuple(devices), edits, _annotations(driver))


def _device_node(node: Node) -> DeviceNode:
    return DeviceNode(node.path, node.major, node.minor)


def _mounts(driver: DriverFacts) -> tuple[Mount, ...]:
    mounts = []
    for library in driver.libraries:
        folder = (library.links[0] if library.links else library.path).rpartition("/")[0]
        name = library.path.rpartition("/")[2]
        # Debian keeps the real file elsewhere (/usr/lib/…/nvidia/current): containers see it where the loader looks.
        mounts.append(Mount(library.path, f"{folder}/{name}"))
        mounts += [Mount(library.path, link) for link in library.links]
    mounts += [Mount(path, path) for path in (*driver.programs, *driver.firmware)]
    mounts += [Mount(path, path, _SOCKET_OPTIONS) for path in driver.sockets]
    return tuple(mounts)


def _annotations(driver: DriverFacts) -> dict[str, str]:
    """What NVIDIA_REQUIRE_* is held against at container start, without asking a device then."""
    version = driver.library_version
    found = {"driver-version": version, "cuda-version": cuda_version_of_driver(version) if version else ""}
    return {f"{ANNOTATION_PREFIX}{name}": value for name, value in found.items() if value}
