"""Tests hold behaviour: none uses a private name of gpuprov, by import, attribute, subclass, or text for a patch."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parents[1]


@cache
def _named(name: str) -> object:
    """Return what `gpuprov.a.b.Class` names; None for other packages' names, and for what does not exist."""
    if name.partition(".")[0] != "gpuprov":
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        owner, _, last = name.rpartition(".")
        return getattr(_named(owner), last, None)


@cache
def _is_member(owner: type, name: str) -> bool:
    """Say whether a class of gpuprov, or a base of it, has the name, as an attribute of `self` too."""
    ours = [one for one in inspect.getmro(owner) if one.__module__.startswith("gpuprov.")]
    return any(name in vars(one) or re.search(rf"\bself\.{name}\b", inspect.getsource(one)) for one in ours)


def _full_name(owner: object, name: object) -> str:
    """Return the full name if it is a private one of a module or a class of gpuprov, otherwise an empty text."""
    if not isinstance(name, str) or not re.fullmatch(r"_(?!_)\w+", name):
        return ""
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__name__}.{name}" if _is_member(owner, name) else ""
    return f"{owner.__name__}.{name}" if inspect.ismodule(owner) and hasattr(owner, name) else ""


class _Source:
    """A test's source: what its names are in gpuprov. An object is known by its class."""

    def __init__(self, text: str) -> None:
        self.nodes = tuple(ast.walk(ast.parse(text)))
        self.known: dict[str, object] = {}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                self.known |= {one.asname or one.name: _named(f"{node.module}.{one.name}") for one in node.names}
            elif isinstance(node, ast.Import):
                self.known |= {one.asname or one.name.partition(".")[0]: _named(one.name) for one in node.names}
        for node in self.nodes:
            for target, value in _typed(node):
                name = getattr(target, "id", target)
                if isinstance(name, str) and isinstance(self.of(value), type):
                    self.known[name] = self.of(value)

    def of(self, node: ast.expr | None) -> object:
        """Return what an expression is: a module, a class (also for its objects), a function; None if not gpuprov's."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(self.of(node.value), node.attr, None)
        called = self.of(node.func) if isinstance(node, ast.Call) else None
        if inspect.isfunction(called):
            return called.__globals__.get(called.__annotations__.get("return", ""))
        return called

    def uses(self) -> Iterator[tuple[object, object]]:
        """Yield the owner and the name of each use that can be one of gpuprov's names."""
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                yield from ((_named(node.module or ""), one.name) for one in node.names)
            elif isinstance(node, ast.Attribute):
                yield self.of(node.value), node.attr
            elif isinstance(node, ast.ClassDef) and node.bases:
                names = re.findall(r"(?:def |\bself\.|super\(\)\.)(\w+)", ast.unparse(node))
                yield from ((base, name) for name in names for base in map(self.of, node.bases))
            elif isinstance(node, ast.Call) and re.search(r"\b(set|get|del)attr$", ast.unparse(node.func)):
                # Also a name from a table: then each text of the file can be it.
                words = self.nodes if isinstance(node.args[1], ast.Name) else (node.args[1],)
                yield from ((self.of(node.args[0]), word.value) for word in words if isinstance(word, ast.Constant))
            elif isinstance(node, ast.Constant) and str(node.value).startswith("gpuprov."):
                owner, _, name = str(node.value).rpartition(".")
                yield _named(owner), name


def _typed(node: ast.AST) -> Iterator[tuple[ast.expr | str | None, ast.expr | None]]:
    """Yield what a node says of an object's class: the object, and the class or the call that returns it."""
    if isinstance(node, ast.arg):
        yield node.arg, node.annotation
    elif isinstance(node, ast.FunctionDef):
        yield node.name, node.returns
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        yield node.targets[0], node.value
    elif isinstance(node, ast.withitem):
        yield node.optional_vars, node.context_expr
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        yield node.args[0], node.args[1]


def private_names(text: str) -> set[str]:
    """Return the private names of gpuprov that a test's source uses, such as `fleet.run.Fleet._claim`."""
    return {_full_name(*use).removeprefix("gpuprov.") for use in _Source(text).uses()} - {""}


CALL, LIVE, VISIBLE = "core.files._call_libc", "fleet.progress.LiveTable._live", "fleet.progress.LiveTable._visible"
FILES, TABLE = "from gpuprov.core import files\n", "from gpuprov.fleet.progress import LiveTable\n"
CASES = {
    "from gpuprov.core.files import _call_libc": {CALL},
    "import gpuprov.core.files as f\nf._call_libc()": {CALL},
    'patch("gpuprov.core.files._call_libc", None)': {CALL},
    FILES + 'patch.setattr(files, "_call_libc", None)': {CALL},
    FILES + 'for name in ("_call_libc",): setattr(files, name, None)': {CALL},
    TABLE + "with LiveTable() as it: it._live": {LIVE},
    TABLE + "def test(it: LiveTable): it._live": {LIVE},
    TABLE + "def made() -> LiveTable: 0\nmade()._live": {LIVE},
    TABLE + "assert isinstance(it, LiveTable)\nit._live": {LIVE},
    TABLE + "class Own(LiveTable):\n  def _visible(self): self._live": {VISIBLE, LIVE},
    # The tests' own names, and names of other packages.
    FILES + 'host._call_libc("_call_libc", "x._call_libc")\nsetattr(host, "_call_libc", files)': set(),
    TABLE + "class Own(LiveTable):\n  def _own(self): self._own(); host._visible()": set(),
    TABLE + "class Own:\n  _live = 1\nOwn()._live": set(),
    "from gpuprov import __version__\nimport gpuprov.core.files\nimport os\nos._exit(gpuprov.__version__)": set(),
}


@pytest.mark.parametrize(("text", "names"), CASES.items())
def test_private_names_of_gpuprov_and_no_others_are_found(text: str, names: set[str]) -> None:
    assert private_names(text) == names


def test_no_test_uses_a_private_name() -> None:
    found = {
        (str(path.relative_to(_TESTS)), name)
        for path in _TESTS.rglob("*.py")
        for name in private_names(path.read_text())
    }
    assert found == set(), "drive the behaviour by a public function, or make what others may use public"
