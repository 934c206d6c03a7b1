"""What a container gets of all that the CDI specification has, and its place in config.json.

What is chosen: what this request asks for, where the container's loader searches; that changes nothing. How it is put
into config.json: CDI's SPEC.md, "OCI Edits", as every engine that reads CDI does it; what is not named there stays.
"""

from __future__ import annotations

import posix
from typing import Any

from . import driver_files, mps
from .config import STAGES, has_user_namespace, list_of, object_of
from .device_nodes import special_edits
from .driver_files import FOLDERS_32_BIT, LIB64, MULTIARCH, RHEL_32_BIT
from .errors import Refused
from .files import BLOCK, CHARACTER, PIPE, TYPE, is_trusted, normal_path
from .request import VENDORS, DeviceRequest
from .rootfs import Root
from .settings import Settings
from .specification import Specifications, kind_of, unusable


class ContainerEdits:
    """What a container gets.

    `cdi`: CDI's edits, ready to be applied; `links` (target, path) to be made in its root; `libraries`: their paths in
    the container; `host_driver`: the driver's version, "" if unknown; `compatibility`: the folder and the names of the
    image's own libraries for CUDA's forward compatibility, if they are used; `masking`: the hook that masks the
    driver's parameters, if the runtime does it; `decisions`: sentences that say which rule decided.
    """

    def __init__(self, cdi: dict[str, Any], links: list[tuple[str, str]], host_driver: str) -> None:
        self.cdi = cdi
        self.links = links
        self.host_driver = host_driver
        mounted = [mount["containerPath"] for mount in cdi.get("mounts") or ()]
        self.libraries = [path for path in mounted if ".so" in path.rpartition("/")[2]]
        self.compatibility: tuple[str, list[str]] = ("", [])
        self.masking: dict[str, Any] | None = None
        self.decisions: list[str] = []


def choose(
    specifications: Specifications, request: DeviceRequest, settings: Settings, root: Root | None
) -> ContainerEdits:
    """Return what a GPU container's request gets; without a root to look into, all stays where the host has it.

    Raises Refused if something that was asked for is not there, or if a specification is not one.
    """
    parts = specifications.edits_of(request.devices or [], by_annotation=request.by_annotation)
    parts += special_edits(specifications, request)
    folders = _Folders(root)
    try:
        capabilities = request.capabilities
        # An annotation may name another vendor's devices alone.
        ours = any(kind_of(name).partition("/")[0] in ("", *VENDORS) for name in request.devices or ("",))
        wanted = [_wanted(part, capabilities, folders) for part in parts]
        if parts and ours and _is_wanted(mps.FOLDER, capabilities) and mps.is_served(mps.FOLDER):
            wanted.append(mps.EDITS)
        edits = merge_edits(wanted)
        if not settings.additional_gids:
            edits.pop("additionalGids", None)
        # A hook without `env` would be given the image's environment by runc 1.1, LD_PRELOAD included (CVE-2025-23266).
        hooks = [{**hook, "env": hook.get("env") or []} for hook in edits.pop("hooks", [])]
        own = next((hook for hook in hooks if _is_own(hook)), None)
        words = (own or {}).get("args") or []
        named = links_of(words)
        if len(named) != words.count("--link"):
            raise ValueError("a --link of its hook names no link")
        links = [(target, folders.in_container(path)) for target, path in named if _is_wanted(path, capabilities)]
        others = [hook for hook in hooks if not _is_own(hook)]
        if others:
            edits["hooks"] = others
        version = ""
        if links:  # a host need not have our own specification for other kinds' devices
            version = specifications.own.host.get("driver", "")
            driver_files.require_current(specifications.own.path, version, edits)
        chosen = ContainerEdits(edits, links, version)
        mounts = len(edits.get("mounts") or ())
        chosen.decisions = [
            f"driver capabilities {', '.join(sorted(capabilities)) or 'none'}: files: {mounts}, links: {len(links)}",
            *folders.decisions,
        ]
        return chosen
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Refused(unusable(specifications.own.path, error)) from None


def _is_own(hook: dict[str, Any]) -> bool:
    """By its name alone: a specification may have been made for another root."""
    return bool(hook["path"].rpartition("/")[2] == driver_files.HOOK_PATH.rpartition("/")[2])


