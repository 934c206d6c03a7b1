"""CDI's container edits put into an OCI config.json (CDI's SPEC.md, "OCI Edits"); unknown fields stay."""

from __future__ import annotations

from . import driver_files
from .rootfs import LibraryFolder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def apply_edits(
    config: dict[str, Any],
    common: dict[str, Any],
    devices: list[dict[str, Any]],
    capabilities: frozenset[str],
    library_folder: LibraryFolder,
) -> None:
    """Change `config` such that the container gets the devices, and the driver's files for these capabilities."""
    for entry in common.get("env", ()):
        _set_environment(config, entry)
    if devices:
        for node in common.get("deviceNodes", ()):
            if driver_files.node_is_needed(node["path"], capabilities):
                _add_device(config, node)
    for edits in devices:
        for node in edits.get("deviceNodes", ()):
            _add_device(config, node)
    wanted = [mount for mount in common.get("mounts", ()) if _is_wanted(mount["containerPath"], capabilities)]
    _add_mounts(config, wanted, library_folder)


def _is_wanted(path: str, capabilities: frozenset[str]) -> bool:
    return bool(capabilities.intersection(driver_files.capabilities_of(path)))


def _set_environment(config: dict[str, Any], entry: str) -> None:
    """Put NAME=VALUE into the environment: in the place of an entry of that name, else at the end."""
    environment = config.setdefault("process", {}).setdefault("env", [])
    name = entry.partition("=")[0] + "="
    places = [place for place, item in enumerate(environment) if str(item).startswith(name)]
    if not places:
        environment.append(entry)
        return
    environment[places[0]] = entry
    for place in reversed(places[1:]):
        del environment[place]


def _add_device(config: dict[str, Any], node: dict[str, Any]) -> None:
    """Add a device node and the device-cgroup rule that lets the container open it.

    As part of config.json the rule is known to runc, and through it to systemd: `systemctl daemon-reload` keeps it.
    """
    linux = config.setdefault("linux", {})
    user = config.get("process", {}).get("user", {})
    device = {"path": node["path"], "type": node.get("type", "c"), "major": node["major"], "minor": node["minor"]}
    device["fileMode"] = node.get("fileMode", 0o666)
    for name in ("uid", "gid"):
        device[name] = node.get(name, user.get(name) or 0)
    devices = linux.get("devices") or []
    linux["devices"] = [one for one in devices if one.get("path") != node["path"]] + [device]
    resources = linux.setdefault("resources", {})
    rule = {
        "allow": True, "type": device["type"], "major": node["major"], "minor": node["minor"],
        "access": node.get("permissions") or "rwm",
    }  # fmt: skip
    rules = resources.get("devices") or []
    if rule not in rules:
        resources["devices"] = [*rules, rule]


def _add_mounts(config: dict[str, Any], mounts: list[dict[str, Any]], library_folder: LibraryFolder) -> None:
    """Add the mounts, in the place of those with the same destination; parents come before what lies below them."""
    added = {}
    for mount in mounts:
        destination = library_folder.in_container(mount["containerPath"])
        entry = {"destination": destination, "type": "bind", "source": mount["hostPath"]}
        added[destination] = {**entry, "options": [*mount.get("options", ()), "bind"]}
    kept = [one for one in config.get("mounts") or () if one.get("destination") not in added]
    every = [*kept, *added.values()]
    every.sort(key=lambda one: str(one.get("destination", "")).rstrip("/").count("/"))
    config["mounts"] = every
