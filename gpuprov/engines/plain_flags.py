"""Plain docker and podman flags for one container, for hosts on which no runtime may be registered.

Pure. No hook runs in such a container, so each library is mounted under every name by which programs load it, in the
folders that the loaders of Debian's and of Red Hat's images search without a cache.
"""

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpuprov.protocol.dataclass import dataclass
from gpuprov.runtime_hook.driver_files import LIB64, MULTIARCH

# `$(gpuprov docker-args)`: a shell splits at blanks and expands these. A colon or a comma divides docker's own values.
_SHELL_SPECIAL = frozenset(" \t\n*?[]\\")
_DOCKER_SPECIAL = frozenset(":\n")
_DEFAULT_ACCESS = "rwm"
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_./:=,+-]+")
_ESCAPED = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


@dataclass(frozen=True)
class Device:
    """A device node: the host's path, the container's, and what the container may do with it (r, w, m)."""

    source: str
    target: str
    access: str = _DEFAULT_ACCESS


@dataclass(frozen=True)
class Mount:
    """A file or folder of the host, mounted read-only in the container."""

    source: str
    target: str


@dataclass(frozen=True)
class PlainFlags:
    """The flags of a container. `left_out`: sentences about what flags can't provide."""

    devices: tuple[Device, ...]
    mounts: tuple[Mount, ...]
    environment: tuple[str, ...]
    groups: tuple[int, ...]
    left_out: tuple[str, ...]


def plain_flags(edits: Mapping[str, Any], multiarch: str) -> PlainFlags:
    """Return the flags for CDI's container edits and `links` (`TARGET::PATH`) of the runtime's decision.

    `multiarch`: the library folder of Debian's images for this machine. Raises ValueError for a path that docker's
    flags can't express.
    """
    devices = [
        Device(node.get("hostPath") or node["path"], node["path"], node.get("permissions") or _DEFAULT_ACCESS)
        for node in edits.get("deviceNodes") or ()
    ]
    mounts = list(_mounts(edits, multiarch))
    for path in (*(one for device in devices for one in (device.source, device.target)),
                 *(one for mount in mounts for one in (mount.source, mount.target))):  # fmt: skip
        if _DOCKER_SPECIAL.intersection(path):
            raise ValueError(f"docker's flags can't hold the path {path!r}")
    return PlainFlags(
        tuple(dict.fromkeys(devices)),
        tuple(dict.fromkeys(mounts)),
        tuple(edits.get("env") or ()),
        tuple(edits.get("additionalGids") or ()),
        tuple(_left_out(edits)),
    )


def words(flags: PlainFlags) -> tuple[str, ...]:
    """Return the arguments of `docker run` and `podman run`."""
    return (
        *(f"--device={device.source}:{device.target}:{device.access}" for device in flags.devices),
        *(f"--volume={mount.source}:{mount.target}:ro" for mount in flags.mounts),
        *(f"--env={entry}" for entry in flags.environment),
        *(f"--group-add={group}" for group in flags.groups),
    )


def shell_words(flags: PlainFlags) -> tuple[str, ...]:
    """Return the arguments for `$(…)`. Raises ValueError for an argument that a shell would split or expand."""
    found = words(flags)
    if wrong := next(filter(_SHELL_SPECIAL.intersection, found), ""):
        raise ValueError(f"a shell would split or expand {wrong!r} in $(…)")
    return found


def compose(flags: PlainFlags, service: str) -> str:
    """Return a file for `docker compose -f compose.yaml -f FILE`, which adds the GPUs to a service."""
    lists: dict[str, list[object]] = {
        "devices": [f"{one.source}:{one.target}:{one.access}" for one in flags.devices],
        "volumes": [{"type": "bind", "source": one.source, "target": one.target, "read_only": True}
                    for one in flags.mounts],
        "environment": list(flags.environment),
        "group_add": list(map(str, flags.groups)),
    }  # fmt: skip
    lines = ["services:", f"  {_yaml(service)}:"]
    for name, entries in lists.items():
        if entries:
            lines += [f"    {name}:", *(f"      - {_yaml(entry)}" for entry in entries)]
    return "\n".join(lines) + "\n"


def quadlet(flags: PlainFlags) -> str:
    """Return the lines for the section [Container] of a podman quadlet (podman-systemd.unit(5))."""
    lines = (
        "[Container]",
        *(f"AddDevice={_quoted(f'{one.source}:{one.target}:{one.access}')}" for one in flags.devices),
        *(f"Volume={_unit(f'{mount.source}:{mount.target}:ro')}" for mount in flags.mounts),
        *(f"Environment={_quoted(entry)}" for entry in flags.environment),
        *(f"GroupAdd={group}" for group in flags.groups),
    )
    return "\n".join(lines) + "\n"