def _wanted(edits: dict[str, Any], capabilities: frozenset[str], folders: _Folders) -> dict[str, Any]:
    """Return the edits without what no capability needs, and at the places where the image looks for it."""
    found = dict(edits)
    nodes, gids = edits.get("deviceNodes"), edits.get("additionalGids") or ()
    if nodes:
        found["deviceNodes"] = [node for node in nodes if driver_files.node_is_needed(node["path"], capabilities)]
        # Groups come with nodes that not everybody may open: none for a node that is left out.
        left_out = {node.get("gid") for node in nodes if node not in found["deviceNodes"]}
        still = {node.get("gid") for node in found["deviceNodes"]}
        found["additionalGids"] = [gid for gid in gids if gid in still or gid not in left_out]
    if edits.get("mounts"):
        found["mounts"] = [
            {**mount, "containerPath": folders.in_container(mount["containerPath"])}
            for mount in edits["mounts"]
            # Sockets come and go with their services (persistenced, fabric manager): one that is gone must not stop us.
            if _is_wanted(mount["containerPath"], capabilities)
            and ("noexec" not in (mount.get("options") or ()) or is_trusted(mount["hostPath"]))
            # Whether its daemon runs is seen at each start; a specification only says that there was a folder.
            and mount["containerPath"] != mps.FOLDER
        ]
    return found


def _is_wanted(path: str, capabilities: frozenset[str]) -> bool:
    return bool(capabilities.intersection(driver_files.capabilities_of(path)))


def links_of(arguments: list[str]) -> list[tuple[str, str]]:
    """Return the links (target, path) that our own hook's arguments name."""
    named = [value.partition("::") for flag, value in zip(arguments, arguments[1:]) if flag == "--link"]
    return [(target, path) for target, separator, path in named if separator]


class _Folders:
    """Where a library that lies in one of the host's library folders goes in the container.

    The folder is one that the image's loader searches by itself: /usr/lib/MULTIARCH on Debian and Ubuntu, /usr/lib64 on
    RHEL, Fedora and SUSE. So libraries are found also after the image's own ldconfig has rewritten the cache.
    """

    def __init__(self, root: Root | None) -> None:
        self._root = root
        self._found: dict[str, str] = {}
        self.decisions: list[str] = []

    def in_container(self, path: str) -> str:
        """Return the container's path for a path of the CDI specification; only libraries ever move."""
        folder, _, name = path.rpartition("/")
        if ".so" not in name or self._root is None:
            return path
        moved = self._found.get(folder)
        if moved is None:
            moved = self._found[folder] = self._moved(folder)
        return f"{moved}/{name}"

    def _moved(self, folder: str) -> str:
        for known in (*MULTIARCH, LIB64, *FOLDERS_32_BIT):
            if folder == known:
                return self._choose(folder)
            if folder.startswith(f"{known}/"):  # those below it too: vdpau, gbm
                return self._moved(known) + folder[len(known) :]
        return folder

    def _choose(self, folder: str) -> str:
        """Return the folder that the image's loader searches, the host's own if the image has none.

        Debian's images have a /usr/lib64 too, for the loader's own path, and don't search it: MULTIARCH goes first.
        """
        assert self._root is not None
        multiarch = f"/usr/lib/{posix.uname().machine}-linux-gnu"
        if folder in FOLDERS_32_BIT:
            like_rhel = self._root.is_directory(LIB64) and not self._root.is_directory(multiarch)
            candidates = (*FOLDERS_32_BIT, *((RHEL_32_BIT,) if like_rhel else ()))
        else:
            candidates = (multiarch if folder == LIB64 else folder, LIB64)
        chosen = next((one for one in candidates if self._root.is_directory(one)), folder)
        if chosen != folder:
            self.decisions.append(f"libraries go to {chosen}, where this image's loader searches, not to {folder}")
        return chosen


