"""TOML as container configurations use it (toml.io, v1.0): a reader without `re`, because tomllib costs 12 ms.

Read are comments, tables, dotted and quoted keys, strings on one line, booleans, integers, and arrays of these over
several lines. Dates, floats, inline tables, arrays of tables and strings over several lines are refused by name.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\"}
_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_BLANKS = " \t"


def parse(text: str) -> dict[str, Any]:
    """Return the document's tables as nested dicts. Raises ValueError, naming the line, for what can't be read."""
    document: dict[str, Any] = {}
    table, defined = document, set()
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        begun = number
        try:
            line = lines[number].rstrip("\r").strip(_BLANKS)
            if line.startswith("[["):
                raise ValueError("an array of tables is not read here")
            if line.startswith("["):
                keys, place = _keys(line, 1, "]")
                if tuple(keys) in defined:
                    raise ValueError(f"the table [{'.'.join(keys)}] stands there twice")
                defined.add(tuple(keys))
                table = _table(document, keys)
                _end(line, place + 1)
            elif line and not line.startswith("#"):
                keys, place = _keys(line, 0, "=")
                value, number = _value_over_lines(lines, number, line, place + 1)
                _put(_table(table, keys[:-1]), keys[-1], value)
        except ValueError as error:
            raise ValueError(f"line {begun + 1}: {error}") from None
        number += 1
    return document


def _table(parent: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    for key in keys:
        parent = parent.setdefault(key, {})
        if not isinstance(parent, dict):
            raise ValueError(f"{key!r} is a value already, no table")
    return parent


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    if key in table:
        raise ValueError(f"{key!r} stands there twice")
    table[key] = value


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in _BLANKS:
        place += 1
    return place


def _end(text: str, place: int) -> None:
    rest = text[place:].strip(_BLANKS)
    if rest and not rest.startswith("#"):
        raise ValueError(f"{rest!r} stands behind the end")


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
            number += 1
            if number == len(lines):
                raise ValueError("an array does not end")
            line, place = lines[number].rstrip("\r"), 0
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
    end = place + 1
    parts: list[str] = []
    while end < len(text):
        sign = text[end]
        if sign == quote:
            return "".join(parts), end + 1
        if sign == "\\" and quote == '"':
            part, end = _escape(text, end + 1)
            parts.append(part)
            continue
        if (sign < " " and sign != "\t") or sign == "\x7f":
            raise ValueError("a control character stands in a text")
        parts.append(sign)
        end += 1
    raise ValueError(f"the closing {quote} is missing")


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
