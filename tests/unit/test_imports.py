"""Modules: none has over 500 lines, no import goes round in a circle, a run that changes nothing loads no more than it
needs.
"""

import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

import gpuprov

_EXAMPLE = Path(__file__).parents[2] / "inventories/example"
_READ = (
    "from gpuprov.fleet.command import inventory_of; from gpuprov.fleet.options import Options; "
    f"inventory_of(Options('install', hosts=({str(_EXAMPLE)!r},)))"
)
_GATHER = (
    "from gpuprov.agent.run import run_request; from gpuprov.protocol.request import Request; "
    "run_request(Request('facts'), lambda event: None)"
)


@pytest.mark.parametrize(
    ("code", "without"),
    [
        (_READ, "gpuprov.facts gpuprov.plan gpuprov.agent.run requests tomlkit rich.progress"),
        (_GATHER, "gpuprov.fleet gpuprov.checks gpuprov.doctor gpuprov.agent.uninstall requests tomlkit pynvml http"),
    ],
    ids=["controller", "host"],
)
def test_only_what_is_needed_is_loaded(code: str, without: str) -> None:
    look = f"import sys\n{code}\nprint(sorted(set({without.split()!r}) & set(sys.modules)))"
    done = subprocess.run((sys.executable, "-c", look), capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_no_modules_import_each_other_in_a_cycle() -> None:
    """Imports inside functions and for type checkers count: they too make two modules one."""
    graph = grimp.build_graph("gpuprov")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(reversed(error.args[1]))}")


def test_classes_that_travel_to_hosts_are_made_by_the_quick_dataclass() -> None:
    """The standard library's would generate the methods of each class at every start."""
    package = Path(gpuprov.__file__).parent
    quick = package / "protocol/dataclass.py"
    slow = re.compile(r"^\s*(import dataclasses|from dataclasses import .*\bdataclass\b)", re.MULTILINE)
    assert [path for path in package.rglob("*.py") if path != quick and slow.search(path.read_text())] == []


def test_no_file_of_python_has_more_than_500_lines() -> None:
    """One that has is to be two: what does not fit into one head is not read."""
    clone = Path(gpuprov.__file__).parents[1]
    folders = ("gpuprov", "playbooks", "tests", "tools", "benchmarks")
    lines = {path: path.read_bytes().count(b"\n") for folder in folders for path in (clone / folder).rglob("*.py")}
    assert [str(path.relative_to(clone)) for path, number in lines.items() if number > 500] == []
