"""The files of a driver: their paths on this host, and their names in a container. Reads only.

Two layouts: a .run's, flat in the loader's folder, and Debian's, in a separate folder behind several links each.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence

from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass
from gpuprov.runtime_hook import ldcache
from gpuprov.runtime_hook.driver_files import FOLDERS_32_BIT, LIB64, MULTIARCH, RHEL_32_BIT

# Default library folders of hosts and containers: Debian's multiarch folders, RHEL's and SUSE's, Arch's.
LIBRARY_DIRECTORIES = (*MULTIARCH, LIB64, "/usr/lib")
_32_BIT_DIRECTORIES = (*FOLDERS_32_BIT, RHEL_32_BIT)
_NVML = "libnvidia-ml.so.1"
# No driver library has such a long name; a hostile file may.
_LONGEST_SONAME = 128
_LIBRARY = re.compile(r"lib(nv|cuda|GLX_nv|EGL_nv|GLES|vdpau_nv)[\w+.-]*?\.so(\.[\d.]+)?")
# Folders below the loader's that others look into: VDPAU's back ends, and Mesa's for GBM (a link to the allocator).
_BACK_ENDS = (("", _LIBRARY), ("/vdpau", _LIBRARY), ("/gbm", re.compile(r"nvidia-drm_gbm\.so")))
# Driver libraries with their own version numbers: libnvidia-egl-gbm.so.1.1.1.
_OWN_VERSION = re.compile(r"libnvidia-(egl-(gbm|wayland2?|xcb|xlib)|nvvm70|api)\.so")
_PROGRAMS = (
    "nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server",
    "nvidia-imex", "nvidia-imex-ctl", "nvidia-xconfig",
)  # fmt: skip
_PROGRAM_DIRECTORIES = ("/usr/bin", "/usr/sbin")
# Where OpenCL, Vulkan, EGL and OptiX look for the driver: the paths of a .run, then those of packages.
_CONFIGURATION = (
    "/etc/OpenCL/vendors/nvidia.icd",
    "/etc/vulkan/icd.d/nvidia_icd.json", "/etc/vulkan/implicit_layer.d/nvidia_layers.json",
    "/usr/share/vulkan/icd.d/nvidia_icd.json", "/usr/share/vulkan/icd.d/nvidia_icd.x86_64.json",
    "/usr/share/vulkan/icd.d/nvidia_icd.aarch64.json",
    "/usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
    "/etc/vulkan/icd.d/nvidia_layers.json", "/usr/share/vulkan/icd.d/nvidia_layers.json",
    "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    "/usr/share/egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "/usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json",
    "/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
    "/usr/share/egl/egl_external_platform.d/20_nvidia_xcb.json",
    "/usr/share/egl/egl_external_platform.d/20_nvidia_xlib.json",
    "/usr/share/nvidia/nvoptix.bin",
    "/etc/X11/xorg.conf.d/10-nvidia.conf", "/usr/share/X11/xorg.conf.d/10-nvidia.conf",
    "/etc/X11/xorg.conf.d/nvidia-drm-outputclass.conf", "/usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf",
)  # fmt: skip
# Links that programs need and a host may lack: the library's name up to `.so`, and the link.
_NEEDED_LINKS = {
    "libcuda": "libcuda.so",
    "libnvidia-opticalflow": "libnvidia-opticalflow.so",
    "libGLX_nvidia": "libGLX_indirect.so.0",
}
# An X server's modules: X.Org's folders, SUSE's updates of them, and a folder beside the libraries (RPM Fusion).
_X_MODULES = tuple(
    f"{folder}/xorg/modules{below}/{kind}"
    for folder in ("/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
    for below in ("", "/updates")
    for kind in ("drivers", "extensions")
) + tuple(f"{folder}/nvidia/xorg" for folder in LIBRARY_DIRECTORIES)


@dataclass(frozen=True)
class Library:
    """A driver library: the real file, and its names in a container (soname, development link).

    The real path is among these names, unless another of them already ends in the same file name.
    """

    path: str
    links: tuple[str, ...]


@dataclass(frozen=True)
class DriverFile:
    """A program or a configuration file: its usual path, and the real file."""

    path: str
    real_path: str


def find_libraries(system: System, first: Sequence[str] = ()) -> tuple[tuple[Library, ...], str]:
    """Return the driver's libraries and their version, which is the version of NVML: every driver has it.

    The first folder in the loader's order, after those in `first`, decides; others (32-bit libraries) count only with
    the same version.
    """
    cached = parse_cache(system.read_bytes(CACHE) or b"")
    folders = _folders(system, first, cached)
    version = next(iter(folders.values()), "")
    # The cache lists a library by its soname: these libraries use their file name as soname and need not be read.
    own_names = frozenset(one.name for one in cached if one.path.endswith(f"/{one.name}"))
    # Of this machine; a host may have other architectures' folders, for programs that it only builds or emulates.
    usual = (f"/usr/lib/{system.architecture()}-linux-gnu", "/usr/lib64", "/usr/lib")
    own = next((name for name in usual if system.real_path(name) == name and system.exists(name)), usual[0])
    links: dict[str, list[str]] = {}
    for number, folder in enumerate(folders):
        if folders[folder] != version:
            continue
        place = folder if folder in (*LIBRARY_DIRECTORIES, *_32_BIT_DIRECTORIES) else own
        # Containers' loaders do not search this folder, so only libraries of this machine's architecture can be placed.
        if number == 0 or place == folder:
            _collect(system, folder, place, version, links, own_names)
    libraries = (Library(real, tuple(sorted(names))) for real, names in sorted(links.items()) if system.exists(real))
    return tuple(libraries), version


def _folders(system: System, first: Sequence[str], cached: Iterable[CachedLibrary]) -> dict[str, str]:
    """Return each folder with an NVML and the version there, in the loader's order, 64-bit ones first."""
    nvml = [one for one in cached if one.name == _NVML]
    ours, other = ([one.path.rpartition("/")[0] for one in nvml if one.is_64_bit is kind] for kind in (True, False))
    names = [*first, *ours, *LIBRARY_DIRECTORIES, *other, *_32_BIT_DIRECTORIES]
    found: dict[str, str] = {}
    for name in names:
        real = system.real_path(f"{name}/{_NVML}")
        version = re.search(r"\.so\.(\d{3,4}(?:\.\d+)+)$", real)
        if version and system.exists(real):
            # /lib may be a link to /usr/lib: the folder counts once.
            found.setdefault(system.real_path(name), version[1])
    return found


