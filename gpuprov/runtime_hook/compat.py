"""CUDA's forward compatibility: libraries in the image that let a newer CUDA run on this host's older driver.

Source: NVIDIA, "CUDA Compatibility", Forward Compatibility. They count when, and only when, they are of a later driver
branch than the host's: an older libcuda than the kernel's modules does not work. The folder is the image's: only names
that NVIDIA's cuda-compat packages have enter the loader's cache, or an image could replace libc.so.6 for every program.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class HasNames(Protocol):
        """A container's root, or what stands for it."""

        def names(self, path: str, most: int) -> list[str]:
            """Return what is in a folder."""

        def real_path(self, path: str) -> str:
            """Return a folder's path without links."""


FOLDER = "/usr/local/cuda/compat"
# So that the image's own ldconfig keeps finding them; a name of its own, which sorts first and never piles up.
CONFIGURATION = "/etc/ld.so.conf.d/00-gpuprov-compat.conf"
_LIBCUDA = "libcuda.so."
# NVIDIA's have some twenty files.
_MOST_FILES = 100
# What the packages cuda-compat-11-0 to cuda-compat-13-1 install, up to `.so`.
_NAMES = (
    "libcuda", "libcudadebugger", "libnvidia-fatbinaryloader", "libnvidia-gpucomp", "libnvidia-nvvm",
    "libnvidia-nvvm70", "libnvidia-pkcs11", "libnvidia-pkcs11-openssl3", "libnvidia-ptxjitcompiler",
    "libnvidia-tileiras",
)  # fmt: skip


def compatibility_libraries(root: HasNames, host_driver: str) -> tuple[str, list[str]]:
    """Return the folder in the container, free of links, and its libraries' names; nothing if they don't count."""
    host = _major(host_driver)
    there = [name for name in root.names(FOLDER, _MOST_FILES) if name.isascii()]
    versions = [name[len(_LIBCUDA) :] for name in there if _is_versioned(name)]
    # Several are as good as none: nobody can say which is meant.
    if not host or len(versions) != 1 or _major(versions[0]) <= host:
        return "", []
    folder = root.real_path(FOLDER)
    # It will be a line of a configuration file.
    if not (folder.isascii() and folder.isprintable()):
        return "", []
    return folder, [name for name in there if _is_nvidias(name)]


def _is_nvidias(name: str) -> bool:
    """Say whether this is a library's name of NVIDIA's: libcuda.so, libcuda.so.1, libcuda.so.550.54.15."""
    stem, so, version = name.partition(".so")
    numbers = version[1:].split(".") if version else []
    return bool(so) and stem in _NAMES and version[:1] in ("", ".") and all(one.isdigit() for one in numbers)


def _is_versioned(name: str) -> bool:
    """Say whether this is libcuda.so.550.54.15: libcuda.so.1 is a link to it."""
    return name.startswith(_LIBCUDA) and "." in name[len(_LIBCUDA) :]


def _major(version: str) -> int:
    text = version.partition(".")[0]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
