"""Content that reaches the disk whole or not at all, and is there when a function returns, power cut or not."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path


def temporary_name(place: Path) -> Path:
    """Return the name under which a file's new content is written before it is renamed.

    Always the same, so that what a kill leaves behind is overwritten or found by the next run.
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


def append_whole(place: Path, content: bytes) -> None:
    """Append to a file, all or nothing. Raises OSError."""
    fresh = not place.exists()
    with place.open("ab", buffering=0) as file:
        length = file.tell()
        try:
            _write_all(file.fileno(), content)
            os.fsync(file.fileno())
        except OSError:
            # Half a line, from a full disk, would swallow the next one.
            file.truncate(length)
            raise
    if fresh:
        sync_path(place.parent)


def sync_file_systems(places: Iterable[Path]) -> None:
    """Wait until the disk has all that any program wrote to the file systems of these folders. Raises OSError.

    Each file system by itself (syncfs(2)): sync(2) would wait for everybody's, a network's that hangs among them.
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
    """Wait until the disk has a file's content, or a folder's names. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy_security_context(source: Path, target: int) -> None:
    """Give an open file the SELinux label of the one that it replaces; silently nothing without SELinux."""
    with contextlib.suppress(OSError):
        os.setxattr(target, "security.selinux", os.getxattr(source, "security.selinux"))


def _write_all(handle: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _sync_file_system(handle: int) -> None:
    """Wait until the file system of an open file or directory has all on its disk (syncfs(2))."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.syncfs(handle) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
