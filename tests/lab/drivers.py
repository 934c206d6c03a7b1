"""Drivers on lab hosts: served to gpuprov, installed by another hand, loaded by the container host, found by a boot."""

import hashlib
import re
import shutil
from pathlib import Path

from tests import simgpu
from tests.lab.host import Host
from tests.lab.lab import Lab

_TREE = "usr/lib/simgpu"
_VERSION = re.compile(r"\d{3}\.\d+\.\d+")


def driver_variables(lab: Lab, version: str = simgpu.DRIVER_VERSION) -> dict[str, str]:
    """Serve the .run of this driver, and return the variables that ask for it."""
    file = simgpu.build_run(lab.www, version)
    return {
        "gpuprov_driver_version": version,
        "gpuprov_driver_url": f"{lab.url}/{file.name}",
        "gpuprov_driver_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }


def load_driver(host: Host, version: str) -> None:
    """Have the container host load this driver at once; the kernel of a lab host is the container host's."""
    loaded = host.root / _TREE / "proc/driver/nvidia/version"
    loaded.write_text(_VERSION.sub(version, loaded.read_text(), count=1))


def change_kernel_side(host: Host, version: str, gpus: int = 2, divided: tuple[int, ...] = ()) -> None:
    """Let the next boot find a kernel with this driver and these GPUs."""
    tree = host.root / _TREE
    for part in ("sys", "proc"):
        shutil.rmtree(tree / part)
    simgpu.write_kernel_tree(tree, gpus, version, divided=divided)


def leave_nodes_to_gpuprov(root: Path) -> None:
    """Let a boot of this root file system make no device nodes by itself."""
    attach = root / _TREE / "attach"
    attach.write_text("".join(line for line in attach.read_text().splitlines(keepends=True) if "mknod" not in line))


def bring_run_files(lab: Lab, host: Host, *versions: str) -> None:
    """Put the .run files of these drivers into root's home."""
    for version in versions:
        shutil.copyfile(simgpu.build_run(lab.www, version), host.root / f"root/{version}.run")


def install_by_hand(host: Host, version: str) -> None:
    """Replace the driver's files as a user does, with the .run in root's home; the kernel keeps what it has loaded."""
    host.ssh(f"sh /root/{version}.run --silent --no-kernel-modules --no-install-libglvnd", timeout=300)
