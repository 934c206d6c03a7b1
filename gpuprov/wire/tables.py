"""Tables that ship as data files beside this module, and their replacements in this process. Never fetches.

A process carries out one request. A request may bring newer tables: the site's releases, the controller's advisories.
"""

from __future__ import annotations

import functools
import json
import pkgutil
from collections.abc import Mapping
from typing import Any

RELEASES, ADVISORIES = "driver_releases", "advisories"
_in_use: dict[str, Any] = {}


@functools.cache
def packaged(name: str) -> Any:
    """Return the content of a table's data file."""
    return json.loads(pkgutil.get_data(__package__, f"{name}.json") or b"")


def table(name: str) -> Any:
    """Return the table in use in this process."""
    return _in_use.get(name) or packaged(name)


def is_replaced(name: str) -> bool:
    """Say whether a table other than the packaged one is in use."""
    return name in _in_use


def use(tables: Mapping[str, Any]) -> None:
    """Use these tables, and the packaged ones for all others. They must have been validated."""
    _in_use.clear()
    _in_use.update(tables)
