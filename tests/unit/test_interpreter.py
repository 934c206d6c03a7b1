"""The Python that runs as root at container starts: who could replace it, which one is taken, and what is kept."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov.core.system import System
from gpuprov.facts.boot import NODES, UNITS
from gpuprov.facts.host import gather
from gpuprov.facts.interpreter import MISSING, Interpreter, bytecode_is_current, compile_bytecode, gather_interpreter
from gpuprov.plan.context import PlanContext
from gpuprov.plan.preflight import preflight
from gpuprov.protocol.spec import parse_spec
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, deployed_files, python_of, render_launcher
from tests import simgpu
from tests.files import put
from tests.pythons import VERSIONS
from tests.unit.fake_host import PYTHON, FakeHost

pytestmark = pytest.mark.root
USUAL = f"/usr/bin/{PYTHON}"


def another(host: FakeHost, path: str) -> str:
    """Put a Python that runs at a path, in a folder of its own."""
    put(host.path(path), "", 0o755)
    return path


def test_links_are_followed_and_the_path_without_them_is_recorded(host: FakeHost) -> None:
    found = gather_interpreter(host, "/usr/bin/python3")
    assert (found.path, found.deployed, found.fault) == (USUAL, "/usr/bin/python3", "")


def test_the_distributions_new_python_stands_in_for_the_one_that_it_replaced(host: FakeHost) -> None:
    """And for no other: where python3 leads to an older one, or to none that will do, nothing starts."""
    gone = gather_interpreter(host, "/usr/bin/python3.8")
    assert (gone.path, gone.fault, gone.replaced) == (USUAL, MISSING, True)
    other = another(host, f"/opt/py/{PYTHON}")
    host.path("/usr/bin/python3").unlink()
    host.path("/usr/bin/python3").symlink_to(other)
    os.chown(host.path(other), 1000, 0)
    assert not gather_interpreter(host, "/usr/bin/python3.8").replaced


def staff_may_write(host: FakeHost) -> None:
    """As Debian 12 has /usr/local."""
    os.chown(host.path("/opt/py"), 0, 50)
    host.change_mode("/opt/py", 0o2775)


SPOILS: dict[str, tuple[Callable[[FakeHost], object], str]] = {
    "a user's program": (lambda host: os.chown(host.path(f"/opt/py/{PYTHON}"), 1000, 0), "belongs to user 1000"),
    "a user's folder": (lambda host: os.chown(host.path("/opt"), 1000, 1000), "/opt belongs to user 1000"),
    "everybody's folder": (lambda host: host.change_mode("/opt/py", 0o777), "/opt/py can be written"),
    "a sticky folder": (lambda host: host.change_mode("/opt", 0o1777), "/opt can be written"),
    "a group's folder": (staff_may_write, "/opt/py can be written by other users than root (mode 2775)"),
    "everybody's program": (lambda host: host.change_mode(f"/opt/py/{PYTHON}", 0o757), "(mode 0757)"),
    "gone": (lambda host: host.remove(f"/opt/py/{PYTHON}"), MISSING),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_one_that_another_user_could_replace_is_not_run(host: FakeHost, spoil: str) -> None:
    path = another(host, f"/opt/py/{PYTHON}")
    assert gather_interpreter(host, path).path == path
    host.commands.clear()
    change, sentence = SPOILS[spoil]
    change(host)
    found = gather_interpreter(host, path)
    assert (found.path, found.deployed) == (USUAL, path)
    assert sentence in found.fault
    assert path not in {argv[0] for argv in host.commands}


def test_root_s_own_group_may_write(host: FakeHost) -> None:
    host.change_mode("/usr/bin", 0o775)
    assert gather_interpreter(host, "").path == USUAL


@pytest.mark.parametrize("folder", ["/opt/a b", "/opt/$(id)", "/opt/é", "/opt/" + "x" * 200])
def test_a_path_that_a_script_or_a_unit_cannot_hold_is_passed_over(host: FakeHost, folder: str) -> None:
    found = gather_interpreter(host, another(host, f"{folder}/{PYTHON}"))
    assert found.path == USUAL
    assert "characters" in found.fault


def test_the_one_in_use_stays_though_the_distributions_would_do(host: FakeHost) -> None:
    path = another(host, f"/opt/py/{PYTHON}")
    assert gather_interpreter(host, "").path == USUAL
    assert gather_interpreter(host, path).path == path


@pytest.mark.parametrize(("version", "will_do"), [("3.8.18", False), ("3.9.0", True), ("3.14.0", True)])
def test_it_must_be_3_9(host: FakeHost, version: str, will_do: bool) -> None:
    host.python_version = version
    found = gather_interpreter(host, USUAL)
    assert bool(found.path) is will_do
    assert found.fault == ("" if will_do else f"it is Python {version}, older than 3.9")


def test_a_standard_library_that_another_user_can_write_will_not_do(host: FakeHost) -> None:
    os.chown(host.path("/usr/lib"), 1000, 0)
    found = gather_interpreter(host, "")
    assert found.path == ""
    assert found.refused == (f"{USUAL}: its standard library /usr/lib: /usr/lib belongs to user 1000, not to root",)


def test_without_one_nothing_is_planned_and_one_reads_why(host: FakeHost) -> None:
    host.python_version = "3.6.8"
    (problem,) = preflight(PlanContext(gather(host), parse_spec({"driver_version": simgpu.DRIVER_VERSION})))
    assert problem.what.startswith("no Python on this host can run the container runtime")
    assert f"{USUAL}: it is Python 3.6.8, older than 3.9" in problem.evidence
    assert problem.next_step.endswith("apt-get install -y python3")


def test_it_is_read_from_the_launcher_or_from_the_boot_unit(host: FakeHost) -> None:
    unit = f"{UNITS}/{NODES}"
    put(host.path(unit), "[Service]\nExecStart=/usr/bin/python3.9 -I /usr/lib/gpuprov/boot.pyz nodes\n")
    assert gather(host).interpreter.deployed == "/usr/bin/python3.9"
    host.path(LAUNCHER_PATH).write_text(render_launcher("/usr/bin/python3.10"))
    found = gather(host).interpreter
    assert (found.deployed, found.fault, found.path) == ("/usr/bin/python3.10", MISSING, USUAL)
    host.path(LAUNCHER_PATH).write_text("#!/bin/sh\nexec /usr/bin/python3 -I -S -E -B -c 'import gc, sys\n")
    assert gather(host).interpreter.deployed == "/usr/bin/python3"
    assert python_of(b"#!/bin/sh\nexec python3\n") == ""


@pytest.mark.parametrize("python", VERSIONS, indirect=True)
def test_byte_code_belongs_to_the_python_that_runs_it(tmp_path: Path, python: str) -> None:
    """By that Python itself, where the agent runs on another."""
    for path, _, content in deployed_files(python):
        if path.endswith(".py"):
            (tmp_path / path.rpartition("/")[2]).write_bytes(content)
    ask = "import sys; print(sys.implementation.cache_tag)"
    tag = subprocess.run((python, "-c", ask), capture_output=True, text=True, check=True).stdout.strip()
    chosen = Interpreter(python, cache_tag=tag)
    system, folder = System(), str(tmp_path)
    assert not bytecode_is_current(system, chosen, folder)
    compile_bytecode(system, chosen, folder)
    assert bytecode_is_current(system, chosen, folder)
    assert list((tmp_path / "__pycache__").glob(f"main.*.{tag}"))
    assert not bytecode_is_current(system, replace(chosen, cache_tag="another", path="/bin/false"), folder)
    (tmp_path / "errors.py").write_text("")
    assert not bytecode_is_current(system, chosen, folder)
