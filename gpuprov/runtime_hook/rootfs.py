"""A container's root file system, which is hostile: read, written and walked on descriptors, never out of it.

Each component is opened below the one before it, without following links; a link's text is read and walked from the
root's own descriptor, and `..` never goes above it. So a link that is absolute, climbs, leads into /proc or is swapped
meanwhile ends inside the root or nowhere (CVE-2024-0132, CVE-2025-23359, CVE-2025-23267). No openat2: Python has no
call for it without `_ctypes`, and kernels before 5.6 lack it.

A link inside the root may also lead into a volume, which is the host's. So a folder is written to only if it belongs to
the mount of the root itself (or to one that volumes.py allows); mount ids decide, because a bind mount has the same
st_dev. A folder whose descriptor is on the root's mount is below the root: its id covers all components above it.
"""

from __future__ import annotations

import posix
from typing import Callable

from .errors import Refused
from .files import LINK, REGULAR, TYPE, fill, normal_path, read_start, remove_file

_PATH = posix.O_PATH | posix.O_NOFOLLOW | posix.O_CLOEXEC
_DIRECTORY = _PATH | posix.O_DIRECTORY
# As the kernel's own limit (path_resolution(7)).
_MOST_LINKS = 40
_MOST_COMPONENTS = 1000
_ENOENT, _EBUSY, _EXDEV, _ELOOP = 2, 16, 18, 40
CREATE = posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW | posix.O_CLOEXEC
# A lease of another process's would block an open for 45 s (fcntl(2), F_SETLEASE); without waiting it fails.
_READ = posix.O_RDONLY | posix.O_NONBLOCK | posix.O_CLOEXEC
# What is being written: of a fixed name, so that an interrupted start leaves one file at most.
_TEMPORARY = ".gpuprov~"


