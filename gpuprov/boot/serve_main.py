"""The server of `gpuprov serve`: 127.0.0.1:3476 and a Unix socket of root's, GET only, all resources bounded.

With systemd socket activation (sd_listen_fds(3)), it makes no sockets and exits after two idle minutes.
serve_answers.py computes the responses.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus

from gpuprov.boot.gpu_report import GpuReport
from gpuprov.boot.serve_answers import Answer, Answers, refusal
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError

ADDRESS = ("127.0.0.1", 3476)
SOCKET = "/run/gpuprov/serve.sock"
# A whole request, its line and headers. There is no body.
LARGEST_REQUEST = 8192
# Seconds to receive a request, and to send its response.
REQUEST_SECONDS = 5.0
MOST_AT_ONCE = 8
# After a response, how much unread input is drained: number of reads, and seconds for each.
_MOST_DRAINED = 16
_DRAIN_SECONDS = 0.5
# Longer than any answer takes.
_IDLE_SECONDS = 120.0
_FIRST_HANDED_OVER = 3
_END_OF_HEAD = (b"\r\n\r\n", b"\n\n")


def handed_over() -> list[socket.socket]:
    """Return the sockets that systemd passes, none without socket activation."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    count = int(os.environ.get("LISTEN_FDS", "0"))
    return [socket.socket(fileno=number) for number in range(_FIRST_HANDED_OVER, _FIRST_HANDED_OVER + count)]


def own_sockets(address: tuple[str, int] = ADDRESS, path: str = SOCKET) -> list[socket.socket]:
    """Return listening sockets; the Unix socket, for root only, is made only by root. Raises GpuprovError."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(MOST_AT_ONCE)
        return [made, _unix_socket(path)] if os.geteuid() == 0 else [made]
    except GpuprovError:
        made.close()
        raise
    except OSError as error:
        made.close()
        where = f"{address[0]}:{address[1]}"
        raise GpuprovError(
            f"{where} can't be used", str(error), f"ss -ltnp 'sport = :{address[1]}' names the program that has it"
        ) from None


def _unix_socket(path: str) -> socket.socket:
    """Return a socket that only root may connect to, in a folder that only root may write."""
    folder = os.path.dirname(path)  # noqa: PTH120
    os.makedirs(folder, mode=0o755, exist_ok=True)  # noqa: PTH103
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
        raise GpuprovError(
            f"{folder} is not a folder that root alone may write", oct(found.st_mode), f"ls -ld {folder}"
        )
    if os.path.lexists(path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            if asked.connect_ex(path) == 0:
                raise GpuprovError(f"another program listens on {path}", "", "systemctl stop gpuprov-serve.socket")
        os.unlink(path)  # noqa: PTH108
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        made.bind(path)
    finally:
        os.umask(before)
    made.listen(MOST_AT_ONCE)
    return made


class _Slots:
    """A bounded number of connections. A new one takes the slot of the oldest that keeps the server waiting.

    Else idle connections of one user would shut out all others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Whether the server works on it; in the order of their arrival.
        self._busy: dict[socket.socket, bool] = {}

    def take(self, connection: socket.socket) -> bool:
        """Give a slot to a connection; return False if the server works on all that have one."""
        with self._lock:
            if len(self._busy) >= MOST_AT_ONCE:
                idle = next((one for one, busy in self._busy.items() if not busy), None)
                if idle is None:
                    return False
                del self._busy[idle]
                with contextlib.suppress(OSError):
                    idle.shutdown(socket.SHUT_RDWR)
            self._busy[connection] = False
            return True

    def mark(self, connection: socket.socket, *, busy: bool) -> bool:
        """Say whether the server works on a connection now; return False if the connection has lost its slot."""
        with self._lock:
            known = connection in self._busy
            if known:
                self._busy[connection] = busy
            return known

    def release(self, connection: socket.socket) -> None:
        """Free the connection's slot, if it still has one."""
        with self._lock:
            self._busy.pop(connection, None)


