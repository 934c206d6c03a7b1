"""A whole genuine driver, installed by Debian's packages: what discovery finds, and the libraries in containers."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuprov.cdi.discover import DriverFacts, discover
from gpuprov.core.system import System
from gpuprov.runtime_hook.driver_files import ALL, capabilities_of
from tests import simgpu
from tests.genuine.installed import Installed, image_files, installed_driver
from tests.integration.genuine_bench import NO_DRIVER, GenuineBench, build_probe, winner

pytestmark = [pytest.mark.root, pytest.mark.slow, NO_DRIVER]

# Files of the packages that no container gets: the path's end, and why.
LEFT_OUT = {
    r"/share/(doc|man|bug|lintian|applications|initramfs-tools)(/.*)?|\.1\.gz": "documents, and what installs packages",
    r"/systemd/system/[\w.-]+|/etc/init\.d/[\w-]+|/etc/modprobe\.d": "the host's services and modules",
    r"/bin/nvidia-modprobe|/sbin/nvidia-powerd|/nvidia-bug-report\.sh": "programs of the host's administrator",
    r"/current/nvidia\.ids": "names of GPUs, for the host's installer",
    r"/nvidia-application-profiles-[\w.-]+": "defaults of OpenGL, which are in the library too",
    r"/nvidia/wine/_?nvngx\.dll": "for games under Wine; NVIDIA's toolkit leaves them out too",
}
# Modules of an X server: they have symbols that only the server has.
X_MODULES = ("nvidia_drv.so", "libglxserver_nvidia.so")
CAPABILITIES = sorted(set(ALL) - {"compat32"})


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The driver, in a copy of its own with a kernel that has loaded it."""
    made = installed_driver()
    root = tmp_path_factory.mktemp("installed") / "root"
    shutil.copytree(made.root, root, symlinks=True, copy_function=_link)
    simgpu.write_kernel_tree(root, 2, discover(System(str(root))).library_version)
    return Installed(root, made.lists)


def _link(source: str, target: str) -> None:
    """Copy a file without its content, where that is possible: 400 MB are not needed twice."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture(scope="module")
def found(installed: Installed) -> DriverFacts:
    return discover(System(str(installed.root)))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, installed: Installed) -> Iterator[GenuineBench]:
    """Containers of an image with the libraries that graphics need."""
    folder = tmp_path_factory.mktemp("bench")
    made = GenuineBench(folder, build_probe(folder))
    shutil.rmtree(made.root / "lib64")
    for name in ("lib", "lib64", "usr"):
        place = made.root / name
        place.unlink() if place.is_symlink() else shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(image_files(), made.root, symlinks=True, dirs_exist_ok=True)
    for name in ("lib", "lib64"):
        if not (made.root / name).exists():
            (made.root / name).symlink_to(f"usr/{name}")
    made.give(installed.root)
    yield made
    made.delete()


def test_every_file_of_the_packages_is_found_or_has_its_reason(installed: Installed, found: DriverFacts) -> None:
    files = (*found.programs, *found.configuration)
    known = {one.path for one in found.libraries} | {one.real_path for one in files} | {one.path for one in files}
    system = System(str(installed.root))
    # By real path: Debian's packages have several links to each library.
    missed = {
        path for paths in installed.lists.values() for path in paths
        if not (installed.root / path[1:]).is_dir() and system.real_path(path) not in known
    }  # fmt: skip
    unexplained = {path for path in missed if not any(re.search(f"(?:{why})$", path) for why in LEFT_OUT)}
    assert unexplained == set()
    # Each reason is still one.
    assert [why for why in LEFT_OUT if not any(re.search(f"(?:{why})$", path) for path in missed)] == []


def test_nothing_is_found_that_no_package_brought(installed: Installed, found: DriverFacts) -> None:
    listed = {path for paths in installed.lists.values() for path in paths}
    real = [one.path for one in found.libraries] + [one.real_path for one in (*found.programs, *found.configuration)]
    assert [path for path in real if path not in listed] == []


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_library_of_a_capability_can_be_loaded(bench: GenuineBench, found: DriverFacts, capability: str) -> None:
    """Also, none needs a library of the driver that only another capability brings."""
    wanted = {}
    for one in found.libraries:
        real = one.path.rpartition("/")[2]
        own = next(name for name in (*one.links, one.path) if name.endswith(f"/{real}"))
        wanted.update({name: real for name in (own, *one.links) if capability in capabilities_of(name)})
    assert wanted
    environment = ("NVIDIA_VISIBLE_DEVICES=all", f"NVIDIA_DRIVER_CAPABILITIES={capability}")
    lines = bench.probe(*wanted, environment=environment)
    assert [line for line in lines if " error " in line] == []
    assert {line.split()[0]: winner(line).rpartition("/")[2] for line in lines} == wanted


def test_x_modules_are_mounted_with_graphics(bench: GenuineBench, found: DriverFacts) -> None:
    """Their servers load them; here they are files of the right place and size."""
    modules = [one for one in found.configuration if one.path.endswith(X_MODULES)]
    assert [one.path.rpartition("/")[2] for one in modules] == ["nvidia_drv.so", "libglxserver_nvidia.so"]
    environment = ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=graphics")
    bench.configure(*environment, arguments=["stat", "-L", "-c", "%n %s", *(one.path for one in modules)])
    assert bench.run() == [f"{one.path} {Path(f'{bench.host}{one.real_path}').stat().st_size}" for one in modules]