def _collect(
    system: System, folder: str, place: str, version: str, links: dict[str, list[str]], own_names: frozenset[str]
) -> None:
    """Add the libraries of exactly this version, each with the names in `folder` that resolve to it."""
    found: dict[str, list[str]] = {}
    for below, pattern in _BACK_ENDS:
        for name in system.list_directory(folder + below):
            if pattern.fullmatch(name) is None:
                continue
            real = system.real_path(f"{folder}{below}/{name}")
            if not real.endswith(f".so.{version}") and _OWN_VERSION.match(name) is None:
                continue
            names = links.setdefault(real, [])
            own = f"{place}{below}/{name}"
            # Debian has a link with the real file's name: it may have been added under another name.
            if own not in (real, *names):
                names.append(own)
            # Debian keeps the real file elsewhere: containers also get it in a folder that their loader searches.
            linked = f"{place}{below}/{real.rpartition('/')[2]}"
            if pattern is _LIBRARY and linked not in (real, *names):
                names.append(linked)
            if not below:
                found[real] = names
    for real, names in found.items():
        if real.rpartition("/")[2] not in own_names:
            _add_soname(system, place, real, names)
        needed = _NEEDED_LINKS.get(real.rpartition("/")[2].partition(".so.")[0])
        if needed and f"{place}/{needed}" not in (real, *names):
            names.append(f"{place}/{needed}")


def _add_soname(system: System, place: str, real: str, names: list[str]) -> None:
    """Add a library's own soname if no link has it: before ldconfig has run, or after a cleanup."""
    file_name = real.rpartition("/")[2]
    linked = (name.rpartition("/")[2] for name in (*names, real))
    if any(".so." in name and name != file_name for name in linked):
        return
    name = soname(system, real)
    if name not in ("", file_name) and f"{place}/{name}" not in names:
        names.append(f"{place}/{name}")


def find_programs_and_configuration(
    system: System, version: str, first: Sequence[str] = ()
) -> tuple[tuple[DriverFile, ...], tuple[DriverFile, ...]]:
    """Return the programs of the driver that a container may want; and the files by which programs find its OpenCL,
    Vulkan, EGL and OptiX, with its modules for an X server, for containers that run one. None without a driver.

    A file below one of the folders in `first` (FOLDER/vulkan/icd.d/…), or below /usr/local/share, where libglvnd does
    not look in a container, is mounted at its usual path.
    """
    if not version:
        return (), ()
    found = []
    for path in _CONFIGURATION:
        below = path.removeprefix("/etc/").removeprefix("/usr/share/")
        local = path.replace("/usr/share/", "/usr/local/share/")
        places = (*(f"{folder.rstrip('/')}/{below}" for folder in first), path, local)
        if real := next((system.real_path(place) for place in places if system.exists(place)), ""):
            found.append(DriverFile(path, real))
    names = ("nvidia_drv.so", "libglxserver_nvidia.so", f"libglxserver_nvidia.so.{version}")
    modules = _present(system, (f"{folder}/{name}" for folder in _X_MODULES for name in names))
    programs = _present(system, (f"{folder}/{name}" for folder in _PROGRAM_DIRECTORIES for name in _PROGRAMS))
    return programs, (*found, *modules)


