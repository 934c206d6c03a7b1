"""Edit another program's JSON file as text: add, change or remove one member and keep every other byte. Pure.

The text is valid JSON with an object at its root; `docker_config.parse_config` checked it before.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Callable

BOM = "\ufeff"
_BLANKS = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
Path = tuple[str, ...]


@dataclass(frozen=True)
class _Member:
    """A member of an object: where its name begins, and where its value begins and ends."""

    name: str
    start: int
    value: int
    end: int


def in_place(text: str, edit: Callable[[str], str]) -> str:
    """Return an edited text with its original byte order mark and line ends."""
    mark = BOM if text.startswith(BOM) else ""
    text = text[len(mark) :]
    is_crlf = text.count("\r\n") == text.count("\n") > 0
    after = edit(text.replace("\r\n", "\n")) if is_crlf else edit(text)
    return mark + (after.replace("\n", "\r\n") if is_crlf else after)


def with_member(text: str, path: Path, value: Any) -> str:
    """Return the text with `value` at that path, making missing objects; unchanged if it is already there."""
    start = _blanks(text, 0)
    for depth, name in enumerate(path):
        members = _members(text, start)
        found = _last(members, name)
        if found is None:
            return _inserted(text, start, members, name, _nested(path[depth + 1 :], value), depth)
        if depth == len(path) - 1 or text[found.value] != "{":
            wanted = _nested(path[depth + 1 :], value)
            if _DECODER.raw_decode(text, found.value)[0] == wanted:
                return text
            layout = _layout(text, start, members, depth)
            return text[: found.value] + _rendered(text, wanted, layout) + text[found.end :]
        start = found.value
    return text


def without_member(text: str, path: Path) -> str:
    """Return the text without the member at that path, and without objects that become empty, except the root."""
    start = _blanks(text, 0)
    for name in path[:-1]:
        found = _last(_members(text, start), name)
        if found is None or text[found.value] != "{":
            return text
        start = found.value
    members = _members(text, start)
    number = next((number for number, member in enumerate(members) if member.name == path[-1]), None)
    if number is None:
        return text
    if len(members) == 1:
        if len(path) > 1:
            return without_member(text, path[:-1])
        return f"{text[: start + 1]}{text[_blanks(text, members[0].end) :]}"
    if number == 0:
        return text[: members[0].start] + text[members[1].start :]
    return text[: members[number - 1].end] + text[members[number].end :]


def _last(members: list[_Member], name: str) -> _Member | None:
    """Return the member of that name; the last of several, which is the one that counts."""
    return next((member for member in reversed(members) if member.name == name), None)


def _members(text: str, start: int) -> list[_Member]:
    """Return the members of the object that begins at `start`."""
    place = _blanks(text, start + 1)
    result: list[_Member] = []
    while text[place] != "}":
        place = _blanks(text, place + 1) if text[place] == "," else place
        name, end = _DECODER.raw_decode(text, place)
        value = _blanks(text, _blanks(text, end) + 1)
        _, after = _DECODER.raw_decode(text, value)
        result.append(_Member(name, place, value, after))
        place = _blanks(text, after)
    return result


def _blanks(text: str, place: int) -> int:
    found = _BLANKS.match(text, place)
    return found.end() if found else place


def _nested(path: Path, value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def _inserted(text: str, start: int, members: list[_Member], name: str, value: Any, depth: int) -> str:
    layout = _layout(text, start, members, depth)
    member = f"{json.dumps(name, ensure_ascii=False)}: {_rendered(text, value, layout)}"
    if members:
        gap = layout or ("" if text[members[0].end] == "," and len(members) > 1 and _is_tight(text, members) else " ")
        return f"{text[: members[-1].end]},{gap}{member}{text[members[-1].end :]}"
    end = _blanks(text, start + 1)
    close = layout[: len(layout) - len(_unit(text))] if layout else ""
    return f"{text[: start + 1]}{layout}{member}{close}{text[end:]}"


def _is_tight(text: str, members: list[_Member]) -> bool:
    return members[1].start == members[0].end + 1


def _layout(text: str, start: int, members: list[_Member], depth: int) -> str:
    """Return the line break and indentation before each member, nothing if the object stands on one line."""
    if members:
        before = text[start + 1 : members[0].start]
        return before[before.rfind("\n") :] if "\n" in before else ""
    is_one_line = "\n" not in text.strip() and len(text.strip()) > 2
    return "" if is_one_line else "\n" + _unit(text) * (depth + 1)


def _unit(text: str) -> str:
    found = re.search(r"^([ \t]+)\"", text, re.MULTILINE)
    return found[1] if found else "    "


def _rendered(text: str, value: Any, layout: str) -> str:
    if not layout:
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False, indent=_unit(text)).replace("\n", layout)
