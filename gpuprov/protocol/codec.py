"""JSON to frozen dataclasses: each field's annotation says its type and its limit, and nothing else gets in. Pure.

Control characters are removed from texts on the way. What does not fit is refused with the path of the field; unknown
keys are skipped, so that an older reader understands a newer writer.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from gpuprov.protocol.words import line, plain

T = TypeVar("T")


@dataclass(frozen=True)
class Limit:
    """The most characters of a text, parts of a list or a mapping, or the largest number. `lines`: it may have them."""

    most: int
    lines: bool = False


@dataclass(frozen=True)
class OneOf:
    """The words that a text may be."""

    words: tuple[str, ...]


# A name, a sentence, text of several lines, a file's diff.
_LINE = Limit(10_000)
Name = Annotated[str, Limit(500)]
Line = Annotated[str, _LINE]
Text = Annotated[str, Limit(200_000, lines=True)]
LongText = Annotated[str, Limit(4_000_000, lines=True)]

_NUMBER, _PARTS, _TREE_TEXT, _DEPTH = Limit(1 << 53), Limit(10_000), Limit(1_000_000, lines=True), 30
# `X | None`; Python 3.9 knows the first form alone.
_UNIONS = (Union, getattr(types, "UnionType", Union))


class WrongDataError(ValueError):
    """Data that is not what the annotations say; the message names the field."""


def load(cls: type[T], data: Any, path: str = "") -> T:
    """Return an instance of the dataclass with the values of a JSON object. Raises WrongDataError."""
    made: Any = cls
    path = path or cls.__name__
    if not isinstance(data, Mapping):
        raise WrongDataError(f"{path} is not an object")
    values: dict[str, Any] = {}
    for name, hint, required in _fields_of(made):
        if name in data:
            values[name] = _value(hint, data[name], f"{path}.{name}")
        elif required:
            raise WrongDataError(f"{path}.{name} is missing")
    return cls(**values)


@functools.cache
def _fields_of(cls: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Return (name, annotation, whether it has no default) of each field."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple(
        (one.name, hints[one.name], one.default is MISSING and one.default_factory is MISSING) for one in fields(cls)
    )


def _value(hint: Any, value: Any, path: str) -> Any:
    limit = None
    if get_origin(hint) is Annotated:
        hint, limit = get_args(hint)
    kind: Any = get_origin(hint) or hint
    parts = get_args(hint)
    if hint is Any:
        return _tree(value, path, _DEPTH)
    if kind in _UNIONS:
        (inner,) = (part for part in parts if part is not type(None))
        return None if value is None else _value(inner, value, path)
    if isinstance(limit, OneOf):
        if value not in limit.words:
            raise WrongDataError(f"{path} is none of {', '.join(limit.words)}")
        return value
    if is_dataclass(kind):
        return load(kind, value, path)  # type: ignore[arg-type]
    if kind is tuple:
        _check(value, (list, tuple), limit or _PARTS, path)
        return tuple(_value(parts[0], one, f"{path}[{number}]") for number, one in enumerate(value))
    if issubclass(kind, Mapping):
        _check(value, (Mapping,), limit or _PARTS, path)
        return {_value(parts[0], key, path): _value(parts[1], one, f"{path}.{key:.40}") for key, one in value.items()}
    return _scalar(kind, value, limit, path)


def _scalar(kind: type[Any], value: Any, limit: Limit | None, path: str) -> Any:
    if kind is bool:
        _check(value, (bool,), _NUMBER, path)
    elif kind is str:
        _check(value, (str,), limit or _TREE_TEXT, path)
        return plain(value) if (limit or _TREE_TEXT).lines else line(value)
    else:
        # In Python a bool is an int; in JSON it is not.
        _check(value, (int, float) if kind is float else (int,), limit or _NUMBER, path, not_bool=True)
    return value


def _check(value: Any, kinds: tuple[type[Any], ...], limit: Limit, path: str, *, not_bool: bool = False) -> None:
    if not isinstance(value, kinds) or (not_bool and isinstance(value, bool)):
        raise WrongDataError(f"{path} is not {_NAMES[kinds[0]]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise WrongDataError(f"{path} is no number that JSON has")
    if (abs(value) if isinstance(value, (int, float)) else len(value)) > limit.most:
        raise WrongDataError(f"{path} is larger than {limit.most}")


_NAMES = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list", Mapping: "an object"
}  # fmt: skip


def _tree(value: Any, path: str, depth: int) -> Any:
    """Return JSON of any form, checked: not too deep, each list, text and number within its limit."""
    if depth == 0:
        raise WrongDataError(f"{path} is nested too deep")
    if isinstance(value, Mapping):
        _check(value, (Mapping,), _PARTS, path)
        return {
            _scalar(str, key, _LINE, path): _tree(one, f"{path}.{key:.40}", depth - 1) for key, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        _check(value, (list, tuple), _PARTS, path)
        return [_tree(one, f"{path}[{number}]", depth - 1) for number, one in enumerate(value)]
    return value if value is None else _scalar(type(value), value, None, path)
