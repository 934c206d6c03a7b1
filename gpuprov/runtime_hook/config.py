"""Read config.json as a low-level runtime reads it, and what it says of the root, the users and the mounts.

runc is written in Go: encoding/json takes a known key in any case of letters, and merges a key that is given twice.
crun takes the exact key alone. What one program judges, the other would not run: a configuration with that is refused.
"""

from __future__ import annotations

import posix
from typing import Any

from . import jsonio
from .errors import Refused

STAGES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
_HOOK = dict.fromkeys(("path", "args", "env", "timeout"))
_MAPPING = dict.fromkeys(("containerID", "hostID", "size"))
_DEVICE = dict.fromkeys(("path", "type", "major", "minor", "fileMode", "uid", "gid", "allow", "access"))
# The objects that this runtime reads or changes. What lies in others stays as it is, in its order: every reader makes
# of it what it did before.
CONFIG: dict[str, Any] = {
    **dict.fromkeys(("ociVersion", "hostname", "domainname", "annotations", "solaris", "windows", "vm", "zos")),
    "process": {
        **dict.fromkeys((
            "terminal", "consoleSize", "args", "commandLine", "env", "cwd", "rlimits", "noNewPrivileges",
            "apparmorProfile", "oomScoreAdj", "scheduler", "selinuxLabel", "ioPriority", "execCPUAffinity",
        )),
        "user": dict.fromkeys(("uid", "gid", "umask", "additionalGids", "username")),
        "capabilities": dict.fromkeys(("bounding", "effective", "inheritable", "permitted", "ambient")),
    },
    "root": dict.fromkeys(("path", "readonly")),
    "mounts": dict.fromkeys(("destination", "type", "source", "options", "uidMappings", "gidMappings")),
    "hooks": dict.fromkeys(STAGES, _HOOK),
    "linux": {
        **dict.fromkeys((
            "sysctl", "cgroupsPath", "netDevices", "seccomp", "rootfsPropagation", "maskedPaths", "readonlyPaths",
            "mountLabel", "intelRdt", "personality", "timeOffsets", "memoryPolicy",
        )),
        "uidMappings": _MAPPING, "gidMappings": _MAPPING, "namespaces": dict.fromkeys(("type", "path")),
        "devices": _DEVICE,
        "resources": {
            **dict.fromkeys(("memory", "cpu", "pids", "blockIO", "hugepageLimits", "network", "rdma", "unified")),
            "devices": _DEVICE,
        },
    },
}  # fmt: skip
STATE = dict.fromkeys(("ociVersion", "id", "status", "pid", "bundle", "bundlePath", "annotations", "root"))


def parse_config(path: str, text: str) -> dict[str, Any]:
    """Return a configuration, empty for what is no object. Raises Refused.

    What is not JSON is refused: runc takes some things for it that are none (something after the end), and a GPU
    container must not slip by.
    """
    try:
        config = parse_object(text, CONFIG)
    except jsonio.AmbiguousError as odd:
        what = f"{path} has {odd}: runc, crun and this program would read different containers"
        raise Refused(f"{what}: remove that key") from None
    except ValueError as error:
        raise Refused(f"{path} is not valid JSON: {error}") from None
    return config if isinstance(config, dict) else {}


def parse_object(text: str, shape: dict[str, Any]) -> Any:
    """Return what a JSON text holds. Raises ValueError, AmbiguousError for known keys that runc reads otherwise."""
    found = jsonio.loads(text, jsonio.unique)
    odd = odd_key(found, shape)
    if odd:
        raise jsonio.AmbiguousError(odd)
    return found


def odd_key(document: Any, shape: dict[str, Any]) -> str:
    """Return what is odd about the first known key that is not in its own letters, nothing if there is none."""
    if isinstance(document, list):
        return next(filter(None, (odd_key(item, shape) for item in document)), "")
    if not isinstance(document, dict):
        return ""
    for key, value in document.items():
        inner = shape.get(key)
        if inner:
            found = odd_key(value, inner)
            if found:
                return found
        elif key not in shape:
            known = next((name for name in shape if _folded(name) == _folded(key)), "")
            if known:
                return f"the key {key!r}, which runc reads as {known!r}"
    return ""


def _folded(key: str) -> str:
    """Return a key as encoding/json compares it: of what is not ASCII, two letters alone stand for an ASCII one."""
    return key.lower().replace("\u017f", "s")  # lower() makes k of the Kelvin sign


def at(document: Any, kind: type, *keys: str) -> Any:
    """Return what is in a document at these keys, one in the other; an empty one of its kind if that is missing."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document if isinstance(document, kind) else kind()


def root_of(config: dict[str, Any], bundle: str) -> str:
    """Return the folder of the container's root file system."""
    path = str(at(config, dict, "root").get("path", ""))
    if path.startswith("/"):
        return path
    # runc takes a relative path from the bundle's folder without links.
    try:
        handle = posix.open(bundle, posix.O_PATH | posix.O_DIRECTORY | posix.O_CLOEXEC)
    except (OSError, ValueError):
        return f"{bundle}/{path}"
    try:
        return f"{posix.readlink(f'/proc/self/fd/{handle}')}/{path}"
    finally:
        posix.close(handle)


def owner_of(config: dict[str, Any]) -> tuple[int, int]:
    """Return the host's numbers for the container's root user and group: what we make there shall be theirs."""
    return _mapped(at(config, list, "linux", "uidMappings")), _mapped(at(config, list, "linux", "gidMappings"))


def _mapped(mappings: list[Any]) -> int:
    for mapping in mappings:
        if isinstance(mapping, dict) and mapping.get("containerID", 0) == 0 and isinstance(mapping.get("hostID"), int):
            return int(mapping["hostID"])
    return 0


def config_id(bundle: str) -> str:
    """Return by what a container is named in the log: engines call the bundle's folder by its id."""
    return bundle.rstrip("/").rpartition("/")[2]


def has_user_namespace(config: dict[str, Any]) -> bool:
    """Say whether the container has a user namespace of its own."""
    return any(one.get("type") == "user" for one in list_of(at(config, dict, "linux"), "namespaces", dict))


def mounts_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the mounts, without what is none."""
    return [one for one in at(config, list, "mounts") if isinstance(one, dict)]


def has_own_proc(config: dict[str, Any]) -> bool:
    """Say whether /proc is a procfs that the low-level runtime mounts for this container."""
    found = [one for one in mounts_of(config) if str(one.get("destination", "")).rstrip("/") == "/proc"]
    if not found or found[-1].get("type") != "proc":
        return False
    # proc(5), subset=pid: no driver is seen there.
    return not any(str(one).startswith("subset=") for one in at(found[-1], list, "options"))


def object_of(parent: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object of the configuration, made if it is missing or null. Raises Refused for anything else."""
    if parent.get(name) is None:
        parent[name] = {}
    found = parent[name]
    if not isinstance(found, dict):
        raise Refused(f"config.json: {name} is no object")
    return found


def list_of(parent: dict[str, Any], name: str, kind: type) -> list[Any]:
    """Return a copy of a list of the configuration, nothing for none. Raises Refused for anything but such a list."""
    found = parent.get(name)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise Refused(f"config.json: {name} is no list of what belongs there")
    return list(found)
