"""Paths of the host that are not the driver's: whether root alone decides what is there.

/tmp/nvidia-mps is in a folder where every user may make files: one who is first would have a folder or a link of his
own mounted into other users' containers.
"""

from __future__ import annotations

import posix

_TYPE, _LINK, _SOCKET = 0o170000, 0o120000, 0o140000
_WRITABLE_BY_ALL = 0o002
_MOST_COMPONENTS = 100
# nvidia-persistenced drops root's rights: the socket and its folder belong to an account of the system's, which are
# numbered below the users' (login.defs(5)).
_PERSISTENCED = "/run/nvidia-persistenced/socket"
_FIRST_USER = 1000


def is_trusted(path: str) -> bool:
    """Say whether a file is there, is no link, and belongs to root with every folder above it.

    nvidia-persistenced's socket, and the folder that it is in, may belong to a service's account. A link on the way
    counts if it is root's and nobody else may write where it is.
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
            kind = status.st_mode & _TYPE
            if kind == _LINK:
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
            return not any(owners) or (kind == _SOCKET and path.endswith(_PERSISTENCED) and _is_services(owners))
    return False


def _is_services(owners: list[int]) -> bool:
    *above, folder, socket = owners
    return not any(above) and folder in (0, socket) and socket < _FIRST_USER
