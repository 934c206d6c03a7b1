"""Paths as text: cleaned as Go does it. Never looked up."""

from __future__ import annotations


def normal_path(path: str) -> str:
    """Return a path without `.`, `..` and doubled slashes, as Go's filepath.Clean does."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part not in ("", ".") and not (part == ".." and path.startswith("/")):
            parts.append(part)
    return ("/" if path.startswith("/") else "") + "/".join(parts) or "."
