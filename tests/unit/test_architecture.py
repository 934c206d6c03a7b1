"""docs/architecture.md follows one value through the code: each hop exists, and the one that leads to it names it."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[2]
_HOP = re.compile(r"^( *)(\d+)\. `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)
_MOST_HOPS = 45
_Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Hop:
    """A line of the list. `depth`: its indentation; a hop is reached from the nearest one above that is less deep."""

    depth: int
    number: int
    file: str
    name: str

    def __str__(self) -> str:
        return f"{self.number}-{self.file}-{self.name}"


def _hops() -> tuple[Hop, ...]:
    text = (_REPOSITORY / "docs/architecture.md").read_text()
    return tuple(Hop(len(row[0]), int(row[1]), row[2], row[3]) for row in _HOP.findall(text))


HOPS = _hops()


@cache
def _module(file: str) -> ast.Module:
    return ast.parse((_REPOSITORY / "gpuprov" / file).read_text())


def _definition(hop: Hop) -> _Definition | None:
    """Return what a hop names: a function, a class, a method, or a table of its module."""
    body: list[ast.stmt] = _module(hop.file).body
    found: _Definition | None = None
    for name in hop.name.split("."):
        found = next((one for one in body if isinstance(one, _Definition) and name in _names(one)), None)
        body = found.body if isinstance(found, (ast.FunctionDef, ast.ClassDef)) else []
    return found


def _names(node: _Definition) -> tuple[str, ...]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return tuple(one.id for one in targets if isinstance(one, ast.Name))


def _mentions(caller: Hop, hop: Hop) -> bool:
    """Say whether the caller's source has the hop's last name, or the name under which its module imports it."""
    wanted = {hop.name.rpartition(".")[2]}
    imports = (one for one in ast.walk(_module(caller.file)) if isinstance(one, ast.ImportFrom))
    wanted |= {alias.asname for one in imports for alias in one.names if alias.name in wanted and alias.asname}
    definition = _definition(caller)
    assert definition is not None
    nodes = list(ast.walk(definition))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return bool(wanted & (used | {node.attr for node in nodes if isinstance(node, ast.Attribute)}))


def _caller(hop: Hop) -> Hop | None:
    return next((one for one in reversed(HOPS[: hop.number - 1]) if one.depth < hop.depth), None)


def test_there_are_few_hops_and_they_are_numbered() -> None:
    assert 30 <= len(HOPS) <= _MOST_HOPS
    assert [hop.number for hop in HOPS] == list(range(1, len(HOPS) + 1))
    # Each process has a beginning of its own.
    assert len([hop for hop in HOPS if hop.depth == 0]) <= 5


@pytest.mark.parametrize("hop", HOPS, ids=str)
def test_each_hop_exists_and_is_reached_from_the_one_that_leads_to_it(hop: Hop) -> None:
    assert _definition(hop) is not None, f"gpuprov/{hop.file} has no {hop.name}"
    caller = _caller(hop)
    assert caller is None or _mentions(caller, hop), f"{caller} does not lead to {hop}: correct docs/architecture.md"
