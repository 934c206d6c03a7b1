"""Jobs that go on behind the controller's back: what is said at once, and what their file holds in the end."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Callable

import pytest

from gpuprov.agent.agent import Job, begin, job_from_line
from gpuprov.agent.playbook_task import for_a_job, task_request
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
