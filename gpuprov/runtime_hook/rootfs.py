"""Looks into a container's root file system for the folder in which its loader finds libraries.

Nothing is written there and nothing of it is run: the driver's libraries are mounted, under each of their names, into a
folder that the image's loader searches by itself: /usr/lib/MULTIARCH on Debian and Ubuntu, /usr/lib64 on RHEL, Fedora
and SUSE. So no ldconfig runs at container start, and a whole class of holes is gone (CVE-2024-0137, CVE-2025-23266).

The root file system is hostile: it is walked component by component on descriptors, and a link is never followed. What
is learnt is a hint; runc, which resolves mount targets inside the root, is what keeps the mount there.
"""

from __future__ import annotations

import os

_MULTIARCH = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
_LIB64 = "/usr/lib64"
_FOLDERS = (*_MULTIARCH, _LIB64)
_OPEN = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LibraryFolder:
    """Where a library that lies in one of the host's library folders goes in the container."""

    __slots__ = ("_folders", "_root")

    def __init__(self, root: str) -> None:
        self._root = root
        self._folders: dict[str, str] = {}

    def in_container(self, path: str) -> str:
        """Return the container's path for a path of the CDI specification; only libraries ever move."""
        folder, _, name = path.rpartition("/")
        if folder not in _FOLDERS:
            return path
        if folder not in self._folders:
            self._folders[folder] = self._choose(folder)
        return f"{self._folders[folder]}/{name}"

    def _choose(self, folder: str) -> str:
        """Return the folder that the image's loader searches, the host's own if the image has none.

        Debian's images have a /usr/lib64 too, for the loader's own path, and don't search it: MULTIARCH goes first.
        """
        multiarch = f"/usr/lib/{os.uname().machine}-linux-gnu" if folder == _LIB64 else folder
        return next((one for one in (multiarch, _LIB64) if self._is_directory(one)), folder)

    def _is_directory(self, path: str) -> bool:
        try:
            handle = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError):  # ValueError: a path that no file can have
            return False
        for name in path.split("/")[1:]:
            try:
                below = os.open(name, _OPEN, dir_fd=handle)
            except OSError:
                return False
            finally:
                os.close(handle)
            handle = below
        os.close(handle)
        return True
