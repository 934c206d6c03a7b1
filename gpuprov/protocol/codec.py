"""JSON to frozen dataclasses: each field's annotation says its type and its limit, and nothing else gets in. Pure.

What does not fit is refused with the path of the field. Unknown keys are skipped, so that an older reader understands a
newer writer. From a writer that is not trusted, such as a host, sizes are limited, and control characters are removed.
"""

from __future__ import annotations

import functools
import json
import math
import types
from collections.abc import Mapping
from enum import Enum
from operator import attrgetter
from typing import Annotated, Any, Callable, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gpuprov.protocol.dataclass import MISSING, Field, asdict, dataclass, fields, is_dataclass
from gpuprov.protocol.words import line, plain

T = TypeVar("T")
_NAMES = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list", Mapping: "an object"
}  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """The most characters of a text, parts of a list or a mapping, or the largest number. `lines`: it may have them."""

    most: int
    lines: bool = False


# A name, a sentence, text of several lines, a file's diff.
_LINE = Limit(10_000)
Name = Annotated[str, Limit(500)]
Line = Annotated[str, _LINE]
Text = Annotated[str, Limit(200_000, lines=True)]
LongText = Annotated[str, Limit(4_000_000, lines=True)]

_NUMBER, _PARTS, _TREE_TEXT, _DEPTH = Limit(1 << 53), Limit(10_000), Limit(1_000_000, lines=True), 30
# `X | None`; Python 3.9 knows the first form alone.
_UNIONS = (Union, getattr(types, "UnionType", Union))
# Key of a field's metadata: the name that the field had in earlier versions.
FORMER_NAME = "former name"


class WrongDataError(ValueError):
    """Data that is not what the annotations say; the message names the field."""


def dump(value: Any, **more: Any) -> str:
    """Return a dataclass as one line of JSON in ASCII, after the keys of `more`."""
    return json.dumps({**more, **asdict(value)}, separators=(",", ":"))


def as_json(value: Any) -> Any:
    """Return dataclasses, mappings, collections and texts of any class (Ansible has some) in JSON's own types."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: as_json(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_json(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value) if isinstance(value, str) else value


def parse(text: str | bytes) -> Any:
    """Return the values of a text of JSON. Raises WrongDataError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise WrongDataError("a line is nested too deep") from None
    except ValueError as error:
        raise WrongDataError(str(error)) from None


def json_at(text: str | bytes, *path: str) -> Any:
    """Return the value at a path of keys in a text of JSON; None if there is none, or for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def load(
    cls: type[T], data: Any, *, trusted: bool = False, exact: bool = False,
    key: Callable[[Field[Any]], str] = attrgetter("name"), null_is_empty: bool = False,
) -> T:  # fmt: skip
    """Return an instance of the dataclass with the values of a JSON object. Raises WrongDataError.

    `trusted`: texts and sizes are taken as they are, from a writer that is gpuprov or is checked elsewhere.
    `exact`: other keys are refused. `key` gives a field's name in the data. `null_is_empty`: null and a missing key are
    empty values, whatever the field's default is.
    """
    made: T = _Reader(trusted, exact, key, null_is_empty).object(cls, data, cls.__name__)
    return made


@functools.cache
def _fields_of(cls: Any, key: Callable[[Field[Any]], str]) -> tuple[tuple[str, str, str, Any, bool], ...]:
    """Return (name, name in the data, former name there, annotation, whether it has no default) of each field."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple(
        (
            one.name, key(one), one.metadata.get(FORMER_NAME, key(one)), hints[one.name],
            one.default is MISSING and one.default_factory is MISSING,
        )
        for one in fields(cls)
    )  # fmt: skip


@functools.cache
def _kind_of(hint: Any) -> tuple[Any, tuple[Any, ...], Limit | None]:
    """Return an annotation's type, its parts, and its limit."""
    limit = None
    if get_origin(hint) is Annotated:
        hint, limit = get_args(hint)
    return get_origin(hint) or hint, get_args(hint), limit


