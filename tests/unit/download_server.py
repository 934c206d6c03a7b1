"""A web server on loopback that breaks off, lies, refuses and hides, and a host that downloads from it."""

import contextlib
import hashlib
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from gpuprov.core.download import fetch
from gpuprov.core.system import System
from tests.loopback import Quiet, serving

CONTENT = bytes(range(256)) * 12_000  # 3 MB, so that it comes in several pieces
DIGEST = hashlib.sha256(CONTENT).hexdigest()
PIECE = 1 << 16
LOGIN_PAGE = b"\n<!DOCTYPE html><html><title>Proxy log-in</title></html>"


@dataclass
class Site:
    """What the server holds and how it behaves; `asked` records each request's path and Range."""

    files: dict[str, bytes] = field(default_factory=dict)
    # The connection is cut after that many bytes of the body, once for each number.
    cuts: list[int] = field(default_factory=list)
    ranges: bool = True
    # Whether it says how long a file is.
    lengths: bool = True
    status: int = 0
    # Path → where it redirects to.
    moved: dict[str, str] = field(default_factory=dict)
    # Answers before the real one: HTTP errors, or 0 for a connection that is reset.
    troubles: list[int] = field(default_factory=list)
    retry_after: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    @property
    def url_with_login(self) -> str:
        return self.url.replace("//", "//user:secret@")

    @property
    def masked_url(self) -> str:
        return self.url.replace("//", "//user:***@")


class Handler(Quiet, BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        site = self.site
        wanted = self.headers.get("Range", "")
        site.asked.append((self.path, wanted))
        assert self.headers.get("Accept-Encoding") == "identity"
        content = site.files.get(self.path)
        if site.troubles:
            self.be_in_trouble(site.troubles.pop(0))
            return
        if site.status or content is None:
            self.send_error(site.status or 404)
            return
        start = int(re.findall(r"\d+", wanted)[0]) if wanted and site.ranges else 0
        if start >= len(content) > 0:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if site.lengths:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = start + site.cuts.pop(0) if site.cuts else len(content)
        with contextlib.suppress(ConnectionError):  # one who has no room for it hangs up
            self.wfile.write(content[start:end])

    def do_HEAD(self) -> None:
        self.site.asked.append((self.path, "HEAD"))
        if self.path in self.site.moved:
            self.send_response(302)
            self.send_header("Location", self.site.moved[self.path])
            self.end_headers()
            return
        self.send_response(self.site.status or (200 if self.path in self.site.files else 404))
        self.end_headers()

    def be_in_trouble(self, status: int) -> None:
        if status == 0:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(status)
        self.send_header("Retry-After", self.site.retry_after)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    with serving(type("SiteHandler", (Handler,), {"site": made})) as made.url:
        yield made


class Impatient(System):
    """A machine that does not wait between attempts, and notes how long it would have."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Impatient:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return Impatient(str(tmp_path))


def download(system: System, url: str, sha256: str = DIGEST) -> list[str]:
    """Fetch to /file; return what was told."""
    told: list[str] = []
    fetch(system, url, "/file", sha256=sha256, tell=lambda message, done, total: told.append(message))
    return told


def names(system: System) -> tuple[str, ...]:
    return system.list_directory("/")
