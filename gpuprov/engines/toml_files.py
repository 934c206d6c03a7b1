"""Read an engine's TOML files, with everything that they import, and edit them as values. Writes nothing."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from gpuprov.core.changes import parent_of
from gpuprov.engines import toml_text
from gpuprov.engines.runtime_entry import FileEdit, Reader
from gpuprov.engines.toml_tables import Tables
from gpuprov.protocol.errors import GpuprovError


def read_text(system: Reader, path: str) -> str | None:
    """Return a file's text, None if there is none. Raises GpuprovError if it is not UTF-8, which TOML must be."""
    content = system.read_bytes(path)
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise GpuprovError(
            f"{path} is not UTF-8; it was left alone",
            f"line {line}, column {column}",
            "correct it, then run this again",
        ) from None


def read(system: Reader, path: str) -> dict[str, Any]:
    """Return the content of a file; empty if there is none."""
    return toml_text.read_toml(read_text(system, path) or "", path)


def matching(system: Reader, pattern: str) -> tuple[str, ...]:
    """Return the files that a pattern names, in the order of their names."""
    folder = parent_of(pattern)
    return tuple(
        f"{folder}/{name}"
        for name in system.list_directory(folder)
        if fnmatch.fnmatchcase(name, pattern.rpartition("/")[2])
    )


def merged(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several configurations as one: tables key by key, later values over earlier ones."""
    result: dict[str, Any] = {}
    for one in found:
        for key, value in one.items():
            old = result.get(key)
            both = isinstance(old, Mapping) and isinstance(value, Mapping)
            result[key] = merged((old, value)) if both and isinstance(old, Mapping) else value
    return result


def edited(system: Reader, path: str, tables: Tables, *, first: str = "") -> FileEdit:
    """Return a file with these tables in it."""
    text = read_text(system, path)
    after = toml_text.with_tables(text, tables, path, first=first)
    return FileEdit(path, None if text is None else text.encode(), after.encode())


def emptied(system: Reader, path: str, *, keep: Sequence[str] = ()) -> FileEdit | None:
    """Return a file without gpuprov's additions, no file if nothing else was in it, None if it had none."""
    text = read_text(system, path)
    if text is None:
        return None
    after = None if toml_text.is_only_ours(text) else toml_text.without_ours(text, keep=keep)
    return None if after == text else FileEdit(path, text.encode(), None if after is None else after.encode())