@dataclass(frozen=True)
class _Reader:
    trusted: bool
    exact: bool
    key: Callable[[Field[Any]], str]
    null_is_empty: bool

    def object(self, cls: Any, data: Any, path: str) -> Any:
        if not isinstance(data, Mapping):
            raise WrongDataError(f"{path} is not an object")
        known = _fields_of(cls, self.key)
        values: dict[str, Any] = {}
        for name, key, former, hint, required in known:
            found = data.get(key, data.get(former))
            if found is None and self.null_is_empty:
                kind, _, _ = _kind_of(hint)
                values[name] = None if kind in _UNIONS else {} if kind is Mapping else kind()
            elif key in data or former in data:
                values[name] = self.value(hint, found, f"{path}.{key}")
            elif required:
                raise WrongDataError(f"{path}.{key} is missing")
        if self.exact and (others := data.keys() - {name for row in known for name in row[1:3]}):
            raise WrongDataError(f"unknown in {path}: {line(', '.join(sorted(others)))[:200]}")
        return cls(**values)

    def value(self, hint: Any, value: Any, path: str) -> Any:
        kind, parts, limit = _kind_of(hint)
        if kind is Any:
            return value if self.trusted else self.tree(value, path, _DEPTH)
        if kind in _UNIONS:
            (inner,) = (part for part in parts if part is not type(None))
            return None if value is None else self.value(inner, value, path)
        if kind is Literal:
            return _one_of(parts, value, path)
        if is_dataclass(kind):
            return self.object(kind, value, path)
        if kind is tuple:
            self.check(value, (list, tuple), limit or _PARTS, path)
            return tuple(self.value(parts[0], one, f"{path}[{number}]") for number, one in enumerate(value))
        if issubclass(kind, Mapping):
            self.check(value, (Mapping,), limit or _PARTS, path)
            return {
                self.value(parts[0], key, path): self.value(parts[1], one, f"{path}.{key:.40}")
                for key, one in value.items()
            }
        if issubclass(kind, Enum):
            return kind(_one_of(tuple(one.value for one in kind), value, path))
        return self.scalar(kind, value, limit, path)

    def scalar(self, kind: type[Any], value: Any, limit: Limit | None, path: str) -> Any:
        if kind is bool:
            self.check(value, (bool,), _NUMBER, path)
        elif kind is str:
            limit = limit or _TREE_TEXT
            value = "" if value is None and self.null_is_empty else value
            self.check(value, (str,), limit, path)
            return value if self.trusted else plain(value) if limit.lines else line(value)
        else:
            # In Python a bool is an int; in JSON it is not.
            self.check(value, (int, float) if kind is float else (int,), limit or _NUMBER, path, not_bool=True)
        return value

    def check(
        self, value: Any, kinds: tuple[type[Any], ...], limit: Limit, path: str, *, not_bool: bool = False
    ) -> None:
        if not isinstance(value, kinds) or (not_bool and isinstance(value, bool)):
            raise WrongDataError(f"{path} is not {_NAMES[kinds[0]]}")
        if isinstance(value, float) and not math.isfinite(value):
            raise WrongDataError(f"{path} is no number that JSON has")
        size = abs(value) if isinstance(value, (int, float)) else len(value)
        if size > limit.most and not self.trusted:
            raise WrongDataError(f"{path} is larger than {limit.most}")

    def tree(self, value: Any, path: str, depth: int) -> Any:
        """Return JSON of any form, checked: not too deep, each list, text and number within its limit."""
        if depth == 0:
            raise WrongDataError(f"{path} is nested too deep")
        if isinstance(value, Mapping):
            self.check(value, (Mapping,), _PARTS, path)
            return {
                self.scalar(str, key, _LINE, path): self.tree(one, f"{path}.{key:.40}", depth - 1)
                for key, one in value.items()
            }
        if isinstance(value, (list, tuple)):
            self.check(value, (list, tuple), _PARTS, path)
            return [self.tree(one, f"{path}[{number}]", depth - 1) for number, one in enumerate(value)]
        return value if value is None else self.scalar(type(value), value, None, path)


def _one_of(allowed: tuple[Any, ...], value: Any, path: str) -> Any:
    if not isinstance(value, type(allowed[0])) or isinstance(value, bool) or value not in allowed:
        raise WrongDataError(f"{path} is none of {', '.join(map(str, allowed))}")
    return value
