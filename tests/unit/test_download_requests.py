"""What each download asks of requests: time limits, certificates, tries; and the advice for each cause."""

import os

import pytest
import requests

from gpuprov.core.download import fetch, fetch_small, proxy_evidence, proxy_for, proxy_source, unreachable
from gpuprov.core.proxy import NO_PROXY, Proxy
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError
from tests.unit.download_server import DIGEST, Impatient, Site, download, site, system
from tests.unit.refused import refused

__all__ = ["site", "system"]


@pytest.fixture
def asked_of_requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Return the list to which each call of requests adds its options; every call is refused."""
    made: list[dict[str, object]] = []

    def refuse(session: object, url: str, **options: object) -> None:
        made.append({"url": url, **options})
        raise requests.exceptions.InvalidURL("not in this test")

    monkeypatch.setattr("requests.Session.get", refuse)
    monkeypatch.setattr("requests.Session.head", refuse)
    for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    return made


def ask_in_every_way(system: System) -> None:
    with pytest.raises(GpuprovError):
        download(system, "https://example.org/x")
    with pytest.raises(GpuprovError):
        fetch_small(system, "https://example.org/y")
    assert unreachable(system, ["https://example.org/z"])


def test_requests_have_limits_and_come_in_pieces(system: System, asked_of_requests: list[dict[str, object]]) -> None:
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
        ({"SSL_CERT_FILE": "/etc"}, ("/etc/ssl/ca-bundle.pem",), "/etc"),
        ({"SSL_CERT_FILE": "/b", "REQUESTS_CA_BUNDLE": "/usr"}, ("/etc/ssl/ca-bundle.pem",), "/usr"),
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


def test_certificates_that_are_missing_are_named(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/missing.pem")
    (problem,) = unreachable(system, ["https://example.org/z"])
    assert (problem.evidence, problem.next_step) == (
        "SSL_CERT_FILE=/missing.pem", "unset SSL_CERT_FILE, or correct it"
    )  # fmt: skip
    assert refused(fetch_small, system, "https://example.org/y") == problem


ENVIRONMENT = {"https_proxy": "http://e:2", "no_proxy": ".example.org,localhost"}


@pytest.mark.parametrize(
    ("proxy", "environment", "url", "expected"),
    [
        (NO_PROXY, {}, "http://a.example.net/x", ""),
        (NO_PROXY, ENVIRONMENT, "https://a.example.net/x", "http://e:2"),
        (NO_PROXY, ENVIRONMENT, "http://a.example.net/x", ""),
        (NO_PROXY, ENVIRONMENT, "https://a.example.org/x", ""),
        (Proxy("http://p:1", ".example.com"), ENVIRONMENT, "https://a.example.net/x", "http://p:1"),
        (Proxy("http://p:1", ".example.com"), ENVIRONMENT, "http://a.example.org/x", "http://p:1"),
        (Proxy("http://p:1", ".example.com"), ENVIRONMENT, "http://a.example.com/x", ""),
        (Proxy("http://p:1"), ENVIRONMENT, "http://a.example.org/x", "http://p:1"),
        (Proxy("http://p:1"), {}, "https://[", ""),
    ],
)
def test_gpuprov_proxy_counts_alone_and_else_the_environment(
    system: System, monkeypatch: pytest.MonkeyPatch, proxy: Proxy, environment: dict[str, str], url: str, expected: str
) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    system.proxy = proxy
    assert proxy_for(system, url) == expected


@pytest.mark.parametrize(
    ("file", "proxy", "source"),
    [
        ("/etc/environment", NO_PROXY, "https_proxy in /etc/environment"),
        ("/etc/profile.d/site.sh", NO_PROXY, "https_proxy in /etc/profile.d/site.sh"),
        ("", NO_PROXY, "https_proxy in the environment of gpuprov"),
        ("", Proxy("http://e:2"), ""),
    ],
)
def test_a_proxys_source(system: System, monkeypatch: pytest.MonkeyPatch, file: str, proxy: Proxy, source: str) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SITE", "http://e:2")
    monkeypatch.setenv("ftp_proxy", "")
    assert proxy_source(system, "https://a.example.net/x") == proxy_evidence(system, "https://a.example.net/x") == ""
    monkeypatch.setenv("https_proxy", "http://e:2")
    system.make_directory("/etc/profile.d")
    system.write("/etc/profile.d/other.sh", b"export http_proxy=http://d:1")
    if file:
        system.write(file, b"export https_proxy=http://e:2\n")
    system.proxy = proxy
    assert proxy_source(system, "https://a.example.net/x") == source
    said = f" ({source})" if source else ""
    assert proxy_evidence(system, "https://a.example.net/x") == f"\nthrough the proxy http://e:2{said}"


def test_a_proxy_without_a_scheme_is_named_as_it_is_used(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "me:hunter22@e:2")
    assert proxy_evidence(system, "http://a.example.net/x").startswith("\nthrough the proxy http://e:2 (")


def test_each_request_uses_the_proxy_of_its_own_url(system: System, site: Site) -> None:
    system.proxy = Proxy(site.url.replace("//", "//robot:secret@"), "127.0.0.1")
    site.files = {"http://a.example.net/key": b"key", "/key": b"key"}
    site.moved = {"http://a.example.net/moved": f"{site.url}/key"}
    assert fetch_small(system, "http://a.example.net/key") == b"key"
    assert unreachable(system, ["http://a.example.net/moved"]) == ()
    assert [path for path, _ in site.asked] == ["http://a.example.net/key", "http://a.example.net/moved", "/key"]
    (problem,) = unreachable(system, ["https://a.example.net/key"])
    assert "Tunnel connection failed: 501" in problem.evidence and "secret" not in problem.evidence
    assert problem.evidence.endswith(f"\nthrough the proxy {site.url}")


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

    def fail(session: object, url: str, **options: object) -> None:
        made.append(url)
        raise error

    monkeypatch.setattr("requests.Session.get", fail)
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
        ("ProxyError", ": the proxy does not let it through", "gpuprov_proxy"),
        ("something else", "", "network and proxy"),
    ],
)
def test_advice_by_cause(system: System, monkeypatch: pytest.MonkeyPatch, said: str, what: str, next_step: str) -> None:
    def fail(session: object, url: str, **options: object) -> None:
        raise requests.exceptions.InvalidURL(f"{'x' * 300} http://user:secret@example.org/ {said}")

    monkeypatch.setattr("requests.Session.get", fail)
    problem = refused(download, system, "http://user:secret@example.org/x")
    assert problem.what == f"http://user:***@example.org/x can't be reached{what}"
    assert problem.evidence.startswith("x" * 300) and problem.evidence.endswith(said)
    assert "secret" not in problem.evidence
    assert next_step in problem.next_step


@pytest.mark.parametrize("file", ["root/.bashrc", ""])
def test_a_dead_proxy_is_named_with_its_source(system: System, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """Port 9 is discard's: nothing listens."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_PROXY", "http://127.0.0.1:9")  # pip's alone
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    if file:
        system.make_directory("/root")
        system.write(f"/{file}", b"export http_proxy=http://127.0.0.1:9\n")
    problem = refused(download, system, "http://example.org/x")
    assert problem.what == "the proxy http://127.0.0.1:9 does not answer"
    where = f"/{file}" if file else "the environment of gpuprov"
    assert f"correct or remove http_proxy in {where}" in problem.next_step
    assert "Connection refused" in problem.evidence
