"""Downloads from a real server on loopback that breaks off, lies, refuses and hides."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import os
import re
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests

from gpuprov.core.download import fetch, fetch_small, masked, published_sha256, trusted_sha256, unreachable
from gpuprov.core.system import System
from gpuprov.wire.errors import GpuprovError, Problem

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


class Handler(BaseHTTPRequestHandler):
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

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name for it)
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("SiteHandler", (Handler,), {"site": made}))
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


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


def test_a_file_comes_whole_and_only_once(system: System, site: Site) -> None:
    site.files["/run"] = CONTENT
    download(system, f"{site.url}/run")
    download(system, f"{site.url}/run")
    assert system.read_bytes("/file") == CONTENT
    assert names(system) == ("file",)
    assert site.asked == [("/run", "")]


def test_a_cut_connection_is_taken_up_where_it_broke(system: System, site: Site) -> None:
    site.files["/run"] = CONTENT
    site.cuts = [20 * PIECE + 1, 10 * PIECE]
    told = download(system, f"{site.url}/run")
    assert system.read_bytes("/file") == CONTENT
    assert [wanted for _, wanted in site.asked] == ["", f"bytes={20 * PIECE}-", f"bytes={30 * PIECE}-"]
    assert told == ["connection lost, trying again (2 of 4)", "connection lost, trying again (3 of 4)"]


def test_a_server_without_ranges_begins_anew(system: System, site: Site) -> None:
    site.files["/run"] = CONTENT
    site.cuts = [1_500_000]
    site.ranges = False
    download(system, f"{site.url}/run")
    assert system.read_bytes("/file") == CONTENT


def test_a_connection_that_always_breaks_is_given_up_and_what_came_is_kept(system: System, site: Site) -> None:
    site.files["/run"] = CONTENT
    site.cuts = [PIECE] * 4
    with pytest.raises(GpuprovError, match="can't be reached"):
        download(system, f"{site.url}/run")
    assert len(site.asked) == 4
    assert system.read_bytes("/file.part") == CONTENT[: 4 * PIECE]
    assert system.read_bytes("/file") is None


@pytest.mark.parametrize(
    ("part", "ranges"),
    [
        (CONTENT[:1000], ["bytes=1000-"]),
        (CONTENT, ["bytes=3072000-", ""]),
        (CONTENT + b"more", ["bytes=3072004-", ""]),
        (b"of another file", ["bytes=15-", ""]),
        (b"", [""]),
    ],
    ids=["its start", "all of it", "more than it", "another file", "nothing"],
)
def test_what_an_earlier_run_left_is_gone_on_with_or_thrown_away(
    system: System, site: Site, part: bytes, ranges: list[str]
) -> None:
    site.files["/run"] = CONTENT
    system.write("/file.part", part)
    download(system, f"{site.url}/run")
    assert system.read_bytes("/file") == CONTENT
    assert [wanted for _, wanted in site.asked] == ranges
    assert names(system) == ("file",)


@pytest.mark.parametrize(
    ("content", "what", "evidence"),
    [
        (b"something else", "is not the file that was asked for", f"expected {DIGEST}"),
        (b"", "is not the file that was asked for", "e3b0c44298fc1c149afbf4c8996fb924"),
        (LOGIN_PAGE, "gave a web page instead of a file", "Proxy log-in"),
    ],
)
def test_a_wrong_digest_leaves_nothing(system: System, site: Site, content: bytes, what: str, evidence: str) -> None:
    site.files["/run"] = content
    with pytest.raises(GpuprovError) as caught:
        download(system, f"{site.url}/run")
    assert what in caught.value.problems[0].what
    assert evidence in caught.value.problems[0].evidence
    assert names(system) == ()


def test_a_wrong_digest_leaves_the_file_that_was_there(system: System, site: Site) -> None:
    site.files["/run"] = b"something else"
    system.write("/file", b"of last year")
    with pytest.raises(GpuprovError):
        download(system, f"{site.url}/run")
    assert system.read_bytes("/file") == b"of last year"


@pytest.mark.parametrize(
    ("status", "evidence", "next_step"),
    [
        (401, "HTTP 401", "log-in"),
        (403, "HTTP 403", "proxy"),
        (404, "HTTP 404", "version and URL"),
        (407, "HTTP 407", "https_proxy="),
        (416, "HTTP 416", "again later"),
        (503, "HTTP 503", "again later"),
    ],
)
def test_an_answer_without_the_file_is_told(
    system: System, site: Site, status: int, evidence: str, next_step: str
) -> None:
    site.status = status
    with pytest.raises(GpuprovError) as caught:
        download(system, f"{site.url}/run")
    (problem,) = caught.value.problems
    assert evidence in problem.evidence and next_step in problem.next_step
    assert len(site.asked) == (4 if status == 503 else 1)
    assert names(system) == ()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("url", "meaning"),
    [
        ("http://127.0.0.1:{port}/x", "the connection is refused"),
        ("http://no-such-host.invalid/x", "its name is not known"),
        ("http://[::1/x", "can't be reached"),
        ("http://user:secret@:80/x", "can't be reached"),
        ("ftp://127.0.0.1/x", "can't be reached"),
    ],
)
def test_what_can_not_be_reached_says_why(system: System, url: str, meaning: str) -> None:
    with pytest.raises(GpuprovError) as caught:
        download(system, url.format(port=free_port()))
    assert meaning in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(GpuprovError, match="can't be reached"):
        fetch_small(system, url.format(port=free_port()))


def test_an_untrusted_certificate_is_told(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "HTTPSConnectionPool: Max retries exceeded (Caused by SSLError([SSL: CERTIFICATE_VERIFY_FAILED]))"

    def refuse(url: str, **_: object) -> None:
        import requests

        raise requests.exceptions.SSLError(said)

    monkeypatch.setattr("requests.get", refuse)
    with pytest.raises(GpuprovError, match="its certificate is not trusted"):
        download(system, "https://example.org/x")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://example.org/a:b@c", "https://example.org/a:b@c"),
        ("https://user:secret@example.org/x?y=1", "https://user:***@example.org/x?y=1"),
        ("https://user:sec:r@et@example.org:8443/", "https://user:***@example.org:8443/"),
        ("https://user@example.org/", "https://user@example.org/"),
        ("http://user:secret@[::1", "http://user:***@[::1"),
        ("see http://a:b@c/ and http://d:e@f/", "see http://a:***@c/ and http://d:***@f/"),
    ],
)
def test_passwords_are_masked(url: str, shown: str) -> None:
    assert masked(url) == shown


def test_a_password_never_gets_into_an_error(system: System, site: Site) -> None:
    url = site.url.replace("//", "//user:secret@")
    with pytest.raises(GpuprovError) as caught:
        download(system, f"{url}/missing")
    assert "secret" not in str(caught.value) and "user:***@127.0.0.1" in str(caught.value)


def test_a_local_file_is_copied(system: System) -> None:
    system.write("/media.run", CONTENT)
    download(system, "file:///media.run")
    assert system.read_bytes("/file") == system.read_bytes("/media.run") == CONTENT
    with pytest.raises(GpuprovError, match=r"there is no file /nothing\.run"):
        fetch(system, "file:///nothing.run", "/other", sha256=DIGEST, tell=lambda *_: None)


def test_small_files_have_a_limit(system: System, site: Site) -> None:
    site.files = {"/key": b"x" * (1 << 20), "/huge": b"x" * ((1 << 20) + 1)}
    assert fetch_small(system, f"{site.url}/key") == site.files["/key"]
    with pytest.raises(GpuprovError, match="larger than expected"):
        fetch_small(system, f"{site.url}/huge")
    system.write("/huge", site.files["/huge"])
    with pytest.raises(GpuprovError, match="larger than expected"):
        fetch_small(system, "file:///huge")
    with pytest.raises(GpuprovError, match="there is no file"):
        fetch_small(system, "file:///nothing")


def test_a_small_file_that_breaks_off_is_an_error(system: System, site: Site) -> None:
    site.files["/key"] = b"x" * 1000
    site.cuts = [10] * 4
    with pytest.raises(GpuprovError, match="can't be reached"):
        fetch_small(system, f"{site.url}/key")
    assert fetch_small(system, f"{site.url}/key") == b"x" * 1000


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{DIGEST}  NVIDIA-Linux-x86_64-550.163.01.run\n", DIGEST),
        (DIGEST, DIGEST),
        (f"{DIGEST}0", ""),
        ("<html>not here</html>", ""),
        ("", ""),
        ("\xfc" + DIGEST, ""),
        (f"{DIGEST}  \xfc.run", DIGEST),
        (None, ""),
    ],
)
def test_the_digest_beside_the_file(system: System, site: Site, text: str | None, found: str) -> None:
    if text is not None:
        site.files["/a.run.sha256sum"] = text.encode("latin-1")
        system.write("/a.run.sha256sum", text.encode("latin-1"))
    assert published_sha256(system, f"{site.url}/a.run") == found
    assert published_sha256(system, "file:///a.run") == found


def test_a_refused_digest_is_no_missing_one(system: System, site: Site) -> None:
    site.status = 403
    with pytest.raises(GpuprovError, match="can't be had"):
        published_sha256(system, f"{site.url}/404.run")


def test_what_cannot_be_had_is_known_before_anything_is_fetched(system: System, site: Site) -> None:
    site.files["/there"] = CONTENT
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}/x"
        urls = [f"{site.url}/there", f"{site.url}/gone", nobody, "file:///anything", f"{site.url}/there"]
        found = unreachable(system, urls)
    assert {one.what for one in found} == {
        f"{site.url}/gone can't be had", f"{nobody} can't be reached: the connection is refused",
    }  # fmt: skip
    assert all(one.next_step for one in found)
    assert sorted(site.asked) == [("/gone", "HEAD"), ("/there", "HEAD")]


@pytest.mark.parametrize("status", [403, 405, 501, 503])
def test_a_server_that_does_not_like_the_question_is_not_held_for_gone(system: System, site: Site, status: int) -> None:
    site.status = status
    assert unreachable(system, [f"{site.url}/x"]) == ()


def test_without_urls_nobody_is_asked(system: System) -> None:
    assert unreachable(system, ["file:///x"]) == ()


@pytest.mark.parametrize("troubles", [[503], [502, 500], [429, 504, 408], [0], [0, 503, 0]])
def test_a_server_in_trouble_is_asked_again(system: Impatient, site: Site, troubles: list[int]) -> None:
    site.files["/f"] = CONTENT
    site.troubles = list(troubles)
    told = download(system, f"{site.url}/f")
    assert system.sha256("/file") == DIGEST
    assert system.pauses == [2.0**number for number in range(len(troubles))]
    assert len([line for line in told if "trying again" in line]) == len(troubles)


def test_trouble_in_the_middle_is_gone_on_from_where_it_came(system: Impatient, site: Site) -> None:
    site.files["/f"] = CONTENT
    site.cuts = [PIECE * 3]

    class Between(list[int]):
        """Trouble after the first request alone."""

        def __bool__(self) -> bool:
            return len(site.asked) == 2 and len(self) > 0

    site.troubles = Between([503])
    download(system, f"{site.url}/f")
    assert [ranges for _, ranges in site.asked] == ["", f"bytes={PIECE * 3}-", f"bytes={PIECE * 3}-"]
    assert system.sha256("/file") == DIGEST


def test_a_server_may_say_how_long_to_wait_within_reason(system: Impatient, site: Site) -> None:
    site.files["/f"] = CONTENT
    for asked, pause in (("17", 17.0), ("99999", 60.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 1.0)):
        site.troubles, site.retry_after, system.pauses = [503], asked, []
        system.remove("/file")
        download(system, f"{site.url}/f")
        assert system.pauses == [pause]


def test_trouble_that_does_not_pass_is_told(system: Impatient, site: Site) -> None:
    site.files["/f"] = CONTENT
    site.troubles = [503] * 9
    with pytest.raises(GpuprovError, match="can't be had") as caught:
        download(system, f"{site.url}/f")
    assert "HTTP 503" in str(caught.value) and len(site.asked) == 4
    site.troubles = [0] * 9
    with pytest.raises(GpuprovError, match="can't be reached"):
        download(system, f"{site.url}/f")


def test_keys_and_digests_are_asked_for_again_too(system: Impatient, site: Site) -> None:
    site.files["/key"] = b"key"
    site.troubles = [0, 503]
    assert fetch_small(system, f"{site.url}/key") == b"key"
    assert system.pauses == [1.0, 2.0]


def test_over_http_no_digest_beside_the_file_counts(system: System, site: Site) -> None:
    site.files["/a.run.sha256sum"] = DIGEST.encode()
    assert trusted_sha256(system, f"{site.url}/a.run") == ""
    system.write("/a.run.sha256sum", DIGEST.encode())
    assert trusted_sha256(system, "file:///a.run") == DIGEST


class Redirecting(http.server.BaseHTTPRequestHandler):
    """Leads every question elsewhere."""

    target = ""

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", self.target)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Redirecting], str]]:
    """A server with https whose certificate is trusted, and its address."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate], check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    handler = type("Handler", (Redirecting,), {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield handler, f"https://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_redirect_from_https_to_http_is_refused(
    system: System, site: Site, tls: tuple[type[Redirecting], str]
) -> None:
    handler, url = tls
    site.files["/a.run"] = CONTENT
    handler.target = f"{site.url}/a.run"
    with pytest.raises(GpuprovError, match="leads from https to http"):
        fetch_small(system, f"{url}/a.run")
    with pytest.raises(GpuprovError, match="leads from https to http"):
        fetch(system, f"{url}/a.run", "/a.run", sha256=DIGEST, tell=lambda *_: None)
    (problem,) = unreachable(system, [f"{url}/a.run"])
    assert "leads from https to http" in problem.what
    # From http anything may follow, and within https too: there it ends with what the second place says.
    handler.target = "/elsewhere"
    with pytest.raises(GpuprovError, match="can't be reached"):
        fetch_small(system, f"{url}/a.run")


