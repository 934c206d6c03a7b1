"""dataclasses.dataclass with methods that all classes share, instead of generated ones for each; and its companions.

Generating the methods of some 200 classes took 0.16 s of each start on a host, two fifths of it.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from dataclasses import MISSING, Field, FrozenInstanceError, asdict, astuple, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = ("MISSING", "Field", "asdict", "astuple", "dataclass", "field", "fields", "is_dataclass", "replace")

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, *, frozen: bool = False, eq: bool = True) -> Any:
        """Make a dataclass as the standard library's does; these are the parameters that gpuprov needs."""

        def made(cls: type) -> type:
            shared: dict[str, Any] = {"__init__": _init, "__repr__": _repr}
            if eq:
                shared |= {"__eq__": _equals, "__hash__": _hash if frozen else None}
            if frozen:
                shared |= {"__setattr__": _refuse, "__delattr__": _refuse}
            for name in shared.keys() - cls.__dict__.keys():
                setattr(cls, name, shared[name])
            return dataclasses.dataclass(init=False, repr=False, eq=False)(cls)

        return made if cls is None else made(cls)


@functools.cache
def _layout(cls: Any) -> tuple[tuple[str, ...], tuple[tuple[str, Any, Any], ...], tuple[str, ...]]:
    """Return the names that a constructor takes; (name, default, factory) of those with one; the names compared."""
    known = fields(cls)
    optional = ((one.name, one.default, one.default_factory) for one in known)
    return (
        tuple(one.name for one in known if one.init),
        tuple(one for one in optional if one[1:] != (MISSING, MISSING)),
        tuple(one.name for one in known if one.compare),
    )


def _init(self: Any, *positional: Any, **named: Any) -> None:
    cls: Any = type(self)
    names, optional, _ = _layout(cls)
    values = self.__dict__
    values.update(zip(names, positional), **named)
    if len(values) != len(positional) + len(named) or not values.keys() <= set(names):
        raise TypeError(f"{cls.__name__}() takes {', '.join(names)}, each once")
    for name, default, factory in optional:
        if name not in values:
            values[name] = factory() if default is MISSING else default
    if missing := [name for name in names if name not in values]:
        raise TypeError(f"{cls.__name__}() lacks {', '.join(missing)}")
    if hasattr(cls, "__post_init__"):
        self.__post_init__()


def _values(self: Any) -> list[Any]:
    return [getattr(self, name) for name in _layout(self.__class__)[2]]


def _equals(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if type(self) is type(other) else NotImplemented


def _hash(self: Any) -> int:
    return hash(tuple(_values(self)))


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse(_self: Any, name: str, _value: object = None) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")
