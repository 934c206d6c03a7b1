"""Every error says what to do next: looked for in the code, so that none is forgotten."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import gpuprov

_ROOT = Path(gpuprov.__file__).parent
# Their sentence ends in what to do, as checks have it, or the next step is the host's own.
_ELSEWHERE = frozenset(("Problem(told(check))", "Problem(f\"{check['name']}: {check['reason']}\", seen)"))


def without_next_step(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, call) of errors that are made with no next step, or with an empty one."""
    for node in ast.walk(ast.parse(source)):
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if name in ("GpuprovError", "Problem") and isinstance(node, ast.Call):
            given = [*node.args[2:], *(word.value for word in node.keywords if word.arg == "next_step")]
            empty = not given or (isinstance(given[0], ast.Constant) and not given[0].value)
            if empty and not any(isinstance(argument, ast.Starred) for argument in node.args):
                yield node.lineno, ast.unparse(node)


def test_every_error_has_a_next_step() -> None:
    found = [
        f"{path.relative_to(_ROOT)}:{line}: {call}"
        for path in sorted(_ROOT.rglob("*.py"))
        for line, call in without_next_step(path.read_text("utf-8"))
        if call not in {ast.unparse(ast.parse(one)) for one in _ELSEWHERE}
    ]
    assert found == []


def test_what_is_looked_for_is_found() -> None:
    bad = "GpuprovError('a', 'b')\nProblem('a', next_step='')\nProblem('a', 'b', '')"
    good = "GpuprovError('a', 'b', 'c')\nProblem('a', next_step=hint)\nProblem(*three)\nother('a')"
    assert [line for line, _ in without_next_step(bad)] == [1, 2, 3]
    assert list(without_next_step(good)) == []
