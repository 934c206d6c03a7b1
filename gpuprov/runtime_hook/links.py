"""What a container's root needs beside mounts, so that programs find the driver: links, and the loader's cache.

Made in the root folder itself, before runc starts, or by the hook in engines that read CDI themselves. What is right
already is not written: nothing piles up in a container that starts many times. In volumes nothing is made. The cache is
a file and not a mount, because the image's own ldconfig replaces it by a rename, which fails on a mount (EBUSY).

CUDA's forward compatibility: libraries in the image let a newer CUDA run on this host's older driver. They count when,
and only when, they are of a later driver branch than the host's: an older libcuda than the kernel's modules does not
work. The folder is the image's: only names that NVIDIA's cuda-compat packages have enter the loader's cache, or an
image could replace libc.so.6 for every program. Source: NVIDIA, "CUDA Compatibility", Forward Compatibility.
"""

from __future__ import annotations

import posix

from . import ldcache
from .driver_files import FOLDERS_32_BIT, LIB64, MULTIARCH, RHEL_32_BIT
from .edits import ContainerEdits
from .errors import Refused
from .rootfs import Root

CACHE = "/etc/ld.so.cache"
_EXDEV = 18
HOST_FLAGS = ldcache.FLAGS.get(posix.uname().machine, 0x0003)
# Folders that loaders search; those below them (vdpau, gbm) belong to other programs.
_64_BIT_FOLDERS = (*MULTIARCH, LIB64)
_32_BIT_FOLDERS = (*FOLDERS_32_BIT, RHEL_32_BIT)
_MUSL = ("/lib/ld-musl-x86_64.so.1", "/lib/ld-musl-aarch64.so.1")
_GLIBC = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")
_COMPAT_FOLDER = "/usr/local/cuda/compat"
# So that the image's own ldconfig keeps finding them; a name of its own, which sorts first and never piles up.
COMPAT_CONFIGURATION = "/etc/ld.so.conf.d/00-gpuprov-compat.conf"
_LIBCUDA = "libcuda.so."
# NVIDIA's have some twenty files.
_MOST_COMPAT_FILES = 100
# What the packages cuda-compat-11-0 to cuda-compat-13-1 install, up to `.so`.
_COMPAT_NAMES = (
    "libcuda", "libcudadebugger", "libnvidia-fatbinaryloader", "libnvidia-gpucomp", "libnvidia-nvvm",
    "libnvidia-nvvm70", "libnvidia-pkcs11", "libnvidia-pkcs11-openssl3", "libnvidia-ptxjitcompiler",
    "libnvidia-tileiras",
)  # fmt: skip


def inject(root: Root, edits: ContainerEdits) -> None:
    """Make the links and the cache. Raises Refused if the root file system can't take them."""
    if not edits.links and not edits.libraries:
        return
    path = ""
    try:
        for target, path in edits.links:
            root.make_link(path, target)
        folder, names = edits.compatibility
        path = COMPAT_CONFIGURATION
        line = f"{folder}\n".encode()
        if not folder:
            _remove(root, path)
        elif root.read_file(path, len(line)) != line:
            root.write_file(path, line, 0o644)
        path = CACHE
        try:
            old = root.read_file(CACHE, ldcache.LARGEST) or b""
            new = ldcache.merge(old, _cache_entries(edits))
            if new != old:
                root.write_file(CACHE, new, 0o644)
        except OSError as error:
            # The loader looks into its own folders after the cache, and finds all but compatibility libraries there.
            if error.errno != _EXDEV or names:
                raise
    except OSError as error:
        raise Refused(_cannot(path, error.strerror)) from None


def refuse_covered(root: Root, edits: ContainerEdits) -> None:
    """Raise Refused for what would have to be made in a volume that is not mounted yet.

    A loader's cache in a volume stays as it is, which is one of the decisions; not with compatibility libraries.
    """
    for target, path in edits.links:
        if (volume := _volume_over(root, path)) and not root.has_link(path, target):
            raise Refused(_cannot(path, volume))
    for path in (COMPAT_CONFIGURATION, CACHE) if edits.compatibility[0] else ():
        if volume := _volume_over(root, path):
            raise Refused(_cannot(path, volume))
    if (edits.links or edits.libraries) and (volume := _volume_over(root, CACHE)):
        edits.decisions.append(f"{CACHE} stays as it is: {volume}")


