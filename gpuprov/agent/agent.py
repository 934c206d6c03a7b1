"""The agent: runs on a host over SSH, reads a request from stdin, writes events as JSON lines to stdout.

A second process, in its own session, does the work. The first one only relays its events: if the connection drops, the
relay dies with it, and the work continues to its end.
"""

import contextlib
import gc
import json
import os
import re
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

from gpuprov.core.commands import lift_memory_limit, run_command
from gpuprov.core.files import write_whole
from gpuprov.protocol.codec import WrongDataError, load, parse
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, UsageError, resource_problem
from gpuprov.protocol.events import ChangeStarted, Event, EventReader, Finished, Kept, to_line
from gpuprov.protocol.request import Request, request_from_line
from gpuprov.protocol.secrets import masked

LOG_PATH = "/var/log/gpuprov.log"
# Of some hundred crashes; nothing rotates it.
_LOG_BYTES = 1 << 20
# The agent's only argument: what to do with the request. With JOB, a second line of input holds the job's id.
JOB = "job"
# Argument that gpuprov-watch.service passes instead: there is no request, the host has a stored specification.
WATCH = "watch"
# A line that the caller may write after the request: stop, unless a change has begun.
STOP = "stop"
_CHUNK = 1 << 16
# docker's client reserves a gigabyte of addresses.
ADDRESSES = 2 << 30
# logind.conf(5), KillUserProcesses=; its folders.
_ENDS_LEFT = re.compile(r"^[ \t]*KillUserProcesses[ \t]*=[ \t]*(yes|true|on|1|y|t)\b", re.IGNORECASE | re.MULTILINE)
_CONFIGURATION = ("/etc", "/run", "/usr/local/lib", "/usr/lib")
# org.freedesktop.systemd1(5): what `systemd-run --scope` calls.
_START_SCOPE = (
    "busctl", "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager",
    "StartTransientUnit", "ssa(sv)a(sa(sv))",
)  # fmt: skip
_SCOPE_SECONDS = 10
# Carries out a request in a new session and writes its events into a pipe; returns its exit code.
Work = Callable[[Request, int], int]
_REPORT = "controller and agent do not understand each other: rebuild the collection, or report it"


def main(compile_late: Callable[[], None] = lambda: None) -> None:
    """Serve the one request on standard input, then exit with its exit code; a job reports its result in its file."""
    if sys.argv[1:] == [WATCH]:
        from gpuprov.agent import watch

        raise SystemExit(watch.main())
    try:
        lift_memory_limit(ADDRESSES)
        request = request_from_line(sys.stdin.readline())
        own = os.path.abspath(sys.argv[0])  # noqa: PTH100
        # The path stays valid for a run that a reboot interrupts: it then starts otherwise.
        request = replace(request, agent=request.agent or (own if own.endswith(".pyz") else ""))
    except GpuprovError as error:
        sys.stdout.write(to_line(Finished(int(error.exit_code), problems=error.problems)) + "\n")
        raise SystemExit(int(error.exit_code)) from None
    if sys.argv[1:] == [JOB]:
        begin(request, job_from_line(sys.stdin.readline()), _work)
        return
    # Ended by it before it is listened to, the worker would leave no result.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    worker, reading = start_worker(request, _work)
    if request.command == "install":
        compile_late()
    raise SystemExit(_relay(worker, reading))


