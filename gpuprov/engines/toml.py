"""An engine's TOML files: read as values, edited by tomlkit, and given back to the byte by `--unset`.

Comments, order and unknown keys stay. What is added bears a mark: a line in a table that is there, a value with the old
one in its comment, a block of tables at the end. Every version of gpuprov writes these marks, so each takes out what
another one put in. An edit is parsed again before it is returned: it has the requested values, and comes out again.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tomlkit
from tomlkit.container import Container, OutOfOrderTableProxy
from tomlkit.exceptions import ParseError, TOMLKitError
from tomlkit.items import AoT, Table

from gpuprov.engines.known import FileEdit, Reader
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
# A Go template (k3s, RKE2) has invalid TOML in whole lines and in values. They are read as comments and strings.
_TEMPLATE_LINE = re.compile(r"^([ \t]*\{\{[^\n]*)$", re.MULTILINE)
_TEMPLATE_VALUE = re.compile(r"(=[ \t]*)(\{\{[^'\n]*\}\})(?=[ \t\r]*$)", re.MULTILINE)
_MASK = "#template#"
_MASKED_VALUE = re.compile(rf"'''{_MASK}([^'\n]*)'''")

Path = tuple[str, ...]


# -- files -----------------------------------------------------------------------------------------------------------


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
        what = f"{path} is not UTF-8; it was left alone"
        raise GpuprovError(what, f"line {line}, column {column}", "correct it, then run this again") from None


def read(system: Reader, path: str) -> dict[str, Any]:
    """Return the content of a file; empty if there is none."""
    return read_toml(read_text(system, path) or "", path)


def read_output(system: Reader, name: str, *commands: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration that an engine's command prints, the first that succeeds. Raises GpuprovError."""
    evidence = ""
    for command in commands:
        done = system.run(command, timeout=20)
        if done.ok:
            return read_toml(done.stdout, " ".join(command))
        evidence = evidence or done.evidence(4)
    raise GpuprovError(f"{name} does not tell its configuration", evidence, "--config-source=file reads the files")


def read_without_ours(system: Reader, path: str) -> dict[str, Any]:
    """Return the content of a file but for gpuprov's additions; empty if there is none."""
    return read_toml(without_ours(read_text(system, path) or ""), path)


def matching(system: Reader, pattern: str) -> tuple[str, ...]:
    """Return the files that a pattern names, in the order of their names."""
    folder, _, names = pattern.rpartition("/")
    return tuple(f"{folder}/{name}" for name in system.list_directory(folder) if fnmatch.fnmatchcase(name, names))


def edited(system: Reader, path: str, wanted: Mapping[str, Any], *, first: str = "") -> FileEdit:
    """Return a file with these values in it."""
    text = read_text(system, path)
    after = with_values(text, wanted, path, first=first)
    return FileEdit(path, None if text is None else text.encode(), after.encode())


def emptied(system: Reader, *paths: str, keep: Sequence[str] = ()) -> tuple[FileEdit, ...]:
    """Return the files that have additions of gpuprov's, without them; no file if nothing else was in it."""
    found = []
    for path in dict.fromkeys(paths):
        text = read_text(system, path)
        after = None if text is None or is_only_ours(text) else without_ours(text, keep=keep)
        if text is not None and after != text:
            found.append(FileEdit(path, text.encode(), None if after is None else after.encode()))
    return tuple(found)


# -- values ----------------------------------------------------------------------------------------------------------


