"""The agent fails: one sentence for the user, the traceback in a log with a bound; too little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprov.protocol.codec import dump
from gpuprov.protocol.request import Request

_AGENT = """
import sys
from gpuprov.agent import agent, run

def defect(*_, **__):
    raise error

agent.LOG_PATH, error, run.run_request = sys.argv.pop(1), eval(sys.argv.pop(1)), defect
agent.main()
"""


def crash(log: Path, error: str = "ZeroDivisionError('a defect')") -> subprocess.CompletedProcess[str]:
    request = dump(Request("facts", run_id="r"))
    return subprocess.run(
        (sys.executable, "-c", _AGENT, str(log), error), input=f"{request}\n", capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def test_a_defect_is_one_sentence_and_a_traceback_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "gpuprov.log"
    done = crash(log)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    (problem,) = json.loads(done.stdout.splitlines()[-1])["problems"]
    assert problem["what"] == "gpuprov itself failed: this is a bug"
    assert problem["next_step"] == f"see {log} on the host"
    assert "ZeroDivisionError: a defect" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "error", ["MemoryError()", "OSError(12, 'Cannot allocate memory')", 'RuntimeError("can\'t start new thread")']
)
def test_no_memory_is_no_defect(tmp_path: Path, error: str) -> None:
    done = crash(tmp_path / "gpuprov.log", error)
    assert (done.returncode, done.stderr) == (1, "")
    (problem,) = json.loads(done.stdout.splitlines()[-1])["problems"]
    assert problem["what"] == "gpuprov ran out of memory"
    assert "ulimit -v" in problem["next_step"]


@pytest.mark.parametrize("program", ["gpuprov", "gpuprov.agent.agent"])
def test_a_low_limit_of_memory_is_named_before_anything_else(program: str, tmp_path: Path) -> None:
    # Root may lift it, unless it lacks the capability.
    unprivileged = ("setpriv", "--bounding-set=-sys_resource") if os.geteuid() == 0 else ()
    done = subprocess.run(
        (*unprivileged, "prlimit", "--as=100000000", sys.executable, "-m", program, "facts"), capture_output=True,
        text=True, timeout=60, check=False, input=f"{dump(Request('facts', run_id='r'))}\n",
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert "this login may use too little memory" in said and "ulimit -v: 97656" in said
    assert "Traceback" not in said


@pytest.mark.root
def test_what_dockers_client_needs_is_required_on_this_machine_too() -> None:
    """With less, Go prints its stack, and docker would seem not to answer."""
    done = subprocess.run(
        ("setpriv", "--bounding-set=-sys_resource", "prlimit", "--as=800000000", sys.executable, "-m", "gpuprov",
         "verify"), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "gpuprov and its programs need 2097152 KiB of addresses\n  seen: ulimit -v: 781250" in done.stderr


def test_the_limit_of_memory_is_lifted_if_possible() -> None:
    lift = "import resource; from gpuprov.core.commands import lift_memory_limit as lift; lift(1 << 30)"
    done = subprocess.run(
        ("prlimit", f"--as=100000000:{4 << 30}", sys.executable, "-c", f"{lift}; print(resource.getrlimit(9)[0])"),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() in ("-1", str(4 << 30)), done.stderr


@pytest.mark.parametrize("size", [1000, 2 << 20])
def test_a_large_log_is_emptied_first(tmp_path: Path, size: int) -> None:
    log = tmp_path / "gpuprov.log"
    log.write_text("old\n" * (size // 4))
    crash(log)
    assert log.read_text().startswith("old") == (size == 1000)
    assert "ZeroDivisionError" in log.read_text()
    assert log.stat().st_size < 1 << 20
