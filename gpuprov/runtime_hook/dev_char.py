"""Links /dev/char/MAJOR:MINOR on the host for the nodes that a container gets.

runc tells systemd of devices by these paths, and systemd forgets those that are not there as soon as it reads its units
again (`systemctl daemon-reload`): running containers then lose their GPUs. udev makes no such links for NVIDIA's nodes,
which sysfs does not know. Source: nvidia-container-toolkit, "system create-dev-char-symlinks"; runc issue 3708.
"""

from __future__ import annotations

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FOLDER = "/dev/char"
_CHARACTER = 0o020000
_TYPE = 0o170000


def link_nodes(nodes: list[dict[str, Any]]) -> None:
    """Make the links that are missing; where that can't be done the container starts all the same."""
    for node in nodes:
        path = node.get("hostPath") or node["path"]
        try:
            status = posix.stat(path)
            if status.st_mode & _TYPE == _CHARACTER and path.startswith("/dev/"):
                name = f"{posix.major(status.st_rdev)}:{posix.minor(status.st_rdev)}"
                _link(f"..{path[len('/dev') :]}", f"{_FOLDER}/{name}")
        except OSError:
            continue  # there already, or no such node


def _link(target: str, path: str) -> None:
    try:
        posix.symlink(target, path)
    except FileNotFoundError:
        posix.mkdir(_FOLDER, 0o755)
        posix.symlink(target, path)
