"""The agent: what runs on a host at the end of an SSH connection; a request on stdin, events as JSON lines on stdout.

The work is done by a second process in a session of its own. The first one only relays its events: when the connection
drops, the relay dies with it and the work goes on to its end, into the host's own log.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Callable

from gpuprov.agent.worker import start_worker
from gpuprov.wire.errors import ExitCode, GpuprovError, Problem
from gpuprov.wire.events import Event, Finished, to_line
from gpuprov.wire.request import Request, request_from_line

LOG_PATH = "/var/log/gpuprov.log"
# The agent's one word: what to do with the request, behind which a second line then says whose job it is.
JOB = "job"


def main() -> None:
    """Serve the one request on standard input, then exit with its exit code; a job's is told by its file."""
    try:
        request = request_from_line(sys.stdin.readline())
    except GpuprovError as error:
        _print(to_line(Finished(int(error.exit_code), problems=error.problems)))
        raise SystemExit(int(error.exit_code)) from None
    if sys.argv[1:] == [JOB]:
        from gpuprov.agent import background

        background.begin(request, background.job_from_line(sys.stdin.readline()), _work)
        return
    raise SystemExit(_relay(*start_worker(request, _work)))


def _relay(worker: int, reading: int) -> int:
    """Copy the worker's events to stdout; hand a request to stop on to it; return its exit code."""

    def stop(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with os.fdopen(reading, "rb") as events:
        for line in events:
            try:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            except OSError:
                # The connection is gone. Leave quietly; the worker notices that nobody listens, and goes on.
                os._exit(0)
    _, status = os.waitpid(worker, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _work(request: Request, writing: int) -> int:
    """Carry the request out in a session of its own."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = _StopFlag()
    signal.signal(signal.SIGINT, stop.set)
    signal.signal(signal.SIGTERM, stop.set)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    sink = _pipe_sink(writing)
    try:
        # Here and not above: the relay needs none of it, and a fork of a small process is cheap. What imports make is
        # not garbage: looking for some among it takes a tenth of their time.
        gc.disable()
        from gpuprov.agent.run import run_request

        gc.freeze()
        gc.enable()
        code = int(run_request(request, sink, stop_requested=stop))
        if request.command == "uninstall" and not request.check and code == 0:
            _remove_agents(sys.argv[0])
        return code
    except BaseException:
        _log(traceback.format_exc())
        problem = Problem(
            "gpuprov itself failed: this is a bug", f"{sys.exc_info()[1]!r}", f"see {LOG_PATH} on the host"
        )
        sink(Finished(int(ExitCode.FAILED), problems=(problem,)))
        return int(ExitCode.FAILED)


def _remove_agents(argument: str) -> None:
    """Remove the agents that controllers pushed, and their folders if nothing else is in them; running code stays."""
    from pathlib import Path

    folder = Path(argument).parent
    if folder.parts[-2:] != (".cache", "gpuprov"):
        return
    with contextlib.suppress(OSError):
        for path in (*folder.glob("agent-*.pyz"), *folder.glob(".agent-*")):
            path.unlink()
        folder.rmdir()
        folder.parent.rmdir()


class _StopFlag:
    """Set by a signal, asked between two changes."""

    def __init__(self) -> None:
        self._requested = False

    def set(self, number: int, frame: FrameType | None) -> None:
        self._requested = True

    def __call__(self) -> bool:
        return self._requested


def _pipe_sink(writing: int) -> Callable[[Event], None]:
    """Return a sink that writes into the pipe as long as somebody reads it, and afterwards drops what it gets."""
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
