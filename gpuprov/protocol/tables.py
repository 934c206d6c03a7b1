"""Tables that ship as data files beside this module, and their replacements in this process. Never fetches.

A process carries out one request. A request may bring newer tables: the site's releases and servers, the controller's
advisories.
"""

from __future__ import annotations

import functools
import json
import pkgutil
from collections.abc import Mapping
from typing import Any

RELEASES, ADVISORIES, SERVERS = "driver_releases", "advisories", "servers"
_in_use: dict[str, Any] = {}


@functools.cache
def packaged(name: str) -> Any:
    """Return the content of a table's data file."""
    return json.loads(pkgutil.get_data(__package__, f"{name}.json") or b"")


def table(name: str) -> Any:
    """Return the table in use in this process."""
    return _in_use.get(name) or packaged(name)


def server(name: str) -> str:
    """Return the URL of a distribution's server, without a slash at its end; a site's table may name some only."""
    replaced = table(SERVERS)["servers"].get(name)
    return str(replaced or packaged(SERVERS)["servers"][name]).rstrip("/")


def is_replaced(name: str) -> bool:
    """Say whether a table other than the packaged one is in use."""
    return name in _in_use


def use(tables: Mapping[str, Any]) -> None:
    """Use these tables, and the packaged ones for all others. They must have been validated."""
    _in_use.clear()
    _in_use.update(tables)
