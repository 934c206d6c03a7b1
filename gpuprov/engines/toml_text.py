"""TOML files of others edited as text: what is added bears a mark, and `without_ours` takes it out to the byte. Pure.

tomlkit reads, renders and changes values, so comments, order and unknown keys stay. Additions are whole lines or one
block at the end, so they can be removed without changing a blank beside them. Every edit is parsed again before it is
returned: it must have the requested values, everything else unchanged, and it must be removable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tomlkit
from tomlkit.container import Container, OutOfOrderTableProxy
from tomlkit.exceptions import ParseError, TOMLKitError

from gpuprov.engines.toml_tables import (
    Path,
    Tables,
    difference,
    has_table,
    is_table,
    joined,
    says,
    table_at,
    with_values,
)
from gpuprov.protocol.errors import GpuprovError

_BEGIN = "# gpuprov begin: `gpuprov runtime configure --unset` takes this out"
_BEGIN_FILE = "# gpuprov begin, new file: `gpuprov runtime configure --unset` takes this out"
_END = "# gpuprov end"
_ADDED = "  # gpuprov: added"
_WAS = "  # gpuprov: was "
_WAS_LINES = "  # gpuprov: was lines "
_BLOCK = re.compile(rf"(?:\A|\n){re.escape(_BEGIN)}\r?\n(?:.*\n)*?{re.escape(_END)}(?:\n|\Z)")
_FILE_BLOCK = re.compile(rf"\A{re.escape(_BEGIN_FILE)}\r?\n(?:.*\n)*?{re.escape(_END)}(?:\n|\Z)")
_ADDED_LINE = re.compile(rf"(?:\n[^\n]*{re.escape(_ADDED)})+\Z|^[^\n]*{re.escape(_ADDED)}\r?\n", re.MULTILINE)
# The values that we write: a basic string, a truth value, a list of basic strings.
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_OUR_VALUE = rf"(?:{_STRING}|true|false|\[(?:{_STRING}(?:, )?)*\])"
_CHANGED_LINE = re.compile(
    rf"^(?P<head>[^\n#]*?=[ \t]*)(?P<value>{_OUR_VALUE})(?P<tail>[^\n]*?){re.escape(_WAS)}"
    r"(?P<old>lines \"[^\n]*\"|[^\n]*?)(?P<end>[ \t]*\r?)$",
    re.MULTILINE,
)
_HEADER = re.compile(r"^[ \t]*(\[[^\[\n][^\n]*?\])[ \t]*(?:#[^\n]*)?(?P<end>\r?\n|\r?\Z)", re.MULTILINE)
_VERSION = re.compile(r"^[ \t]*[\"']?version[\"']?[ \t]*=[^\n]*(?P<end>\n|\Z)", re.MULTILINE)
# A Go template (k3s, RKE2) has invalid TOML in whole lines and in values. They are read as comments and strings.
_TEMPLATE_LINE = re.compile(r"^([ \t]*\{\{[^\n]*)$", re.MULTILINE)
_TEMPLATE_VALUE = re.compile(r"(=[ \t]*)(\{\{[^'\n]*\}\})(?=[ \t\r]*$)", re.MULTILINE)
_MASK = "#template#"
_MASKED_VALUE = re.compile(rf"'''{_MASK}([^'\n]*)'''")


def read_toml(text: str, name: str) -> dict[str, Any]:
    """Return the values in a TOML text; lines of a Go template are skipped.

    Raises GpuprovError with line and column if the engine could not read it either.
    """
    return _document(text, name).unwrap()


def is_only_ours(text: str) -> bool:
    """Say whether gpuprov made a file and nothing else was added to it."""
    return bool(_FILE_BLOCK.search(text)) and not without_ours(text).strip()


def without_ours(text: str, *, keep: Sequence[str] = ()) -> str:
    """Return the text without additions of `with_tables`, except lines with the keys in `keep`."""

    def stays(found: re.Match[str]) -> bool:
        return found[0].partition("=")[0].strip() in keep

    text = _FILE_BLOCK.sub("", _BLOCK.sub("", text))
    text = _ADDED_LINE.sub(lambda found: found[0] if stays(found) else "", text)
    return _CHANGED_LINE.sub(lambda found: found[0] if stays(found) else _restored(found), text)


def ours_in(text: str, name: str) -> Tables:
    """Return the additions of `with_tables` in a text."""
    return difference(read_toml(without_ours(text), name), read_toml(text, name))


def with_tables(text: str | None, tables: Tables, name: str, *, first: str = "") -> str:
    """Return the text with these keys in these tables; unchanged if it has them already. None: there is no file.

    `first` is the first line of a new file. Raises GpuprovError if the file can't be read, or can't be edited safely.
    """
    if text is not None and says(read_toml(text, name), tables):
        return text
    base = without_ours(text or "")
    before = read_toml(base, name)
    # Additions of earlier calls, perhaps for another runtime, stay.
    tables = joined(ours_in(text or "", name), tables)
    changed = _with_changed_values(base, before, tables, name)
    new_tables: list[tuple[Path, dict[str, Any]]] = []
    for path, keys in tables:
        missing = {key: value for key, value in keys.items() if key not in table_at(before, path)}
        place = _place_in_table(changed, path, before)
        if place is None and (missing or not keys) and not (not missing and has_table(before, path)):
            new_tables.append((path, missing))
        elif place is not None:
            changed = _with_lines(changed, place, missing)
    if new_tables:
        changed = _with_block(changed, new_tables, new_file=text is None or is_only_ours(text), first=first)
    _require_right(base, changed, with_values(before, tables), name)
    return changed


def _document(text: str, name: str) -> tomlkit.TOMLDocument:
    try:
        return tomlkit.parse(_masked(text))
    except ParseError as error:
        line = (text.split("\n")[error.line - 1 : error.line] or [""])[0].strip()
        seen = f"line {error.line}, column {error.col + 1}: {str(error).rpartition(' at line ')[0]}: {line}"
    except (TOMLKitError, ValueError, RecursionError) as error:
        seen = str(error)
    raise GpuprovError(f"{name} is not valid TOML; it was left alone", seen, "correct it, then run this again")


def _masked(text: str) -> str:
    return _TEMPLATE_VALUE.sub(rf"\1'''{_MASK}\2'''", _TEMPLATE_LINE.sub(rf"{_MASK}\1", text))


def _unmasked(text: str) -> str:
    return _MASKED_VALUE.sub(r"\1", text).replace(_MASK, "")


# -- existing values -------------------------------------------------------------------------------------------------


def _with_changed_values(text: str, before: Mapping[str, Any], tables: Tables, name: str) -> str:
    """Return the text with the wanted values of existing keys changed, and the old value noted beside each."""
    changes = [
        (path, key, value)
        for path, keys in tables
        for key, value in keys.items()
        if key in table_at(before, path) and table_at(before, path)[key] != value
    ]
    if not changes:
        return text
    if any(is_table(table_at(before, path)[key]) for path, key, _ in changes):
        raise _refused(name)
    document = _document(text, name)
    for path, key, value in changes:
        table: Any = document
        for part in path:
            table = table[part]
        _change(table, key, value)
    return _unmasked(tomlkit.dumps(document))


def _change(table: Any, key: str, value: Any) -> None:
    old = _item(table, key)
    source = old.as_string()
    was = f"{_WAS_LINES}{json.dumps(source)}" if "\n" in source else f"{_WAS}{source}"
    new = tomlkit.item(value)
    new.trivia.indent, new.trivia.trail = old.trivia.indent, old.trivia.trail
    new.trivia.comment_ws, new.trivia.comment = old.trivia.comment_ws, f"{old.trivia.comment}{was}"
    table[key] = new


def _item(table: Any, key: str) -> Any:
    """Return a value as tomlkit holds it, with its blanks and comment; `table[key]` gives mere truth values."""
    if isinstance(table, OutOfOrderTableProxy):
        return dict.__getitem__(table, key)
    return (table if isinstance(table, Container) else table.value).item(key)


def _restored(found: re.Match[str]) -> str:
    old = found["old"]
    if old.startswith('lines "'):
        old = json.loads(old[len("lines ") :])
    return f"{found['head']}{old}{found['tail']}{found['end']}"


# -- new lines and new tables ----------------------------------------------------------------------------------------


def _place_in_table(text: str, path: Path, before: Mapping[str, Any]) -> int | None:
    """Return where a line may be inserted in a table with its own header; None if it has none."""
    if not path:
        # Root keys stand before the first table: below the version, which every file with keys but version 1 has.
        if not before:
            return None
        version = _VERSION.search(text)
        return version.end() if version else 0
    for header in _HEADER.finditer(text):
        if path[-1] in header[1] and _path_of(header[1]) == path:
            return header.end()
    return None


def _path_of(header: str) -> Path:
    try:
        found: Any = tomlkit.parse(header).unwrap()
    except (TOMLKitError, ValueError):
        return ()
    path: list[str] = []
    while isinstance(found, dict) and found:
        name = next(iter(found))
        path.append(name)
        found = found[name]
    return tuple(path)


def _with_lines(text: str, place: int, keys: Mapping[str, Any]) -> str:
    lines = [f"{_assignment(key, value)}{_ADDED}" for key, value in keys.items()]
    if not lines:
        return text
    ending = "\r\n" if text[:place].endswith("\r\n") else "\n"
    if place and not text[:place].endswith("\n"):
        return text[:place] + "".join(f"\n{line}" for line in lines) + text[place:]
    header = text[:place].rstrip("\r\n").rpartition("\n")[2]
    indent = header[: len(header) - len(header.lstrip())]
    indent += "  " if indent else ""
    return text[:place] + "".join(f"{indent}{line}{ending}" for line in lines) + text[place:]


def _assignment(key: str, value: Any) -> str:
    document = tomlkit.document()
    document[key] = value
    return tomlkit.dumps(document).rstrip("\n")


def _with_block(text: str, tables: list[tuple[Path, dict[str, Any]]], *, new_file: bool, first: str) -> str:
    new_file = new_file and not text
    parts = [first] if new_file and first else []
    for path, keys in sorted(tables, key=lambda table: table[0] != ()):
        body = [_assignment(key, value) for key, value in keys.items()]
        parts.append("\n".join(([f"[{'.'.join(_quoted(name) for name in path)}]"] if path else []) + body))
    block = f"{_BEGIN_FILE if new_file else _BEGIN}\n" + "\n\n".join(parts) + f"\n{_END}\n"
    return f"{text}\n{block}" if text else block


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


# -- the proof -------------------------------------------------------------------------------------------------------


def _require_right(base: str, changed: str, expected: Mapping[str, Any], name: str) -> None:
    """Raise GpuprovError if an edit does not have the expected values, or could not be removed again."""
    try:
        right = read_toml(changed, name) == expected and without_ours(changed) == base
    except GpuprovError:
        right = False
    if not right:
        raise _refused(name)


def _refused(name: str) -> GpuprovError:
    return GpuprovError(
        f"{name} can't be edited safely; it was left alone",
        "one of its tables is written inline, or by dotted keys, and can't be added to line by line",
        "write that table with a [header] of its own, or give another file with --drop-in-config",
    )
