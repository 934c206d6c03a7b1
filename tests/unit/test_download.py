"""Downloads that break off, go on, or are refused: what is on the disk and what the error says."""

import gzip
import http.server
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuprov.core.download import fetch, fetch_small, published_sha256, trusted_sha256, unreachable
from gpuprov.core.system import System
from gpuprov.driver.run_files import FetchRunfile
from gpuprov.packages.keys import fetch_pinned_key
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.secrets import masked
from tests.loopback import Quiet, free_port, serving
from tests.unit.download_server import (
    CONTENT,
    DIGEST,
    LOGIN_PAGE,
    PIECE,
    Impatient,
    Site,
    download,
    names,
    site,
    system,
)
from tests.unit.refused import refused

__all__ = ["site", "system"]


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


def test_a_server_without_ranges_restarts_the_download(system: System, site: Site) -> None:
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
def test_what_a_run_left_is_resumed_or_removed(system: System, site: Site, part: bytes, ranges: list[str]) -> None:
    site.files["/run"] = CONTENT
    system.write("/file.part", part)
    download(system, f"{site.url}/run")
    assert system.read_bytes("/file") == CONTENT
    assert [wanted for _, wanted in site.asked] == ranges
    assert names(system) == ("file",)


@pytest.mark.parametrize(
    ("status", "next_step"),
    [(401, "login"), (403, "proxy"), (404, "version and URL"), (407, "gpuprov_proxy"), (416, "later"), (503, "later")],
)
def test_an_http_error_is_told(system: System, site: Site, status: int, next_step: str) -> None:
    site.status = status
    problem = refused(download, system, f"{site.url_with_login}/run")
    assert f"HTTP {status}" in problem.evidence and next_step in problem.next_step
    assert "secret" not in str(problem) and "user:***@127.0.0.1" in str(problem)
    assert len(site.asked) == (4 if status == 503 else 1)
    assert names(system) == ()


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
    said = str(refused(download, system, url.format(port=free_port())))
    assert meaning in said and "secret" not in said
    assert "can't be reached" in refused(fetch_small, system, url.format(port=free_port())).what


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://example.org/a:b@c", "https://example.org/a:b@c"),
        ("https://user:secret@example.org/x?y=1", "https://user:***@example.org/x?y=1"),
        ("https://user:sec:r@et@example.org:8443/", "https://user:***@example.org:8443/"),
        ("https://user@example.org/", "https://***@example.org/"),
        ("t://user@example", "t://***@example"),
        ("http://user:secret@[::1", "http://user:***@[::1"),
        ("see http://a:b@c/ and http://d:e@f/", "see http://a:***@c/ and http://d:***@f/"),
        ("https://git.example/x.run?private_token=glpat-1 fails", "https://git.example/x.run?private_token=*** fails"),
        ("url: /x.run?se=2027&sig=a%2Bb&X-Amz-Signature=c", "url: /x.run?se=2027&sig=***&X-Amz-Signature=***"),
        ('"https://e.org/?Key-Pair=1&design=2&key=3",', '"https://e.org/?Key-Pair=***&design=2&key=***",'),
        ("what now? token=x, a token=y", "what now? token=x, a token=y"),
    ],
)
def test_passwords_are_masked(url: str, shown: str) -> None:
    assert masked(url) == shown


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


@pytest.mark.parametrize("status", [403, 405, 501, 503])
def test_a_server_that_does_not_like_the_question_is_not_held_for_gone(system: System, site: Site, status: int) -> None:
    site.status = status
    assert unreachable(system, [f"{site.url}/x"]) == ()


def test_without_urls_nobody_is_asked(system: System) -> None:
    assert unreachable(system, ["file:///x"]) == ()


@pytest.mark.parametrize("troubles", [[503], [502, 500], [429, 504, 408], [0], [0, 503, 0]])
def test_a_server_in_trouble_is_retried(system: Impatient, site: Site, troubles: list[int]) -> None:
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


def test_what_came_instead_of_a_key_is_told_with_its_url(system: System, site: Site) -> None:
    """A dry run asks several repositories; a proxy may answer for each of them."""
    site.files["/key"] = LOGIN_PAGE
    problem = refused(fetch_pinned_key, system, f"{site.url_with_login}/key", "A" * 40)
    assert "a web page, not a key" in problem.what and "check the URL" in problem.next_step
    assert f"{site.masked_url}/key" in problem.evidence and "Proxy log-in" in problem.evidence


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