def incus(flags: PlainFlags, nodes: Mapping[str, os.stat_result]) -> str:
    """Return a profile for `incus profile create NAME` (also LXD's): each node and each file is a device.

    `nodes`: the status of each device node, whose mode and group the guest's node gets.
    """
    config = {f"environment.{name}": value for name, _, value in (one.partition("=") for one in flags.environment)}
    devices: dict[str, dict[str, str]] = {
        f"gpu{number}": {
            "type": "unix-char", "source": one.source, "path": one.target,
            "mode": f"{stat.S_IMODE(nodes[one.source].st_mode):04o}", "gid": str(nodes[one.source].st_gid),
        }
        for number, one in enumerate(flags.devices)
    }  # fmt: skip
    for number, one in enumerate(flags.mounts):
        devices[f"file{number}"] = {"type": "disk", "source": one.source, "path": one.target, "readonly": "true"}
    return json.dumps({"config": config, "description": "GPUs, by gpuprov", "devices": devices}, indent=1) + "\n"


def lxc(flags: PlainFlags, nodes: Mapping[str, os.stat_result]) -> str:
    """Return lines for a container's configuration (lxc.container.conf(5)); Proxmox VE reads them in ID.conf too.

    `nodes`: the status of each device node.
    """
    numbers = {path: f"{os.major(one.st_rdev)}:{os.minor(one.st_rdev)}" for path, one in nodes.items()}
    lines = [f"lxc.cgroup2.devices.allow = c {numbers[one.source]} {one.access}" for one in flags.devices]
    lines += [_lxc_mount(one.source, one.target, "bind,create=file") for one in flags.devices]
    lines += [_lxc_mount(one.source, one.target, "bind,ro,create=file") for one in flags.mounts]
    lines += [f"lxc.environment = {entry}" for entry in flags.environment]
    return "\n".join(lines) + "\n"


def _lxc_mount(source: str, target: str, options: str) -> str:
    escaped = [path.replace(" ", "\\040") for path in (source, target.lstrip("/"))]
    return f"lxc.mount.entry = {' '.join(escaped)} none {options} 0 0"


def _yaml(value: object) -> str:
    """Return a value as YAML, of which JSON is a part; compose itself expands what begins with a dollar sign."""
    return json.dumps(value).replace("$", "$$")


def _unit(text: str) -> str:
    """Return a text as systemd's units have it: a percent sign begins a specifier there."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """Return a word of a setting that is a list of words; C's escapes count in quotes (systemd.syntax(7), QUOTING)."""
    escaped = "".join(_ESCAPED.get(one, one) for one in _unit(text))
    return f'"{escaped}"' if escaped != text or not _PLAIN_WORD.fullmatch(text) else text


def _mounts(edits: Mapping[str, Any], multiarch: str) -> Iterator[Mount]:
    names = _names(edits.get("links") or ())
    for mount in edits.get("mounts") or ():
        path = mount["containerPath"]
        for name in (path, *names.get(path, ())):
            yield from (Mount(mount["hostPath"], place) for place in _places(name, multiarch))


def _names(links: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return for each file the paths of the links that lead to it, over other links too."""
    targets = {}
    for link in links:
        target, _, path = link.partition("::")
        targets[path] = target if target.startswith("/") else f"{path.rpartition('/')[0]}/{target}"
    found: dict[str, list[str]] = {}
    for path in targets:
        end, seen = path, {path}
        while end in targets and targets[end] not in seen:
            end = targets[end]
            seen.add(end)
        found.setdefault(end, []).append(path)
    return {end: tuple(paths) for end, paths in found.items()}


def _places(path: str, multiarch: str) -> tuple[str, ...]:
    """Return the places of a file: a library in both folders that loaders search, any other file at its host path."""
    for folder in (*MULTIARCH, LIB64):
        if path.startswith(f"{folder}/") and ".so" in path.rpartition("/")[2]:
            below = path[len(folder) :]
            return f"{multiarch}{below}", f"{LIB64}{below}"
    return (path,)


def _left_out(edits: Mapping[str, Any]) -> Iterator[str]:
    for hook in edits.get("hooks") or ():
        yield f"the hook {hook['path']} does not run: flags can't name hooks"
    for device in edits.get("netDevices") or ():
        yield f"the network device {device['hostInterfaceName']} is not moved: flags can't"
    if edits.get("intelRdt"):
        yield "Intel RDT is not set: flags can't"
