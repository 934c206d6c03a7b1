"""The agent: runs on a host over SSH, reads a request from stdin, writes events as JSON lines to stdout.

A second process, in its own session, does the work. The first one only relays its events: if the connection drops, the
relay dies with it, and the work continues to its end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import sys
import traceback
from dataclasses import replace
from types import FrameType
from typing import Callable

from gpuprov.agent.worker import STOP, StopFlag, start_worker
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.events import Event, Finished, to_line
from gpuprov.protocol.request import Request, request_from_line
from gpuprov.protocol.secrets import masked

LOG_PATH = "/var/log/gpuprov.log"
# The agent's only argument: what to do with the request. With JOB, a second line of input holds the job's id.
JOB = "job"
# Argument that gpuprov-watch.service passes instead: there is no request, the host has a stored specification.
WATCH = "watch"
_CHUNK = 1 << 16


def main() -> None:
    """Serve the one request on standard input, then exit with its exit code; a job reports its result in its file."""
    if sys.argv[1:] == [WATCH]:
        from gpuprov.agent import watch

        raise SystemExit(watch.main())
    try:
        request = request_from_line(sys.stdin.readline())
        # The path stays valid for a run that a reboot interrupts: it then starts otherwise.
        request = replace(request, agent=request.agent or _own_file())
    except GpuprovError as error:
        _print(to_line(Finished(int(error.exit_code), problems=error.problems)))
        raise SystemExit(int(error.exit_code)) from None
    if sys.argv[1:] == [JOB]:
        from gpuprov.agent import background

        background.begin(request, background.job_from_line(sys.stdin.readline()), _work)
        return
    # Ended by it before it is listened to, the worker would leave no result.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    raise SystemExit(_relay(*start_worker(request, _work)))


def _own_file() -> str:
    """Return the path of the file that this agent was started from, "" if it was started in another way."""
    path = os.path.abspath(sys.argv[0])  # noqa: PTH100
    return path if path.endswith(".pyz") else ""


def _relay(worker: int, reading: int) -> int:
    """Copy the worker's events to stdout, pass on signals to stop, and return the worker's exit code."""

    def stop(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGTERM)

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
                elif key.fd != reading:
                    _pass_on(worker, data)
                else:
                    _write(data)
    _, status = os.waitpid(worker, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _pass_on(worker: int, data: bytes) -> None:
    """Tell the worker to stop unless a change has begun, if the caller says so."""
    if STOP.encode() in data:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGUSR1)


def _write(data: bytes) -> None:
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError:
        # The connection is lost: exit silently; the worker continues without a reader.
        os._exit(0)


def _work(request: Request, writing: int) -> int:
    """Carry out the request in a new session."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopFlag()
    signal.signal(signal.SIGINT, stop.set)
    signal.signal(signal.SIGTERM, stop.set)
    signal.signal(signal.SIGUSR1, stop.set_unless_begun)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    sink = stop.watching(_pipe_sink(writing))
    try:
        # Imported here: the relay does not need it, and forking a small process is cheap. Garbage collection during
        # imports finds nothing and takes a tenth of their time.
        gc.disable()
        from gpuprov.agent.run import run_request

        gc.freeze()
        gc.enable()
        code = int(run_request(request, sink, stop_requested=stop))
        if request.command == "uninstall" and not request.check and code == 0:
            _remove_agents(sys.argv[0])
        return code
    except BaseException:
        _log(masked(traceback.format_exc()))
        problem = Problem(
            "gpuprov itself failed: this is a bug", masked(f"{sys.exc_info()[1]!r}"), f"see {LOG_PATH} on the host"
        )
        sink(Finished(int(ExitCode.FAILED), problems=(problem,)))
        return int(ExitCode.FAILED)


def _remove_agents(argument: str) -> None:
    """Remove the pushed agents, and their folders if these are empty then."""
    from pathlib import Path

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
    listening = True

    def sink(event: Event) -> None:
        nonlocal listening
        if not listening:
            return
        try:
            with os.fdopen(writing, "wb", closefd=False) as pipe:
                pipe.write(to_line(event).encode() + b"\n")
        except OSError:
            listening = False

    return sink


def _log(text: str) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(LOG_PATH, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(text)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