@pytest.mark.parametrize("there", [True, False])
def test_a_runfile_that_was_there_stays_with_the_undo(system: System, there: bool) -> None:
    if there:
        system.make_directory("/cache")
        system.write("/cache/a.run", CONTENT)
    change = FetchRunfile("file:///mirror/a.run", "/cache/a.run", DIGEST)
    change.undo(system, change.capture(system), {})
    assert system.exists("/cache/a.run") == there


def test_without_any_digest_no_runfile_is_fetched(system: System, site: Site) -> None:
    site.files["/a.run"] = CONTENT
    site.files["/a.run.sha256sum"] = DIGEST.encode()
    problem = refused(FetchRunfile(f"{site.url}/a.run", "/cache/a.run", "").apply, system, lambda *_: None)
    assert "SHA-256 is not known" in problem.what
    assert f"{site.url}/a.run" in problem.evidence and "gpuprov_driver_sha256" in problem.next_step
    assert (site.asked, system.exists("/cache")) == ([], False)


def answering(headers: dict[str, str], content: bytes = b"") -> type[http.server.BaseHTTPRequestHandler]:
    """Return what answers every question with these headers."""

    class Answering(Quiet, http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    return Answering


def test_a_length_of_thousands_of_digits_is_told(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(answering({"Content-Length": "9" * 5000})) as url, pytest.raises(GpuprovError, match="be reached"):
        fetch(system, f"{url}/", "/a", sha256=DIGEST, tell=lambda *_: None)


def test_a_server_that_compresses_all_it_sends_is_understood(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    content = gzip.compress(b"580.95.05 580.95.05/NVIDIA-Linux-x86_64-580.95.05.run\n")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(answering({"Content-Encoding": "gzip"}, content)) as url:
        assert fetch_small(system, f"{url}/latest.txt").startswith(b"580.95.05 ")


class Redirect(Quiet, http.server.BaseHTTPRequestHandler):
    """Leads every question elsewhere."""

    target = ""

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", self.target)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Redirect], str]]:
    """A server with https whose certificate is trusted, and its address."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate], check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    handler = type("Handler", (Redirect,), {})
    with serving(handler, context) as url:
        yield handler, url


def test_a_redirect_from_https_to_http_is_refused(system: System, site: Site, tls: tuple[type[Redirect], str]) -> None:
    handler, url = tls
    site.files["/a.run"] = CONTENT
    handler.target = f"{site.url}/a.run"
    with pytest.raises(GpuprovError, match="leads from https to http"):
        fetch_small(system, f"{url}/a.run")
    with pytest.raises(GpuprovError, match="leads from https to http"):
        fetch(system, f"{url}/a.run", "/a.run", sha256=DIGEST, tell=lambda *_: None)
    (problem,) = unreachable(system, [f"{url}/a.run"])
    assert "leads from https to http" in problem.what and f"Location: {site.url}" in problem.evidence
    assert "https" in problem.next_step
    # As requests reads a URL: the scheme in any case, tabs and control characters dropped.
    for scheme in ("HTTP:", "Http:", "ht\ttp:", "\thttp:"):
        handler.target = f"{scheme}{site.url.partition(':')[2]}/a.run"
        with pytest.raises(GpuprovError, match="leads from https to http"):
            fetch_small(system, f"{url}/a.run")
    handler.target = "https://[::1/a.run"
    problem = refused(fetch_small, system, f"{url}/a.run")
    assert "leads to something that is not a URL" in problem.what
    assert "Location: https://[::1/a.run" in problem.evidence and "URL" in problem.next_step
    # http.server would write latin-1; requests reads a place as UTF-8.
    handler.target = "https://\x80/a.run"
    with pytest.raises(GpuprovError, match="can't be reached"):
        fetch_small(system, f"{url}/a.run")
    assert "can't be reached" in unreachable(system, [f"{url}/a.run"])[0].what
    # From http anything may follow, and within https too: there it ends with what the second place says.
    handler.target = "/elsewhere"
    with pytest.raises(GpuprovError, match="can't be reached"):
        fetch_small(system, f"{url}/a.run")
