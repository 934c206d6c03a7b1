"""Jobs that go on behind the controller's back: what is said at once, and what their file holds in the end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import pytest

from gpuprov.agent.agent import Job, begin, job_from_line
from gpuprov.agent.playbook_task import for_a_job, task_request
from gpuprov.fleet.history import write_log
from gpuprov.protocol.codec import dump
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import Event, FactsGathered, Finished, to_line
from gpuprov.protocol.request import Request
from tests.lab.shell import wait_for


def says(*events: Event) -> Callable[[Request, int], int]:
    def work(request: Request, writing: int) -> int:
        for event in events:
            os.write(writing, f"{to_line(event)}\n".encode())
        return 0

    return work


def waits_for_a_signal(request: Request, writing: int) -> int:
    def stop(number: int, frame: object) -> None:
        os.write(writing, f"{to_line(Finished(1, summary='stopped'))}\n".encode())
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    time.sleep(3600)
    return 0


def result_of(path: Path) -> dict[str, Any]:
    wait_for("the job's end", lambda: "started" not in json.loads(path.read_text()))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_job_is_begun_and_not_finished() -> None:
    """ansible-core 2.21 warns of numbers."""
    started = Job("j1.2", "~/.ansible_async", "verify", 30).started()
    assert (started["started"], started["finished"]) == (True, False)
    assert isinstance(started["started"], bool) and isinstance(started["finished"], bool)


def test_the_file_has_the_result(tmp_path: Path) -> None:
    job = Job("j12.34", str(tmp_path / "jobs"), "facts", 60, {"other": 1})
    begin(Request("facts"), job, says(FactsGathered({"gpus": []}), Finished(0, summary="seen")))
    result = result_of(job.path)
    assert (result["failed"], result["msg"], result["ansible_job_id"]) == (False, "seen", "j12.34")
    assert result["ansible_facts"] == {"ansible_local": {"other": 1, "gpuprov": {"gpus": []}}}
    assert [path.name for path in job.path.parent.iterdir()] == ["j12.34"]
    assert job.path.stat().st_mode & 0o777 == 0o600


def test_a_job_that_takes_too_long_is_asked_to_stop(tmp_path: Path) -> None:
    job = Job("j1.1", str(tmp_path), "install", 0.2)
    # It may come before the run is ready for it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    begin(Request("install"), job, waits_for_a_signal)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert result_of(job.path)["msg"] == "stopped"


def test_a_job_whose_process_dies_has_failed(tmp_path: Path) -> None:
    job = Job("j1.2", str(tmp_path), "install", 60)
    begin(Request("install"), job, says())
    result = result_of(job.path)
    assert result["failed"]
    assert "the agent ended without a result" in result["msg"]


def test_a_job_survives_the_wire() -> None:
    job = Job("j1.2", "~/.ansible_async", "verify", 30, {"a": [1]})
    assert job_from_line(dump(job)) == job


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "j1;rm"])
def test_a_jobs_id_is_no_path(name: str) -> None:
    with pytest.raises(GpuprovError):
        job_from_line(dump(Job(name, "~", "facts", 1)))
    with pytest.raises(GpuprovError):
        job_from_line("{}")


def test_nobody_waits_for_a_jobs_reboot() -> None:
    assert not for_a_job(task_request("install", {"gpuprov_driver_version": "550.163.01"})).caller_returns
    with pytest.raises(GpuprovError, match="can't wait for a reboot"):
        for_a_job(task_request("install", {"gpuprov_reboot": "if-needed"}))
    with pytest.raises(GpuprovError, match="can't wait for a reboot"):
        for_a_job(task_request("doctor", {}, fix=True, allow=["reset", "reboot"]))
    assert for_a_job(task_request("doctor", {}, fix=True, allow=["reset"])).allow == ("reset",)


# -- what ends the agent -----------------------------------------------------------------------------------------------


_AGENT = """
import sys
from gpuprov.agent import agent, run

def defect(*_, **__):
    raise error

agent.LOG_PATH, error, run.run_request = sys.argv.pop(1), eval(sys.argv.pop(1)), defect
agent.main()
"""


def run(*argv: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, input=typed, capture_output=True, text=True, timeout=60, check=False)


REQUEST = f"{dump(Request('facts', run_id='r'))}\n"


def crash(log: Path, error: str = "ZeroDivisionError('a defect')") -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", _AGENT, str(log), error, typed=REQUEST)


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


def test_a_log_of_more_than_a_mebibyte_begins_again(tmp_path: Path) -> None:
    log = tmp_path / "gpuprov.log"
    log.write_bytes(b"x" * (1 << 20))
    crash(log)
    assert "xTraceback" in log.read_text()
    crash(log)
    text = log.read_text()
    assert text.startswith("Traceback") and text.rstrip().endswith("ZeroDivisionError: a defect")


@pytest.mark.parametrize(
    "error", ["MemoryError()", "OSError(12, 'Cannot allocate memory')", 'RuntimeError("can\'t start new thread")']
)
def test_no_memory_is_no_defect(tmp_path: Path, error: str) -> None:
    done = crash(tmp_path / "gpuprov.log", error)
    assert (done.returncode, done.stderr) == (1, "")
    (problem,) = json.loads(done.stdout.splitlines()[-1])["problems"]
    assert problem["what"] == "gpuprov ran out of memory"
    assert "ulimit -v" in problem["next_step"]


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (OSError(28, "No space left on device", "/var/tmp"), "df -h"),
        (OSError(30, "Read-only file system"), "findmnt"),
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']"), "TMPDIR"),
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']"), "`ulimit -f`"),
    ],
)
def test_no_room_is_no_defect(tmp_path: Path, error: OSError, step: str) -> None:
    (problem,) = json.loads(crash(tmp_path / "gpuprov.log", repr(error)).stdout.splitlines()[-1])["problems"]
    assert (problem["what"], write_log(error).what) == ("a file can't be written",) * 2
    assert str(error.strerror) in problem["evidence"]
    assert step in problem["next_step"]


@pytest.mark.parametrize("program", ["gpuprov", "gpuprov.agent.agent"])
def test_a_low_limit_of_memory_is_named_before_anything_else(program: str, tmp_path: Path) -> None:
    # Root may lift it, unless it lacks the capability.
    unprivileged = ("setpriv", "--bounding-set=-sys_resource") if os.geteuid() == 0 else ()
    limited = (*unprivileged, "prlimit", "--as=100000000")
    done = run(*limited, sys.executable, "-m", program, "facts", typed=REQUEST)
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert "this login may use too little memory" in said and "ulimit -v: 97656" in said
    assert "Traceback" not in said


@pytest.mark.root
def test_what_dockers_client_needs_is_required_on_this_machine_too() -> None:
    """With less, Go prints its stack, and docker would seem not to answer."""
    limited = ("setpriv", "--bounding-set=-sys_resource", "prlimit", "--as=800000000")
    done = run(*limited, sys.executable, "-m", "gpuprov", "verify")
    assert (done.returncode, done.stdout) == (1, "")
    assert "gpuprov and its programs need 2097152 KiB of addresses\n  seen: ulimit -v: 781250" in done.stderr


def test_the_limit_of_memory_is_lifted_if_possible() -> None:
    lift = "import resource; from gpuprov.core.commands import lift_memory_limit as lift; lift(1 << 30)"
    code = f"{lift}; print(resource.getrlimit(9)[0])"
    done = run("prlimit", f"--as=100000000:{4 << 30}", sys.executable, "-c", code)
    assert done.stdout.strip() in ("-1", str(4 << 30)), done.stderr