class Server:
    """Serve requests on listening sockets, each in its own thread, a bounded number at once."""

    def __init__(self, sockets: Sequence[socket.socket], answers: Answers, *, seconds: float = REQUEST_SECONDS) -> None:
        self._sockets = sockets
        self._answers = answers
        self._seconds = seconds
        # One socket's clients, whom any user may be, take no slot of the other, which is root's.
        self._slots = {one: _Slots() for one in sockets}
        for one in sockets:
            one.setblocking(False)

    def serve(self, *, idle_seconds: float | None = None) -> None:
        """Serve until the process ends, or until no request arrives for that long."""
        while True:
            ready, _, _ = select.select(self._sockets, (), (), idle_seconds)
            if not ready:
                return
            for listening in ready:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    continue  # it has gone again
                self._take(connection, self._slots[listening])

    def close(self) -> None:
        """Close the sockets, and remove the unix socket's file."""
        for one in self._sockets:
            if one.family == socket.AF_UNIX:
                os.unlink(one.getsockname())  # noqa: PTH108
            one.close()

    def _take(self, connection: socket.socket, slots: _Slots) -> None:
        if not slots.take(connection):
            # Without waiting: who has all slots must not hold this thread too.
            with connection:
                _send(connection, refusal(503, "too many requests at once"), 0)
                _drain(connection, 0)
            return
        threading.Thread(target=self._handle, args=(connection, slots), daemon=True).start()

    def _handle(self, connection: socket.socket, slots: _Slots) -> None:
        try:
            with connection:
                deadline = time.monotonic() + self._seconds
                head = _head(connection, deadline)
                if not slots.mark(connection, busy=True):
                    return
                answer = self._answers.answer(*head) if isinstance(head, tuple) else head
                deadline = time.monotonic() + self._seconds
                _send(connection, answer, deadline)
                slots.mark(connection, busy=False)
                _drain(connection, deadline)
        except OSError:
            pass  # the client disconnected
        finally:
            slots.release(connection)


class _Parser(http.server.BaseHTTPRequestHandler):
    """Parse a request's head from memory by the standard library's rules; sends no response itself."""

    def __init__(self, head: bytes) -> None:
        self.rfile = io.BytesIO(head)
        self.problem = ""
        self.raw_requestline = self.rfile.readline(LARGEST_REQUEST)
        self.whole = self.parse_request() and bool(self.request_version != "HTTP/0.9")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.problem = self.problem or message or "the request is not valid"

    def handle_expect_100(self) -> bool:
        return True


def _head(connection: socket.socket, deadline: float) -> tuple[str, str, list[str]] | Answer:
    """Return (method, target, hosts) of a request that arrived whole in time, else the error response."""
    received = b""
    while not any(end in received for end in _END_OF_HEAD):
        left = deadline - time.monotonic()
        if len(received) > LARGEST_REQUEST:
            return refusal(431, f"a request has at most {LARGEST_REQUEST} bytes")
        if left <= 0:
            return refusal(408, "the request did not come in time")
        connection.settimeout(left)
        try:
            more = connection.recv(4096)
        except socket.timeout:
            continue
        if not more:
            return refusal(400, "the request ends too early")
        received += more
    parsed = _Parser(received)
    if not parsed.whole:
        return refusal(400, parsed.problem or "the request is not valid")
    return parsed.command, parsed.path, parsed.headers.get_all("Host", [])


def _send(connection: socket.socket, answer: Answer, deadline: float) -> None:
    """Send a response; stop when the client stops reading."""
    body = answer.body.encode()
    head = (
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\nContent-Type: {answer.type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\nCache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\n\r\n"
    )
    left = memoryview(head.encode() + body)
    try:
        while left:
            connection.settimeout(max(deadline - time.monotonic(), 0))
            left = left[connection.send(left) :]
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def _drain(connection: socket.socket, deadline: float) -> None:
    """Read what the client still sends: unread input makes the kernel reset the connection, and loses the response."""
    with contextlib.suppress(OSError):
        for _ in range(_MOST_DRAINED):
            connection.settimeout(min(max(deadline - time.monotonic(), 0), _DRAIN_SECONDS))
            if not connection.recv(LARGEST_REQUEST):
                return


def serve(system: System) -> str:
    """Serve on systemd's sockets, or on own ones, until Ctrl-C; return why it ended."""
    sockets = handed_over()
    server = Server(sockets or own_sockets(), Answers(GpuReport(system)))
    if sockets:
        server.serve(idle_seconds=_IDLE_SECONDS)
        return "nobody has asked for a while"
    try:
        server.serve()
    except (KeyboardInterrupt, SystemExit):  # gpuprov's own handler raises the second
        server.close()
    return "stopped"
