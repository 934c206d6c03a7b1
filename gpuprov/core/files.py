"""Examine and read files, including links and files of other users. Never blocks on a FIFO, never writes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat as stat_module
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 16
# No configuration, log or list that is read whole is as large; another user's sparse file may be.
_LARGEST_READ = 1 << 28
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# struct statx (statx(2)): the mode, and the device's major and minor.
_STATX = struct.Struct("28xH98xII120x")
_STATX_TYPE, _AT_STATX_DONT_SYNC, _AT_FDCWD = 0x1, 0x4000, -100
_MOST_LINKS = 40  # the kernel's limit (path_resolution(7))


class NotRegularError(OSError):
    """The path is not a regular file but a FIFO, a device node or a socket."""


NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotRegularError)


@dataclass(frozen=True)
class FileStatus:
    """The kind and state of a path, links not followed. `kind`: file, directory, link, char, block, other.

    `modified`: when its content changed last, in seconds since 1970.
    """

    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    target: str = ""
    major: int = 0
    minor: int = 0
    modified: float = 0.0


def status_of(place: Path) -> FileStatus | None:
    """Return the status of a path, or None if it does not exist."""
    try:
        found = os.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return None
    kind = _kind(found.st_mode)
    return FileStatus(
        kind=kind,
        mode=stat_module.S_IMODE(found.st_mode),
        uid=found.st_uid,
        gid=found.st_gid,
        size=found.st_size,
        target=str(place.readlink()) if kind == "link" else "",
        major=os.major(found.st_rdev),
        minor=os.minor(found.st_rdev),
        modified=found.st_mtime,
    )


def device_number(place: Path) -> tuple[int, int] | None:
    """Return major and minor of a character device, None for anything else. Follows links, also those of /proc/PID/fd.

    Raises OSError. The place may lie in any user's file system: its server (FUSE) is not asked, so it can't block us.
    """
    # Most runs need no C library.
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    found = ctypes.create_string_buffer(_STATX.size)
    if library.statx(_AT_FDCWD, os.fsencode(place), _AT_STATX_DONT_SYNC, _STATX_TYPE, found):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(place))
    mode, major, minor = _STATX.unpack(found.raw)
    return (major, minor) if stat_module.S_ISCHR(mode) else None


def _kind(mode: int) -> str:
    kinds = (
        (stat_module.S_ISREG, "file"), (stat_module.S_ISDIR, "directory"), (stat_module.S_ISLNK, "link"),
        (stat_module.S_ISCHR, "char"), (stat_module.S_ISBLK, "block"),
    )  # fmt: skip
    return next((name for test, name in kinds if test(mode)), "other")


def open_regular(place: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, NotRegularError for anything else; never waits for a FIFO."""
    # Opening a device may have side effects: check first.
    _require_regular(place.stat(), place)
    file = os.fdopen(os.open(place, _READ), "rb")
    try:
        _require_regular(os.fstat(file.fileno()), place)
    except OSError:
        file.close()
        raise
    return file


def _require_regular(status: os.stat_result, place: Path) -> None:
    if not stat_module.S_ISREG(status.st_mode):
        raise NotRegularError(errno.EINVAL, "not a regular file", str(place))


def read_whole(file: BinaryIO) -> bytes | None:
    """Return the whole content of a file, None if it is too large. Files in /proc report no size before reading."""
    size = os.fstat(file.fileno()).st_size
    if size > _LARGEST_READ:
        return None
    content = b""
    # In pieces: a single large read would allocate its buffer first.
    while len(content) <= _LARGEST_READ:
        part = file.read(max(size + 1, _CHUNK))
        if not part:
            return content
        content += part
    return None


def read_foreign(place: Path, size: int) -> str:
    """Return the text of a regular file of at most `size` bytes, "" for anything else. Follows no link."""
    try:
        handle = os.open(place, _READ | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb") as file:
            regular = stat_module.S_ISREG(os.fstat(handle).st_mode)
            content = file.read(size + 1) if regular else b""
    except OSError:
        return ""
    return content.decode("utf-8", "replace") if len(content) <= size else ""


def lock_holder(place: Path) -> int | None:
    """Return the process that holds a record lock (fcntl(2)) on a file, or None; 0 for one that can't be seen."""
    try:
        handle = os.open(place, _READ)
    except OSError:
        return None
    try:
        # struct flock of 64-bit Linux: type, whence, start, length, pid.
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(handle, fcntl.F_GETLK, asked))
    finally:
        os.close(handle)
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def real_path(root: Path, path: str) -> str:
    """Return `path` with every link resolved, as on a machine whose file system begins at `root`."""
    if os.path.realpath(root) == "/":
        return os.path.realpath(path)
    # Below a root prefix, an absolute link starts at that root.
    resolved: list[str] = []
    pending = path.split("/")[::-1]
    hops = 0
    while pending:
        name = pending.pop()
        if name == "..":
            resolved = resolved[:-1]
        if name in ("", ".", ".."):
            continue
        place = root.joinpath(*resolved, name)
        if not place.is_symlink() or hops == _MOST_LINKS:
            resolved.append(name)
            continue
        hops += 1
        target = str(place.readlink())
        resolved = [] if target.startswith("/") else resolved
        pending += target.split("/")[::-1]
    return "/" + "/".join(resolved)
