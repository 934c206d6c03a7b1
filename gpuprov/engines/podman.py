"""podman's configuration: the runtime in containers.conf, and the OCI hook that podman and CRI-O can run instead. Pure.

podman needs no configuration for CDI (`podman run --device nvidia.com/gpu=all`): it reads /etc/cdi itself.
"""

from __future__ import annotations

import json

from gpuprov.engines.runtime_entry import RuntimeEntry
from gpuprov.engines.toml_tables import Tables

MAIN = "/etc/containers/containers.conf"
DROP_IN = "/etc/containers/containers.conf.d/99-nvidia.conf"
HOOK_FILE = "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json"
_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


def runtime_tables(entry: RuntimeEntry) -> Tables:
    """Return the tables to write into containers.conf:

    `engine.runtimes` lists possible paths of a runtime's program.
    """
    default: Tables = ((("engine",), {"runtime": entry.name}),) if entry.set_default else ()
    return (*default, (("engine", "runtimes"), {entry.name: [entry.path]}))


def hook_json(program: str) -> bytes:
    """Return the OCI hook for podman's and CRI-O's hooks.d (oci-hooks(5)), as nvidia-ctk writes it."""
    folder, _, name = program.rpartition("/")
    search = _PATH if folder in _PATH else (*_PATH, folder)
    hook = {
        "version": "1.0.0",
        "hook": {"path": program, "args": [name, "prestart"], "env": [f"PATH={':'.join(search)}"]},
        "when": {"always": True, "commands": [".*"]},
        "stages": ["prestart"],
    }
    return (json.dumps(hook, indent=2) + "\n").encode()


def is_hook_for(content: bytes, program: str) -> bool:
    """Say whether a hooks.d file runs that program, so that it may be removed."""
    try:
        found = json.loads(content)
        return bool(found["hook"]["path"] == program)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
