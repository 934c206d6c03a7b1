"""Read files, including links and files of other users, without blocking on a FIFO; write atomically and durably.

Written content is on disk when a function returns, even after a power cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shlex
import stat as stat_module
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from gpuprov.protocol.dataclass import dataclass

_CHUNK = 1 << 16
# No configuration, log or list that is read whole is as large; another user's sparse file may be.
_LARGEST_READ = 1 << 28
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# struct statx (statx(2)): the mode, and the device's major and minor.
_STATX = struct.Struct("28xH98xII120x")
_STATX_TYPE, _AT_STATX_DONT_SYNC, _AT_FDCWD = 0x1, 0x4000, -100
_KINDS = (
    (stat_module.S_ISREG, "file"), (stat_module.S_ISDIR, "directory"), (stat_module.S_ISLNK, "link"),
    (stat_module.S_ISCHR, "char"), (stat_module.S_ISBLK, "block"),
)  # fmt: skip
_MOST_LINKS = 40  # the kernel's limit (path_resolution(7))


class NotRegularError(OSError):
    """The path is not a regular file but a FIFO, a device node or a socket."""


# The last: a file below /proc whose process ended before it was read.
NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotRegularError, ProcessLookupError)


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
    """Return the status of a path, or None if it does not exist, as below a loop of links."""
    try:
        found = os.lstat(place)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return None
    kind = next((name for is_of, name in _KINDS if is_of(found.st_mode)), "other")
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
    found = ctypes.create_string_buffer(_STATX.size)
    _call_libc("statx", _AT_FDCWD, os.fsencode(place), _AT_STATX_DONT_SYNC, _STATX_TYPE, found)
    mode, major, minor = _STATX.unpack(found.raw)
    return (major, minor) if stat_module.S_ISCHR(mode) else None


def open_regular(place: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, NotRegularError for anything else; never waits for a FIFO."""
    try:
        found = place.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            # A loop leads to no file.
            raise NotRegularError(*error.args, str(place)) from None
        raise
    # Opening a device may have side effects: check first.
    _require_regular(found, place)
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
            content = file.read(size + 1) if stat_module.S_ISREG(os.fstat(handle).st_mode) else b""
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
    prefix = str(root).rstrip("/")
    if not prefix:
        return os.path.realpath(path)
    # Below a root prefix, an absolute link starts at that root. Strings: this is called for thousands of paths.
    resolved = ""
    pending = path.split("/")[::-1]
    hops = 0
    while pending:
        name = pending.pop()
        if name == "..":
            resolved = resolved.rpartition("/")[0]
        if name in ("", ".", ".."):
            continue
        try:
            target = os.readlink(f"{prefix}{resolved}/{name}")  # noqa: PTH115
        except (OSError, ValueError):  # no link
            target = ""
        if not target or hops == _MOST_LINKS:
            resolved = f"{resolved}/{name}"
            continue
        hops += 1
        resolved = "" if target.startswith("/") else resolved
        pending += target.split("/")[::-1]
    return resolved or "/"


# A file is written beside the old one; btrfs and others do not count inodes.
_FEWEST_INODES = 16


def temporary_name(place: Path) -> Path:
    """Return the temporary name under which a file's new content is written before the rename.

    The name is fixed, so the next run overwrites or finds what a killed run left.
    """
    return place.with_name(f".{place.name}.gpuprov")


def own_target(place: Path) -> Path:
    """Return where links of this user's lead; one that another user has put there, as into /tmp, is not followed."""
    for _ in range(_MOST_LINKS):
        if not place.is_symlink() or place.lstat().st_uid != os.geteuid():
            break
        place = place.parent / place.readlink()
    return place


def write_whole(place: Path, content: bytes, mode: int, owner: tuple[int, int] | None) -> None:
    """Write a file: temporary file beside it, fsync, rename, fsync of the folder. Raises OSError.

    `owner` is (uid, gid); without it an existing file's owner stays. The attributes of an existing file are kept.
    Only a file is replaced, never a device: a link to /dev/null may lie where the file should.
    """
    before = place.lstat() if place.exists() else None
    if before is not None and not place.is_file():
        raise FileExistsError(errno.EEXIST, "this is no regular file", str(place))
    if owner is None and before is not None:
        owner = (before.st_uid, before.st_gid)
    temporary = temporary_name(place)
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            if owner is not None:
                os.fchown(file.fileno(), *owner)
            _copy_attributes(place, file.fileno())
            # After the ACL, whose mask it sets.
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_path(place.parent)


