"""A host's driver below a folder: its files, its loaded modules, its device nodes; and what containers get of it."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from gpuprov.cdi.discover import DriverFacts
from gpuprov.cdi.generate import specification
from tests.simgpu import DRIVER_VERSION, DeviceNode, device_nodes, install_tree, write_kernel_tree
from tests.triplet import LIBRARIES


def write_driver(root: Path, gpus: int, *, library_directory: str = LIBRARIES, divided: tuple[int, ...] = ()) -> None:
    """Lay the driver as its .run does, with all nodes of whole GPUs."""
    install_tree(root, DRIVER_VERSION, library_directory=library_directory)
    write_kernel_tree(root, gpus, divided=divided)
    (root / "lib").symlink_to("usr/lib")
    make_nodes(root, device_nodes(gpus))


def make_nodes(root: Path, nodes: Iterable[DeviceNode]) -> None:
    for node in nodes:
        path = root / node.path.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(path, stat.S_IFCHR, os.makedev(node.major, node.minor))
        path.chmod(node.mode)


def mounts(driver: DriverFacts) -> dict[str, str]:
    """Return container path → host path of what each container with a GPU gets, over mounts and links."""
    edits = specification(driver).edits
    found = {mount.container_path: mount.host_path for mount in edits.mounts}
    return reached(found, [link for hook in edits.hooks for link in hook.args if "::" in link])


def reached(found: dict[str, str], links: list[str]) -> dict[str, str]:
    """Return the mounts, and each link (TARGET::PATH) with the file at its end; a link that ends nowhere fails."""
    targets = {path: target for target, path in (link.split("::") for link in links)}
    for path in targets:
        end = path
        while end in targets:
            end = targets[end] if targets[end].startswith("/") else f"{end.rpartition('/')[0]}/{targets[end]}"
        found[path] = found[end]
    return found
