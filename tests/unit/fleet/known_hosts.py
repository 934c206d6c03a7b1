"""Keys out of the text of a known_hosts file."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from gpuprov.fleet.host_keys import KnownHosts, KnownKey


def matching_keys(text: str, name: str, path: str = "") -> tuple[KnownKey, ...]:
    """Return the keys that KnownHosts finds for `name`, with `path` as the file's name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "known_hosts"
        file.write_text(text, "utf-8")
        found = KnownHosts((str(file),), ()).keys(name)
        return tuple(replace(key, place=key.place.replace(str(file), path)) for key in found)
