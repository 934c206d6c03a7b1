"""A container's root file system: hostile, so walked on descriptors; nothing outside of it is ever opened or made.

Each component is opened below the one before it, without following links; a link's text is read and walked from the
root's own descriptor, and `..` goes back over the descriptors that were passed, never above the first. So a link that
is absolute, climbs, leads into /proc or is swapped meanwhile ends inside the root or nowhere (CVE-2024-0132,
CVE-2025-23359, CVE-2025-23267). No openat2: Python has no door to it without ctypes, and kernels before 5.6 lack it.
"""

from __future__ import annotations

import posix

_PATH = posix.O_PATH | posix.O_NOFOLLOW | posix.O_CLOEXEC
_DIRECTORY = _PATH | posix.O_DIRECTORY
_CREATE = posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW | posix.O_CLOEXEC
# As the kernel's own limit (path_resolution(7)).
_MOST_LINKS = 40
_MOST_COMPONENTS = 1000
_TYPE = 0o170000
_REGULAR = 0o100000
_LINK = 0o120000
# What is being written: of a fixed name, so that an interrupted start leaves one file at most.
_TEMPORARY = ".gpuprov~"


class Root:
    """The root file system in a folder. `owner` is the user and group of what is made there. Raises OSError."""

    __slots__ = ("_handle", "_known", "owner")

    def __init__(self, path: str, owner: tuple[int, int] = (0, 0)) -> None:
        self._handle = posix.open(path, posix.O_PATH | posix.O_DIRECTORY | posix.O_CLOEXEC)
        self._known: dict[str, tuple[int, str]] = {}
        self.owner = owner

    def close(self) -> None:
        """Close every descriptor."""
        for handle, _ in self._known.values():
            posix.close(handle)
        self._known = {}
        posix.close(self._handle)

    def open_directory(self, path: str, *, make: bool = False) -> int:
        """Return a descriptor (O_PATH) of a folder, made with those above it if `make`; it stays the root's to close.

        Raises OSError if there is none, or no folder.
        """
        return self._directory(path, make)[0]

    def real_path(self, path: str) -> str:
        """Return a folder's path in the container with no link in it. Raises OSError."""
        return self._directory(path, False)[1]

    def is_directory(self, path: str, *, through_links: bool = True) -> bool:
        """Say whether there is a folder; without `through_links`, reached over folders alone."""
        try:
            real = self.real_path(path)
        except (OSError, ValueError):  # ValueError: a path that no file can have
            return False
        return through_links or real == path

    def exists(self, path: str) -> bool:
        """Say whether anything is at the path, a link that leads nowhere included."""
        folder, _, name = path.rpartition("/")
        try:
            posix.stat(name, dir_fd=self.open_directory(folder), follow_symlinks=False)
        except (OSError, ValueError):
            return False
        return True

    def names(self, path: str, most: int) -> list[str]:
        """Return what is in a folder, sorted; nothing if there is none, or if it holds more than `most`."""
        try:
            handle = posix.open(f"/proc/self/fd/{self.open_directory(path)}", posix.O_RDONLY | posix.O_DIRECTORY)
        except (OSError, ValueError):
            return []
        try:
            with posix.scandir(handle) as entries:
                found = [entry.name for entry, _ in zip(entries, range(most + 1))]
        finally:
            posix.close(handle)
        return sorted(found) if len(found) <= most else []

    def read_file(self, path: str, most: int) -> bytes | None:
        """Return a regular file's content, None if there is none, or if it is larger than `most` bytes."""
        try:
            handle = self._open_file(path)
        except (OSError, ValueError):
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
        finally:
            posix.close(handle)

    def write_file(self, path: str, content: bytes, mode: int) -> None:
        """Put a file there at once, whatever stood under its name but a folder. Raises OSError."""
        folder, _, name = path.rpartition("/")
        directory = self.open_directory(folder, make=True)
        self._clear(directory)
        handle = posix.open(_TEMPORARY, _CREATE, 0o600, dir_fd=directory)
        try:
            while content:
                content = content[posix.write(handle, content) :]
            posix.fchown(handle, *self.owner)
            posix.fchmod(handle, mode)
        finally:
            posix.close(handle)
        posix.rename(_TEMPORARY, name, src_dir_fd=directory, dst_dir_fd=directory)

    def make_link(self, path: str, target: str) -> None:
        """Put a symbolic link there at once, unless it says that already. Raises OSError, for a folder there too."""
        folder, _, name = path.rpartition("/")
        directory = self.open_directory(folder, make=True)
        try:
            self._link(target, name, directory)
            return
        except FileExistsError:
            pass
        try:
            if posix.readlink(name, dir_fd=directory) == target:
                return
        except OSError:
            pass  # no link
        self._clear(directory)
        self._link(target, _TEMPORARY, directory)
        posix.rename(_TEMPORARY, name, src_dir_fd=directory, dst_dir_fd=directory)

    def remove(self, path: str) -> None:
        """Take a file or a link away, if there is one."""
        folder, _, name = path.rpartition("/")
        try:
            posix.unlink(name, dir_fd=self.open_directory(folder))
        except FileNotFoundError:
            pass

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

    def _open_file(self, path: str) -> int:
        """Open a regular file for reading; a device or a pipe is not even touched."""
        for _ in range(_MOST_LINKS):
            folder, _, name = path.rpartition("/")
            directory, real = self._directory(folder, False)
            handle = posix.open(name, _PATH, dir_fd=directory)
            try:
                kind = posix.fstat(handle).st_mode & _TYPE
                if kind == _REGULAR:
                    return posix.open(f"/proc/self/fd/{handle}", posix.O_RDONLY | posix.O_CLOEXEC)
                if kind != _LINK:
                    raise OSError(22, "no regular file", path)
                target = posix.readlink("", dir_fd=handle)
            finally:
                posix.close(handle)
            path = target if target.startswith("/") else f"{real}/{target}"
        raise OSError(40, "too many links", path)

    def _directory(self, path: str, make: bool) -> tuple[int, str]:
        known = self._known.get(path)
        if known is None:
            known = self._known[path] = self._walk(path, make)
        return known

    def _walk(self, path: str, make: bool) -> tuple[int, str]:
        """Return a descriptor of the folder, and its path in the container without links."""
        todo = path.split("/")[::-1]
        passed = [posix.open(".", _DIRECTORY, dir_fd=self._handle)]
        names: list[str] = []
        links = 0
        try:
            for _ in range(_MOST_COMPONENTS):
                if not todo:
                    return passed.pop(), "/" + "/".join(names)
                name = todo.pop()
                if name in ("", "."):
                    continue
                if name == "..":
                    if names:
                        names.pop()
                        posix.close(passed.pop())
                    continue
                try:
                    passed.append(self._step(name, passed[-1], make))
                    names.append(name)
                    continue
                except NotADirectoryError:
                    target = posix.readlink(name, dir_fd=passed[-1])  # EINVAL: no link, and no folder either
                links += 1
                if links > _MOST_LINKS:
                    break
                if target.startswith("/"):
                    while names:
                        names.pop()
                        posix.close(passed.pop())
                todo += target.split("/")[::-1]
            raise OSError(40, "too many links", path)
        finally:
            for handle in passed:
                posix.close(handle)

    def _step(self, name: str, above: int, make: bool) -> int:
        try:
            return posix.open(name, _DIRECTORY, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
        try:
            posix.mkdir(name, 0o755, dir_fd=above)
            if self.owner != (0, 0):
                posix.chown(name, *self.owner, dir_fd=above, follow_symlinks=False)
        except FileExistsError:
            pass
        return posix.open(name, _DIRECTORY, dir_fd=above)