def _relay(worker: int, reading: int) -> int:
    """Copy the worker's events to stdout, pass on signals to stop, and return the worker's exit code."""

    def send(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, number)

    def stop(number: int, _frame: object) -> None:
        # A login that logind ends is sent SIGTERM, then SIGHUP, which ends this process before it asks anybody to stop.
        time.sleep(0.5 if number == signal.SIGTERM else 0)
        send(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with selectors.DefaultSelector() as inputs:
        inputs.register(reading, selectors.EVENT_READ)
        # What the caller says after the request. A regular file can't be waited for.
        with contextlib.suppress(OSError):
            inputs.register(0, selectors.EVENT_READ)
        while reading in inputs.get_map():
            for key, _ in inputs.select():
                data = os.read(key.fd, _CHUNK)
                if not data:
                    inputs.unregister(key.fd)
                elif key.fd == reading:
                    try:
                        sys.stdout.buffer.write(data)
                        sys.stdout.buffer.flush()
                    except OSError:
                        # The connection is lost: exit silently; the worker continues without a reader.
                        os._exit(0)
                elif STOP.encode() in data:
                    send(signal.SIGUSR1)
    _, status = os.waitpid(worker, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def start_worker(request: Request, work: Callable[[Request, int], int]) -> tuple[int, int]:
    """Start a process that works on the request; return its id and the read end of the pipe for its events."""
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(reading)
        os._exit(work(request, writing))
    os.close(writing)
    return worker, reading


def _work(request: Request, writing: int) -> int:
    """Carry out the request in a new session."""
    _detach()
    sink = Kept(ChangeStarted, _pipe_sink(writing))
    asked: set[int] = set()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: asked.add(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})

    def stop_requested() -> bool:
        """Say whether to stop after the current change; at SIGUSR1 only if none has begun."""
        return bool(asked - {signal.SIGUSR1}) or (bool(asked) and not sink.events)

    try:
        # Imported here: the relay does not need it, and forking a small process is cheap. Garbage collection during
        # imports finds nothing and takes a tenth of their time.
        gc.disable()
        from gpuprov.agent.run import run_request

        gc.freeze()
        gc.enable()
        code = int(run_request(request, sink, stop_requested=stop_requested))
        if request.command == "uninstall" and not request.check and code == 0:
            _remove_agents(sys.argv[0])
        return code
    except BaseException as error:
        _log(masked(traceback.format_exc()))
        seen, step = masked(f"{error!r}"), f"see {LOG_PATH} on the host"
        problem = resource_problem(error) or Problem("gpuprov itself failed: this is a bug", seen, step)
        sink(Finished(int(ExitCode.FAILED), problems=(problem,)))
        return int(ExitCode.FAILED)


def _detach() -> None:
    """Begin a new session with nothing of the connection open, or the controller waits for it."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    with contextlib.suppress(OSError):
        _leave_login()


def _leave_login() -> None:
    """Let systemd move this process out of the login's scope, if logind ends what a login leaves there."""
    places = (place for folder in _CONFIGURATION for place in Path(folder, "systemd").glob("logind.conf*"))
    files = (path for place in places for path in (place.glob("*.conf") if place.is_dir() else (place,)))
    if "/session-" in Path("/proc/self/cgroup").read_text("utf-8") and any(
        _ENDS_LEFT.search(path.read_text("utf-8", "replace")) for path in files
    ):
        own = str(os.getpid())
        scope = (f"gpuprov-{own}.scope", "fail", "1", "PIDs", "au", "1", own, "0")
        run_command((*_START_SCOPE, *scope), timeout=_SCOPE_SECONDS, stdin=b"", env=None, on_line=None)


def _remove_agents(argument: str) -> None:
    """Remove the pushed agents, and their folders if these are empty then."""
    folder = Path(argument).parent
    if folder.parts[-2:] != (".cache", "gpuprov"):
        return
    with contextlib.suppress(OSError):
        for path in (*folder.glob("agent-*.pyz"), *folder.glob(".agent-*")):
            path.unlink()
        folder.rmdir()
        folder.parent.rmdir()


def _pipe_sink(writing: int) -> Callable[[Event], None]:
    """Return a sink that writes into the pipe, and drops events once nobody reads it."""

    def sink(event: Event) -> None:
        with contextlib.suppress(OSError), os.fdopen(writing, "wb", closefd=False) as pipe:
            pipe.write(to_line(event).encode() + b"\n")

    return sink


def _log(text: str) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(LOG_PATH, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w") as file:
            if os.fstat(handle).st_size > _LOG_BYTES:
                file.truncate(0)
            file.write(text)


# -- requests that continue after the controller disconnects: Ansible's `async` -------------------------------------


@dataclass(frozen=True)
class Job:
    """A job as the controller names it: its id, the folder of its file, its command, its time limit in seconds.

    The file is the one that Ansible's async_status reads (ansible-core, modules/async_wrapper.py and async_status.py):
    it has the key `started` while the job runs, and holds the task's result afterwards.
    """

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
        ends = {"started": True, "finished": False}
        return {**ends, "ansible_job_id": self.id, "results_file": f"{self.folder}/{self.id}"}


def job_from_line(line: str) -> Job:
    """Return the job of a line. Raises GpuprovError for an id that is no safe file name."""
    try:
        job = load(Job, parse(line), trusted=True, exact=True)
    except WrongDataError as error:
        raise UsageError("this is no job", str(error), _REPORT) from None
    if not job.id.replace(".", "").isalnum() or job.id.startswith("."):
        raise UsageError("a job's id is letters, digits and dots", repr(job.id), _REPORT)
    return job


def begin(request: Request, job: Job, work: Work) -> None:
    """Continue in a child process; returns in the parent only."""
    job.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def store(content: dict[str, Any]) -> None:  # atomically: the controller reads the file while the job runs
        write_whole(job.path, json.dumps(content).encode(), 0o600, None)

    store(job.started())
    if os.fork() != 0:
        return
    _detach()
    try:
        store({**_result(job, request, work), "ansible_job_id": job.id})
    finally:
        os._exit(0)


def _result(job: Job, request: Request, work: Work) -> dict[str, Any]:
    """Return the task's result from the events of the whole run, which after its time limit is asked to stop."""
    from gpuprov.agent.playbook_task import failure, task_result

    worker, reading = start_worker(request, work)
    too_late = threading.Timer(job.seconds, os.kill, (worker, signal.SIGTERM))
    too_late.daemon = True
    too_late.start()
    try:
        with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
            read = EventReader()
            events = tuple(event for line in lines if (event := read(line)) is not None)
        too_late.cancel()
        os.waitpid(worker, 0)
        if read.finished is None:
            seen = "the job's process was killed, or the host went down"
            raise GpuprovError("the agent ended without a result", seen, "run the same task again; it resumes that run")
    except GpuprovError as error:
        return failure(error).answer({})
    return task_result(job.command, events).answer(job.local_facts)


if __name__ == "__main__":
    main()