# -- what is asked of requests ---------------------------------------------------------------------------------------


@pytest.fixture
def asked_of_requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Return the list to which each call of requests adds its options; every call is refused."""
    made: list[dict[str, object]] = []

    def refuse(url: str, **options: object) -> None:
        made.append({"url": url, **options})
        raise requests.exceptions.InvalidURL("not in this test")

    monkeypatch.setattr("requests.get", refuse)
    monkeypatch.setattr("requests.head", refuse)
    for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    return made


def ask_in_every_way(system: System) -> None:
    with pytest.raises(GpuprovError):
        download(system, "https://example.org/x")
    with pytest.raises(GpuprovError):
        fetch_small(system, "https://example.org/y")
    assert unreachable(system, ["https://example.org/z"])


def test_no_question_waits_for_ever_and_files_come_in_pieces(
    system: System, asked_of_requests: list[dict[str, object]]
) -> None:
    ask_in_every_way(system)
    first, second, third = asked_of_requests
    for options in asked_of_requests:
        timeout = options["timeout"]
        assert isinstance(timeout, tuple) and all(0 < seconds <= 60 for seconds in timeout)
    assert (first["stream"], second["stream"], third["allow_redirects"]) == (True, True, True)


@pytest.mark.parametrize(
    ("environment", "files", "expected"),
    [
        ({}, (), True),
        ({}, ("/etc/ssl/ca-bundle.pem",), "/etc/ssl/ca-bundle.pem"),
        ({}, ("/etc/ssl/ca-bundle.pem", "/etc/ssl/certs/ca-certificates.crt"), "/etc/ssl/certs/ca-certificates.crt"),
        ({"SSL_CERT_FILE": "/b"}, ("/etc/ssl/ca-bundle.pem",), "/b"),
        ({"SSL_CERT_FILE": "/b", "REQUESTS_CA_BUNDLE": "/a"}, ("/etc/ssl/ca-bundle.pem",), "/a"),
    ],
)
def test_certificates_are_always_checked_against_those_of_the_host(
    system: System, asked_of_requests: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str], files: tuple[str, ...], expected: object,
) -> None:  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for path in files:
        system.make_directory(path.rpartition("/")[0])
        system.write(path, b"")
    ask_in_every_way(system)
    assert [options["verify"] for options in asked_of_requests] == [expected] * 3


@pytest.mark.parametrize(
    ("error", "begun", "attempts"),
    [
        (requests.exceptions.ReadTimeout("Read timed out."), False, 4),
        (requests.exceptions.ConnectTimeout("timed out"), False, 1),
        (requests.exceptions.ConnectTimeout("timed out"), True, 4),
        (requests.exceptions.ChunkedEncodingError("Connection broken: IncompleteRead"), False, 4),
        (requests.exceptions.ConnectionError("Connection aborted."), False, 4),
        (requests.exceptions.ConnectionError("reset by peer"), False, 4),
        (requests.exceptions.ConnectionError("Connection refused"), False, 1),
        (requests.exceptions.ConnectionError("Connection refused"), True, 4),
        (requests.exceptions.ConnectionError("NameResolutionError"), True, 1),
        (requests.exceptions.ConnectionError("Name or service not known"), True, 1),
        (requests.exceptions.SSLError("CERTIFICATE_VERIFY_FAILED"), True, 1),
        (requests.exceptions.TooManyRedirects("Exceeded 30 redirects."), True, 1),
    ],
    ids=str,
)
def test_what_may_pass_is_tried_four_times_and_what_can_not_once(
    system: Impatient, monkeypatch: pytest.MonkeyPatch, error: Exception, begun: bool, attempts: int
) -> None:
    made = []

    def fail(url: str, **options: object) -> None:
        made.append(url)
        raise error

    monkeypatch.setattr("requests.get", fail)
    if begun:
        system.write("/file.part", b"some of it")
    told: list[tuple[str, int, int]] = []
    with pytest.raises(GpuprovError, match="can't be reached"):
        fetch(system, "http://example.org/x", "/file", sha256=DIGEST, tell=lambda *words: told.append(words))
    assert len(made) == attempts
    assert system.pauses == [1.0, 2.0, 4.0][: attempts - 1]
    assert told == [(f"connection lost, trying again ({number} of 4)", 0, 0) for number in range(2, attempts + 1)]


@pytest.mark.parametrize(
    ("said", "what", "next_step"),
    [
        ("CERTIFICATE_VERIFY_FAILED", ": its certificate is not trusted", "update-ca-certificates"),
        ("NameResolutionError", ": its name is not known", "DNS"),
        ("Read timed out", ": it does not answer", "firewall"),
        ("ProxyError", ": the proxy does not let it through", "https_proxy"),
        ("something else", "", "network and proxy"),
    ],
)
def test_each_cause_has_its_advice(
    system: System, monkeypatch: pytest.MonkeyPatch, said: str, what: str, next_step: str
) -> None:
    def fail(url: str, **options: object) -> None:
        raise requests.exceptions.InvalidURL(f"{'x' * 300} http://user:secret@example.org/ {said}")

    monkeypatch.setattr("requests.get", fail)
    with pytest.raises(GpuprovError) as caught:
        download(system, "http://user:secret@example.org/x")
    (problem,) = caught.value.problems
    assert problem.what == f"http://user:***@example.org/x can't be reached{what}"
    assert problem.evidence.endswith(said) and len(problem.evidence) == 200 and "secret" not in problem.evidence
    assert next_step in problem.next_step


# -- progress and room -----------------------------------------------------------------------------------------------


class Clocked(Impatient):
    """A machine whose clock goes on by some seconds whenever it is looked at, and that has some room."""

    seconds = 1.0
    time = 0.0
    room = 10 << 30

    def now(self) -> float:
        self.time += self.seconds
        return self.time

    def free_bytes(self, path: str) -> int:
        return self.room


def progress(system: System, url: str) -> list[tuple[str, int, int]]:
    told: list[tuple[str, int, int]] = []
    fetch(system, url, "/file", sha256=DIGEST, tell=lambda *words: told.append(words))
    return told


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("have", [0, 2 * PIECE])
def test_progress_counts_what_is_there_already(tmp_path: Path, site: Site, have: int, lengths: bool) -> None:
    system = Clocked(str(tmp_path))
    site.files["/f"], site.lengths = CONTENT, lengths
    if have:
        system.write("/file.part", CONTENT[:have])
    told = progress(system, f"{site.url}/f")
    total = len(CONTENT) if lengths else 0
    assert told[0] == ("downloading", have + PIECE, total)
    assert told[-1] == ("downloading", len(CONTENT), total)
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert system.sha256("/file") == DIGEST


def test_progress_is_told_now_and_then_alone(tmp_path: Path, site: Site) -> None:
    system = Clocked(str(tmp_path))
    site.files["/f"], system.seconds = CONTENT, 0.25
    pieces = len(CONTENT) // PIECE + 1
    told = progress(system, f"{site.url}/f")
    # Each piece looks at the clock once, and once more if it is told of: every third piece.
    assert pieces // 4 <= len(told) <= pieces // 2
    system.remove("/file")
    system.seconds = 0.0
    assert progress(system, f"{site.url}/f") == []


@pytest.mark.parametrize("have", [0, 2 * PIECE])
def test_a_file_that_has_no_room_is_not_begun(tmp_path: Path, site: Site, have: int) -> None:
    system = Clocked(str(tmp_path))
    site.files["/f"] = CONTENT
    if have:
        system.write("/file.part", CONTENT[:have])
    system.room = len(CONTENT) - have - 1
    with pytest.raises(GpuprovError) as caught:
        progress(system, f"{site.url}/f")
    (problem,) = caught.value.problems
    assert problem.what == f"not enough room for {site.url}/f"
    assert problem.evidence == "2 MiB to come, 2 MiB free for /file.part"
    assert (system.status("/file.part") is None) == (have == 0)
    system.room += 1
    progress(system, f"{site.url}/f")
    assert system.sha256("/file") == DIGEST


def test_room_is_named_in_mebibytes_and_by_its_folder(tmp_path: Path, site: Site) -> None:
    system = Clocked(str(tmp_path))
    system.make_directory("/var/cache")
    site.files["/f"], system.room = CONTENT, 0
    with pytest.raises(GpuprovError) as caught:
        fetch(system, f"{site.url}/f", "/var/cache/f", sha256=DIGEST, tell=lambda *_: None)
    (problem,) = caught.value.problems
    assert problem.evidence == "2 MiB to come, 0 MiB free for /var/cache/f.part"
    assert problem.next_step == "make room: df -h /var/cache"


# -- what is told ----------------------------------------------------------------------------------------------------


def test_what_belongs_to_another_file_is_told_once_and_begun_anew(system: System, site: Site) -> None:
    site.files["/run"] = CONTENT
    system.write("/file.part", b"of another file")
    told = progress(Clocked(str(system.root)), f"{site.url}/run")
    anew = told.index(("what an earlier download left does not belong to this file; starting again", 0, 0))
    assert {message for message, _, _ in (*told[:anew], *told[anew + 1 :])} == {"downloading"}
    assert told[anew + 1] == ("downloading", PIECE, len(CONTENT))


def test_a_local_file_replaces_what_an_earlier_run_left_of_it(system: System) -> None:
    system.write("/media.run", CONTENT)
    system.write("/file.part", CONTENT + b"more")
    assert progress(system, "file:///media.run") == []
    assert system.sha256("/file") == DIGEST
    with pytest.raises(GpuprovError) as caught:
        fetch(system, "file:///nothing.run", "/other", sha256=DIGEST, tell=lambda *_: None)
    (problem,) = caught.value.problems
    assert (problem.evidence, problem.next_step) == ("", "check the path")


def test_what_is_not_the_file_is_told_with_both_digests_and_what_to_do(system: System, site: Site) -> None:
    url = site.url.replace("//", "//user:secret@")
    site.files = {"/run": b"x", "/page": b" <!DOCTYPE html>" + b"y" * 600}
    found: list[Problem] = []
    for name in ("run", "page"):
        with pytest.raises(GpuprovError) as caught:
            progress(system, f"{url}/{name}")
        found += caught.value.problems
    masked_url = site.url.replace("//", "//user:***@")
    assert [problem.what for problem in found] == [
        f"what {masked_url}/run gave is not the file that was asked for",
        f"{masked_url}/page gave a web page instead of a file",
    ]
    assert found[0].evidence == f"its SHA-256 is {hashlib.sha256(b'x').hexdigest()}, expected {DIGEST}"
    assert found[1].evidence == "<!DOCTYPE html>" + "y" * 104
    assert "digest" in found[0].next_step
    assert "check the URL" in found[1].next_step and "proxy" in found[1].next_step


def test_small_files_that_can_not_be_had_say_what_to_do(system: System, site: Site) -> None:
    url = site.url.replace("//", "//user:secret@")
    site.files["/huge"] = b"x" * ((1 << 20) + 1)
    found: list[Problem] = []
    for address in (f"{url}/huge", "file:///nothing"):
        with pytest.raises(GpuprovError) as caught:
            fetch_small(system, address)
        found += caught.value.problems
    assert (found[0].what, found[0].evidence, found[0].next_step) == (
        f"{site.url.replace('//', '//user:***@')}/huge is larger than expected", "more than 1048576 bytes",
        "check the URL",
    )  # fmt: skip
    assert (found[1].what, found[1].evidence) == ("there is no file file:///nothing", "")
    assert found[1].next_step == "check the path"
    system.write("/there", b"content")
    assert fetch_small(system, "file:///there") == b"content"


def test_of_a_huge_local_file_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    class Counting(System):
        def read_start(self, path: str, size: int) -> bytes | None:
            assert size == (1 << 20) + 1
            return super().read_start(path, size)

    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 34)
    with pytest.raises(GpuprovError, match="larger than expected"):
        fetch_small(Counting(str(tmp_path)), "file:///huge")


def test_what_can_not_be_had_is_told_in_order_and_redirections_are_followed(system: System, site: Site) -> None:
    site.files["/there"] = CONTENT
    site.moved = {"/a": "/there", "/b": "/gone"}
    url = site.url.replace("//", "//user:secret@")
    found = unreachable(system, [f"{url}/{name}" for name in ("z", "b", "there", "a", "z")])
    masked_url = site.url.replace("//", "//user:***@")
    assert [(one.what, one.evidence) for one in found] == [
        (f"{masked_url}/b can't be had", "HTTP 404"), (f"{masked_url}/z can't be had", "HTTP 404"),
    ]  # fmt: skip
    assert {one.next_step for one in found} == {"there is no such file: check version and URL"}


def test_a_wait_that_a_server_asks_for_is_not_shorter_than_ours(system: Impatient, site: Site) -> None:
    site.files["/f"] = CONTENT
    site.troubles, site.retry_after = [503, 503, 503], "2"
    told = progress(system, f"{site.url}/f")
    assert system.pauses == [2.0, 2.0, 4.0]
    assert told[0] == ("HTTP 503 Service Unavailable, trying again (2 of 4)", 0, 0)
