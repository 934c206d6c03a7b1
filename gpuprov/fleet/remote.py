"""Commands over one SSH connection: their input, their output as it comes, their end; knows nothing of the agent."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gpuprov.system import Completed

if TYPE_CHECKING:
    from fabric import Connection

_CHUNK = 1 << 15
# A line of JSON with a plan full of diffs is long; a host that never ends its line must not fill our memory.
_LONGEST_LINE = 16 << 20
_MOST_OUTPUT = 1 << 20
_KEPT_LINES = 40
CONNECTION_LOST = 255
KILLED = 128  # by a signal; paramiko does not say which


def run(connection: Connection, command: str, stdin: bytes = b"", *, timeout: float = 60) -> Completed:
    """Run a command to its end. `returncode` is 255 if the connection breaks or `timeout` seconds pass in silence."""
    output: list[str] = []
    done = stream(connection, command, output.append, stdin=(stdin,), timeout=timeout)
    return Completed((command,), done.returncode, "".join(f"{line}\n" for line in output), done.stderr)


def stream(
    connection: Connection,
    command: str,
    on_line: Callable[[str], None],
    *,
    stdin: Iterable[bytes] = (),
    answer: Callable[[str], Iterable[bytes] | None] | None = None,
    timeout: float | None = None,
) -> Completed:
    """Run a command and hand each line of its stdout to `on_line` as it comes; `stderr` in the result is its end.

    `stdin` comes in pieces, so that it may be longer than memory. `answer` sees each line of stderr and returns what to
    write to stdin then; returning None gives up.
    """
    channel = connection.create_session()
    channel.settimeout(timeout)
    errors: deque[str] = deque(maxlen=_KEPT_LINES)
    try:
        channel.exec_command(command)
        reader = threading.Thread(target=_read_errors, args=(channel, errors, answer), daemon=True)
        reader.start()
        _write(channel, stdin, last=answer is None)
        for line in _lines(channel.recv):
            on_line(line)
        reader.join(5)
        code = channel.recv_exit_status()
        if code < 0:
            code = KILLED if _is_alive(connection) else CONNECTION_LOST
    except (OSError, EOFError) as error:
        errors.append(str(error) or type(error).__name__)
        code = CONNECTION_LOST
    finally:
        channel.close()
    return Completed((command,), code, "", "\n".join(errors))


def _is_alive(connection: Connection) -> bool:
    """Say whether the connection outlived its command; its thread may be just about to end."""
    connection.transport.join(0.5)
    return bool(connection.transport.is_active())


def _write(channel: Any, pieces: Iterable[bytes], *, last: bool) -> None:
    try:
        for piece in pieces:
            channel.sendall(piece)
        if last:
            channel.shutdown_write()
    except OSError:
        pass  # the command ended without reading it all; its exit code and stderr say why


def _read_errors(channel: Any, errors: deque[str], answer: Callable[[str], Iterable[bytes] | None] | None) -> None:
    try:
        for line in _lines(channel.recv_stderr):
            errors.append(line)
            reply = () if answer is None else answer(line)
            if reply is None:
                channel.close()
                return
            if reply:
                _write(channel, reply, last=True)
    except OSError:
        pass  # the same break shows on stdout


def _lines(receive: Callable[[int], bytes]) -> Iterator[str]:
    """Yield lines without their ends."""
    pending = bytearray()
    while data := receive(_CHUNK):
        *lines, rest = (pending + data).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace").rstrip("\r")
        pending = bytearray(rest)
        if len(pending) > _LONGEST_LINE:
            raise OSError("the host sent a line without an end")
    if pending:
        yield pending.decode("utf-8", "replace")
