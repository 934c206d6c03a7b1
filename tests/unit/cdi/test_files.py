"""Which files of a driver are found: Debian's genuine lists of three branches, and places that other packages use."""

import random
import re
import struct
import subprocess
from pathlib import Path

import pytest

from gpuprov.cdi.discover import DriverFacts, discover
from gpuprov.cdi.files import find_firmware, find_libraries, soname
from gpuprov.cdi.generate import specification
from gpuprov.core.system import System
from gpuprov.facts.driver import damage
from gpuprov.runtime_hook import driver_files
from tests import simgpu
from tests.unit.cdi.test_discover import DATA
from tests.unit.driver_tree import mounts

MULTIARCH = "/usr/lib/x86_64-linux-gnu"
VERSIONS = ("535.261.03", "550.163.01", "555.58.02")
# In the packages, and for no container: documents, and what belongs to the kernel's modules or to a desktop.
NOT_FOR_CONTAINERS = re.compile(
    r"nvidia-bug-report\.sh|nvidia(-open)?\.ids|nvidia-application-profiles-.*|_?nvngx\.dll|"
    # OpenSSL 1.1's and the X server's own, by a path that an alternative brings elsewhere.
    r"nvidia_drv\.so|libglxserver_nvidia\.so.*"
)


def lay_names(root: Path, version: str) -> list[str]:
    """Lay a Debian package's files (names alone), with the links that its alternatives make; return their paths.

    The names are those of Contents-amd64 of bookworm, trixie and experimental, non-free, of 2026-11.
    """
    names = (DATA / f"debian-{version}.names").read_text().splitlines()
    for name in names:
        place = root / name[1:]
        place.parent.mkdir(parents=True, exist_ok=True)
        library = re.fullmatch(r"(.*\.so)(\.\d+)?", name)
        real = f"{library[1]}.{version}" if library else ""
        # In the package a link to another library.
        real = real.replace("nvidia-drm_gbm.so", "libnvidia-allocator.so")
        if real in names and real != name:
            place.symlink_to(real.rpartition("/")[2])
        else:
            place.touch()
        folder, _, own = name.rpartition("/")
        seen = {f"{MULTIARCH}/nvidia/current": MULTIARCH, "/usr/lib/nvidia/current": "/usr/bin"}.get(folder, "")
        seen = "/usr/share/X11/xorg.conf.d" if own == "nvidia-drm-outputclass.conf" else seen
        seen = "/usr/share/nvidia" if own == "nvoptix.bin" else seen
        seen = f"{MULTIARCH}/gbm" if own == "nvidia-drm_gbm.so" else seen
        if seen:
            (root / seen[1:]).mkdir(parents=True, exist_ok=True)
            (root / seen[1:] / own).symlink_to(Path("/") / name)
    return names


def links(driver: DriverFacts) -> dict[str, str]:
    words = [word for hook in specification(driver).edits.hooks for word in hook.args if "::" in word]
    return {path: target for target, path in (word.split("::") for word in words)}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_file_for_containers_in_debians_packages_is_found(tmp_path: Path, version: str) -> None:
    names = lay_names(tmp_path, version)
    driver = discover(System(str(tmp_path)))
    assert driver.library_version == version
    found = {real.rpartition("/")[2] for real in mounts(driver).values()} | {
        path.rpartition("/")[2] for path in (*mounts(driver), *links(driver))
    }
    missed = {name.rpartition("/")[2] for name in names} - found
    assert {name for name in missed if not NOT_FOR_CONTAINERS.fullmatch(name)} == set()
    assert "/usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf" in mounts(driver)


@pytest.mark.parametrize("version", VERSIONS)
def test_programs_can_be_linked_though_the_host_has_no_development_links(tmp_path: Path, version: str) -> None:
    lay_names(tmp_path, version)
    for place in (
        *(tmp_path / MULTIARCH[1:]).glob("*.so"),
        *(tmp_path / f"{MULTIARCH}/nvidia/current"[1:]).glob("*.so"),
    ):
        place.unlink()
    made = links(discover(System(str(tmp_path))))
    assert made[f"{MULTIARCH}/libcuda.so"] == "libcuda.so.1"
    assert made[f"{MULTIARCH}/libnvidia-opticalflow.so"] == "libnvidia-opticalflow.so.1"
    assert made[f"{MULTIARCH}/libGLX_indirect.so.0"] == f"libGLX_nvidia.so.{version}"
    assert made[f"{MULTIARCH}/libcuda.so.1"] == f"libcuda.so.{version}"
    assert f"{MULTIARCH}/libnvidia-ml.so" not in made


