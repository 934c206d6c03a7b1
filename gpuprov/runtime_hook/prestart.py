"""The prestart hook's work: devices, files, links and the loader's cache, put into a container by hand.

runc has made the container's namespaces and mounted its root by then, and not yet entered it: from the container's
mount namespace both the host's files and the root's folder are seen. What is mounted there goes with the namespace.
"""

from __future__ import annotations

import posix
import sys
import time
from typing import Any

from . import record
from .config import has_own_proc
from .decision import Decision
from .device_cgroup import Bus, allow, read_proc, scope_of, tell, wait
from .device_nodes import PARAMS, is_rootless, masked_copy
from .edits import NODE_TYPES, node_identity
from .errors import Refused
from .files import DIRECTORY, REGULAR, TYPE, remove_file
from .links import inject
from .rootfs import CREATE, Root, open_root
from .settings import Settings
from .system_calls import act_as, bind, enter_mount_namespace
from .volumes import is_same_file, watch

_HOST = (0, 0)
_EXDEV = 18
# Systemd does not answer while it reads its units again or is replaced (`daemon-reexec`), and then takes devices away
# that it does not know. Seconds to wait after each call that failed; a call itself takes three at most.
_PAUSES = (0.2, 0.8, 0)
# What stands in config.json alone, which runc has read by now.
_TOO_LATE = ("hooks", "netDevices", "intelRdt", "env")


def inject_into(pid: int, identifier: str, decision: Decision) -> None:
    """Give the container of a process what was decided; afterwards this process is in its mount namespace.

    Raises Refused if anything can't be given: then the container must not start.
    """
    edits, settings = decision.edits.cdi, decision.settings
    _refuse_what_comes_too_late(edits)
    in_user_namespace = is_another_namespace(pid, "user")
    owner = root_user(pid) if in_user_namespace else _HOST
    if not is_another_namespace(pid, "mnt"):
        raise Refused("the container has no mount namespace of its own: what it is given would be the host's")
    nodes = [_node(node) for node in edits.get("deviceNodes") or ()]
    params = masked_copy()
    bound = in_user_namespace or is_rootless()
    told = None
    if not settings.no_cgroups:
        told = allow_nodes(pid, identifier, [node for node in nodes if node["access"]], settings)
    # From here on Python must find nothing in the container's files that it would load.
    sys.path.clear()
    sys.meta_path.clear()
    enter_mount_namespace(pid)
    root = open_root(decision.root_path, owner)
    if decision.root is None or root.identity != decision.root.identity:
        raise Refused(f"something else than the container's root file system is mounted at {decision.root_path}")
    watch(root, decision.volumes)
    posix.umask(0)
    for node in nodes:
        _attempt(node["path"], _add_node, root, node, bound)
    for mount in edits.get("mounts") or ():
        _attempt(mount["containerPath"], _add_mount, root, mount)
    mask_params(root, params, decision.config)
    posix.umask(0o022)
    act_as(owner)
    inject(root, decision.edits)
    act_as(_HOST)
    root.close()
    wait(told)


def allow_nodes(pid: int, identifier: str, nodes: list[dict[str, Any]], settings: Settings) -> Bus | None:
    """Let the container open its nodes: at once by the kernel, and after systemd's next reload by systemd.

    Returns what to wait for in the end. Systemd comes second: it changes the programs of the cgroup, too.
    """
    scope = scope_of(allow(pid, nodes), identifier)
    if not scope or not nodes:
        return None
    for pause in _PAUSES:
        try:
            return tell(scope, nodes)
        except OSError as error:
            trouble = error.strerror or error
            time.sleep(pause)
    said = f"systemd was not told of the devices of {scope}, and takes them away at `systemctl daemon-reload`"
    record.log(settings, "warning", f"{said}: {trouble}")
    return None


def mask_params(root: Root, copy: str, config: dict[str, Any]) -> None:
    """Mount a copy of the driver's parameters over them, in a procfs of the container's own. Raises Refused.

    They stay as they are where something else is mounted below /proc: a volume, or a folder that crun has made
    read-only by then.
    """
    if not copy or not has_own_proc(config) or not root.exists(PARAMS):
        return
    try:
        root.open_writable(PARAMS.rpartition("/")[0])
    except OSError:
        return
    mount = {"hostPath": copy, "containerPath": PARAMS, "options": ["ro", "nosuid", "nodev", "noexec"]}
    _attempt(PARAMS, _add_mount, root, mount)