def _volume_over(root: Root, path: str) -> str:
    """Return what to say of the volume, not mounted yet, that covers a path; nothing if none does. Raises Refused."""
    folder, _, name = path.rpartition("/")
    try:
        real = f"{root.resolve(folder)}/{name}"
    except OSError as error:
        raise Refused(_cannot(path, error.strerror)) from None
    return root.volume_over(real) if root.cover_of(real) is not None else ""


def _cannot(path: str, why: str | None) -> str:
    return f"{path} can't be made in the container's root file system: {why}"


def statement_on_loader(root: Root) -> list[str]:
    """Return what can't work in an image because of its C library, nothing for glibc's."""
    if any(root.exists(path) for path in _GLIBC) or not any(root.exists(path) for path in _MUSL):
        return []
    return [
        "this image's C library is musl: NVIDIA's libraries and programs need glibc, so nvidia-smi and CUDA "
        "can't run in it: use an image with glibc (device nodes are there all the same)"
    ]


def find_compatibility(root: Root, edits: ContainerEdits, *, wanted: bool) -> None:
    """Note in the edits which of the image's compatibility libraries are used."""
    if wanted and (edits.links or edits.libraries):
        edits.compatibility = compatibility_libraries(root, edits.host_driver)
        if edits.compatibility[0]:
            newer = f"the image's {edits.compatibility[0]} is newer than driver {edits.host_driver}"
            edits.decisions.append(f"{newer}: it is used")


def _cache_entries(edits: ContainerEdits) -> list[tuple[str, str, int]]:
    """Return the cache's entries: each link, and each library to which no link leads, by its name."""
    linked = {f"{path.rpartition('/')[0]}/{target}" for target, path in edits.links}
    links = [path for _, path in edits.links]
    found = []
    for path in (*links, *edits.libraries):
        folder, _, name = path.rpartition("/")
        if folder in _64_BIT_FOLDERS:
            kind = HOST_FLAGS
        elif folder in _32_BIT_FOLDERS:
            kind = ldcache.FLAGS_32_BIT
        else:
            continue
        # libcuda.so leads to libcuda.so.1, which leads on: both are names; the file at the end is found by them.
        if name.startswith("lib") and (path not in linked or path in links):
            found.append((name, path, kind))
    folder, names = edits.compatibility
    return [*found, *((name, f"{folder}/{name}", HOST_FLAGS) for name in names)]


def _remove(root: Root, path: str) -> None:
    try:
        root.remove(path)
    except OSError as error:
        if error.errno != _EXDEV:  # in a volume
            raise


def compatibility_libraries(root: Root, host_driver: str) -> tuple[str, list[str]]:
    """Return the folder in the container, free of links, and its libraries' names; nothing if they don't count."""
    host = _major(host_driver)
    there = [name for name in root.names(_COMPAT_FOLDER, _MOST_COMPAT_FILES) if name.isascii()]
    # libcuda.so.550.54.15; libcuda.so.1 is a link to it.
    versions = [name[len(_LIBCUDA) :] for name in there if name.startswith(_LIBCUDA)]
    versions = [version for version in versions if "." in version]
    # Several are as good as none: nobody can say which is meant.
    if not host or len(versions) != 1 or _major(versions[0]) <= host:
        return "", []
    folder = root.real_path(_COMPAT_FOLDER)
    # It will be a line of a configuration file.
    if not (folder.isascii() and folder.isprintable()):
        return "", []
    return folder, [name for name in there if _is_nvidias(name)]


def _is_nvidias(name: str) -> bool:
    """Say whether this is a library's name of NVIDIA's: libcuda.so, libcuda.so.1, libcuda.so.550.54.15."""
    stem, so, version = name.partition(".so")
    numbers = version[1:].split(".") if version else []
    return bool(so) and stem in _COMPAT_NAMES and version[:1] in ("", ".") and all(one.isdecimal() for one in numbers)


def _major(version: str) -> int:
    text = version.partition(".")[0]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
