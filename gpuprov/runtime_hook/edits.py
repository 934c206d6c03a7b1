"""CDI's container edits put into an OCI config.json (CDI's SPEC.md, "OCI Edits"); unknown fields stay.

What stands in the specification and can't be applied here (a hook, a network device) is refused, not left out.
"""

from __future__ import annotations

import os
import stat

from . import driver_files
from .errors import Refused
from .rootfs import LibraryFolder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_APPLIED = ("env", "deviceNodes", "mounts", "additionalGids")
# NVIDIA's own hook, which docker adds for --gpus: it would do the same once more, its way.
_NVIDIA_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")


def apply_edits(
    config: dict[str, Any],
    common: dict[str, Any],
    devices: list[dict[str, Any]],
    capabilities: frozenset[str],
    library_folder: LibraryFolder,
) -> None:
    """Change `config` such that the container gets the devices, and the driver's files for these capabilities.

    Raises Refused if an edit can't be applied, or if the configuration has no place for it.
    """
    mounts: list[dict[str, Any]] = []
    for edits in (common, *devices):
        unknown = [name for name, value in edits.items() if value and name not in _APPLIED]
        if unknown:
            raise Refused(f"the CDI specification has {unknown[0]}, which this runtime can't do")
        for entry in edits.get("env") or ():
            _set_environment(config, entry)
        if devices:
            _add_nodes(config, edits, capabilities)
        mounts += [one for one in edits.get("mounts") or () if _is_wanted(one["containerPath"], capabilities)]
    _add_mounts(config, mounts, library_folder)
    _drop_nvidia_hooks(config)


def _is_wanted(path: str, capabilities: frozenset[str]) -> bool:
    return bool(capabilities.intersection(driver_files.capabilities_of(path)))


def _object(parent: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object of the configuration, made if it is missing or null. Raises Refused for anything else."""
    if parent.get(name) is None:
        parent[name] = {}
    found = parent[name]
    if not isinstance(found, dict):
        raise Refused(f"config.json: {name} is no object")
    return found


def _list(parent: dict[str, Any], name: str, kind: type) -> list[Any]:
    """Return a copy of a list of the configuration, nothing for none. Raises Refused for anything but such a list."""
    found = parent.get(name)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise Refused(f"config.json: {name} is no list of what belongs there")
    return list(found)


def _set_environment(config: dict[str, Any], entry: str) -> None:
    """Put NAME=VALUE into the environment: in the place of an entry of that name, else at the end."""
    process = _object(config, "process")
    name = entry.partition("=")[0] + "="
    environment = _list(process, "env", str)
    places = [place for place, item in enumerate(environment) if item.startswith(name)]
    if not places:
        process["env"] = [*environment, entry]
        return
    environment[places[0]] = entry
    # Of several entries with one name the last would count.
    process["env"] = [item for place, item in enumerate(environment) if place not in places[1:]]


def _add_nodes(config: dict[str, Any], edits: dict[str, Any], capabilities: frozenset[str]) -> None:
    for node in edits.get("deviceNodes") or ():
        if driver_files.node_is_needed(node["path"], capabilities):
            _add_device(config, node)
    groups = [group for group in edits.get("additionalGids") or () if group]
    if groups:
        user = _object(_object(config, "process"), "user")
        present = _list(user, "additionalGids", int)
        user["additionalGids"] = list(dict.fromkeys([*present, *groups]))


def _add_device(config: dict[str, Any], node: dict[str, Any]) -> None:
    """Add a device node and the device-cgroup rule that lets the container open it.

    As part of config.json the rule is known to runc, and through it to systemd: `systemctl daemon-reload` keeps it.
    """
    linux = _object(config, "linux")
    resources = _object(linux, "resources")
    user = _object(_object(config, "process"), "user")
    device = {"path": node["path"], **_identity(node)}
    for name in ("uid", "gid"):
        device[name] = node.get(name, user.get(name) or 0)
    devices = _list(linux, "devices", dict)
    linux["devices"] = [one for one in devices if one.get("path") != node["path"]] + [device]
    access = node.get("permissions") or "rwm"
    if access == "none":
        return
    rule = {"allow": True, **{name: device[name] for name in ("type", "major", "minor")}, "access": access}
    rules = _list(resources, "devices", dict)
    if rule not in rules:
        resources["devices"] = [*rules, rule]


def _identity(node: dict[str, Any]) -> dict[str, Any]:
    """Return type, numbers and mode of a node; what the specification leaves out is the host's node's."""
    if "major" in node and "minor" in node:
        kind = node.get("type") or "c"
        return {
            "type": kind, "major": node["major"], "minor": node["minor"], "fileMode": node.get("fileMode") or 0o666,
        }  # fmt: skip
    path = node.get("hostPath") or node["path"]
    try:
        status = os.stat(path)
    except OSError as error:
        raise Refused(f"the device node {path} is not on this host ({error.strerror}): run gpuprov install") from None
    kind = {stat.S_IFCHR: "c", stat.S_IFBLK: "b"}.get(stat.S_IFMT(status.st_mode), "")
    if not kind:
        raise Refused(f"{path} on this host is no device node: run gpuprov install")
    mode = node.get("fileMode") or stat.S_IMODE(status.st_mode)
    return {"type": kind, "major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev), "fileMode": mode}


def _add_mounts(config: dict[str, Any], mounts: list[dict[str, Any]], library_folder: LibraryFolder) -> None:
    """Add the mounts, in the place of those with the same destination; parents come before what lies below them."""
    added = {}
    for mount in mounts:
        destination = library_folder.in_container(mount["containerPath"])
        options = list(mount.get("options") or ())
        if "bind" not in options and "rbind" not in options:
            options.append("bind")
        added[destination] = {
            "destination": destination, "type": "bind", "source": mount["hostPath"], "options": options,
        }  # fmt: skip
    kept = [one for one in _list(config, "mounts", dict) if _destination(one) not in added]
    config["mounts"] = sorted([*kept, *added.values()], key=lambda one: _destination(one).count("/"))


def _destination(mount: dict[str, Any]) -> str:
    return os.path.normpath(str(mount.get("destination", "")))


def _drop_nvidia_hooks(config: dict[str, Any]) -> None:
    if not config.get("hooks"):
        return
    hooks = _object(config, "hooks")
    before = _list(hooks, "prestart", dict)
    kept = [hook for hook in before if os.path.basename(str(hook.get("path", ""))) not in _NVIDIA_HOOKS]
    if len(kept) != len(before):
        hooks["prestart"] = kept
