"""Device nodes beside the GPUs': links by which systemd knows them, and libraries that must make none.

runc tells systemd of devices by /dev/char/MAJOR:MINOR, and systemd forgets those that are not there as soon as it reads
its units again (`systemctl daemon-reload`): running containers then lose their GPUs. udev makes no such links for
NVIDIA's nodes, which sysfs does not know. Source: nvidia-container-toolkit, "system create-dev-char-symlinks"; runc
issue 3708.

IMEX channels, rights over MIG, storage and network that go with GPUs: what these need is looked up on the host when a
container asks for them, by name; no device is opened.

NVIDIA's libraries look into /proc/driver/nvidia/params: where ModifyDeviceFiles is 0, they make no nodes. Containers
see a copy that says so, as with every variant of NVIDIA's toolkit. runc mounts nothing below /proc from config.json:
mount(8) does it as a hook, before the root is entered.
"""

from __future__ import annotations

import posix
from typing import Any

from .config import has_own_proc, has_user_namespace
from .errors import Refused
from .files import CHARACTER, TYPE, exists, make_folder, read_text, replace_file
from .request import DeviceRequest
from .specification import Specifications

_FOLDER = "/dev/char"
PARAMS = "/proc/driver/nvidia/params"
# The same for all containers.
COPY = "/run/gpuprov/params"
_MOUNT_PROGRAMS = ("/usr/bin/mount", "/bin/mount")
# crun before 1.17 fails where a hook ends before it has read its state (crun issue 1551), and mount(8) reads none.
_AFTER_STATE = 'while read -r line; do :; done; exec "$0" "$@"'
_ALL_USERS = "0 0 4294967295"
# Root in the container is root on the host: the copy is everybody's.
_OPTIONS = "bind,ro,nosuid,nodev,noexec"
_IMEX = "/dev/nvidia-caps-imex-channels"
# A channel's number is a device minor.
_MOST_IMEX = 1 << 20
_CHANNELS = (
    "channel 0: options nvidia NVreg_CreateImexChannel0=1 in /etc/modprobe.d, then a reboot; any: mknod PATH c MAJOR "
    "NUMBER, with the MAJOR of nvidia-caps-imex-channels in /proc/devices"
)
_MIG_MINORS = "/proc/driver/nvidia-caps/mig-minors"
_CAPABILITIES = "/dev/nvidia-caps"


def link_nodes(nodes: list[dict[str, Any]]) -> None:
    """Make the links that are missing; where that can't be done the container starts all the same."""
    for node in nodes:
        path = node.get("hostPath") or node["path"]
        try:
            status = posix.stat(path)
            if status.st_mode & TYPE == CHARACTER and path.startswith("/dev/"):
                make_folder(_FOLDER)
                name = f"{posix.major(status.st_rdev)}:{posix.minor(status.st_rdev)}"
                posix.symlink(f"..{path[len('/dev') :]}", f"{_FOLDER}/{name}")
        except OSError:
            continue  # there already, or no such node


def masking_hook(config: dict[str, Any], root_path: str) -> dict[str, Any] | None:
    """Return the hook that masks the parameters in a container, None where there is nothing to mask.

    Only over a procfs of the container's own: `proc` in the root is then a mount of the low-level runtime's, and what
    mount(8) follows below it is the kernel's. Nor in a user namespace, where nobody makes device nodes. The hook needs
    what `masked_copy` writes.
    """
    if not has_own_proc(config) or has_user_namespace(config) or not _masked():
        return None
    if posix.stat(PARAMS).st_dev != posix.stat("/proc").st_dev:
        return None  # mounted over procfs's own file, which containers see
    program = next((path for path in _MOUNT_PROGRAMS if posix.access(path, posix.X_OK)), "")
    if not program:
        raise Refused(f"{PARAMS} can't be masked in the container: {' or '.join(_MOUNT_PROGRAMS)} is missing")
    root = root_path if root_path.startswith("/") else f"{posix.getcwd()}/{root_path}"
    target = f"{root}{PARAMS}"
    return {
        "hookName": "createContainer", "path": "/bin/sh",
        "args": ["sh", "-c", _AFTER_STATE, program, "-n", "-o", _OPTIONS, COPY, target], "env": ["PATH=/usr/bin:/bin"],
    }  # fmt: skip


def masked_copy() -> str:
    """Write a copy of the driver's parameters with `ModifyDeviceFiles: 0`, and return its path.

    Nothing is written, and "" returned, where there are none to change, and where a rootless engine can't write it: in
    its containers nobody makes device nodes. Raises Refused.
    """
    changed = _masked()
    if not changed:
        return ""
    if read_text(COPY) == changed:
        return COPY
    try:
        make_folder(COPY.rpartition("/")[0])
        replace_file(COPY, changed, 0o644)  # every container reads it and none writes it
    except OSError as error:
        if is_rootless():
            return ""
        raise Refused(f"{COPY} can't be written: {error.strerror}") from None
    return COPY


def _masked() -> str:
    """Return the driver's parameters as containers see them, nothing where these are the host's."""
    text = read_text(PARAMS) or ""
    changed = text.replace("ModifyDeviceFiles: 1\n", "ModifyDeviceFiles: 0\n")
    return "" if changed == text else changed


def is_rootless() -> bool:
    """Say whether the engine itself runs in a user namespace."""
    return (read_text("/proc/self/uid_map") or _ALL_USERS).split() != _ALL_USERS.split()


def special_edits(specifications: Specifications, request: DeviceRequest) -> list[dict[str, Any]]:
    """Return CDI edits, one for each such request. Raises Refused for what is not on this host."""
    found = [_channel(name) for name in request.imex_channels]
    rights = {"config": request.mig_config, "monitor": request.mig_monitor}
    found += [_mig(name) for name, value in rights.items() if value]
    for extra in request.extras:
        found += specifications.edits_of([f"nvidia.com/{extra}=all"])
    return found


def _channel(name: str) -> dict[str, Any]:
    if not (name.isascii() and name.isdigit() and len(name) < 8 and int(name) < _MOST_IMEX):
        raise Refused(f"NVIDIA_IMEX_CHANNELS asks for {name!r}: channels are numbers below {_MOST_IMEX}")
    return _node(f"{_IMEX}/channel{int(name)}", "IMEX channel", _CHANNELS)


def _mig(name: str) -> dict[str, Any]:
    """Return the node of the capability to configure, or to monitor, MIG: it stands for all GPUs."""
    lines = (line.split() for line in (read_text(_MIG_MINORS) or "").splitlines())
    minors = dict(words for words in lines if len(words) == 2)
    if not minors.get(name, "").isdecimal():
        raise Refused(f"this host's driver has no MIG capability {name!r} ({_MIG_MINORS}): no GPU here knows MIG")
    return _node(f"{_CAPABILITIES}/nvidia-cap{minors[name]}", f"MIG {name}", "run gpuprov install on this host")


def _node(path: str, what: str, hint: str) -> dict[str, Any]:
    if not exists(path):
        raise Refused(f"the {what} {path} is not on this host: {hint}")
    return {"deviceNodes": [{"path": path, "permissions": "rw"}]}
