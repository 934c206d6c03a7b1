"""containerd's configuration, versions 1 to 3: the table of a runtime, the options that it copies, the imports. Pure.

containerd before 2.0 takes a plugin's table from the last file that has one, whole (mergeConfig: "Replace entire
sections instead of merging"): a drop-in with one runtime in it would silently throw away the main file's sandbox image,
CNI folders and cgroup driver. And its built-in runtime runc, the default one, is gone as soon as a file names any other
runtime. containerd 2 merges both key by key. (Seen with 1.6.20, 1.7.24 and 2.1.9.)
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuprov.core.changes import parent_of
from gpuprov.engines.runtime_entry import RuntimeEntry
from gpuprov.engines.toml_tables import Path, Tables, table_at
from gpuprov.protocol.errors import GpuprovError

MAIN = "/etc/containerd/config.toml"
DROP_IN = "/etc/containerd/conf.d/99-nvidia.toml"
# The CRI plugin's table. 1: docs/man/containerd-config.toml.5.md; 2 and 3: docs/cri/config.md in containerd.
_PLUGIN = {1: "cri", 2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
_RUNTIME_TYPE = "io.containerd.runc.v2"
_RUNC_LIKE = ("runc", "crun")


@dataclass(frozen=True)
class Distribution:
    """A Kubernetes distribution with a containerd of its own: its files, and what makes it read them.

    It writes `rendered` at every start, from `templates` (by version) if any exist.
    """

    name: str
    rendered: str
    templates: Mapping[int, str]
    drop_in: Mapping[int, str]
    reload_command: str


def _rancher(name: str) -> Distribution:
    folder = f"/var/lib/rancher/{name}/agent/etc/containerd"
    unit = {"k3s": "k3s", "rke2": "rke2-server"}[name]
    return Distribution(
        name,
        f"{folder}/config.toml",
        {2: f"{folder}/config.toml.tmpl", 3: f"{folder}/config-v3.toml.tmpl"},
        {2: f"{folder}/config.toml.d/99-nvidia.toml", 3: f"{folder}/config-v3.toml.d/99-nvidia.toml"},
        f"systemctl restart {unit} (on an agent: {name}-agent)",
    )


# https://docs.k3s.io/advanced#configuring-containerd, https://docs.rke2.io/advanced, microk8s' args folder.
DISTRIBUTIONS = {
    "k3s": _rancher("k3s"),
    "rke2": _rancher("rke2"),
    "microk8s": Distribution(
        "microk8s", "/var/snap/microk8s/current/args/containerd.toml",
        {2: "/var/snap/microk8s/current/args/containerd-template.toml"}, {},
        "snap restart microk8s.daemon-containerd",
    ),
}  # fmt: skip


def version_of(found: Mapping[str, Any], default: int) -> int:
    """Return a file's configuration version: 1 if it has keys but no version, the default if it is empty.

    Raises GpuprovError for a version that is no number: containerd itself does not start with it.
    """
    if not found:
        return default
    version = found.get("version", 1)
    if isinstance(version, bool) or not isinstance(version, int):
        hint = "write it without quotes: version = 2"
        raise GpuprovError("containerd's configuration version must be a whole number", f"version = {version!r}", hint)
    # Versions after 3 are treated as 3: no later table names are known.
    return min(version, 3) if version >= 1 else 1


def version_from_program(said: str) -> int:
    """Return the configuration version to start with, from the output of `containerd --version`."""
    found = re.search(r"\bv?(\d+)\.\d+\.\d+", said)
    return 3 if found and int(found[1]) >= 2 else 2


def plugin_path(version: int) -> Path:
    """Return the table of the CRI plugin."""
    return ("plugins", _PLUGIN[version])


def plugin_table(found: Mapping[str, Any], version: int) -> Mapping[str, Any]:
    """Return the content of the CRI plugin's table."""
    return table_at(found, plugin_path(version))


