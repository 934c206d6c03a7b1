"""Requests that continue after the controller disconnects: Ansible's `async`.

The job's file is the one that Ansible's async_status reads (ansible-core, modules/async_wrapper.py and
async_status.py): it has the key `started` while the job runs, and holds the task's result afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

from gpuprov.agent.worker import start_worker
from gpuprov.protocol.codec import WrongDataError, load, parse
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.events import Event, EventReader, Finished
from gpuprov.protocol.request import Request

# Carries out a request in a new session and writes its events into a pipe; returns its exit code.
Work = Callable[[Request, int], int]


@dataclass(frozen=True)
class Job:
    """A job as the controller names it: its id, the folder of its file, its command, its time limit in seconds."""

    id: str
    folder: str
    command: str
    seconds: float
    local_facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return Path(self.folder).expanduser() / self.id

    def started(self) -> dict[str, Any]:
        """Return what the task answers while the job runs; the controller says it itself, whatever the host answers."""
        return {"started": 1, "finished": 0, "ansible_job_id": self.id, "results_file": f"{self.folder}/{self.id}"}


_REPORT = "controller and agent do not understand each other: rebuild the collection, or report it"


def job_from_line(line: str) -> Job:
    """Return the job of a line. Raises GpuprovError for an id that is no safe file name."""
    try:
        job = load(Job, parse(line), trusted=True, exact=True)
    except WrongDataError as error:
        raise GpuprovError("this is no job", str(error), _REPORT, exit_code=ExitCode.USAGE) from None
    if not job.id.replace(".", "").isalnum() or job.id.startswith("."):
        raise GpuprovError("a job's id is letters, digits and dots", repr(job.id), _REPORT, exit_code=ExitCode.USAGE)
    return job


def begin(request: Request, job: Job, work: Work) -> None:
    """Continue in a child process; returns in the parent only."""
    job.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(job.path, job.started())
    if os.fork() != 0:
        return
    # Close everything of the connection, or the controller waits for it.
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    try:
        _write(job.path, {**_result(job, request, work), "ansible_job_id": job.id})
    finally:
        os._exit(0)


def _events(request: Request, seconds: float, work: Work) -> tuple[Event, ...]:
    """Return the events of the whole run; after its timeout the run is asked to stop between two changes."""
    worker, reading = start_worker(request, work)
    too_late = threading.Timer(seconds, os.kill, (worker, signal.SIGTERM))
    too_late.daemon = True
    too_late.start()
    with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
        read = EventReader()
        events = tuple(event for line in lines if (event := read(line)) is not None)
    too_late.cancel()
    os.waitpid(worker, 0)
    return events


def _result(job: Job, request: Request, work: Work) -> dict[str, Any]:
    from gpuprov.agent.playbook_task import failure, task_result

    try:
        events = _events(request, job.seconds, work)
    except GpuprovError as error:
        return failure(error).answer({})
    if not any(isinstance(event, Finished) for event in events):
        return failure(
            GpuprovError(
                "the agent ended without a result",
                "the job's process was killed, or the host went down",
                "run the same task again; it resumes that run",
            )
        ).answer({})
    return task_result(job.command, events).answer(job.local_facts)


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace the file atomically: the controller reads it while the job runs."""
    temporary = path.with_name(f".{path.name}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(content, file)
    temporary.replace(path)
