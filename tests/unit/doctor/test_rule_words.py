"""Each {NAME} in a table's words has a value, by the code that gives the values: also where no host of a test has the
trouble. A name without a value would end the doctor instead of naming a cause.
"""

import ast
import contextlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from string import Formatter
from typing import Any, get_type_hints

import pytest

from gpuprov.checks import health, smi
from gpuprov.core.commands import Failure, failures
from gpuprov.doctor import rules, suggested_commands
from gpuprov.doctor.examine import RULES
from gpuprov.doctor.snapshot import HostSnapshot, Smi
from gpuprov.protocol import tables
from tests.unit.doctor.host import examined, healthy

pytestmark = pytest.mark.root

_FOLDER = Path(rules.__file__).parent
_TREES = [ast.parse(path.read_text()) for path in _FOLDER.glob("*rules.py")]
_FUNCTIONS = {node.name: node for tree in _TREES for node in tree.body if isinstance(node, ast.FunctionDef)}
# Another rule's condition, if called, is only a question.
_HELPERS = {
    name
    for name, node in _FUNCTIONS.items()
    if "Seen" in ast.unparse(node.returns or ast.Constant(""))
    and name.replace("_", "-") not in {one.name for one in RULES}
}
_WRITTEN = json.loads((_FOLDER / "rules.json").read_text())["rules"]
_ROWS = [{**health.words(row["name"]), **row} for row in _WRITTEN if "name" in row] + [*rules.rows_of_xids()]
_COMMANDS = {
    name for name, one in vars(suggested_commands).items()
    if inspect.isfunction(one) and get_type_hints(one) == {"x": HostSnapshot, "return": str}
}  # fmt: skip


def _of_lambdas() -> Iterator[tuple[str, ast.expr]]:
    for call in (node for tree in _TREES for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) == "conditions":
            table = call.args[0]
            pairs = [(table.key, table.value)] if isinstance(table, ast.DictComp) else zip(table.keys, table.values)  # type: ignore[attr-defined]
            yield from ((ast.unparse(key).removeprefix("f").strip("'\""), value) for key, value in pairs)


_LAMBDAS = dict(_of_lambdas())


def _given(code: ast.AST) -> Iterator[set[str]]:
    """Yield the names that each result of a condition's code gives."""
    text, of_type = ast.unparse(code), ast.unparse(getattr(code, "returns", None) or ast.Constant("str"))
    # A pattern's groups are the values of in_kernel_log.
    later = {*re.findall(r"\.values\['(\w+)'\]", text), *re.findall(r"\(\?P<(\w+)>", text)}
    later.update(*(re.findall(r"(\w+)=", words) for words in re.findall(r"\.values\.update\((.*)\)", text)))
    found = []
    for call in (node for node in ast.walk(code) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        if name == "Seen":
            found.append({str(word.arg) for word in call.keywords})
        elif name in _HELPERS:
            found += _given(_FUNCTIONS[name])
    # Text and lines are evidence alone.
    if "str" in of_type and ("def " in text or not found):
        found.append(set())
    yield from ({*one, *later} for one in found)


def _variants(row: Mapping[str, Any]) -> list[set[str]]:
    if "xid" in row:
        return [{"bus"}, *([{*re.compile(row["kernel_log"]).groupindex}] if "kernel_log" in row else [])]
    if "kernel_log" in row:
        return [{*re.compile(row["kernel_log"]).groupindex}]
    if "smi" in row:
        return [*_given(_FUNCTIONS["reported"])]
    if {"docker_log", "failed_unit"} & {*row}:
        return [set()]
    name = row["name"].replace("-", "_")
    number = re.fullmatch(r"nvidia-smi-(\d+)", row["name"])
    if number:
        words = smi.exits()[int(number[1])]
        return [{word for word, text in (("meaning", words.what), ("next_step", words.next_step)) if text}]
    return [*_given(_FUNCTIONS[name] if name in _FUNCTIONS else _LAMBDAS[row["name"]])]


def _fields(text: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(text) if name is not None]


@pytest.fixture(scope="module")
def x(tmp_path_factory: pytest.TempPathFactory) -> HostSnapshot:
    return replace(examined(healthy(tmp_path_factory.mktemp("host"))), other_smi=Smi())


def _has(x: HostSnapshot, name: str) -> bool:
    with contextlib.suppress(AttributeError, KeyError):
        return Formatter().get_field(name, (), {"x": x, "edit": ""}) is not None
    return False


def _without_value(x: HostSnapshot, row: Mapping[str, Any]) -> set[str]:
    """Return the words that some result of a row's condition lacks."""
    missing = set()
    variants = _variants(row)
    for given in variants:
        for word in ("meaning", "next_step"):
            # A condition's own words may be empty: any of its names serves those of the row then.
            values = set().union(*variants) if word in given else given
            names = set(_fields(row.get(word, ""))) - values - _COMMANDS
            missing |= {name for name in names if not _has(x, name)} | ({word} - given if not row.get(word) else set())
    return missing


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row["name"])
def test_each_word_of_a_rule_has_its_value(x: HostSnapshot, row: Mapping[str, Any]) -> None:
    assert _without_value(x, row) == set()


@pytest.mark.parametrize(("name", "word", "text", "lacks"), [
    ("xid-48", "meaning", "of {xbus}", "xbus"),
    ("fallen-off-bus", "next_step", "{reboot}", "reboot"),
    ("known-problem", "meaning", "", ""),
    ("toolkit-missing", "next_step", "{install_packages}", "install_packages"),
    ("headers-missing", "meaning", "{x.host.kernel.xrelease}", "x.host.kernel.xrelease"),
    ("log-driver-unreachable", "meaning", "{driver}", "driver"),
    ("ldconfig-missing", "next_step", "sed {lines}", "lines"),
    ("nvidia-smi-12", "next_step", "", ""),
    ("secure-boot-unsigned", "next_step", "{enroll}", "enroll"),
    ("nvidia-smi-18", "next_step", "", "next_step"),
])  # fmt: skip
def test_a_wrong_name_is_seen(x: HostSnapshot, name: str, word: str, text: str, lacks: str) -> None:
    row = next(row for row in _ROWS if row["name"] == name)
    assert _without_value(x, {**row, word: text}) == ({lacks} if lacks else set())


def test_every_rule_and_every_exit_code_has_its_row() -> None:
    assert {row["name"] for row in _ROWS} == {rule.name for rule in RULES}
    assert {f"nvidia-smi-{code}" for code in smi.exits()} <= {row["name"] for row in _ROWS}


def test_no_word_of_health_is_left_open() -> None:
    for row in health.rules()["rules"]:
        assert not _fields(f"{row['what']} {health.next_step(row['next'], 0)}")
    xids = tables.packaged(tables.XIDS)
    assert not _fields(" ".join([*xids["actions"].values(), *(one["what"] for one in (*xids["xids"], *xids["named"]))]))


def test_each_word_about_a_failed_program_has_its_value() -> None:
    known = {"apt": {"listed"}, "rpm": {"listed", "folder"}, "installer": {"install", "remove", "initramfs"},
             "device node": {"path"}}  # fmt: skip
    for program, names in known.items():
        for row in tables.rows(tables.FAILURES, program, Failure):
            assert {*_fields(row.next_step)} <= (names - {"path"} if row.pattern else set())
            assert {*_fields(row.what)} <= names & {"listed", "path"}


def test_each_word_about_a_refused_login_has_its_value() -> None:
    for sign in (*failures("sudo"), *failures("login")):
        assert {*_fields(sign.what)} <= {*re.compile(sign.pattern).groupindex}
