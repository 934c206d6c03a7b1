"""daemon.json as text: parsed with line and column of errors, edited without losing other content. Pure."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from gpuprov.engines.docker_unit import DAEMON_JSON
from gpuprov.engines.known import RuntimeEntry
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.versions import version_numbers

BOM = "\ufeff"
_DECODER = json.JSONDecoder()
Path = tuple[str, ...]
# The first that takes a byte order mark, and that has `dockerd --validate`.
_FIRST_WITH_BOM = _FIRST_WITH_VALIDATE = (23,)

# docker 25 to 28.1 reads CDI specifications if its file sets features.cdi, 28.2 and later unless it disables it; older
# releases can't (docs.docker.com, dockerd, "Enable CDI devices").
_FIRST_WITH_CDI = (25,)
_FIRST_WITH_CDI_BY_DEFAULT = (28, 2)
VERSIONS_WITH_FEATURE = "25 to 28.1"


def knows_cdi(version: str) -> bool:
    """Say whether a docker of that version can read CDI specifications."""
    return version_numbers(version) >= _FIRST_WITH_CDI


def needs_feature(version: str) -> bool:
    """Say whether a docker of that version needs features.cdi to read them."""
    return _FIRST_WITH_CDI <= version_numbers(version) < _FIRST_WITH_CDI_BY_DEFAULT


def parse_config(
    text: str | None, path: str = DAEMON_JSON, version: str = ""
) -> tuple[Mapping[str, Any], tuple[Problem, ...]]:
    """Return the configuration in daemon.json's text; a missing or empty file is an empty configuration.

    `text` holds bytes that are invalid UTF-8 as lone surrogates (surrogateescape); docker accepts such bytes. Of a
    duplicate key in an object the last counts, as for docker. Returned as problems: text that gpuprov can't read or
    edit, or that has no place for a runtime. `version` is docker's, which decides on a byte order mark; "" means
    unknown.
    """
    if text is None or not text.strip():
        return {}, ()
    if text.startswith(BOM) and version_numbers(version) >= _FIRST_WITH_BOM:
        text = text[1:]
    validates, name = version_numbers(version) >= _FIRST_WITH_VALIDATE, shlex.quote(path)
    check = f"dockerd --validate --config-file {name}" if validates else f"python3 -m json.tool {name}"
    step = f"correct it, then check: {check}"
    try:
        config = json.loads(text, parse_constant=_number, parse_float=_number)
    except json.JSONDecodeError as error:
        # Not splitlines: JSON counts line feeds only.
        line = text.split("\n")[error.lineno - 1]
        seen = f"line {error.lineno}, column {error.colno}: {error.msg}: {line.strip()}"
        # Terminals reject lone surrogates.
        seen = seen.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return {}, (Problem(f"{path} is not valid JSON", seen, step),)
    except (ValueError, RecursionError) as error:
        return {}, (Problem(f"{path} can't be edited safely", str(error), step),)
    if wrong := _wrong_shape(config):
        return {}, (Problem(f"{path} has the wrong shape", wrong, step),)
    return config, ()


def edited(
    text: str | None, entry: RuntimeEntry, *, drop: Sequence[str] = (), keep_arguments: bool = False
) -> str | None:
    """Return valid daemon.json with this runtime; None if nothing changes.

    Without a path no runtime is added; the runtimes of `drop` are removed. `keep_arguments`: of a runtime that is
    there, only the program changes. Every other byte stays: a JSON writer would lose line ends, a byte order mark, a
    duplicate key, bytes that are invalid UTF-8.
    """
    text = text if text and text.lstrip(BOM).strip() else "{}\n"

    def edit(plain: str) -> str:
        there = (json.loads(plain).get("runtimes") or {}).get(entry.name)
        if entry.path and keep_arguments and isinstance(there, dict):
            plain = with_member(plain, ("runtimes", entry.name, "path"), entry.path)
        elif entry.path and not (isinstance(there, dict) and there.get("path") == entry.path and not there.get("args")):
            plain = with_member(plain, ("runtimes", entry.name), {"path": entry.path, "args": []})
        if entry.path and entry.set_default:
            plain = with_member(plain, ("default-runtime",), entry.name)
        if entry.cdi:
            plain = with_member(plain, ("features", "cdi"), True)
        return without_runtimes(plain, drop)

    after = in_place(text, edit)
    return None if after == text else after


def without_runtimes(text: str, names: Sequence[str]) -> str:
    """Return the text without these runtimes; docker does not start with a missing default runtime."""
    if names and json.loads(text).get("default-runtime") in names:
        text = without_member(text, ("default-runtime",))
    for name in names:
        text = without_member(text, ("runtimes", name))
    return text


def _number(text: str) -> float:
    """Refuse NaN, Infinity and overflowing numbers: Python would write them back, and docker could not read them."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number in JSON")
    return value


def _wrong_shape(config: Any) -> str:
    if not isinstance(config, dict):
        return f"it is {json.dumps(config):.40}, not an object"
    for name in ("runtimes", "features"):
        found = config.get(name, {})
        # docker itself takes null for none.
        if found is not None and not isinstance(found, dict):
            return f'"{name}" is {json.dumps(found):.40}, not an object'
    return ""


# -- one member of a JSON text: added, changed or removed; every other byte stays -------------------------------------


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
    """Return the text without the member at that path, and without objects that become empty, except the root.

    Of several of one name the last counts; without it, the one before would.
    """
    while (after := _without_last(text, path)) != text:
        text = after
    return text


def _without_last(text: str, path: Path) -> str:
    start = _blanks(text, 0)
    for name in path[:-1]:
        found = _last(_members(text, start), name)
        if found is None or text[found.value] != "{":
            return text
        start = found.value
    members = _members(text, start)
    number = max((number for number, member in enumerate(members) if member.name == path[-1]), default=None)
    if number is None:
        return text
    if len(members) == 1:
        if len(path) > 1:
            return _without_last(text, path[:-1])
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
    return len(text) - len(text[place:].lstrip(" \t\r\n"))


def _nested(path: Path, value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def _inserted(text: str, start: int, members: list[_Member], name: str, value: Any, depth: int) -> str:
    layout = _layout(text, start, members, depth)
    member = f"{json.dumps(name, ensure_ascii=False)}: {_rendered(text, value, layout)}"
    if members:
        is_tight = len(members) > 1 and members[1].start == members[0].end + 1
        gap = layout or ("" if is_tight else " ")
        return f"{text[: members[-1].end]},{gap}{member}{text[members[-1].end :]}"
    end = _blanks(text, start + 1)
    close = layout[: len(layout) - len(_unit(text))] if layout else ""
    return f"{text[: start + 1]}{layout}{member}{close}{text[end:]}"


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