_LISTS = ("env", "deviceNodes", "netDevices", "mounts", "hooks", "additionalGids")
# The two ways by which docker's and NVIDIA's own hook comes into a configuration: it would do the same once more.
_NVIDIA_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")
# `u` is a character device too.
NODE_TYPES = {"c": CHARACTER, "u": CHARACTER, "b": BLOCK, "p": PIPE}


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
        devices = object_of(object_of(config, "linux"), "netDevices")
        devices[device["hostInterfaceName"]] = {"name": device["name"]}
    _add_mounts(config, edits.get("mounts") or (), idmap=idmap and has_user_namespace(config))
    for hook in edits.get("hooks") or ():
        stage = hook["hookName"]
        if stage not in STAGES:
            raise Refused(f"the CDI specification has a hook for {stage!r}, which is no stage of a container")
        hooks = object_of(config, "hooks")
        entry = {name: hook[name] for name in ("path", "args", "env", "timeout") if name in hook}
        hooks[stage] = [*list_of(hooks, stage, dict), entry]
    if edits.get("intelRdt"):
        object_of(config, "linux")["intelRdt"] = edits["intelRdt"]
    groups = [group for group in edits.get("additionalGids") or () if group]
    if groups:
        user = object_of(object_of(config, "process"), "user")
        user["additionalGids"] = list(dict.fromkeys([*list_of(user, "additionalGids", int), *groups]))


def drop_nvidia_hooks(config: dict[str, Any]) -> None:
    """Take NVIDIA's own prestart hook out, which docker adds for --gpus."""
    if not config.get("hooks"):
        return
    hooks = object_of(config, "hooks")
    before = list_of(hooks, "prestart", dict)
    kept = [hook for hook in before if str(hook.get("path", "")).rpartition("/")[2] not in _NVIDIA_HOOKS]
    if len(kept) != len(before):
        hooks["prestart"] = kept


def _add_environment(config: dict[str, Any], entries: Any) -> None:
    """Put NAME=VALUE into the environment: in the place of an entry of that name, else at the end."""
    if not entries:
        return
    process = object_of(config, "process")
    environment = list_of(process, "env", str)
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


def _add_device(config: dict[str, Any], node: dict[str, Any]) -> None:
    """Add a device node and the device-cgroup rule that lets the container open it.

    As part of config.json the rule is known to runc, and through it to systemd: `systemctl daemon-reload` keeps it.
    """
    linux = object_of(config, "linux")
    resources = object_of(linux, "resources")
    user = object_of(object_of(config, "process"), "user")
    device = {"path": node["path"], **node_identity(node)}
    for name in ("uid", "gid"):
        value = node.get(name)
        own = user.get(name) if isinstance(user.get(name), int) else 0
        device[name] = own if value is None else value
    devices = list_of(linux, "devices", dict)
    linux["devices"] = [one for one in devices if one.get("path") != node["path"]] + [device]
    access = node.get("permissions") or "rwm"
    if access == "none" or device["type"] not in ("b", "c"):
        return
    rule = {"allow": True, **{name: device[name] for name in ("type", "major", "minor")}, "access": access}
    rules = list_of(resources, "devices", dict)
    if rule not in rules:
        resources["devices"] = [*rules, rule]


def node_identity(node: dict[str, Any]) -> dict[str, Any]:
    """Return type, numbers and mode of a node; what the specification leaves out is the host's node's."""
    if node.get("major") is not None and node.get("minor") is not None:
        kind, mode = node.get("type") or "c", node.get("fileMode") or 0o666
        return {"type": kind, "major": node["major"], "minor": node["minor"], "fileMode": mode}
    path = node.get("hostPath") or node["path"]
    try:
        status = posix.stat(path)
    except OSError as error:
        raise Refused(f"the device node {path} is not on this host ({error.strerror}): run gpuprov install") from None
    kind = node.get("type") or next((name for name, one in NODE_TYPES.items() if one == status.st_mode & TYPE), "")
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
        if idmap and not {"idmap", "ridmap"}.intersection(options):
            if "rbind" in options:
                options.append("ridmap")
            elif kind == "bind" or "bind" in options:
                options.append("idmap")
        if "bind" not in options and "rbind" not in options and kind in ("", "bind"):
            options.append("bind")
        added[normal_path(mount["containerPath"])] = {
            "destination": mount["containerPath"], "type": kind or "bind", "source": mount["hostPath"],
            "options": options,
        }  # fmt: skip
    kept = [one for one in list_of(config, "mounts", dict) if _destination(one) not in added]
    config["mounts"] = sorted([*kept, *added.values()], key=lambda one: _destination(one).count("/"))


def _destination(mount: dict[str, Any]) -> str:
    destination = str(mount.get("destination", ""))
    return normal_path(destination) if "//" in destination or "/." in destination else destination.rstrip("/") or "/"
