"""A folder that a web server on loopback offers as long as a test has it."""

from __future__ import annotations

import base64
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class QuietHandler(SimpleHTTPRequestHandler):
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

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name for it)
        pass


class LoginHandler(QuietHandler):
    login = "robot:p/w@42"


# The same as a URL has it.
LOGIN_IN_URL, PASSWORD = "robot:p%2Fw%4042", "p/w@42"


@contextmanager
def served(folder: Path, handler: type[QuietHandler] = QuietHandler) -> Iterator[str]:
    """Serve a folder; give its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