CONFIGURATION = (
    "/etc/X11/xorg.conf.d/10-nvidia.conf", "/usr/share/X11/xorg.conf.d/10-nvidia.conf",
    "/usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf", "/usr/share/vulkan/icd.d/nvidia_icd.aarch64.json",
    "/usr/share/egl/egl_external_platform.d/09_nvidia_wayland2.json", "/etc/vulkan/icd.d/nvidia_layers.json",
    "/usr/share/vulkan/icd.d/nvidia_layers.json",
    "/usr/lib/xorg/modules/drivers/nvidia_drv.so", "/usr/lib64/xorg/modules/updates/drivers/nvidia_drv.so",
    "/usr/lib64/nvidia/xorg/libglxserver_nvidia.so",
    "/usr/lib64/xorg/modules/updates/extensions/libglxserver_nvidia.so",
    f"{MULTIARCH}/nvidia/xorg/libglxserver_nvidia.so.{simgpu.DRIVER_VERSION}",
)  # fmt: skip


@pytest.mark.parametrize("path", CONFIGURATION)
def test_a_file_for_graphics_is_mounted_where_it_lies_and_for_graphics_alone(tmp_path: Path, path: str) -> None:
    simgpu.install_tree(tmp_path)
    place = tmp_path / path[1:]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch()
    assert mounts(discover(System(str(tmp_path))))[path] == path
    assert driver_files.capabilities_of(path) == ("display", "graphics")


@pytest.mark.parametrize("name", ["glvnd/egl_vendor.d/10_nvidia.json", "vulkan/icd.d/nvidia_icd.json"])
def test_a_file_of_the_hosts_local_folder_is_mounted_where_containers_look(tmp_path: Path, name: str) -> None:
    simgpu.install_tree(tmp_path)
    (tmp_path / "usr/share" / name).unlink(missing_ok=True)
    local = tmp_path / "usr/local/share" / name
    local.parent.mkdir(parents=True)
    local.touch()
    found = mounts(discover(System(str(tmp_path))))
    assert found[f"/usr/share/{name}"] == f"/usr/local/share/{name}"
    assert f"/usr/local/share/{name}" not in found


def test_libraries_of_an_unusual_folder_get_a_place_in_the_machines_own(tmp_path: Path) -> None:
    class Arm(System):
        def architecture(self) -> str:
            return "aarch64"

    for folder in ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "opt/driver"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (tmp_path / "opt/driver" / f"{name[:-2]}.{VERSION}").touch()
        (tmp_path / "opt/driver" / name).symlink_to(f"{name[:-2]}.{VERSION}")
    libraries, _ = find_libraries(Arm(str(tmp_path)), ("/opt/driver",))
    assert {name.rpartition("/")[0] for one in libraries for name in one.links} == {"/usr/lib/aarch64-linux-gnu"}


# -- firmware where the kernel would look for it, and the folders of services ----------------------------------------


VERSION = simgpu.DRIVER_VERSION
KERNEL = "6.1.0-18-amd64"


def put(root: Path, folder: str, *names: str) -> None:
    place = root / folder.lstrip("/") / "nvidia" / VERSION
    place.mkdir(parents=True)
    for name in names:
        (place / name).touch()


@pytest.mark.parametrize(
    ("folders", "found"),
    [
        (["/lib/firmware"], "/lib/firmware"),
        (["/lib/firmware", f"/lib/firmware/{KERNEL}"], f"/lib/firmware/{KERNEL}"),
        ([f"/lib/firmware/{KERNEL}", "/lib/firmware/updates"], "/lib/firmware/updates"),
        (["/lib/firmware/updates", f"/lib/firmware/updates/{KERNEL}"], f"/lib/firmware/updates/{KERNEL}"),
        (["/lib/firmware", "/srv/firmware"], "/srv/firmware"),
        ([], ""),
    ],
)
def test_the_first_folder_in_the_kernels_order_counts(tmp_path: Path, folders: list[str], found: str) -> None:
    for path, text in (("proc/sys/kernel/osrelease", KERNEL), ("sys/module/firmware_class/parameters/path", "")):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(f"{text}\n")
    if "/srv/firmware" in folders:
        (tmp_path / "sys/module/firmware_class/parameters/path").write_text("/srv/firmware\n")
    for folder in folders:
        put(tmp_path, folder, "gsp_ga10x.bin", "gsp_tu10x.bin")
    expected = tuple(f"{found}/nvidia/{VERSION}/{name}" for name in ("gsp_ga10x.bin", "gsp_tu10x.bin")) if found else ()
    assert find_firmware(System(str(tmp_path)), VERSION) == expected
    assert find_firmware(System(str(tmp_path)), "") == ()


