"""A container's root file system as the runtime and the hook use it: what is read from it, and what is made in it.

Every path is walked by root_walk.py; nothing outside of the root is ever opened or made.
"""

from __future__ import annotations

import posix

from .root_walk import MOST_LINKS, PATH, Walk, mount_id

_CREATE = posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW | posix.O_CLOEXEC
# A lease of another process's would block an open for 45 s (fcntl(2), F_SETLEASE); without waiting it fails.
_READ = posix.O_RDONLY | posix.O_NONBLOCK | posix.O_CLOEXEC
_TYPE = 0o170000
_REGULAR = 0o100000
_LINK = 0o120000
_ENOENT, _EBUSY, _EXDEV = 2, 16, 18
# What is being written: of a fixed name, so that an interrupted start leaves one file at most.
_TEMPORARY = ".gpuprov~"


class Root(Walk):
    """The root file system in a folder, with its files. Made as a Walk is."""

    __slots__ = ()

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

    def is_directory(self, path: str, *, through_links: bool = True) -> bool:
        """Say whether there is a folder; without `through_links`, reached over folders alone."""
        try:
            real = self.real_path(path)
        except (OSError, ValueError):  # ValueError: a path that no file can have
            return False
        return through_links or real == path

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
        except (OSError, ValueError):
            return None
        if handle is None:
            return None
        try:
            parts = []
            left = most + 1
            while left > 0:
                part = posix.read(handle, left)
                if not part:
                    break
                parts.append(part)
                left -= len(part)
            return b"".join(parts) if left > 0 else None
        except OSError:
            return None
        finally:
            posix.close(handle)

    def write_file(self, path: str, content: bytes, mode: int) -> None:
        """Put a file there at once, whatever stood under its name but a folder. Raises OSError."""
        folder, _, name = path.rpartition("/")
        directory = self.writable_handle(self.directory(folder, True), name)
        self._clear(directory)
        handle = posix.open(_TEMPORARY, _CREATE, 0o600, dir_fd=directory)
        try:
            while content:
                content = content[posix.write(handle, content) :]
            posix.fchown(handle, *self.owner)
            posix.fchmod(handle, mode)
        finally:
            posix.close(handle)
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
        self._clear(directory)
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

    def _replace(self, path: str, name: str, directory: int) -> None:
        try:
            posix.rename(_TEMPORARY, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError as error:
            self._clear(directory)
            # The name itself is a volume.
            raise (OSError(_EXDEV, self.volume_over(path), path) if error.errno == _EBUSY else error) from None

    def _link(self, target: str, name: str, directory: int) -> None:
        posix.symlink(target, name, dir_fd=directory)
        if self.owner != (0, 0):
            posix.chown(name, *self.owner, dir_fd=directory, follow_symlinks=False)

    @staticmethod
    def _clear(directory: int) -> None:
        try:
            posix.unlink(_TEMPORARY, dir_fd=directory)
        except FileNotFoundError:
            pass

    def _open_file(self, path: str, most: int) -> int | None:
        """Open a file for reading if it is one to be read; a device or a pipe is not even touched. Raises OSError."""
        for _ in range(MOST_LINKS):
            folder, _, name = path.rpartition("/")
            real = self.directory(folder, False)
            handle = posix.open(name, PATH, dir_fd=self.handles[real])
            try:
                status = posix.fstat(handle)
                kind = status.st_mode & _TYPE
                if kind == _REGULAR:
                    if self.cover_of(f"{real}/{name}") is not None or mount_id(handle) != self.mount:
                        return None
                    if not 0 < status.st_size <= most:
                        return None
                    return posix.open(f"/proc/self/fd/{handle}", _READ)
                if kind != _LINK:
                    return None
                target = posix.readlink("", dir_fd=handle)
            finally:
                posix.close(handle)
            path = target if target.startswith("/") else f"{real}/{target}"
        return None
