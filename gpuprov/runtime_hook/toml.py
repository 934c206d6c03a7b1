"""TOML as container configurations use it (toml.io, v1.0): a reader without `re`, because tomllib costs 12 ms.

Read are comments, tables, dotted and quoted keys, strings on one line, booleans, integers, and arrays of these over
several lines. Dates, floats, inline tables, arrays of tables and strings over several lines are refused by name.
"""

from __future__ import annotations

from typing import Any

_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\"}
_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_BLANKS = " \t"
# No configuration of containers nests deeper; thousands would cost time and room by their square.
_MOST_PARTS = 40


class _Document:
    """The tables read so far, and which of them no later line may open or add to (toml.io, "Table")."""

    def __init__(self) -> None:
        self.tables: dict[str, Any] = {}
        self._table = self.tables
        self._header: tuple[str, ...] = ()
        self._closed: set[tuple[str, ...]] = set()
        # What dotted keys of this section have opened: its next lines may add to that, no other section may.
        self._dotted: set[tuple[str, ...]] = set()

    def open(self, keys: list[str]) -> None:
        """Begin the section of a table."""
        self._closed |= self._dotted
        self._dotted.clear()
        self._header = tuple(keys)
        if self._header in self._closed:
            raise ValueError(f"the table [{'.'.join(keys)}] stands there twice")
        self._closed.add(self._header)
        self._table = _table(self.tables, keys)

    def put(self, keys: list[str], value: Any) -> None:
        """Add a value to the section's table."""
        self._dotted.update((*self._header, *keys[:length]) for length in range(1, len(keys)))
        if not self._closed.isdisjoint(self._dotted):
            raise ValueError(f"{'.'.join(keys)!r} adds to a table that stands elsewhere")
        table = _table(self._table, keys[:-1])
        if keys[-1] in table:
            raise ValueError(f"{keys[-1]!r} stands there twice")
        table[keys[-1]] = value


def parse(text: str) -> dict[str, Any]:
    """Return the document's tables as nested dicts. Raises ValueError, naming the line, for what can't be read."""
    document = _Document()
    lines = text.replace("\r\n", "\n").split("\n")
    number = 0
    while number < len(lines):
        begun = number
        try:
            number = _statement(document, lines, number) + 1
        except ValueError as error:
            raise ValueError(f"line {begun + 1}: {error}") from None
    return document.tables


def _statement(document: _Document, lines: list[str], number: int) -> int:
    """Read what begins in a line, and return the number of the line in which it ends."""
    line = lines[number].strip(_BLANKS)
    if line.startswith("[["):
        raise ValueError("an array of tables is not read here")
    if line.startswith("["):
        keys, place = _keys(line, 1, "]")
        document.open(keys)
        _end(line, place + 1)
    elif line.startswith("#"):
        _refuse_control_characters(line)
    elif line:
        keys, place = _keys(line, 0, "=")
        value, number = _value_over_lines(lines, number, line, place + 1)
        document.put(keys, value)
    return number


def _table(parent: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    for key in keys:
        parent = parent.setdefault(key, {})
        if not isinstance(parent, dict):
            raise ValueError(f"{key!r} is a value already, no table")
    return parent


def _skip(text: str, place: int) -> int:
    return len(text) - len(text[place:].lstrip(_BLANKS))


def _end(text: str, place: int) -> None:
    rest = text[place:].strip(_BLANKS)
    if rest and not rest.startswith("#"):
        raise ValueError(f"{rest!r} stands behind the end")
    _refuse_control_characters(rest)


def _refuse_control_characters(text: str) -> None:
    if not text.isprintable() and any((sign < " " and sign != "\t") or sign == "\x7f" for sign in text):
        raise ValueError("a control character stands there")


def _keys(text: str, place: int, end: str) -> tuple[list[str], int]:
    """Return the parts of a dotted key, and where the sign that ends it stands."""
    keys = []
    while True:
        place = _skip(text, place)
        if text[place : place + 1] in ('"', "'"):
            key, place = _string(text, place)
        else:
            begun = place
            while place < len(text) and text[place] in _BARE:
                place += 1
            key = text[begun:place]
            if not key:
                raise ValueError(f"a key is missing before {text[place:]!r}")
        keys.append(key)
        place = _skip(text, place)
        sign = text[place : place + 1]
        if sign == end:
            return keys, place
        if sign != ".":
            raise ValueError(f"{end!r} is missing after {'.'.join(keys)!r}")
        if len(keys) == _MOST_PARTS:
            raise ValueError(f"a key of more than {_MOST_PARTS} parts is not read here")
        place += 1


def _value_over_lines(lines: list[str], number: int, line: str, place: int) -> tuple[Any, int]:
    """Return a value and the number of the line in which it ends."""
    place = _skip(line, place)
    if line[place : place + 1] != "[":
        value, place = _value(line, place)
        _end(line, place)
        return value, number
    items: list[Any] = []
    place += 1
    wanted = True
    while True:
        place = _skip(line, place)
        sign = line[place : place + 1]
        if sign in ("", "#"):
            _refuse_control_characters(line[place:])
            number += 1
            if number == len(lines):
                raise ValueError("an array does not end")
            line, place = lines[number], 0
        elif sign == "]":
            _end(line, place + 1)
            return items, number
        elif sign == "," and not wanted:
            wanted, place = True, place + 1
        elif wanted:
            value, place = _value(line, place)
            items.append(value)
            wanted = False
        else:
            raise ValueError(f"a comma is missing before {line[place:]!r}")


def _value(text: str, place: int) -> tuple[Any, int]:
    sign = text[place : place + 1]
    if sign in ('"', "'"):
        return _string(text, place)
    end = place
    while end < len(text) and text[end] not in ",]# \t":
        end += 1
    word = text[place:end]
    if word in ("true", "false"):
        return word == "true", end
    digits = word[1:] if word[:1] in "+-" else word
    groups = digits.split("_")
    if digits.isascii() and all(group.isdigit() for group in groups) and (digits == "0" or digits[0] != "0"):
        return int(word.replace("_", "")), end
    raise ValueError(f"{text[place:]!r} is no text in quotes, no true or false, and no whole number")


def _string(text: str, place: int) -> tuple[str, int]:
    """Return a string and the place behind its closing quote."""
    quote = text[place]
    if text.startswith(quote * 3, place):
        raise ValueError("text over several lines is not read here")
    parts: list[str] = []
    place += 1
    while True:
        end = text.find(quote, place)
        if end < 0:
            raise ValueError(f"the closing {quote} is missing")
        escape = text.find("\\", place, end) if quote == '"' else -1
        part = text[place : end if escape < 0 else escape]
        _refuse_control_characters(part)
        parts.append(part)
        if escape < 0:
            return "".join(parts), end + 1
        part, place = _escape(text, escape + 1)
        parts.append(part)


def _escape(text: str, place: int) -> tuple[str, int]:
    sign = text[place : place + 1]
    if sign in _ESCAPES and sign:
        return _ESCAPES[sign], place + 1
    size = {"u": 4, "U": 8}.get(sign, 0)
    digits = text[place + 1 : place + 1 + size]
    if not size or len(digits) != size or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
        raise ValueError(f"\\{sign} is no escape")
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"\\{sign}{digits} is no character")
    return chr(code), place + 1 + size
