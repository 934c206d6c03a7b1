"""Every error says what to do next, every count is right for one: looked for in the code, so that none is forgotten."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import gpuprov

_ROOT = Path(gpuprov.__file__).parent
# Their sentence ends in what to do, as checks have it, or the next step is the host's own.
_ELSEWHERE = {
    "Problem(check_text(check))",
    "Problem(f'{check.name}: {check.reason}', f'host: {here}, container: {there}' if there else here)",
}


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


_COUNT = re.compile(r" (?:(?!and |of |on |with )[a-z]+(?<!s) )?([a-z]+s|GPUs)\b")


def nouns(source: str) -> set[str]:
    """Return the plurals that `counted` writes somewhere."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    of_counted = [call.args for call in calls if isinstance(call.func, ast.Name) and call.func.id == "counted"]
    last = [args[-1].value for args in of_counted if isinstance(args[-1], ast.Constant)]
    return {str(word).split()[-1].removesuffix("s") + "s" for word in last}


def uncounted(source: str, known: set[str]) -> Iterator[str]:
    """Yield what prints `1 hosts`: a value before a noun that is counted elsewhere, a length before a plural."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.IfExp) and re.search(r" (?:if|else) 's'$|^'s' if ", ast.unparse(node)):
            yield ast.unparse(node)
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        for value, text in zip(parts, parts[1:]):
            if isinstance(value, ast.FormattedValue) and value.conversion == -1 and isinstance(text, ast.Constant):
                number, noun = ast.unparse(value.value), _COUNT.match(str(text.value))
                # A limit in capitals is never one; a list of words is no number.
                if noun is None or number.isupper() or ".join(" in number:
                    continue
                if noun[1] in known or re.match(r"len\(|sum\(", number) or ".count(" in number:
                    yield f"{number} {noun[1]}"


def test_every_count_is_right_for_one() -> None:
    sources = {path.relative_to(_ROOT): path.read_text("utf-8") for path in sorted(_ROOT.rglob("*.py"))}
    known = set().union(*map(nouns, sources.values()))
    assert {"advisories", "days", "GPUs", "hosts"} <= known
    found = [f"{path}: {one}" for path, text in sources.items() for one in uncounted(text, known)]
    templates = {path.name: path.read_text("utf-8") for path in _ROOT.rglob("*.j2")}
    found += [f"{name}: {one}" for name, text in templates.items() for one in re.findall(r"== '?1'? else '\w+'", text)]
    assert found == [], "next: gpuprov.protocol.words.counted"


def test_a_count_that_is_wrong_for_one_is_found() -> None:
    bad = """f"{n} days", f"{len(x)} more nodes", f"file{'s' if n > 1 else ''}", f"host{'' if n == 1 else 's'}" """
    assert len(list(uncounted(bad, {"days"}))) == 4
    good = """f"{counted(n, 'day')}", f"{LIMIT} days", f"{' '.join(ctr)} days", f"{name!r} days", f"{x} of days" """
    assert list(uncounted(good, {"days"})) == []
    assert nouns("counted(1, 'more host'), counted(2, 'advisory', 'advisories')") == {"hosts", "advisories"}
