"""gpuprov's dataclasses do what the standard library's do: the same classes, made by both, and the same calls."""

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from gpuprov.protocol import dataclass as ours

Make = Callable[..., Any]


def classes(dataclass: Make) -> dict[str, Any]:
    @dataclass(frozen=True)
    class Value:
        name: str
        number: int = 3
        parts: list[int] = dataclasses.field(default_factory=list, compare=False)
        secret: str = dataclasses.field(default="", repr=False)

    @dataclass(frozen=True)
    class Below(Value):
        number: int = 4
        other: tuple[int, ...] = ()

    @dataclass
    class Changed:
        name: str
        seen: list[str] = dataclasses.field(default_factory=list, init=False)
        _asked: int = 0

        def __post_init__(self) -> None:
            self.seen.append(self.name)

    @dataclass(frozen=True, eq=False)
    class Itself:
        name: str = "x"

    return {one.__name__: one for one in (Value, Below, Changed, Itself)}


THEIRS, OURS = classes(dataclasses.dataclass), classes(ours.dataclass)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Value", ("a",), {}), ("Value", ("a", 1, [2], "pw"), {}), ("Value", (), {"number": 1, "name": "b"}),
    ("Value", (), {}), ("Value", ("a", 1, [], "", 5), {}), ("Value", ("a",), {"name": "b"}),
    ("Value", ("a",), {"unknown": 1}), ("Below", ("a",), {}), ("Below", ("a", 1, [], "", (1,)), {}),
    ("Changed", ("a",), {}), ("Changed", ("a", 7), {}), ("Changed", ("a",), {"seen": []}), ("Itself", (), {}),
]  # fmt: skip


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (TypeError, dataclasses.FrozenInstanceError) as error:
        return type(error)


def described(made: Any) -> Any:
    return made if isinstance(made, type) else (repr(made), dataclasses.asdict(made), dataclasses.astuple(made))


@pytest.mark.parametrize(("name", "positional", "named"), CALLS)
def test_instances_are_made_shown_and_copied_alike(
    name: str, positional: tuple[Any, ...], named: dict[str, Any]
) -> None:
    theirs, made = (outcome(functools.partial(one[name], *positional, **named)) for one in (THEIRS, OURS))
    assert described(made) == described(theirs)
    if isinstance(made, type):
        return
    changes: tuple[Make, ...] = (copy.copy, copy.deepcopy, functools.partial(dataclasses.replace, name="c"))
    for change in changes:
        assert described(change(made)) == described(change(theirs))


def test_equality_and_hashes_are_alike() -> None:
    def compared(known: dict[str, Any]) -> list[Any]:
        value, below, changed, itself = known.values()
        pairs = [
            (value("a"), value("a", 3, [1])), (value("a"), value("b")), (value("a", 4), below("a")),
            (changed("a"), changed("a")), (changed("a"), changed("b")), (itself(), itself()), (value("a"), "a"),
        ]  # fmt: skip
        hashes = [hash(value("a")) == hash(value("a", 3, [1])), outcome(lambda: hash(changed("a")))]
        return [one == other for one, other in pairs] + hashes + [{itself(): 1}.get(itself())]

    assert compared(OURS) == compared(THEIRS)


@pytest.mark.parametrize("name", ["Value", "Below", "Changed", "Itself"])
def test_what_is_frozen_stays_as_it_is(name: str) -> None:
    def tried(known: dict[str, Any]) -> list[Any]:
        one = known[name]("a")
        return [outcome(lambda: setattr(one, "name", "b")), outcome(lambda: delattr(one, "name")), one.__dict__]

    assert tried(OURS) == tried(THEIRS)


def test_an_instance_can_be_pickled() -> None:
    fact = ours.replace(Pickled("a"), parts=(1,))
    assert pickle.loads(pickle.dumps(fact)) == fact


@ours.dataclass(frozen=True)
class Pickled:
    name: str
    parts: tuple[int, ...] = ()
