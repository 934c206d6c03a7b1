"""Keys of config.json and of the OCI state that a low-level runtime reads in another way than Python does.

runc is written in Go: encoding/json takes a known key in any case of letters, and merges a key that is given twice.
crun takes the exact key alone. What one program judges, the other would not run: no GPU container gets by with that.
"""

from __future__ import annotations

from . import jsonio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

    Shape = dict[str, Optional["Shape"]]

_HOOK: Shape = dict.fromkeys(("path", "args", "env", "timeout"))
_MAPPING: Shape = dict.fromkeys(("containerID", "hostID", "size"))
_DEVICE: Shape = dict.fromkeys(
    ("path", "type", "major", "minor", "fileMode", "uid", "gid", "allow", "access")
)  # fmt: skip
# The objects that this runtime reads or changes. What lies in others stays as it is, in its order: every reader makes
# of it what it did before.
CONFIG: Shape = {
    "ociVersion": None, "hostname": None, "domainname": None, "annotations": None, "solaris": None, "windows": None,
    "vm": None, "zos": None,
    "process": {
        "terminal": None, "consoleSize": None, "args": None, "commandLine": None, "env": None, "cwd": None,
        "rlimits": None, "noNewPrivileges": None, "apparmorProfile": None, "oomScoreAdj": None, "scheduler": None,
        "selinuxLabel": None, "ioPriority": None, "execCPUAffinity": None,
        "user": dict.fromkeys(("uid", "gid", "umask", "additionalGids", "username")),
        "capabilities": dict.fromkeys(("bounding", "effective", "inheritable", "permitted", "ambient")),
    },
    "root": dict.fromkeys(("path", "readonly")),
    "mounts": dict.fromkeys(("destination", "type", "source", "options", "uidMappings", "gidMappings")),
    "hooks": dict.fromkeys(
        ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"), _HOOK
    ),
    "linux": {
        **dict.fromkeys((
            "sysctl", "cgroupsPath", "netDevices", "seccomp", "rootfsPropagation", "maskedPaths", "readonlyPaths",
            "mountLabel", "intelRdt", "personality", "timeOffsets", "memoryPolicy",
        )),
        "uidMappings": _MAPPING, "gidMappings": _MAPPING, "namespaces": dict.fromkeys(("type", "path")),
        "devices": _DEVICE,
        "resources": {
            **dict.fromkeys((
                "memory", "cpu", "pids", "blockIO", "hugepageLimits", "network", "rdma", "unified",
            )),
            "devices": _DEVICE,
        },
    },
}  # fmt: skip
STATE: Shape = dict.fromkeys(("ociVersion", "id", "status", "pid", "bundle", "bundlePath", "annotations", "root"))


def odd_key(document: Any, shape: Shape) -> str:
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


def duplicate(keys: list[str]) -> str:
    """Return what is odd about keys that an object has twice, nothing for none."""
    return f"the key {keys[0]!r} twice in one object" if keys else ""


def as_runc_reads(text: str) -> Any:
    """Return config.json with known keys in their own letters and what is given twice merged, as runc has it."""
    known = {_folded(name): name for name in _names(CONFIG)}

    def merged(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            _merge(found, known.get(_folded(key), key), value)
        return found

    return jsonio.loads(text, merged)


def _merge(found: dict[str, Any], key: str, value: Any) -> None:
    before = found.get(key)
    if isinstance(before, dict) and isinstance(value, dict):
        for name, inner in value.items():
            _merge(before, name, inner)
    elif value is not None or key not in found:
        found[key] = value


def _names(shape: Shape) -> list[str]:
    return [name for key, inner in shape.items() for name in (key, *(_names(inner) if inner else ()))]


def _folded(key: str) -> str:
    """Return a key as encoding/json compares it: of what is not ASCII, two letters alone stand for an ASCII one."""
    return key.lower().replace("\u017f", "s")  # lower() makes k of the Kelvin sign
