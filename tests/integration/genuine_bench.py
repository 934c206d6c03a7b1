"""A bench whose driver is a genuine one: found by gpuprov's own discovery, given by the deployed runtime, run by runc.

The machine has no GPU. /proc and /sys are the simulated ones of two GPUs, so that discovery has devices to name; behind
the device nodes is nothing, and the genuine libraries say so.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov.cdi.discover import discover
from gpuprov.cdi.generate import specification
from gpuprov.cdi.specification import Specification, render_json
from gpuprov.core.system import System
from tests import simgpu
from tests.genuine import Driver
from tests.integration.container_bench import LIBRARIES, Bench

# Another driver's libraries would meet the loaded module, and answer 803 instead of 100.
NO_DRIVER = pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists(), reason="this machine has a driver loaded: make test-gpu is for it"
)
_PROBE = Path(__file__).resolve().parents[1] / "genuine/probe.c"
# What NVIDIA's libraries and programs need of the C library, and the probe.
_C_LIBRARY = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libgcc_s.so.1")
_ALL = ("NVIDIA_VISIBLE_DEVICES=all",)
_LOADER = "/lib64/ld-linux-x86-64.so.2"


def build_probe(folder: Path) -> Path:
    """Compile the program that loads libraries in containers and says what they answer."""
    program = folder / "probe"
    subprocess.run(("gcc", "-O1", "-Wall", "-Werror", "-o", str(program), str(_PROBE), "-ldl"), check=True)
    return program


def build_stub(folder: Path) -> Path:
    """Compile a stub of libcuda that answers as CUDA's own does; NVIDIA's comes in packages of a gigabyte."""
    names = (
        "cuInit",
        "cuDriverGetVersion",
        "cuDeviceGetCount",
        "cuGetProcAddress",
        "cuGetExportTable",
        "cuGetProcAddress_v2",
    )
    source = "".join(f"int {name}(void) {{ return 34; }}\n" for name in names)
    library = folder / "libcuda.so"
    flags = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library))
    subprocess.run(("gcc", "-x", "c", "-", *flags), input=source.encode(), check=True)
    return library


def host_root(folder: Path, driver: Driver) -> Path:
    """Lay out a host's root with the driver as NVIDIA's installer would, and a kernel that has loaded it."""
    place = folder / LIBRARIES.lstrip("/")
    place.mkdir(parents=True)
    for stem in ("libcuda", "libnvidia-ml"):
        shutil.copy(driver.library(stem), place)
    (folder / "usr/bin").mkdir()
    shutil.copy(driver.file("nvidia-smi"), folder / "usr/bin")
    (folder / "etc").mkdir()
    subprocess.run(("ldconfig", "-r", str(folder)), check=True, stderr=subprocess.DEVNULL)
    simgpu.write_kernel_tree(folder, 2, driver.version)
    return folder


def below_root(found: Specification, root: Path, hook: Path) -> Specification:
    """Return the specification of a host whose files lie below `root`, with the deployed hook."""
    mounts = tuple(replace(one, host_path=f"{root}{one.host_path}") for one in found.edits.mounts)
    hooks = tuple(replace(one, path=str(hook)) for one in found.edits.hooks)
    return replace(found, edits=replace(found.edits, mounts=mounts, hooks=hooks))


class GenuineBench(Bench):
    """Containers with a C library and the probe in them; `install` gives the host a driver, or another one."""

    def __init__(self, folder: Path, probe: Path, low_level: str = "runc") -> None:
        super().__init__(folder, low_level)
        self._roots: dict[str, Path] = {}
        self.kernel, self.host = "", folder
        fill_root(self.root, probe)

    def _driver(self) -> None:
        """Leave the host without a driver: `install` brings one."""

    def install(self, driver: Driver) -> None:
        """Make this driver the host's: installed and loaded."""
        if driver.version not in self._roots:
            self._roots[driver.version] = host_root(self.folder / f"host-{driver.version}", driver)
        self.give(self._roots[driver.version])

    def give(self, root: Path) -> None:
        """Make the host's specification the one of the driver below this root, as discovery finds it."""
        facts = discover(System(str(root)))
        self.kernel, self.host = facts.kernel_version, root
        shutil.copy(root / "proc/driver/nvidia/version", self.deployed.module)
        self.specification.write_bytes(render_json(below_root(specification(facts), root, self.deployed.hook)))

    def put(self, path: str, source: Path) -> None:
        """Put a copy of a library into the image, in `path`'s folder, with the links of its soname."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)
        subprocess.run(("ldconfig", "-n", str(place.parent)), check=True)

    def forget_starts(self) -> None:
        """Remove what earlier starts left in the image: empty targets of mounts, links, the loader's cache."""
        for place in (self.root / LIBRARIES.lstrip("/")).iterdir():
            if place.is_symlink() or place.stat().st_size == 0:
                place.unlink()
        (self.root / "etc/ld.so.cache").unlink(missing_ok=True)

    def probe(self, *libraries: str, environment: Sequence[str] = _ALL, by_hook: str = "") -> list[str]:
        """Return what the probe says of these libraries in a container, a line for each."""
        return self.report(*environment, by_hook=by_hook, arguments=["/bin/probe", *libraries])

    def run(self) -> list[str]:
        """Create the configured container, run it to its end, and return its lines."""
        done = self.create()
        assert done.returncode == 0, done.stderr
        return self.output()


def fill_root(root: Path, probe: Path, *more: str) -> None:
    """Give an image the C library, the probe, and more libraries of the machine."""
    (root / "lib64").mkdir(exist_ok=True)
    shutil.copy(_LOADER, root / "lib64")
    place = root / LIBRARIES.lstrip("/")
    place.mkdir(parents=True, exist_ok=True)
    # The loader searches /lib/x86_64-linux-gnu first, as in an image of Debian, where it is the same folder.
    if not (root / "lib").exists():
        (root / "lib").symlink_to("usr/lib")
    for name in (*_C_LIBRARY, *more):
        shutil.copy(Path("/lib/x86_64-linux-gnu", name), place / name)
    shutil.copy(probe, root / "bin/probe")


def answers(lines: Iterable[str]) -> dict[str, str]:
    """Return the calls of the probe's lines: {"cuInit": "100", "cuDriverGetVersion": "0:12040"}."""
    return dict(re.findall(r" (\w+)=(-?\d+(?::-?\d+)?)", "\n".join(lines)))


def winner(line: str) -> str:
    """Return the real path of the library in a line of the probe."""
    return os.path.normpath(line.split()[1])