class Root:
    """The root file system in a folder, and the folders in it that were opened. Raises OSError.

    `owner` is the user and group of what is made there. `handles` has a descriptor for each folder that was opened, by
    its path without links, "" for the root.

    `volume_over` gives, for a path in the container, what to say of the volume that covers it. `allowed_mounts` returns
    the ids of further mounts in which files may be made. Both are called only when a folder is not on the root's mount.
    """

    def __init__(self, path: str, owner: tuple[int, int] = (0, 0), *, of_process: bool = False) -> None:
        handle = posix.open(path, posix.O_PATH | posix.O_DIRECTORY | posix.O_CLOEXEC)
        self.handles = {"": handle}
        self._known: dict[str, str] = {}
        self._writable: set[str] = set()
        self._covers: dict[str, str] = {}
        self._mount = b""
        self.owner = owner
        self.allowed_mounts: Callable[[], set[bytes]] = set
        self.volume_over: Callable[[str], str] = lambda path: (
            f"{path or '/'} is on another mount than the container's root file system"
        )
        # /proc/PID/root is a link that the kernel itself follows, into the process's own mounts.
        if not of_process and posix.readlink(f"/proc/self/fd/{handle}") != normal_path(path):
            self.close()
            # runc refuses it too, but only after this would have written.
            raise OSError(_ELOOP, "a symbolic link leads there", path)

    def close(self) -> None:
        """Close every descriptor."""
        for handle in self.handles.values():
            posix.close(handle)
        self.handles = {}

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the root folder."""
        status = posix.fstat(self.handles[""])
        return status.st_dev, status.st_ino

    def cover(self, destination: str, source: str) -> None:
        """Walk from now on as if `source` were mounted at a destination; an empty source has nothing in it.

        For volumes that are not mounted yet. Nothing is made in them. Raises OSError if it covers the root itself.
        """
        real = self.resolve(destination)
        if not real:
            raise OSError(_EXDEV, f"the volume at {destination} covers it", destination)
        for below in [one for one in self.handles if one == real or one.startswith(f"{real}/")]:
            posix.close(self.handles.pop(below))
        self._known = {}
        self._covers = {one: old for one, old in self._covers.items() if not one.startswith(f"{real}/")}
        self._covers[real] = source

    def resolve(self, path: str) -> str:
        """Return a path with its links resolved in the container, as runc does: what is missing stays as it is."""
        return self._walk(path, make=False, lenient=True)

    def cover_of(self, real: str) -> str | None:
        """Return the source of the volume, not mounted yet, at or above a path without links; None if there is none."""
        found = [one for one in self._covers if real == one or real.startswith(f"{one}/")]
        return self._covers[max(found, key=len)] if found else None

    def directory(self, path: str, make: bool) -> str:
        """Return a folder's path without links, "" for the root; its descriptor is open then. Raises OSError."""
        known = self._known.get(path)
        if known is None:
            known = self._known[path] = self._walk(path, make=make, lenient=False)
        return known

    def writable_handle(self, real: str, name: str = "") -> int:
        """Return a folder's descriptor. Raises OSError if it, or the name in it, is in a volume."""
        handle = self.handles[real]
        if real not in self._writable:
            is_covered = self.cover_of(real) is not None
            if is_covered or ((found := mount_id(handle)) != self.mount and found not in self.allowed_mounts()):
                raise OSError(_EXDEV, self.volume_over(real), real)
            self._writable.add(real)
        if self._covers and self.cover_of(f"{real}/{name}") is not None:
            raise OSError(_EXDEV, self.volume_over(f"{real}/{name}"), real)
        return handle

    @property
    def mount(self) -> bytes:
        """The id of the mount that the root folder is on."""
        self._mount = self._mount or mount_id(self.handles[""])
        return self._mount

    def open_directory(self, path: str, *, make: bool = False) -> int:
        """Return a descriptor (O_PATH) of a folder, made with those above it if `make`; it stays the root's to close.

        Raises OSError if there is none, or no folder.
        """
        return self.handles[self.directory(path, make)]

    def open_writable(self, path: str) -> int:
        """Return a descriptor of a folder in which files may be made and replaced; the folder is made if need be.

        Raises OSError, naming the volume, if the folder is in one.
        """
        return self.writable_handle(self.directory(path, True))

    def real_path(self, path: str) -> str:
        """Return a folder's path in the container with no link in it. Raises OSError."""
        return self.directory(path, False) or "/"

    def is_directory(self, path: str) -> bool:
        """Say whether there is a folder."""
        try:
            return bool(self.real_path(path))
        except (OSError, ValueError):  # ValueError: a path that no file can have
            return False

    def exists(self, path: str) -> bool:
        """Say whether anything is at the path, a link that leads nowhere included."""
        return self.status(path) is not None

    def status(self, path: str) -> posix.stat_result | None:
        """Return what lstat says of a path, None if there is nothing."""
        folder, _, name = path.rpartition("/")
        try:
            return posix.stat(name, dir_fd=self.open_directory(folder), follow_symlinks=False)
        except (OSError, ValueError):
            return None

    def names(self, path: str, most: int) -> list[str]:
        """Return what is in a folder, sorted; nothing if there is none, or if it holds more than `most`."""
        try:
            handle = posix.open(f"/proc/self/fd/{self.open_directory(path)}", _READ | posix.O_DIRECTORY)
        except (OSError, ValueError):
            return []
        try:
            with posix.scandir(handle) as entries:
                found = [entry.name for entry, _ in zip(entries, range(most + 1))]
        finally:
            posix.close(handle)
        return sorted(found) if len(found) <= most else []

    def read_file(self, path: str, most: int) -> bytes | None:
        """Return a regular file's content; None if there is none, or if it is empty or larger than `most` bytes.

        Volumes are not read: a file of /proc or of another machine's may keep a reader waiting for ever.
        """
        try:
            handle = self._open_file(path, most)
            if handle is None:
                return None
            content = b""
            try:
                while len(content) <= most and (part := posix.read(handle, most + 1 - len(content))):
                    content += part
            finally:
                posix.close(handle)
        except (OSError, ValueError):
            return None
        return content if len(content) <= most else None

    def write_file(self, path: str, content: bytes, mode: int) -> None:
        """Put a file there at once, whatever stood under its name but a folder. Raises OSError."""
        folder, _, name = path.rpartition("/")
        directory = self.writable_handle(self.directory(folder, True), name)
        remove_file(_TEMPORARY, directory)
        handle = posix.open(_TEMPORARY, CREATE, 0o600, dir_fd=directory)
        fill(handle, content, mode, self.owner)
        self._replace(path, name, directory)

    def make_link(self, path: str, target: str) -> None:
        """Put a symbolic link there at once, unless it says that already. Raises OSError, for a folder there too."""
        folder, _, name = path.rpartition("/")
        real = self.directory(folder, True)
        try:
            if posix.readlink(name, dir_fd=self.handles[real]) == target:
                return
            there = True
        except OSError as error:
            there = error.errno != _ENOENT
        directory = self.writable_handle(real, name)
        if not there:
            self._link(target, name, directory)
            return
        remove_file(_TEMPORARY, directory)
        self._link(target, _TEMPORARY, directory)
        self._replace(path, name, directory)

    def has_link(self, path: str, target: str) -> bool:
        """Say whether a symbolic link with this text is there."""
        folder, _, name = path.rpartition("/")
        try:
            return posix.readlink(name, dir_fd=self.open_directory(folder)) == target
        except (OSError, ValueError):
            return False

    def remove(self, path: str) -> None:
        """Take a file or a link away, if there is one. Raises OSError."""
        folder, _, name = path.rpartition("/")
        try:
            real = self.directory(folder, False)
            posix.stat(name, dir_fd=self.handles[real], follow_symlinks=False)
            posix.unlink(name, dir_fd=self.writable_handle(real, name))
        except FileNotFoundError:
            pass

    def _walk(self, path: str, *, make: bool, lenient: bool) -> str:
        """Return the folder's path in the container without links, "" for the root; its descriptor is open then.

        If `lenient`, the path may end in anything, or nowhere.
        """
        todo = path.split("/")[::-1]
        real = ""
        links = 0
        for _ in range(_MOST_COMPONENTS):
            if not todo:
                return real
            name = todo.pop()
            if name in ("", "."):
                continue
            if name == "..":
                real = real.rpartition("/")[0]
                continue
            below = f"{real}/{name}"
            if below not in self.handles and not (lenient and real not in self.handles):
                target = self._open(below, real, name, make, lenient)
                if target:
                    links += 1
                    if links > _MOST_LINKS:
                        break
                    real = "" if target.startswith("/") else real
                    todo += target.split("/")[::-1]
                    continue
            real = below
        raise OSError(_ELOOP, "too many links", path)

    def _open(self, below: str, real: str, name: str, make: bool, lenient: bool) -> str:
        """Open a component; return the text of the link that it is, nothing for a folder."""
        try:
            if below in self._covers:
                self.handles[below] = _open_source(self._covers[below])
            else:
                self.handles[below] = self._step(real, name, make)
            return ""
        except NotADirectoryError:
            try:
                if below not in self._covers:
                    return posix.readlink(name, dir_fd=self.handles[real])  # EINVAL: no link, and no folder either
            except OSError:
                pass
            if not lenient:
                raise
        except OSError:
            if not lenient:
                raise
        return ""

    def _step(self, real: str, name: str, make: bool) -> int:
        above = self.handles[real]
        try:
            return posix.open(name, _DIRECTORY, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
        self.writable_handle(real)
        try:
            posix.mkdir(name, 0o755, dir_fd=above)
            if self.owner != (0, 0):
                posix.chown(name, *self.owner, dir_fd=above, follow_symlinks=False)
        except FileExistsError:
            pass
        return posix.open(name, _DIRECTORY, dir_fd=above)

    def _replace(self, path: str, name: str, directory: int) -> None:
        try:
            posix.rename(_TEMPORARY, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError as error:
            remove_file(_TEMPORARY, directory)
            # The name itself is a volume.
            raise (OSError(_EXDEV, self.volume_over(path), path) if error.errno == _EBUSY else error) from None

    def _link(self, target: str, name: str, directory: int) -> None:
        posix.symlink(target, name, dir_fd=directory)
        if self.owner != (0, 0):
            posix.chown(name, *self.owner, dir_fd=directory, follow_symlinks=False)

    def _open_file(self, path: str, most: int) -> int | None:
        """Open a file for reading if it is one to be read; a device or a pipe is not even touched. Raises OSError."""
        for _ in range(_MOST_LINKS):
            folder, _, name = path.rpartition("/")
            real = self.directory(folder, False)
            handle = posix.open(name, _PATH, dir_fd=self.handles[real])
            try:
                status = posix.fstat(handle)
                kind = status.st_mode & TYPE
                if kind == REGULAR:
                    if self.cover_of(f"{real}/{name}") is not None or mount_id(handle) != self.mount:
                        return None
                    if not 0 < status.st_size <= most:
                        return None
                    return posix.open(f"/proc/self/fd/{handle}", _READ)
                if kind != LINK:
                    return None
                target = posix.readlink("", dir_fd=handle)
            finally:
                posix.close(handle)
            path = target if target.startswith("/") else f"{real}/{target}"
        return None


def open_root(path: str, owner: tuple[int, int]) -> Root:
    """Return the root file system in a folder. Raises Refused if it can't be opened."""
    try:
        return Root(path, owner)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise Refused(f"the container's root folder {path} can't be opened: {why}") from None


def mount_id(handle: int) -> bytes:
    """Return by which number the kernel knows the mount that an open file is on (proc_pid_fdinfo(5), Linux 3.15)."""
    lines = read_start(f"/proc/self/fdinfo/{handle}", 4096).splitlines()
    return next(line for line in lines if line.startswith(b"mnt_id:"))


def _open_source(source: str) -> int:
    # A link at its end is the engine's to follow.
    if not source:
        raise FileNotFoundError(_ENOENT, "nothing is known of what is in there")
    return posix.open(source, posix.O_PATH | posix.O_DIRECTORY | posix.O_CLOEXEC)