def runtime_like_default(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the runtime entry to copy: the default one, else runc, else crun, else a standard one.

    `source` is the CRI plugin's table. The cgroup driver (SystemdCgroup) comes with it.
    """
    containerd = source.get("containerd", {})
    runtimes = containerd.get("runtimes", {})
    default = str(containerd.get("default_runtime_name") or "")
    names = [name for name in (default, *_RUNC_LIKE) if name and not name.startswith("nvidia")]
    for name in names:
        if isinstance(runtimes.get(name), Mapping):
            return dict(runtimes[name])
    return {"runtime_type": _RUNTIME_TYPE, "privileged_without_host_devices": False}


def runtime_tables(
    found: Mapping[str, Any],
    version: int,
    entry: RuntimeEntry,
    source: Mapping[str, Any],
    *,
    forgets_runc: bool = False,
) -> Tables:
    """Return the tables to write into a file with content `found`: the runtime, based on the default entry in `source`.

    An existing runtime of that name keeps its keys; only its program is set. `forgets_runc`: the default runtime would
    be lost if only gpuprov's were named.
    """
    plugin = plugin_path(version)
    runtimes = (*plugin, "containerd", "runtimes")
    there = plugin_table(found, version).get("containerd", {}).get("runtimes", {}).get(entry.name)
    copied: dict[str, Any] = {} if isinstance(there, Mapping) else runtime_like_default(source)
    programs = {"BinaryName": entry.path, **({"Runtime": entry.path} if version == 1 else {})}
    options = {**copied.pop("options", {}), **programs}
    tables = [((*runtimes, entry.name), copied), ((*runtimes, entry.name, "options"), options)]
    if forgets_runc:
        runc = source.get("containerd", {}).get("runtimes", {}).get("runc", {"runtime_type": _RUNTIME_TYPE})
        tables.insert(0, ((*runtimes, "runc"), dict(runc)))
    if entry.set_default:
        tables.append(((*plugin, "containerd"), {"default_runtime_name": entry.name}))
    if entry.cdi:
        tables.append((plugin, {"enable_cdi": True}))
    return tuple((path, keys) for path, keys in _flat(tables) if keys)


def relies_on_builtin_runc(table: Mapping[str, Any]) -> bool:
    """Say whether the default runtime is the built-in runc, which no file names. `table` is the CRI plugin's."""
    containerd = table.get("containerd", {})
    return containerd.get("default_runtime_name", "runc") == "runc" and "runc" not in containerd.get("runtimes", {})


def _flat(tables: list[tuple[Path, dict[str, Any]]]) -> list[tuple[Path, dict[str, Any]]]:
    """Return nested tables as separate tables."""
    result: list[tuple[Path, dict[str, Any]]] = []
    for path, keys in tables:
        inner = [((*path, key), dict(value)) for key, value in keys.items() if isinstance(value, Mapping)]
        result.append((path, {key: value for key, value in keys.items() if not isinstance(value, Mapping)}))
        result += _flat(inner)
    return result


def whole_table(source: Mapping[str, Any], version: int) -> Tables:
    """Return the CRI plugin's whole table, for a drop-in that containerd before 2.0 takes in its place."""
    return tuple((path, keys) for path, keys in _flat([(plugin_path(version), dict(source))]) if keys)


def with_version(version: int, wanted: Tables) -> Tables:
    """Return the tables with the version at the root, which a new file of version 2 or 3 must have."""
    return (((), {"version": version}), *wanted) if version > 1 else wanted


def import_pattern(drop_in: str) -> str:
    """Return the pattern by which the main file imports a drop-in: every .toml file of its folder."""
    return f"{parent_of(drop_in)}/*.toml"


def imports(found: Mapping[str, Any]) -> list[str]:
    """Return the main file's imports."""
    listed = found.get("imports", [])
    return [str(one) for one in listed] if isinstance(listed, list) else []


def is_imported(found: Mapping[str, Any], main: str, drop_in: str) -> bool:
    """Say whether the main file already imports that drop-in. Relative patterns start at the main file's folder."""
    patterns = (one if one.startswith("/") else f"{parent_of(main)}/{one}" for one in imports(found))
    return any(fnmatch.fnmatchcase(drop_in, pattern) for pattern in patterns)
