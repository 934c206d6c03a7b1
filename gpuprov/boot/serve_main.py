"""The server of `gpuprov serve`: 127.0.0.1:3476 and a Unix socket of root's, GET only, all resources bounded.

With systemd socket activation (sd_listen_fds(3)), it makes no sockets and exits after two idle minutes.
serve_answers.py computes the responses.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuprov.boot.serve_answers import Answer, Answers, gpu_report, refusal
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError

ADDRESS = ("127.0.0.1", 3476)
SOCKET = "/run/gpuprov/serve.sock"
# A whole request, its line and headers. There is no body.
LARGEST_REQUEST = 8192
# Connections of one socket.
MOST_AT_ONCE = 8
# How soon a socket of which all connections were busy accepts the next one.
_TICK_SECONDS = 0.5
# Longer than any answer takes.
_IDLE_SECONDS = 120.0
_FIRST_HANDED_OVER = 3


class Server(http.server.ThreadingHTTPServer):
    """Serve one listening socket, each request in its own thread, a bounded number at once.

    A new connection takes the place of the oldest one that has not sent its request: idle connections of one user
    would shut out all others.
    """

    # TCPServer makes a socket, which is replaced; systemd allows the service no other family.
    address_family = socket.AF_UNIX
    timeout = 0.0

    def __init__(self, listening: socket.socket, answers: Answers) -> None:
        super().__init__(("", 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.socket.setblocking(False)
        self.answers = answers
        self._lock = threading.Lock()
        # Connections that have not sent their request, oldest first; and those that get their answer.
        self._waiting: list[Any] = []
        self._busy: set[Any] = set()

    def has_room(self) -> bool:
        """Say whether another connection may be accepted; until then it waits in the kernel's queue."""
        return len(self._busy) < MOST_AT_ONCE

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a new connection."""
        with self._lock:
            if self._waiting and len(self._waiting) + len(self._busy) >= MOST_AT_ONCE:
                with contextlib.suppress(OSError):
                    self._waiting.pop(0).shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
            self._waiting.append(request)
        super().process_request(request, client_address)

    def begin(self, connection: Any) -> bool:
        """Note that a connection has sent its request; return False if it has lost its place."""
        with self._lock:
            if connection not in self._waiting:
                return False
            self._waiting.remove(connection)
            self._busy.add(connection)
            return True

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and free its place."""
        with self._lock:
            if request in self._waiting:
                self._waiting.remove(request)
            self._busy.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a defect; a client that disconnects is none."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Head:
    """The start of what a client sends; reading on raises HTTPException, which parse_request answers with 431."""

    def __init__(self, file: Any) -> None:
        self._file, self._left, self.close = file, LARGEST_REQUEST, file.close

    def readline(self, size: int) -> bytes:
        if not self._left:
            raise http.client.HTTPException(f"more than {LARGEST_REQUEST} bytes")
        line: bytes = self._file.readline(min(size, self._left))
        self._left -= len(line)
        return line


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection: one request, and its answer."""

    server: Server
    # Seconds without a byte of the request, and to send the answer.
    timeout = 5.0

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]

    def do_GET(self) -> None:
        if self.server.begin(self.connection):
            self._send(self.server.answers.answer(self.path, self.headers.get_all("Host", [])))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self._send(refusal(code, message or "the request is not valid"))

    def _send(self, answer: Answer) -> None:
        status, body = answer
        self.send_response_only(status)
        kind = "application/json" if body.startswith("{") else "text/plain; charset=utf-8"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body.encode())))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass  # any user of the host could fill the journal


def run(servers: Sequence[Server], idle_seconds: float = float("inf")) -> None:
    """Serve until no request has arrived for that long."""
    last = time.monotonic()
    while time.monotonic() - last < idle_seconds:
        for one in select.select([one for one in servers if one.has_room()], (), (), _TICK_SECONDS)[0]:
            one.handle_request()
            last = time.monotonic()


def handed_over() -> list[socket.socket]:
    """Return the sockets that systemd passes, none without socket activation."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    count = int(os.environ.get("LISTEN_FDS", "0"))
    return [socket.socket(fileno=number) for number in range(_FIRST_HANDED_OVER, _FIRST_HANDED_OVER + count)]


def own_sockets(address: tuple[str, int] = ADDRESS, path: str = SOCKET) -> list[socket.socket]:
    """Return listening sockets; the Unix socket, for root only, is made only by root. Raises GpuprovError."""
    try:
        made = socket.create_server(address)
    except OSError as error:
        where = f"{address[0]}:{address[1]}"
        raise GpuprovError(
            f"{where} can't be used", str(error), f"ss -ltnp 'sport = :{address[1]}' names the program that has it"
        ) from None
    if os.geteuid() != 0:
        return [made]
    Path(path).parent.mkdir(mode=0o755, exist_ok=True)
    Path(path).unlink(missing_ok=True)  # of a server that was killed: who runs has the port
    of_root = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        of_root.bind(path)
    finally:
        os.umask(before)
    of_root.listen()
    return [made, of_root]


def serve(system: System) -> str:
    """Serve on systemd's sockets, or on own ones, until Ctrl-C; return why it ended."""
    answers, sockets = Answers(lambda: gpu_report(system, int(system.now()))), handed_over()
    if sockets:
        run([Server(one, answers) for one in sockets], _IDLE_SECONDS)
        return "stopped: no request for a while"
    sockets = own_sockets()
    try:
        run([Server(one, answers) for one in sockets])
    except (KeyboardInterrupt, SystemExit):  # gpuprov's own handler raises the second
        for one in sockets[1:]:
            Path(one.getsockname()).unlink()
    return "stopped"
