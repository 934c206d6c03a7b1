"""A defect of gpuprov's own on a host: one sentence for the user, the traceback in a log with a bound."""

from __future__ import annotations

import json
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
    raise ZeroDivisionError("a defect")

agent.LOG_PATH, run.run_request = sys.argv.pop(1), defect
agent.main()
"""


def crash(log: Path) -> subprocess.CompletedProcess[str]:
    request = dump(Request("facts", run_id="r"))
    return subprocess.run(
        (sys.executable, "-c", _AGENT, str(log)), input=f"{request}\n", capture_output=True, text=True, timeout=60,
        check=False,
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


@pytest.mark.parametrize("size", [1000, 2 << 20])
def test_a_large_log_is_emptied_first(tmp_path: Path, size: int) -> None:
    log = tmp_path / "gpuprov.log"
    log.write_text("old\n" * (size // 4))
    crash(log)
    assert log.read_text().startswith("old") == (size == 1000)
    assert "ZeroDivisionError" in log.read_text()
    assert log.stat().st_size < 1 << 20
