"""Paths as text, and files of the host: replaced whole, or checked whether only root controls them.

/tmp/nvidia-mps is in a folder where every user may create files. A user could create it first, and have his own folder
or link mounted into other users' containers.
"""

from __future__ import annotations

import posix

# Of st_mode, as in inode(7).
TYPE, REGULAR, DIRECTORY, LINK, SOCKET = 0o170000, 0o100000, 0o040000, 0o120000, 0o140000
CHARACTER, BLOCK, PIPE = 0o020000, 0o060000, 0o010000
_WRITABLE_BY_ALL = 0o002
_MOST_COMPONENTS = 100
# nvidia-persistenced drops root's rights: the socket and its folder belong to an account of the system's, which are
# numbered below the users' (login.defs(5)).
_PERSISTENCED = "/run/nvidia-persistenced/socket"
_FIRST_USER = 1000
_CREATE = posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_NOFOLLOW | posix.O_CLOEXEC


def normal_path(path: str) -> str:
    """Return a path without `.`, `..` and doubled slashes, as Go's filepath.Clean does."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part not in ("", ".") and not (part == ".." and path.startswith("/")):
            parts.append(part)
    return ("/" if path.startswith("/") else "") + "/".join(parts) or "."


def is_trusted(path: str) -> bool:
    """Say whether a file exists, is no link, and root owns it and every folder above it.

    The owner of nvidia-persistenced's socket and its folder may be a service account. A link in the path is accepted if
    root owns it and no other user may write to its folder.
    """
    todo = path.split("/")[::-1]
    real = ""
    owners = [0]
    writable = False
    for _ in range(_MOST_COMPONENTS):
        if not todo:
            return False
        name = todo.pop()
        if name in ("", "."):
            continue
        if name == "..":
            return False
        try:
            status = posix.stat(f"{real}/{name}", follow_symlinks=False)
            kind = status.st_mode & TYPE
            if kind == LINK:
                if status.st_uid or writable or not todo:
                    return False
                target = posix.readlink(f"{real}/{name}")
                real = "" if target.startswith("/") else real
                todo += target.split("/")[::-1]
                continue
        except (OSError, ValueError):
            return False
        real = f"{real}/{name}"
        owners.append(status.st_uid)
        writable = bool(status.st_mode & _WRITABLE_BY_ALL)
        if not todo:
            *above, folder, own = owners
            services = not any(above) and folder in (0, own) and own < _FIRST_USER
            return not any(owners) or (kind == SOCKET and path.endswith(_PERSISTENCED) and services)
    return False


def replace_file(path: str, text: str, mode: int, owner: tuple[int, int] | None = None, suffix: str = "") -> None:
    """Replace a file whole: what reads it meanwhile sees the old one. Raises OSError.

    `suffix` is of the name under which it is written first; without one, that name is hidden and this process's own.
    """
    folder, _, name = path.rpartition("/")
    temporary = f"{path}{suffix}" if suffix else f"{folder}/.{name}.{posix.getpid()}"
    handle = posix.open(temporary, _CREATE, 0o600)
    try:
        fill(handle, text.encode(), mode, owner)
        posix.rename(temporary, path)
    except OSError:
        posix.unlink(temporary)
        raise


def fill(handle: int, content: bytes, mode: int, owner: tuple[int, int] | None) -> None:
    """Write a new file, give it its owner and, whatever the caller's umask is, its mode; close it. Raises OSError."""
    try:
        while content:
            content = content[posix.write(handle, content) :]
        if owner:
            posix.fchown(handle, *owner)
        posix.fchmod(handle, mode)
    finally:
        posix.close(handle)


def read_text(path: str) -> str | None:
    """Return a file's text, None if it can't be read; what is no UTF-8 is U+FFFD, as in Go's encoding/json."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def read_start(path: str, most: int) -> bytes:
    """Return the first bytes of a file, which is no link, without waiting for any. Raises OSError."""
    handle = posix.open(path, posix.O_RDONLY | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC)
    try:
        return posix.read(handle, most)
    finally:
        posix.close(handle)


def status_of(path: str, *, follow_symlinks: bool = True) -> posix.stat_result | None:
    """Return what stat says of a path, None if there is nothing."""
    try:
        return posix.stat(path, follow_symlinks=follow_symlinks)
    except (OSError, ValueError):  # ValueError: a path that no file can have
        return None


def exists(path: str) -> bool:
    """Say whether there is a file, and not only a link that leads nowhere."""
    return status_of(path) is not None


def remove_file(name: str, directory: int | None = None) -> None:
    """Take a file or a link away, if there is one; `directory`: a descriptor of its folder. Raises OSError."""
    try:
        posix.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass


def make_folder(path: str, mode: int = 0o755) -> None:
    """Make a folder unless it is there. Raises OSError."""
    try:
        posix.mkdir(path, mode)
    except FileExistsError:
        pass
