"""What a container's root needs beside mounts, so that programs find the driver: links, and the loader's cache.

Made in the root folder itself, before runc starts, or by the hook in engines that read CDI themselves. What is right
already is not written: nothing piles up in a container that starts many times. In volumes nothing is made. The cache is
a file and not a mount, because the image's own ldconfig replaces it by a rename, which fails on a mount (EBUSY).
"""

from __future__ import annotations

import posix

from . import compat, ldcache
from .errors import Refused
from .rootfs import Root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .equipment import Equipment

CACHE = "/etc/ld.so.cache"
_EXDEV = 18
_FLAGS = ldcache.FLAGS.get(posix.uname().machine, 0x0003)
# Folders that loaders search; those below them (vdpau, gbm) belong to other programs.
_64_BIT_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
_32_BIT_FOLDERS = ("/usr/lib/i386-linux-gnu", "/usr/lib32", "/usr/lib")
_MUSL = ("/lib/ld-musl-x86_64.so.1", "/lib/ld-musl-aarch64.so.1")
_GLIBC = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")


def prepare_root(root: Root, equipment: Equipment, *, cuda_compat: bool = True) -> None:
    """Make the links and the cache. Raises Refused if the root file system can't take them."""
    if not equipment.links and not equipment.libraries:
        return
    path = ""
    try:
        for target, path in equipment.links:
            root.make_link(path, target)
        folder, names = compat.compatibility_libraries(root, equipment.host_driver) if cuda_compat else ("", [])
        path = compat.CONFIGURATION
        if folder:
            _write(root, path, f"{folder}\n".encode())
            equipment.decisions.append(f"the image's {folder} is newer than driver {equipment.host_driver}: it is used")
        else:
            _remove(root, path)
        path = CACHE
        entries = [*cache_entries(equipment), *((name, f"{folder}/{name}", _FLAGS) for name in names)]
        try:
            _write_cache(root, entries)
        except OSError as error:
            # The loader looks into its own folders after the cache, and finds all but compatibility libraries there.
            if error.errno != _EXDEV or names:
                raise
            equipment.decisions.append(f"{path} stays as it is: {error.strerror}")
    except OSError as error:
        raise Refused(f"{path} can't be made in the container's root file system: {error.strerror}") from None


def statement_on_loader(root: Root) -> str:
    """Return what can't work in an image because of its C library, nothing for glibc's."""
    if any(root.exists(path) for path in _MUSL) and not any(root.exists(path) for path in _GLIBC):
        return (
            "this image's C library is musl: NVIDIA's libraries and programs need glibc, so nvidia-smi and CUDA "
            "can't run in it: use an image with glibc (device nodes are there all the same)"
        )
    return ""


def cache_entries(equipment: Equipment) -> list[tuple[str, str, int]]:
    """Return the cache's entries: each link, and each library to which no link leads, by its name."""
    linked = {f"{path.rpartition('/')[0]}/{target}" for target, path in equipment.links}
    links = [path for _, path in equipment.links]
    found = []
    for path in (*links, *equipment.libraries):
        folder, _, name = path.rpartition("/")
        if folder in _64_BIT_FOLDERS:
            flags = _FLAGS
        elif folder in _32_BIT_FOLDERS:
            flags = ldcache.FLAGS_32_BIT
        else:
            continue
        # libcuda.so leads to libcuda.so.1, which leads on: both are names; the file at the end is found by them.
        if name.startswith("lib") and (path not in linked or path in links):
            found.append((name, path, flags))
    return found


def _write_cache(root: Root, entries: list[tuple[str, str, int]]) -> None:
    old = root.read_file(CACHE, ldcache.LARGEST) or b""
    new = ldcache.merge(old, entries)
    if new != old:
        root.write_file(CACHE, new, 0o644)


def _remove(root: Root, path: str) -> None:
    try:
        root.remove(path)
    except OSError as error:
        if error.errno != _EXDEV:  # in a volume
            raise


def _write(root: Root, path: str, content: bytes) -> None:
    if root.read_file(path, len(content)) != content:
        root.write_file(path, content, 0o644)
