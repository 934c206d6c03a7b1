"""CDI's container edits put into an OCI config.json (CDI's SPEC.md, "OCI Edits"); what is not named there stays.

Which edits, decides equipment.py; here they are applied as every engine that reads CDI does it.
"""

from __future__ import annotations

import posix

from .errors import Refused
from .paths import normal_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LISTS = ("env", "deviceNodes", "netDevices", "mounts", "hooks", "additionalGids")
# The two ways by which docker's and NVIDIA's own hook comes into a configuration: it would do the same once more.
_NVIDIA_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")
_TYPE = 0o170000
_KINDS = {0o020000: "c", 0o060000: "b", 0o010000: "p"}
_STAGES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")


def merge_edits(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return several edits as one: lists one behind the other, of Intel's RDT the last."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name in _LISTS:
            if part.get(name):
                merged.setdefault(name, []).extend(part[name])
        if part.get("intelRdt"):
            merged["intelRdt"] = part["intelRdt"]
    return merged


def apply_edits(config: dict[str, Any], edits: dict[str, Any], *, idmap: bool = False) -> None:
    """Change `config` as the edits say; `idmap` has bind mounts mapped in user namespaces (runc from 1.2 on knows it).

    Raises Refused if the configuration has no place for an edit, or if a device node is not on this host.
    """
    _add_environment(config, edits.get("env") or ())
    for node in edits.get("deviceNodes") or ():
        _add_device(config, node)
    for device in edits.get("netDevices") or ():
        devices = _object(_object(config, "linux"), "netDevices")
        devices[device["hostInterfaceName"]] = {"name": device["name"]}
    _add_mounts(config, edits.get("mounts") or (), idmap=idmap and has_user_namespace(config))
    for hook in edits.get("hooks") or ():
        _add_hook(config, hook)
    if edits.get("intelRdt"):
        _object(config, "linux")["intelRdt"] = edits["intelRdt"]
    _add_groups(config, edits.get("additionalGids") or ())


def drop_nvidia_hooks(config: dict[str, Any]) -> None:
    """Take NVIDIA's own prestart hook out, which docker adds for --gpus."""
    if not config.get("hooks"):
        return
    hooks = _object(config, "hooks")
    before = _list(hooks, "prestart", dict)
    kept = [hook for hook in before if str(hook.get("path", "")).rpartition("/")[2] not in _NVIDIA_HOOKS]
    if len(kept) != len(before):
        hooks["prestart"] = kept


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


def _add_environment(config: dict[str, Any], entries: Any) -> None:
    """Put NAME=VALUE into the environment: in the place of an entry of that name, else at the end."""
    if not entries:
        return
    process = _object(config, "process")
    environment = _list(process, "env", str)
    for entry in entries:
        name = entry.partition("=")[0] + "="
        places = [place for place, item in enumerate(environment) if item.startswith(name)]
        if not places:
            environment.append(entry)
            continue
        environment[places[0]] = entry
        # Of several entries with one name the last would count.
        environment = [item for place, item in enumerate(environment) if place not in places[1:]]
    process["env"] = environment


def _add_groups(config: dict[str, Any], groups: Any) -> None:
    wanted = [group for group in groups if group]
    if wanted:
        user = _object(_object(config, "process"), "user")
        user["additionalGids"] = list(dict.fromkeys([*_list(user, "additionalGids", int), *wanted]))


def _add_device(config: dict[str, Any], node: dict[str, Any]) -> None:
    """Add a device node and the device-cgroup rule that lets the container open it.

    As part of config.json the rule is known to runc, and through it to systemd: `systemctl daemon-reload` keeps it.
    """
    linux = _object(config, "linux")
    resources = _object(linux, "resources")
    user = _object(_object(config, "process"), "user")
    device = {"path": node["path"], **node_identity(node)}
    for name in ("uid", "gid"):
        value = node.get(name)
        own = user.get(name) if isinstance(user.get(name), int) else 0
        device[name] = own if value is None else value
    devices = _list(linux, "devices", dict)
    linux["devices"] = [one for one in devices if one.get("path") != node["path"]] + [device]
    access = node.get("permissions") or "rwm"
    if access == "none" or device["type"] not in ("b", "c"):
        return
    rule = {"allow": True, **{name: device[name] for name in ("type", "major", "minor")}, "access": access}
    rules = _list(resources, "devices", dict)
    if rule not in rules:
        resources["devices"] = [*rules, rule]


def node_identity(node: dict[str, Any]) -> dict[str, Any]:
    """Return type, numbers and mode of a node; what the specification leaves out is the host's node's."""
    if node.get("major") is not None and node.get("minor") is not None:
        kind = node.get("type") or "c"
        return {
            "type": kind, "major": node["major"], "minor": node["minor"], "fileMode": node.get("fileMode") or 0o666,
        }  # fmt: skip
    path = node.get("hostPath") or node["path"]
    try:
        status = posix.stat(path)
    except OSError as error:
        raise Refused(f"the device node {path} is not on this host ({error.strerror}): run gpuprov install") from None
    kind = node.get("type") or _KINDS.get(status.st_mode & _TYPE, "")
    if not kind:
        raise Refused(f"{path} on this host is no device node: run gpuprov install")
    mode = node.get("fileMode") or status.st_mode & 0o7777
    return {"type": kind, "major": posix.major(status.st_rdev), "minor": posix.minor(status.st_rdev), "fileMode": mode}


def _add_mounts(config: dict[str, Any], mounts: Any, *, idmap: bool) -> None:
    """Add the mounts, in the place of those with the same destination; parents come before what lies below them."""
    if not mounts:
        return
    added = {}
    for mount in mounts:
        options = list(mount.get("options") or ())
        kind = mount.get("type") or ""
        if idmap:
            _map_ids(options, kind)
        if "bind" not in options and "rbind" not in options and kind in ("", "bind"):
            options.append("bind")
        added[normal_path(mount["containerPath"])] = {
            "destination": mount["containerPath"], "type": kind or "bind", "source": mount["hostPath"],
            "options": options,
        }  # fmt: skip
    kept = [one for one in _list(config, "mounts", dict) if _destination(one) not in added]
    config["mounts"] = sorted([*kept, *added.values()], key=lambda one: _destination(one).count("/"))


def _map_ids(options: list[str], kind: str) -> None:
    if "idmap" in options or "ridmap" in options:
        return
    if "rbind" in options:
        options.append("ridmap")
    elif kind == "bind" or "bind" in options:
        options.append("idmap")


def _destination(mount: dict[str, Any]) -> str:
    destination = str(mount.get("destination", ""))
    return normal_path(destination) if "//" in destination or "/." in destination else destination.rstrip("/") or "/"


def has_user_namespace(config: dict[str, Any]) -> bool:
    """Say whether the container has a user namespace of its own."""
    linux = config.get("linux")
    namespaces = _list(linux, "namespaces", dict) if isinstance(linux, dict) else ()
    return any(one.get("type") == "user" for one in namespaces)


def _add_hook(config: dict[str, Any], hook: dict[str, Any]) -> None:
    stage = hook["hookName"]
    if stage not in _STAGES:
        raise Refused(f"the CDI specification has a hook for {stage!r}, which is no stage of a container")
    hooks = _object(config, "hooks")
    entry: dict[str, Any] = {
        "path": hook["path"],
        **{name: hook[name] for name in ("args", "env", "timeout") if name in hook},
    }
    hooks[stage] = [*_list(hooks, stage, dict), entry]