def test_mps_is_never_in_the_specification(tmp_path: Path) -> None:
    simgpu.install_tree(tmp_path)
    simgpu.write_kernel_tree(tmp_path, 1)
    (tmp_path / "tmp/nvidia-mps").mkdir(parents=True)
    (tmp_path / "run/nvidia-fabricmanager").mkdir(parents=True)
    (tmp_path / "run/nvidia-fabricmanager/socket").touch()
    assert discover(System(str(tmp_path))).sockets == ("/run/nvidia-fabricmanager/socket",)


_OWN = sorted(set(re.findall(r" (/\S+\.so[.\d]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)))


def elf32(name: bytes, *, order: str = ">") -> bytes:
    """Return a 32-bit library with nothing but a dynamic section: headers, one entry for each tag, names."""
    names = b"\0" + name + b"\0"
    headers, dynamic = 52 + 2 * 32, 3 * 8
    address = 0x10000 + headers + dynamic
    length = headers + dynamic + len(names)
    return b"".join((
        b"\x7fELF", bytes((1, 2 if order == ">" else 1, 1)), bytes(9),
        struct.pack(order + "HHIIIIIHHHHHH", 3, 20, 1, 0, 52, 0, 0, 52, 32, 2, 40, 0, 0),
        struct.pack(order + "8I", 1, 0, 0x10000, 0x10000, length, length, 4, 0x1000),
        struct.pack(order + "8I", 2, headers, 0x10000 + headers, 0x10000 + headers, dynamic, dynamic, 4, 4),
        struct.pack(order + "6I", 14, 1, 5, address, 0, 0),
        names,
    ))  # fmt: skip


def name_in(folder: Path, content: bytes) -> str:
    (folder / "lib.so").write_bytes(content)
    return soname(System(str(folder)), "/lib.so")


def test_the_c_library_bears_its_name() -> None:
    (path,) = (path for path in _OWN if re.search(r"/libc[.-]", path))
    assert soname(System(), path) == "libc.so.6"
    assert soname(System(), "/nowhere.so") == ""


@pytest.mark.parametrize("order", ["<", ">"])
def test_32_bits_and_both_byte_orders(tmp_path: Path, order: str) -> None:
    assert name_in(tmp_path, elf32(b"libcuda.so.1", order=order)) == "libcuda.so.1"


_ODD_NAMES = (b"", b"a/../b.so", b"line\n.so", b"\xff.so", b"x" * 129)
_NO_LIBRARIES = (b"", b"\x7fELF", b"#!/bin/sh\n", bytes(64), b"\x7fELF\x03\x01" + bytes(58))


@pytest.mark.parametrize("content", [*map(elf32, _ODD_NAMES), *_NO_LIBRARIES])
def test_what_is_no_library_and_has_no_librarys_name_has_none(tmp_path: Path, content: bytes) -> None:
    assert name_in(tmp_path, content) == ""


def test_a_library_cut_off_anywhere_has_none(tmp_path: Path) -> None:
    whole = elf32(b"libcuda.so.1")
    assert {name_in(tmp_path, whole[:length]) for length in range(len(whole))} == {""}


def test_broken_bytes_never_break_the_reader(tmp_path: Path) -> None:
    chance = random.Random(1)
    for _ in range(300):
        broken = bytearray(elf32(b"libcuda.so.1"))
        for _ in range(chance.randrange(1, 6)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        assert len(name_in(tmp_path, bytes(broken))) <= 128


@pytest.mark.parametrize("page_size", [4096, 16384, 65536])
def test_libraries_for_larger_pages_have_names_and_ends(tmp_path: Path, page_size: int) -> None:
    """The linker aligns segments with the largest pages of an architecture: 64 KiB on arm64."""
    folder, version = tmp_path / MULTIARCH[1:], VERSIONS[0]
    folder.mkdir(parents=True)
    for name in ("libnvidia-ml", "libcuda"):
        library = folder / f"{name}.so.{version}"
        options = f"-Wl,-soname,{name}.so.1,-z,max-page-size={page_size}"
        argv = ("gcc", "-shared", "-fPIC", "-nostdlib", options, "-o", str(library), "-x", "c", "-")
        subprocess.run(argv, input=b"int data = 1; int code(void) { return data; }", check=True)
    headers = subprocess.run(("readelf", "-lW", str(library)), capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"LOAD .* (0x\w+)$", headers, re.MULTILINE)) == {hex(page_size)}
    (folder / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{version}")
    (tmp_path / "usr/bin").mkdir()
    (tmp_path / "usr/bin/nvidia-smi").touch(0o755)
    system = System(str(tmp_path))
    driver = discover(system)
    assert links(driver)[f"{MULTIARCH}/libcuda.so.1"] == f"libcuda.so.{version}"
    assert damage(system, driver) == ""
    library.write_bytes(library.read_bytes()[:-1])
    assert "file too short" in damage(system, driver)