def find_firmware(system: System, version: str) -> tuple[str, ...]:
    """Return the GPU firmware of that version, from the first folder that has it, in the kernel's search order.

    Source: Linux, Documentation/driver-api/firmware/fw_search_path.rst.
    """
    if not version:
        return ()
    custom = (system.read_text("/sys/module/firmware_class/parameters/path") or "").strip()
    kernel = (system.read_text("/proc/sys/kernel/osrelease") or "").strip()
    below = (f"/updates/{kernel}", "/updates", f"/{kernel}") if kernel else ("/updates",)
    folders = [custom, *(f"/lib/firmware{name}" for name in (*below, ""))]
    places = (f"{one}/nvidia/{version}" for one in folders if one)
    found = (tuple(f"{folder}/{name}" for name in system.list_directory(folder)) for folder in places)
    return next(filter(None, found), ())


def _present(system: System, paths: Iterable[str]) -> tuple[DriverFile, ...]:
    return tuple(DriverFile(path, system.real_path(path)) for path in paths if system.exists(path))


def soname(system: System, path: str) -> str:
    """Return the DT_SONAME of a library (gABI, "Dynamic Section"); "" for a file that has none."""
    # Imported here: most hosts have all links, so no library must be read.
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with system.open(path) as file:
            segments = ELFFile(file).iter_segments("PT_DYNAMIC")  # type: ignore[no-untyped-call,unused-ignore]
            found = (segment.iter_tags("DT_SONAME") for segment in segments)  # type: ignore[attr-defined,unused-ignore]
            names = [tag.soname for tags in found for tag in tags]
    # A broken file can raise other errors than the library's own.
    except (OSError, ELFError, ValueError, KeyError, IndexError, AttributeError, TypeError, AssertionError, EOFError):
        return ""
    name = str(names[0]) if names else ""
    return name if 0 < len(name) <= _LONGEST_SONAME and "/" not in name and name.isprintable() else ""


# -- the loader's cache ------------------------------------------------------------------------------------------------
# Source: glibc, sysdeps/generic/dl-cache.h. Not `ldconfig -p`: no process, and any root prefix.
CACHE = "/etc/ld.so.cache"
_ENTRY = struct.Struct(ldcache.ENTRY)
# Of the file's size: the texts of a genuine one hardly overlap.
_MOST_TEXT = 4
# The kinds of x86-64 and AArch64 in an entry's flags; i386 and armhf have others, or none.
_64_BIT = (0x0300, 0x0A00)
# An entry's capabilities: with this bit, the number of a glibc-hwcaps folder in the extension's list (glibc 2.33).
_IN_EXTENSION = 1 << 62
_MOST_VARIANTS = 64


@dataclass(frozen=True)
class CachedLibrary:
    """What the loader takes for a name; with a `variant` (x86-64-v3, or `legacy`) only on processors that have it."""

    name: str
    path: str
    is_64_bit: bool
    variant: str = ""


def parse_cache(content: bytes) -> tuple[CachedLibrary, ...]:
    """Return the libraries in the order of the cache; none for an invalid or truncated file."""
    try:
        cache = ldcache.Cache(content)
    except (ValueError, struct.error):
        return ()
    content, extensions = cache.content, cache.extensions
    entries = _ENTRY.iter_unpack(cache.entries(0, cache.count))
    variants = _variants(content, extensions)
    found = []
    # In a hostile file all entries may have the same long text.
    left = _MOST_TEXT * len(content)
    for flags, name, path, _, capabilities in entries:
        is_64_bit, variant = flags & ldcache.MACHINE in _64_BIT, _variant(capabilities, variants)
        one = CachedLibrary(_string(content, name), _string(content, path), is_64_bit, variant)
        left -= len(one.name) + len(one.path)
        if left < 0:
            return ()
        found.append(one)
    return tuple(found)


def _variants(content: bytes, extensions: int) -> tuple[str, ...]:
    """Return the names of the glibc-hwcaps folders that entries refer to."""
    try:
        magic, count = struct.unpack_from("=II", content, extensions)
        if not extensions or magic != ldcache.EXTENSION_MAGIC:
            return ()
        for number in range(min(count, ldcache.MOST_SECTIONS)):
            tag, _, offset, size = struct.unpack_from("=IIII", content, extensions + 8 + 16 * number)
            if tag == ldcache.HWCAPS_TAG:
                places = struct.unpack_from(f"={min(size // 4, _MOST_VARIANTS)}I", content, offset)
                return tuple(_string(content, place) for place in places)
    except struct.error:
        pass
    return ()


def _variant(capabilities: int, variants: tuple[str, ...]) -> str:
    if not capabilities & _IN_EXTENSION:
        return "legacy" if capabilities else ""
    number = capabilities & 0xFFFFFFFF
    return variants[number] if number < len(variants) else "unknown"


def _string(content: bytes, offset: int) -> str:
    end = content.find(b"\0", offset, offset + ldcache.LONGEST_PATH)
    return content[offset:end].decode("utf-8", "replace") if end >= 0 else ""
