"""CDI devices put into an OCI configuration, as an engine does it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from gpuprov.cdi.registry import Registry
from gpuprov.cdi.specification import render_json
from gpuprov.runtime_hook.edits import apply_edits, merge_edits
from gpuprov.runtime_hook.errors import Refused
from gpuprov.wire.errors import GpuprovError


def inject(config: dict[str, Any], names: Sequence[str], registry: Registry) -> dict[str, Any]:
    """Return the configuration with the devices (qualified names), each specification's common edits once before them.

    Raises GpuprovError, listing them, if there is a device that no specification has: then nothing is done.
    """
    missing = [name for name in names if name not in registry.devices]
    if missing:
        there = ", ".join(sorted(registry.devices)) or "none"
        raise GpuprovError(f"there is no CDI device {', '.join(missing)}", f"there are {there}", "gpuprov cdi list")
    parts: list[dict[str, Any]] = []
    begun: set[str] = set()
    for name in names:
        found = registry.devices[name]
        document = json.loads(render_json(found.specification))
        if found.path not in begun:
            begun.add(found.path)
            parts.append(document.get("containerEdits") or {})
        parts += [one["containerEdits"] for one in document["devices"] if one["name"] == found.device.name]
    edited = copy.deepcopy(config)
    try:
        apply_edits(edited, merge_edits(parts), idmap=True)
    except Refused as refused:
        raise GpuprovError(
            "the devices can't be put into this configuration", str(refused),
            "give a config.json as engines write it, such as that of `runc spec`",
        ) from None  # fmt: skip
    return edited
