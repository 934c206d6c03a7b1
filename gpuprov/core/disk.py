"""Write content atomically and durably: it is on disk when a function returns, even after a power cut."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

# A file is written beside the old one; btrfs and others do not count inodes.
_FEWEST_INODES = 16


def temporary_name(place: Path) -> Path:
    """Return the temporary name under which a file's new content is written before the rename.

    The name is fixed, so the next run overwrites or finds what a killed run left.
    """
    return place.with_name(f".{place.name}.gpuprov")


def write_whole(place: Path, content: bytes, mode: int, owner: tuple[int, int] | None) -> None:
    """Write a file: temporary file beside it, fsync, rename, fsync of the folder. Raises OSError.

    `owner` is (uid, gid); without it an existing file's owner stays. The SELinux context of an existing file is kept.
    """
    before = place.lstat() if place.exists() else None
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
            os.fchmod(file.fileno(), mode)
            _copy_security_context(place, file.fileno())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_path(place.parent)


def make_user_folder(place: Path) -> None:
    """Make a folder for this user alone, with its missing parents, but never the home directory. Raises OSError."""
    home = Path("~").expanduser()
    if home in place.parents and not home.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no home directory", str(home))
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
        return (
            f"{one} is immutable (chattr +i)",
            f"lsattr -d {shlex.quote(str(one))}; chattr -i {shlex.quote(str(one))}",
        )
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
    there = next(one for one in (place, *place.parents) if one.exists())
    if not os.statvfs(there).f_flag & os.ST_NOEXEC:
        return ""
    return _mount_of(there)


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
            _write_all(file.fileno(), content)
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
    handles: dict[int, int] = {}
    try:
        for path in filter(Path.is_dir, places):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            device = os.fstat(handle).st_dev
            if device in handles:
                os.close(handle)
                continue
            handles[device] = handle
            _sync_file_system(handle)
    finally:
        for handle in handles.values():
            os.close(handle)


def sync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy_security_context(source: Path, target: int) -> None:
    """Give an open file the SELinux label of the file that it replaces; no effect without SELinux."""
    with contextlib.suppress(OSError):
        os.setxattr(target, "security.selinux", os.getxattr(source, "security.selinux"))


def _write_all(handle: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _sync_file_system(handle: int) -> None:
    """Wait until the file system of an open file or directory is fully on disk (syncfs(2))."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.syncfs(handle) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
