"""TOML tables as values: compare, merge and subtract them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Path = tuple[str, ...]
# The required values of a configuration: ((table, keys), …), in the order of new tables. () is the root table.
Tables = tuple[tuple[Path, Mapping[str, Any]], ...]


def says(found: Mapping[str, Any], tables: Tables) -> bool:
    """Say whether a configuration has all these keys with these values."""
    return all(
        has_table(found, path) and {**table_at(found, path), **keys} == table_at(found, path) for path, keys in tables
    )


def joined(first: Tables, second: Tables) -> Tables:
    """Return two sets of tables as one; the second's values win."""
    result = {path: dict(keys) for path, keys in first}
    for path, keys in second:
        result[path] = {**result.get(path, {}), **keys}
    return tuple(result.items())


def with_values(found: Mapping[str, Any], tables: Tables) -> dict[str, Any]:
    """Return a configuration with the values of all tables in it."""
    result = dict(found)
    for path, keys in tables:
        result = _put(result, path, keys)
    return result


def _put(found: Mapping[str, Any], path: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    if not path:
        return {**found, **keys}
    inner = found.get(path[0], {})
    return {**found, path[0]: _put(inner if isinstance(inner, Mapping) else {}, path[1:], keys)}


def difference(before: Mapping[str, Any], after: Mapping[str, Any], path: Path = ()) -> Tables:
    """Return the keys and tables that `after` adds to `before` or changes."""
    tables = {key: value for key, value in after.items() if isinstance(value, Mapping)}
    keys = {
        key: value for key, value in after.items() if key not in tables and not (key in before and before[key] == value)
    }
    own = ((path, keys),) if keys else ()
    inner = (
        difference(before[key] if is_table(before.get(key)) else {}, value, (*path, key))
        for key, value in tables.items()
    )
    return (*own, *(one for several in inner for one in several))


def has_table(found: Any, path: Path) -> bool:
    """Say whether there is a table at that path."""
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            return False
        found = found[name]
    return isinstance(found, Mapping)


def table_at(found: Any, path: Path) -> Mapping[str, Any]:
    """Return a table, an empty one where there is none."""
    for name in path:
        found = found.get(name, {}) if isinstance(found, Mapping) else {}
    return found if isinstance(found, Mapping) else {}


def is_table(value: Any) -> bool:
    """Say whether a value is a table."""
    return isinstance(value, Mapping)
