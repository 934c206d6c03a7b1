"""CRI-O's configuration: the runtime's table, and what it copies from the default one. Pure.

CRI-O reads crio.conf, then every file of crio.conf.d in the order of their names, key by key (crio.conf.d(5)).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuprov.engines.runtime_entry import RuntimeEntry
from gpuprov.engines.toml_tables import Tables

MAIN = "/etc/crio/crio.conf"
DROP_IN = "/etc/crio/crio.conf.d/99-nvidia.conf"
# Where NVIDIA's tool writes; CRI-O reads every file of the folder, so both would count.
OTHERS_DROP_IN = "/etc/crio/crio.conf.d/99-nvidia.toml"
_RUNTIME = ("crio", "runtime")
_RUNC_LIKE = ("runc", "crun")


def runtime_like_default(source: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the runtime entry to copy: the default one, else runc, else crun, else an empty one."""
    runtime = source.get("crio", {}).get("runtime", {})
    runtimes = runtime.get("runtimes", {})
    default = str(runtime.get("default_runtime") or "")
    names = [one for one in (default, *_RUNC_LIKE) if one and one != name and not one.startswith("nvidia")]
    return next((dict(runtimes[one]) for one in names if isinstance(runtimes.get(one), Mapping)), {})


def runtime_tables(found: Mapping[str, Any], entry: RuntimeEntry, source: Mapping[str, Any]) -> Tables:
    """Return the tables to write into a file with content `found`. CRI-O reads CDI by default: nothing to enable."""
    there = found.get("crio", {}).get("runtime", {}).get("runtimes", {}).get(entry.name)
    copied = {} if isinstance(there, Mapping) else runtime_like_default(source, entry.name)
    table = {**copied, "runtime_path": entry.path, "runtime_type": "oci"}
    default: Tables = ((_RUNTIME, {"default_runtime": entry.name}),) if entry.set_default else ()
    return (*default, ((*_RUNTIME, "runtimes", entry.name), table))
