"""Web servers on loopback, as long as a test has them, and ports on which nothing listens."""

import base64
import functools
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Quiet:
    """A handler, before its base class, that prints nothing."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name for it)
        pass


class QuietHandler(Quiet, SimpleHTTPRequestHandler):
    login = ""  # USER:PASSWORD that each request must bring

    def send_head(self) -> Any:
        sent = f"Basic {base64.b64encode(self.login.encode()).decode()}"
        if not self.login or self.headers.get("Authorization") == sent:
            return super().send_head()
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="site"')
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None


class LoginHandler(QuietHandler):
    login = "robot:p/w@42"


# The same as a URL has it.
LOGIN_IN_URL, PASSWORD = "robot:p%2Fw%4042", "p/w@42"


@contextmanager
def served(folder: Path, handler: type[QuietHandler] = QuietHandler) -> Iterator[str]:
    """Serve a folder; give its URL."""
    with serving(functools.partial(handler, directory=str(folder))) as url:
        yield url


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler], context: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve what the handler answers, with a context by https; give the server's URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if context:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"{'https' if context else 'http'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
