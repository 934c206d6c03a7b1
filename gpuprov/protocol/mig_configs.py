"""Named divisions of GPUs in the format of NVIDIA's mig-parted. Source: its README and api/spec/v1. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gpuprov.protocol.errors import UsageError
from gpuprov.protocol.models import model_of
from gpuprov.protocol.tables import MIG_CONFIGS, Tables

DISABLED, ENABLED = "disabled", "enabled"
_LISTS = "mig-configs"
_PROFILE = re.compile(r"[0-9]+g\.[0-9]+gb([+-][a-z.]+)?")
_FIELDS = {"device-filter", "devices", "mig-enabled", "mig-devices"}
_FILTER = re.compile(r"0[xX]([0-9a-fA-F]{4})10[dD][eE]")
_MOST_PROFILES = 32


def layout_of(name: str, device_ids: Sequence[str], tables: Tables) -> tuple[str, ...]:
    """Return a configuration's text for each GPU, by its PCI device id: `disabled`, `enabled` or profiles, "" if none.

    `devices: all` means all that have MIG, and a later entry wins: as with mig-parted. Raises UsageError if no
    configuration has the name.
    """
    known = tables.table(MIG_CONFIGS)[_LISTS]
    if name not in known:
        names = ", ".join(map(str, known)) or "none: gpuprov_mig_configs names no file"
        raise UsageError(f"there is no MIG configuration {name}", f"known: {names}", "set gpuprov_mig_config to one")
    found = [""] * len(device_ids)
    for entry in known[name]:
        filters, indexes, text = _read(entry)
        for index, device_id in enumerate(device_ids):
            model = model_of(device_id, tables)
            meant = (model is None or model.mig) if indexes is None else index in indexes
            if meant and (not filters or device_id.lower() in filters):
                found[index] = text
    return tuple(found)


def checked_mig_configs(data: Any, origin: str) -> Mapping[str, Any]:
    """Return a site's file if it is sound. Raises UsageError that names what is wrong in it."""
    entry: Any = None
    try:
        if data["version"] != "v1":
            raise ValueError("its version is not v1")
        for entries in data[_LISTS].values():
            for entry in entries:
                _read(entry)
        # Without what else YAML can hold, such as dates: it is sent as JSON.
        return {"version": "v1", _LISTS: json.loads(json.dumps(data[_LISTS]))}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        seen = f"{origin}: {error}" + (f" in {str(entry)[:200]}" if entry else "")
        raise UsageError("the file of MIG configurations is not valid", seen, "its form is mig-parted's, v1") from None


def _read(entry: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[int, ...] | None, str]:
    """Return the device ids, the indexes (None: all) and the text of an entry. Raises ValueError and others."""
    given = entry.get("device-filter") or []
    matches = [_FILTER.fullmatch(one) for one in ([given] if isinstance(given, str) else given)]
    devices, enabled, counts = entry["devices"], entry["mig-enabled"], entry.get("mig-devices")
    if unknown := sorted(map(str, set(entry) - _FIELDS)):
        raise ValueError(f"there is no field {unknown[0]}")
    if type(enabled) is not bool or (enabled and counts is None) or (not enabled and counts):
        raise ValueError("mig-enabled is neither true with mig-devices, nor false without any")
    if devices != "all" and not (isinstance(devices, list) and all(type(one) is int for one in devices)):
        raise ValueError("devices is neither all nor a list of whole numbers")
    profiles = [(str(profile), count) for profile, count in (counts or {}).items()]
    if None in matches or not all(_PROFILE.fullmatch(one) and type(n) is int and n > 0 for one, n in profiles):
        raise ValueError("a device-filter is no PCI id such as 0x233010DE, or a profile none such as 1g.10gb")
    if sum(count for _, count in profiles) > _MOST_PROFILES:
        raise ValueError(f"more than {_MOST_PROFILES} MIG devices on a GPU")
    text = ",".join(profile for profile, count in sorted(profiles) for _ in range(count)) or ENABLED
    filters = tuple(match[1].lower() for match in matches if match)
    return filters, None if devices == "all" else tuple(devices), text if enabled else DISABLED