def _refuse_what_comes_too_late(edits: dict[str, Any]) -> None:
    # That one says that the work is done already, which is as true of a hook's.
    wanted = {**edits, "env": [entry for entry in edits.get("env") or () if entry != "NVIDIA_VISIBLE_DEVICES=void"]}
    named = [name for name in _TOO_LATE if wanted.get(name)]
    if named:
        what = f"the CDI specification has {', '.join(named)} for what was asked for, which no prestart hook can give"
        raise Refused(f"{what}: use --runtime=nvidia, not --gpus")


def root_user(pid: int) -> tuple[int, int]:
    """Return the host's numbers for root's user and group in a process's user namespace.

    Not those of config.json: a namespace that is joined by its path need not have its mappings there. Raises Refused if
    the process has ended.
    """
    return _outside(read_proc(f"/proc/{pid}/uid_map")), _outside(read_proc(f"/proc/{pid}/gid_map"))


def _outside(mappings: str) -> int:
    rows = [line.split() for line in mappings.splitlines()]
    return next((int(outside) for inside, outside, _ in rows if inside == "0"), 0)


def is_another_namespace(pid: int, kind: str) -> bool:
    """Say whether a process is in another namespace (`user`, `mnt`) than this one. Raises Refused if it has ended."""
    try:
        ours, theirs = posix.stat(f"/proc/self/ns/{kind}"), posix.stat(f"/proc/{pid}/ns/{kind}")
    except OSError as error:
        raise Refused(f"the container's process {pid} is gone: {error.strerror}") from None
    return (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino)


def _attempt(path: str, action: Any, *arguments: Any) -> None:
    try:
        action(*arguments)
    except OSError as error:
        raise Refused(f"{path} can't be put into the container: {error.strerror}") from None


def _node(node: dict[str, Any]) -> dict[str, Any]:
    permissions = node.get("permissions") or "rwm"
    identity = node_identity(node)
    access = permissions if permissions != "none" and identity["type"] in ("b", "c") else ""
    return {**node, **identity, "access": access, "host": node.get("hostPath") or node["path"]}


def _add_node(root: Root, node: dict[str, Any], bound: bool) -> None:
    """Make a device node; or bind the host's: in a user namespace nodes can't be made, or not be opened."""
    folder, _, name = node["path"].rpartition("/")
    if bound:
        _add_mount(root, {"hostPath": node["host"], "containerPath": node["path"], "options": ["nosuid", "noexec"]})
        return
    kind, device = NODE_TYPES[node["type"]], posix.makedev(node["major"], node["minor"])
    found = root.status(node["path"])
    if found and found.st_mode & TYPE == kind and found.st_rdev == device:
        return
    directory = root.open_writable(folder)
    remove_file(name, directory)
    posix.mknod(name, kind | node["fileMode"], device, dir_fd=directory)
    posix.chown(name, node.get("uid") or 0, node.get("gid") or 0, dir_fd=directory, follow_symlinks=False)


def _add_mount(root: Root, mount: dict[str, Any]) -> None:
    """Mount a file or folder, unless a volume has brought it to that place already."""
    path, source = mount["containerPath"], mount["hostPath"]
    folder, _, name = path.rpartition("/")
    status = posix.stat(source)
    is_folder = status.st_mode & TYPE == DIRECTORY
    try:
        act_as(root.owner)
        directory = root.open_writable(folder)
        if is_folder:
            root.open_writable(path)
        else:
            _make_file(root, directory, name)
        act_as(_HOST)
        bind(source, directory, name, mount.get("options") or [], folder=is_folder)
    except OSError as error:
        if error.errno != _EXDEV or not is_same_file(root, path, status):
            raise
        act_as(_HOST)


def _make_file(root: Root, directory: int, name: str) -> None:
    """See to it that a regular file is there to be mounted over; a link in its place is taken away."""
    try:
        found = posix.stat(name, dir_fd=directory, follow_symlinks=False)
        if found.st_mode & TYPE == REGULAR:
            return
        posix.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    handle = posix.open(name, CREATE, 0o644, dir_fd=directory)
    posix.fchown(handle, *root.owner)
    posix.close(handle)
