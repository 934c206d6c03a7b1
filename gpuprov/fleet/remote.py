"""Commands over one SSH connection: their input, their output as it comes, their end; knows nothing of the agent."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gpuprov.core.commands import Completed
from gpuprov.protocol.dataclass import replace

if TYPE_CHECKING:
    from fabric import Connection

_CHUNK = 1 << 15
# A plan with many diffs is a long line, and a run has many lines; but an endless output must not fill the memory.
_LONGEST_LINE = 4 << 20
_MOST_OUTPUT = 64 << 20
_MOST_OF_A_SHORT_COMMAND = 1 << 20
_KEPT_LINES = 40
_LONGEST_KEPT = 500
# How long a host may take to accept a command, and to report its end after its last output.
ACCEPTANCE_SECONDS = 60
_LAST_SESSION_SECONDS = 5
CONNECTION_LOST = 255
TOO_MUCH = 254
SILENT = 253
KILLED = 128  # by a signal; paramiko does not say which
_ENDS = {
    CONNECTION_LOST: "the connection broke", TOO_MUCH: "too much output", SILENT: "no answer",
    KILLED: "killed by a signal",
}  # fmt: skip


class TooMuchError(Exception):
    """The host's output exceeds the limit."""


class LateInput:
    """Writes to a running command's stdin, after what it got at its start; silently nothing before and after it."""

    channel: Any = None

    def __call__(self, data: bytes) -> None:
        with contextlib.suppress(OSError, EOFError):
            if self.channel is not None:
                self.channel.sendall(data)


def run(connection: Connection, command: str, stdin: bytes = b"", *, timeout: float = 60) -> Completed:
    """Run a command to its end. `returncode` is one of the constants above if it does not reach its end."""
    output: list[str] = []
    done = stream(connection, command, output.append, stdin=(stdin,), timeout=timeout, most=_MOST_OF_A_SHORT_COMMAND)
    return replace(done, stdout="".join(f"{line}\n" for line in output))


def stream(
    connection: Connection, command: str, on_line: Callable[[str], None], *, stdin: Iterable[bytes] = (),
    answer: Callable[[str], Iterable[bytes] | None] | None = None, timeout: float | None = None,
    most: int = _MOST_OUTPUT, later: LateInput | None = None,
) -> Completed:  # fmt: skip
    """Run a command and pass each line of its stdout to `on_line` as it arrives; `stderr` in the result is its tail.

    `stdin` is an iterable, so it may exceed memory; with `later` it stays open. `answer` sees each line of stderr and
    returns what to write to stdin; None aborts. `returncode` is 255 if the connection breaks, 253 after `timeout`
    seconds of silence, 254 if the output exceeds `most` bytes.
    """
    from paramiko.ssh_exception import SSHException

    errors: deque[str] = deque(maxlen=_KEPT_LINES)
    channel: Any = None
    try:
        channel = _session(connection)
        channel.settimeout(timeout)
        _begin(channel, command)
        if later is not None:
            later.channel = channel
        reader = threading.Thread(
            target=_read_errors, args=(channel, errors, answer), kwargs={"last": later is None}, daemon=True
        )
        reader.start()
        _write(channel, stdin, last=answer is None and later is None)
        for line in _lines(channel.recv, most):
            on_line(line)
        reader.join(5)
        code = _exit_code(connection, channel)
    except TimeoutError:
        errors.append(f"not a word for {timeout:g} s")
        code = SILENT
    except TooMuchError as error:
        errors.append(str(error))
        code = TOO_MUCH
    except (OSError, EOFError, SSHException) as error:
        errors.append(str(error) or type(error).__name__)
        code = CONNECTION_LOST
    finally:
        # A connection that is breaking can't be closed cleanly.
        with contextlib.suppress(OSError, EOFError, SSHException):
            if channel is not None:
                channel.close()
    return Completed((command,), code, "", "\n".join(errors), ended=_ENDS.get(code, ""))


def _session(connection: Connection) -> Any:
    """Open a session. A server that allows one at a time (MaxSessions) refuses it until it has ended the last one."""
    from paramiko.ssh_exception import ChannelException

    deadline = time.monotonic() + _LAST_SESSION_SECONDS
    while True:
        try:
            return connection.create_session()
        except ChannelException:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _begin(channel: Any, command: str) -> None:
    """Start the command; paramiko itself would wait without a limit for the host to accept it."""
    too_late = threading.Timer(ACCEPTANCE_SECONDS, channel.close)
    too_late.daemon = True
    too_late.start()
    try:
        channel.exec_command(command)
    finally:
        too_late.cancel()


def _exit_code(connection: Connection, channel: Any) -> int:
    if not channel.status_event.wait(ACCEPTANCE_SECONDS):
        return CONNECTION_LOST
    code = int(channel.recv_exit_status())
    if code >= 0:
        return code
    connection.transport.join(0.5)  # its thread may be about to end
    return KILLED if connection.transport.is_active() else CONNECTION_LOST


def _write(channel: Any, pieces: Iterable[bytes], *, last: bool) -> None:
    # A command may end without reading it all; its exit code and stderr say why.
    with contextlib.suppress(OSError):
        for piece in pieces:
            channel.sendall(piece)
        if last:
            channel.shutdown_write()


def _read_errors(
    channel: Any, errors: deque[str], answer: Callable[[str], Iterable[bytes] | None] | None, *, last: bool
) -> None:
    try:
        for line in _lines(channel.recv_stderr, _MOST_OUTPUT):
            errors.append(line[:_LONGEST_KEPT])
            reply = () if answer is None else answer(line)
            if reply is None:
                channel.close()
                return
            if reply:
                _write(channel, reply, last=last)
    except (OSError, EOFError):
        pass  # the same break shows on stdout
    except TooMuchError as error:
        errors.append(str(error))
        channel.close()


def _lines(receive: Callable[[int], bytes], most: int) -> Iterator[str]:
    """Yield lines without their ends. Raises TooMuchError for a line, or an output, that never ends."""
    pending: list[bytes] = []
    waiting = total = 0
    while data := receive(_CHUNK):
        total += len(data)
        if total > most:
            raise TooMuchError(f"more than {most >> 20} MiB of output")
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join((*pending, lines[0]))
            pending, waiting = [], 0
        for line in lines:
            yield line.decode("utf-8", "replace").rstrip("\r")
        pending.append(rest)
        waiting += len(rest)
        if waiting > _LONGEST_LINE:
            raise TooMuchError(f"more than {_LONGEST_LINE >> 20} MiB without a line end")
    if waiting:
        yield b"".join(pending).decode("utf-8", "replace")
