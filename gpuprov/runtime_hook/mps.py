"""CUDA's multi-process service (MPS): whether the host's daemon runs behind /tmp/nvidia-mps, where CUDA looks for it.

A program that finds the folder connects to what serves there and gives it its work, so a container gets the folder only
while the host's own daemon serves it. nvidia-cuda-mps-control leaves its socket behind when it is killed, and its pid
file may be written by all users: neither is believed. The process must be root's, run that program in the host's root
folder, and hold the listening socket itself.
"""

from __future__ import annotations

import posix
from typing import Any

from .files import REGULAR, SOCKET, TYPE, is_trusted, read_start, status_of

FOLDER = "/tmp/nvidia-mps"
_PROGRAM = "nvidia-cuda-mps-control"
_OPTIONS = ["ro", "nosuid", "nodev", "noexec", "rbind", "rprivate"]
# The CDI edits that mount the daemon's folder.
EDITS: dict[str, Any] = {"mounts": [{"hostPath": FOLDER, "containerPath": FOLDER, "options": _OPTIONS}]}
_LONGEST_PID = 16
# Linux, include/uapi/linux/net.h: __SO_ACCEPTCON, as /proc/net/unix shows it.
_LISTENS = b"00010000"


def is_served(folder: str, proc: str = "/proc") -> bool:
    """Say whether the host's own MPS daemon serves this folder of root's. Connects to nothing."""
    control, pid_file = f"{folder}/control", f"{folder}/{_PROGRAM}.pid"
    if not (_is_roots(control, SOCKET) and _is_roots(pid_file, REGULAR) and is_trusted(folder)):
        return False
    try:
        pid = read_start(pid_file, _LONGEST_PID).decode("ascii").strip()
        process = f"{proc}/{pid}"
        return pid.isascii() and pid.isdigit() and _is_daemon(process, control) and _listens(process, control)
    except (OSError, ValueError):
        return False


def _is_roots(path: str, kind: int) -> bool:
    status = status_of(path, follow_symlinks=False)
    return status is not None and status.st_mode & TYPE == kind and status.st_uid == 0


def _lines(path: str) -> list[bytes]:
    """Return the lines of a file of /proc, which only a newline ends: users choose names with other white space."""
    with open(path, "rb") as file:
        return file.read().split(b"\n")


def _is_daemon(process: str, control: str) -> bool:
    """Say whether root runs the program outside of any container; a command line or a name proves nothing."""
    # A driver that was upgraded under the daemon leaves a name that ends like this.
    program = posix.readlink(f"{process}/exe").rpartition("/")[2].replace(" (deleted)", "")
    users = next((line.split()[1:] for line in _lines(f"{process}/status") if line.startswith(b"Uid:")), [])
    if program != _PROGRAM or users != [b"0"] * 4:
        return False
    # Of root's process alone: that of a user may be in a file system of the user's, which never answers.
    return _sees(process, "/.") and _sees(process, control)


def _sees(process: str, path: str) -> bool:
    """Say whether a path is the same file for a process: a container, and a unit with PrivateTmp=, has others."""
    theirs, ours = posix.stat(f"{process}/root{path}"), posix.stat(path)
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)


def _listens(process: str, path: str) -> bool:
    """Say whether the process holds a socket that listens at this path."""
    # Num, RefCount, Protocol, Flags, Type, St, Inode, Path: proc_net_unix in proc(5). A user's socket may have a
    # newline in its path and so add a row, but no descriptor to the process.
    rows = (line.split(None, 7) for line in _lines(f"{process}/net/unix"))
    wanted = (row[6] for row in rows if len(row) == 8 and row[3] == _LISTENS and row[7] == path.encode())
    sockets = {b"socket:[%b]" % inode for inode in wanted}
    for name in posix.listdir(f"{process}/fd") if sockets else ():
        try:
            if posix.readlink(f"{process}/fd/{name}".encode()) in sockets:
                return True
        except OSError:  # closed meanwhile: clients come and go
            pass
    return False
