"""Device nodes beside those in config.json: links by which systemd knows them, and libraries that must make none.

runc tells systemd of devices by /dev/char/MAJOR:MINOR, and systemd forgets those that are not there as soon as it reads
its units again (`systemctl daemon-reload`): running containers then lose their GPUs. udev makes no such links for
NVIDIA's nodes, which sysfs does not know. Source: nvidia-container-toolkit, "system create-dev-char-symlinks"; runc
issue 3708.

NVIDIA's libraries look into /proc/driver/nvidia/params: where ModifyDeviceFiles is 0, they make no nodes. Containers
see a copy that says so, as with every variant of NVIDIA's toolkit. runc mounts nothing below /proc from config.json:
mount(8) does it as a hook, before the root is entered.
"""

from __future__ import annotations

import posix

from .config import has_own_proc, has_user_namespace
from .errors import Refused
from .files import make_folder, replace_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FOLDER = "/dev/char"
_CHARACTER = 0o020000
_TYPE = 0o170000
PARAMS = "/proc/driver/nvidia/params"
# The same for all containers.
_COPY = "/run/gpuprov/params"
_MOUNT_PROGRAMS = ("/usr/bin/mount", "/bin/mount")
# Root in the container is root on the host: the copy is everybody's.
_OPTIONS = "bind,ro,nosuid,nodev,noexec"


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


def masking_hook(config: dict[str, Any], root_path: str) -> dict[str, Any] | None:
    """Return the hook that masks the parameters in a container, None where there is nothing to mask.

    Only over a procfs of the container's own: `proc` in the root is then a mount of the low-level runtime's, and what
    mount(8) follows below it is the kernel's. Nor in a user namespace, where nobody makes device nodes. The hook needs
    what `masked_copy` writes.
    """
    if not has_own_proc(config) or has_user_namespace(config) or not _is_the_kernels() or not _masked():
        return None
    program = next((path for path in _MOUNT_PROGRAMS if posix.access(path, posix.X_OK)), "")
    if not program:
        raise Refused(f"{PARAMS} can't be masked in the container: {' or '.join(_MOUNT_PROGRAMS)} is missing")
    root = root_path if root_path.startswith("/") else f"{posix.getcwd()}/{root_path}"
    target = f"{root}{PARAMS}"
    return {
        "hookName": "createContainer", "path": program, "args": ["mount", "-n", "-o", _OPTIONS, _COPY, target],
        "env": ["PATH=/usr/bin:/bin"],
    }  # fmt: skip


def _is_the_kernels() -> bool:
    """Return whether procfs itself has the file: one that is mounted over it is in no procfs of a container."""
    try:
        return posix.stat(PARAMS).st_dev == posix.stat("/proc").st_dev
    except OSError:
        return False


def masked_copy() -> str:
    """Write a copy of the driver's parameters with `ModifyDeviceFiles: 0`, and return its path.

    Nothing is written, and "" returned, where there are none to change, and where a rootless engine can't write it: in
    its containers nobody makes device nodes. Raises Refused.
    """
    changed = _masked()
    if not changed:
        return ""
    try:
        with open(_COPY, encoding="utf-8") as file:
            if file.read() == changed:
                return _COPY
    except OSError:
        pass
    try:
        make_folder(_COPY.rpartition("/")[0])
        replace_file(_COPY, changed, 0o644)  # every container reads it and none writes it
    except OSError as error:
        if is_rootless():
            return ""
        raise Refused(f"{_COPY} can't be written: {error.strerror}") from None
    return _COPY


def _masked() -> str:
    """Return the driver's parameters as containers see them, nothing where these are the host's."""
    try:
        with open(PARAMS, encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return ""
    changed = text.replace("ModifyDeviceFiles: 1\n", "ModifyDeviceFiles: 0\n")
    return "" if changed == text else changed


def is_rootless() -> bool:
    """Say whether the engine itself runs in a user namespace."""
    try:
        with open("/proc/self/uid_map", encoding="utf-8") as file:
            return file.read().split() != ["0", "0", "4294967295"]
    except OSError:
        return False
