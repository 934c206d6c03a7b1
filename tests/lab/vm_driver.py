"""The disk of the virtual machine with Debian's genuine driver on it, installed by gpuprov's own plan.

apt, dpkg and DKMS run on this machine's processor, in the disk's file system: emulated they would take an hour.
Built once, into the cache, by the digest of the machine's disk and of this recipe: building nvidia.ko takes minutes.
"""

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.lab.shell import LabError, run
from tests.lab.sources import copy_network_configuration
from tests.lab.vm import Vm

_RELEASE = "bookworm"
_BUILD_SECONDS = 2400
_PREPARE = """
set -eu
export DEBIAN_FRONTEND=noninteractive
mount -t proc none /proc
apt-get -qq update
python3 -c "$1"
# The machine boots without GPUs: the kernel would link the driver at every one that it finds, for a minute each time.
rm /etc/modules-load.d/machine.conf
"""
# The plan is made for the kernel on the disk, which does not run here, and for a GPU that an H100's is.
_INSTALL = """
import os
import sys
sys.path.insert(0, "/root/agent.pyz")
from dataclasses import replace
from gpuprov.core.apply import apply_changes
from gpuprov.core.journal import new_journal
from gpuprov.core.system import System
from gpuprov.facts.host import gather
from gpuprov.machine.pci import PciGpu
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.spec import parse_spec

class Disk(System):
    def kernel_release(self):
        # Modules of the newer kernel that a test installs lie there too.
        return os.readlink("/vmlinuz").partition("vmlinuz-")[2]

def plan():
    facts = gather(system)
    metal = replace(facts.kernel, container="", takes_modules=True)
    facts = replace(facts, kernel=metal, gpus=(PciGpu("0000:1b:00.0", "2330"),))
    return make_plan(facts, spec, ("repositories", "packages"))

system, spec = Disk(), parse_spec({"driver": "distribution"})
planned = plan()
if planned.problems:
    sys.exit("; ".join(map(str, planned.problems)))
journal = new_journal(system, "install")
apply_changes([one.change for one in planned.changes], system, journal, lambda event: None)
journal.end("done")
left = [one.change.summary() for one in plan().changes]
if left:
    sys.exit(f"not settled: {left}")
"""


class DriverVm(Vm):
    """A virtual machine with the genuine driver of its Debian release."""

    def __init__(self, cache: Path, directory: Path, tell: Callable[[str], None] = lambda message: None) -> None:
        super().__init__(cache, directory, tell)
        self.image = _build(cache, self.image, tell)


def _build(cache: Path, image: Path, tell: Callable[[str], None]) -> Path:
    """Return the folder with that machine's `disk`, `boot` and `key`, building them if the cache lacks them."""
    recipe = repr((image.name, _PREPARE, _INSTALL))
    place = cache / f"driver-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    with (cache / "driver.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return place
        tell("building nvidia.ko for a virtual machine (minutes, once)")
        for stale in cache.glob("driver-*"):
            shutil.rmtree(stale)
        half = cache / "building-driver"
        _remove(half)
        run(("cp", "--archive", "--sparse=always", str(image), str(half)), timeout=_BUILD_SECONDS)
        with mounted(half / "disk", half / "root") as root:
            _install(root)
        (half / "root").rmdir()
        half.rename(place)
    return place


def _install(root: Path) -> None:
    sources = (root / "etc/apt/sources.list").read_text()
    copy_network_configuration(root, _RELEASE)
    agent = root / "root/agent.pyz"
    gpuprov = str(Path(sys.executable).with_name("gpuprov"))
    subprocess.run((gpuprov, "agent", "build", "-o", str(agent)), check=True, timeout=120, capture_output=True)
    in_root(root, _PREPARE, _INSTALL)
    (root / "etc/apt/sources.list").write_text(sources)
    for left in (agent, root / "etc/resolv.conf", root / "etc/apt/apt.conf.d/80site"):
        left.unlink()
    run(("chroot", str(root), "apt-get", "clean"))
    shutil.rmtree(root / "var/lib/apt/lists")


def in_root(root: Path, script: str, *arguments: str) -> None:
    """Run a script there, in namespaces of its own: its mounts and processes end with it."""
    namespaces = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")
    run((*namespaces, "chroot", str(root), "sh", "-c", script, "sh", *arguments), timeout=_BUILD_SECONDS)


@contextlib.contextmanager
def mounted(disk: Path, place: Path) -> Iterator[Path]:
    """Mount a virtual machine's disk at a new folder for the time of the block."""
    place.mkdir()
    run(("mount", "-o", "loop", str(disk), str(place)))
    try:
        yield place
    finally:
        # A namespace that somebody else has made meanwhile may keep it mounted: what is written must be on the disk.
        run(("sync", "--file-system", str(place)))
        run(("umount", str(place)))


def _remove(directory: Path) -> None:
    """Remove what a build that was killed has left, its mount too."""
    with contextlib.suppress(LabError):
        run(("umount", str(directory / "root")))
    shutil.rmtree(directory, ignore_errors=True)
