"""Ansible's own table of plugins that have moved, kept as JSON for the next run; knows nothing of inventories.

Its thousands of lines of YAML take a quarter of the time in which an inventory is read. The function that parses them
says of itself that tools may put another in its place, to keep what it returns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Parse = Callable[[Any, Any], Any]
# The table is ten times as long; what collections bring is short, and parsed as ever.
_WORTH_KEEPING = 1 << 15


def keep_routing(folder: Path) -> None:
    """Let Ansible find in `folder` what an earlier run has parsed; an Ansible without that function is left alone."""
    from ansible.utils.collection_loader import _collection_finder as finder

    parse: Parse | None = getattr(finder, "_meta_yml_to_dict", None)
    if parse is not None:
        finder._meta_yml_to_dict = keeping(parse, folder)


def keeping(parse: Parse, folder: Path) -> Parse:
    """Return a function that does what `parse` does, once for each text."""

    def kept(text: bytes | str, place: Any) -> Any:
        content = text.encode() if isinstance(text, str) else text
        if len(content) < _WORTH_KEEPING:
            return parse(text, place)
        path = folder / f"ansible-routing-{hashlib.sha256(content).hexdigest()}.json"
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError):
            found = parse(text, place)
            _write(path, json.dumps(found).encode())
            return found

    return kept


def _write(path: Path, content: bytes) -> None:
    """Store it for the next run; a cache that cannot be written costs time, nothing else."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        pass