def merged(*found: Mapping[str, Any]) -> dict[str, Any]:
    """Return several configurations as one: tables key by key, later values over earlier ones."""
    result: dict[str, Any] = {}
    for one in found:
        for key, value in one.items():
            old = result.get(key)
            result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def table_at(found: Any, *path: str) -> Mapping[str, Any]:
    """Return a table, an empty one where there is none."""
    for name in path:
        found = found.get(name, {}) if isinstance(found, Mapping) else {}
    return found if isinstance(found, Mapping) else {}


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that `after` adds to `before` or changes."""
    found = {}
    for key, value in after.items():
        if not isinstance(value, Mapping):
            if key not in before or before[key] != value:
                found[key] = value
        elif inner := difference(table_at(before, key), value):
            found[key] = inner
    return found


def _tables(values: Mapping[str, Any], path: Path = ()) -> list[tuple[Path, dict[str, Any]]]:
    """Return nested values as separate tables, a table before its inner ones."""
    keys = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    found = [(path, keys)] if keys else []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _tables(value, (*path, key))
    return found


# -- text ------------------------------------------------------------------------------------------------------------


def read_toml(text: str, name: str) -> dict[str, Any]:
    """Return the values in a TOML text; lines of a Go template are skipped.

    Raises GpuprovError with line and column if the engine could not read it either.
    """
    return _document(text, name).unwrap()


def is_only_ours(text: str) -> bool:
    """Say whether gpuprov made a file and nothing else was added to it."""
    return bool(_FILE_BLOCK.search(text)) and not without_ours(text).strip()


def without_ours(text: str, *, keep: Sequence[str] = ()) -> str:
    """Return the text without additions of `with_values`, except lines with the keys in `keep`."""

    def before(found: re.Match[str]) -> str:
        if found[0].partition("=")[0].strip() in keep:
            return found[0]
        if found.re is _ADDED_LINE:
            return ""
        old = found["old"]
        if old.startswith('lines "'):
            old = json.loads(old[len("lines ") :])
        return f"{found['head']}{old}{found['tail']}{found['end']}"

    text = _FILE_BLOCK.sub("", _BLOCK.sub("", text))
    return _CHANGED_LINE.sub(before, _ADDED_LINE.sub(before, text))


def with_values(text: str | None, wanted: Mapping[str, Any], name: str, *, first: str = "") -> str:
    """Return the text with these values; unchanged if it has them already. None: there is no file.

    `first` is the first line of a new file. Raises GpuprovError if the file can't be read, or can't be edited safely.
    """
    present = read_toml(text or "", name)
    if text is not None and merged(present, wanted) == present:
        return text
    base = without_ours(text or "")
    before = read_toml(base, name)
    # Additions of earlier calls, perhaps for another runtime, stay. An empty table, of a copied runtime, has no line.
    wanted = difference({}, merged(difference(before, present), wanted))
    document = _document(base, name)
    try:
        indents = [(one.trivia, one.trivia.indent) for one in _headed(document)]
        tables = _tables(_put_into(document, wanted) if before else wanted)
        for trivia, indent in indents:  # tomlkit sets a blank line before the table that follows a new key
            trivia.indent = indent
        changed = _MASKED_VALUE.sub(r"\1", tomlkit.dumps(document)).replace(_MASK, "")
        if not base.endswith("\n"):
            changed = changed.removesuffix("\n")
        if tables:
            changed = _with_block(changed, tables, new_file=text is None or is_only_ours(text), first=first)
        right = read_toml(changed, name) == merged(before, wanted) and without_ours(changed) == base
    except (GpuprovError, TOMLKitError, ValueError, TypeError):
        right = False
    if not right:
        seen = "one of its tables is written inline, or by dotted keys, and can't be added to line by line"
        step = "write that table with a [header] of its own, or give another file with --drop-in-config"
        raise GpuprovError(f"{name} can't be edited safely; it was left alone", seen, step)
    return changed


def _document(text: str, name: str) -> tomlkit.TOMLDocument:
    """Return a text as a tomlkit document. Its `unwrap` finds duplicate keys that `parse` accepts."""
    try:
        document = tomlkit.parse(_TEMPLATE_VALUE.sub(rf"\1'''{_MASK}\2'''", _TEMPLATE_LINE.sub(rf"{_MASK}\1", text)))
        document.unwrap()
        return document
    except ParseError as error:
        line = (text.split("\n")[error.line - 1 : error.line] or [""])[0].strip()
        seen = f"line {error.line}, column {error.col + 1}: {str(error).rpartition(' at line ')[0]}: {line}"
    except (TOMLKitError, ValueError, RecursionError) as error:
        seen = str(error)
    raise GpuprovError(f"{name} is not valid TOML; it was left alone", seen, "correct it, then run this again")


def _headed(container: Any) -> Iterator[Table]:
    """Return each table of a document."""
    for _, one in container.body:
        for table in one.body if isinstance(one, AoT) else [one] if isinstance(one, Table) else []:
            yield table
            yield from _headed(table.value)


def _put_into(table: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Put values into the tables that have a header, with gpuprov's marks; return those of the other tables."""
    others: dict[str, Any] = {}
    for key, value in wanted.items():
        if isinstance(value, Mapping):
            if inner := _put_into(table[key], value) if key in table else value:
                others[key] = inner
        elif key not in table and isinstance(table, Table) and table.is_super_table():
            others[key] = value
        elif key not in table:
            table[key] = new = tomlkit.item(value)
            new.trivia.comment_ws, new.trivia.comment = "  ", _ADDED.strip()
        elif table[key] != value:
            _change(table, key, value)
    return others


def _change(table: Any, key: str, value: Any) -> None:
    # As tomlkit holds it, with its blanks and comment: `table[key]` gives mere truth values.
    if isinstance(table, OutOfOrderTableProxy):
        old: Any = dict.__getitem__(table, key)
    else:
        old = (table if isinstance(table, Container) else table.value).item(key)
    source = old.as_string()
    was = f"{_WAS_LINES}{json.dumps(source)}" if "\n" in source else f"{_WAS}{source}"
    new = tomlkit.item(value)
    new.trivia.indent, new.trivia.trail = old.trivia.indent, old.trivia.trail
    new.trivia.comment_ws, new.trivia.comment = old.trivia.comment_ws, f"{old.trivia.comment}{was}"
    table[key] = new


def _with_block(text: str, tables: list[tuple[Path, dict[str, Any]]], *, new_file: bool, first: str) -> str:
    new_file = new_file and not text
    parts = [first] if new_file and first else []
    for path, keys in tables:
        header = [f"[{'.'.join(tomlkit.key(name).as_string() for name in path)}]"] if path else []
        parts.append("\n".join([*header, tomlkit.dumps(keys).rstrip("\n")]))
    block = f"{_BEGIN_FILE if new_file else _BEGIN}\n" + "\n\n".join(parts) + f"\n{_END}\n"
    return f"{text}\n{block}" if text else block
