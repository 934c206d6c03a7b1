"""Check host paths outside the driver: whether only root controls their content.

/tmp/nvidia-mps is in a folder where every user may create files. A user could create it first, and have his own folder
or link mounted into other users' containers.
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
