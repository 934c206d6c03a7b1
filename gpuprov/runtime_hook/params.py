"""Keeps NVIDIA's libraries from making device nodes inside containers, as every variant of NVIDIA's toolkit does.

They look into /proc/driver/nvidia/params: where ModifyDeviceFiles is 0, they make none. Containers see a copy that
says so. runc mounts nothing below /proc from config.json: mount(8) does it as a hook, before the root is entered.
"""

from __future__ import annotations

import posix

from .edits import has_user_namespace
from .errors import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PARAMS = "/proc/driver/nvidia/params"
# The same for all containers.
_COPY = "/run/gpuprov/params"
_MOUNT_PROGRAMS = ("/usr/bin/mount", "/bin/mount")
# Root in the container is root on the host: the copy is everybody's.
_OPTIONS = "bind,ro,nosuid,nodev,noexec"
_CREATE = posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_NOFOLLOW | posix.O_CLOEXEC


def masking_hook(config: dict[str, Any], root_path: str) -> dict[str, Any] | None:
    """Return the hook that masks the parameters in a container, None where there is nothing to mask.

    Only over a procfs of the container's own: `proc` in the root is then a mount of the low-level runtime's, and what
    mount(8) follows below it is the kernel's. Nor in a user namespace, where nobody makes device nodes. Raises Refused
    if the copy can't be written.
    """
    if not _has_own_proc(config) or has_user_namespace(config) or not _is_the_kernels():
        return None
    copy = masked_copy()
    if not copy:
        return None
    program = next((path for path in _MOUNT_PROGRAMS if posix.access(path, posix.X_OK)), "")
    if not program:
        raise Refused(f"{PARAMS} can't be masked in the container: {' or '.join(_MOUNT_PROGRAMS)} is missing")
    root = root_path if root_path.startswith("/") else f"{posix.getcwd()}/{root_path}"
    target = f"{root}{PARAMS}"
    return {
        "hookName": "createContainer", "path": program, "args": ["mount", "-n", "-o", _OPTIONS, copy, target],
        "env": ["PATH=/usr/bin:/bin"],
    }  # fmt: skip


def _has_own_proc(config: dict[str, Any]) -> bool:
    mounts = config.get("mounts")
    found = [
        mount
        for mount in (mounts if isinstance(mounts, list) else ())
        if isinstance(mount, dict) and str(mount.get("destination", "")).rstrip("/") == "/proc"
    ]
    if not found or found[-1].get("type") != "proc":
        return False
    options = found[-1].get("options")
    # proc(5), subset=pid: no driver is seen there.
    return not any(str(one).startswith("subset=") for one in (options if isinstance(options, list) else ()))


def _is_the_kernels() -> bool:
    """Return whether procfs itself has the file: one that is mounted over it is in no procfs of a container."""
    try:
        return posix.stat(PARAMS).st_dev == posix.stat("/proc").st_dev
    except OSError:
        return False


def masked_copy() -> str:
    """Return a copy of the driver's parameters with `ModifyDeviceFiles: 0`, nothing where there are none to change.

    Nor where a rootless engine can't write it: in its containers nobody makes device nodes. Raises Refused.
    """
    try:
        with open(PARAMS, encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return ""
    changed = text.replace("ModifyDeviceFiles: 1\n", "ModifyDeviceFiles: 0\n")
    if changed == text:
        return ""
    try:
        with open(_COPY, encoding="utf-8") as file:
            if file.read() == changed:
                return _COPY
    except OSError:
        pass
    try:
        _write(changed)
    except OSError as error:
        if is_rootless():
            return ""
        raise Refused(f"{_COPY} can't be written: {error.strerror}") from None
    return _COPY


def _write(text: str) -> None:
    try:
        posix.mkdir(_COPY.rpartition("/")[0], 0o755)
    except FileExistsError:
        pass
    temporary = f"{_COPY}.{posix.getpid()}"
    # Every container reads it and none writes it, whatever the caller's umask is.
    handle = posix.open(temporary, _CREATE, 0o644)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        posix.chmod(temporary, 0o644)
        posix.rename(temporary, _COPY)
    except OSError:
        posix.unlink(temporary)
        raise


def is_rootless() -> bool:
    """Say whether the engine itself runs in a user namespace."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() != ["0", "0", "4294967295"]
    except OSError:
        return False