def expanded(path: str) -> Path:
    """Return a path with the home that its `~` names; that of a user who does not exist names no file."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (Path raises)


def make_user_folder(place: Path) -> None:
    """Make a folder for this user alone, with its missing parents, but never the home directory. Raises OSError.

    In another user's home (`sudo -E`) they become that user's: a ~/.cache of root would stop other programs.
    """
    home = Path("~").expanduser()
    if home in place.parents and not home.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no home directory", str(home))
    for one in [one for one in (*reversed(place.parents), place) if os.geteuid() == 0 and not one.exists()]:
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            above = os.open(one.parent, os.O_DIRECTORY)
            opened.callback(os.close, above)
            os.mkdir(one.name, 0o700 if one == place else 0o777, dir_fd=above)
            # By its descriptor: that user could put a hard link in its place.
            new = os.open(one.name, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            opened.callback(os.close, new)
            os.fchown(new, os.fstat(above).st_uid, os.fstat(above).st_gid)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_refusal(place: Path) -> tuple[str, str]:
    """Return why root can't write a file, and how to correct that; ("", "") if it can, or the file need not exist.

    access(2) asks the kernel without writing: for root it refuses read-only file systems and immutable files.
    A file is replaced by rename(2), which a mount point refuses.
    """
    exists = place.exists() or place.is_symlink()
    if place.is_file() and not place.is_symlink() and _mount_of(place) == str(place.resolve()):
        return f"{place} is a mount point", f"umount {shlex.quote(str(place))}"
    folder = next(one for one in place.parents if one.exists())
    for one in (place, folder) if exists and not place.is_symlink() else (folder,):
        if os.access(one, os.W_OK):
            continue
        if os.statvfs(one).f_flag & os.ST_RDONLY:
            mount = _mount_of(one)
            return f"{mount} is mounted read-only", f"mount -o remount,rw {shlex.quote(mount)}"
        name = shlex.quote(str(one))
        return f"{one} is immutable (chattr +i)", f"lsattr -d {name}; chattr -i {name}"
    if df(folder) == "-i":
        left, mount = os.statvfs(folder), _mount_of(folder)
        return f"{mount} has {left.f_favail} of {left.f_files} inodes left", f"df -i {shlex.quote(mount)}; remove files"
    return "", ""


def df(place: Path) -> str:
    """Return the option of df(1) that shows what an existing place's file system is short of: bytes, or inodes."""
    left = os.statvfs(place)
    return "-i" if left.f_files and left.f_favail < _FEWEST_INODES else "-h"


def mounted_noexec(place: Path) -> str:
    """Return the mount that holds this place if it is mounted noexec, else ""."""
    there = next(one for one in (place, *place.parents) if one.is_dir())
    return _mount_of(there) if os.statvfs(there).f_flag & os.ST_NOEXEC else ""


def _mount_of(place: Path) -> str:
    """Return where the mount of an existing place is; its device number does not tell bind mounts (proc(5))."""
    lines = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    mounts = {Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), line.split()[4])) for line in lines}
    real = place.resolve()
    return str(next((above for above in (real, *real.parents) if above in mounts), "/"))


def append_whole(place: Path, content: bytes) -> None:
    """Append to a file, all or nothing. Raises OSError."""
    fresh = not place.exists()
    with place.open("ab", buffering=0) as file:
        length = file.tell()
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
            os.fsync(file.fileno())
        except OSError:
            # A partial line, from a full disk, would merge with the next one.
            file.truncate(length)
            raise
    if fresh:
        sync_path(place.parent)


def sync_file_systems(places: Iterable[Path]) -> None:
    """Wait until everything written to the file systems of these folders is on disk. Raises OSError.

    Each file system separately (syncfs(2)): sync(2) waits for all of them, even for a network one that hangs.
    """
    synced: set[int] = set()
    for path in places:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            # Missing, a user's (FUSE), or of a server that refuses root: nothing was written there.
            continue
        try:
            if (device := os.fstat(handle).st_dev) not in synced:
                synced.add(device)
                _call_libc("syncfs", handle)
        finally:
            os.close(handle)


def sync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy_attributes(source: Path, target: int) -> None:
    """Give an open file the SELinux label, the ACL and the user attributes of the file that it replaces."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listxattr(source)
    for name in names:
        # Others belong to the content, or to the file system.
        if name in ("security.selinux", "system.posix_acl_access") or name.startswith("user."):
            # One may be refused: a container may not set labels.
            with contextlib.suppress(OSError):
                os.setxattr(target, name, os.getxattr(source, name))


def _call_libc(function: str, *arguments: Any) -> None:
    """Call a function of the C library that Python lacks. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
