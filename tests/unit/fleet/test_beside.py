"""A result from another process: its value, its error, and what is left of a child that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprov.fleet.beside import begun_beside
from gpuprov.wire.errors import ExitCode, GpuprovError

_EXAMPLE = Path(__file__).parents[3] / "inventories/example"


def test_the_result_comes_from_another_process() -> None:
    other = begun_beside(os.getpid)()
    assert other != os.getpid()
    with pytest.raises(ChildProcessError):
        os.waitpid(other, os.WNOHANG)


def test_an_error_keeps_all_of_its_problems_and_its_exit_code() -> None:
    def fail() -> None:
        raise GpuprovError("no", "seen", "next", exit_code=ExitCode.USAGE)

    with pytest.raises(GpuprovError) as caught:
        begun_beside(fail)()
    assert caught.value.problems == GpuprovError("no", "seen", "next").problems
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_defect_shows_itself_here() -> None:
    with pytest.raises(ZeroDivisionError):
        begun_beside(lambda: 1 // 0)()


def test_a_child_that_is_killed_is_done_without() -> None:
    here = os.getpid()

    def die_elsewhere() -> str:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return "done here"

    assert begun_beside(die_elsewhere)() == "done here"


def test_an_inventory_read_beside_brings_nothing_of_ansible_along() -> None:
    code = (
        "import sys\n"
        "from gpuprov.fleet.command import Options, _read\n"
        f"found = _read(Options('install', hosts=({str(_EXAMPLE)!r},)))\n"
        "print(len(found.hosts), found.hosts[0].spec.driver_version, 'ansible' in sys.modules, 'fabric' in sys.modules)"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "7 580.178.04 False True\n"
