"""Download files with requests: resumed, retried, and verified by digest before any use.

Sessions use the host's certificates and the proxy of each request, and follow no redirect from https to http.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from gpuprov.core.changes import Tell, tell_nobody
from gpuprov.core.commands import first_match
from gpuprov.core.proxy import Proxy
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.secrets import masked

if TYPE_CHECKING:
    import requests

# The host's own certificates include the site's; the bundle of requests lacks those.
_CA_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem",
)  # fmt: skip


def refuse_downgrade(response: requests.Response, *_: object, **__: object) -> None:
    """Raise GpuprovError for a redirect from https to http: anyone on the network could forge the response."""
    if not response.is_redirect:
        return
    from urllib.parse import urlsplit

    target = response.headers["Location"]
    try:
        # Read as requests reads it: urlsplit() drops tabs, and requests would follow "ht\ttp:".
        scheme = urlsplit(target).scheme
    except ValueError as error:
        seen = f"HTTP {response.status_code}, Location: {masked(target)}: {error}"
        step = "check the URL, and the server"
        raise GpuprovError(f"{masked(response.url)} leads to something that is not a URL", seen, step) from None
    if response.url.startswith("https:") and scheme == "http":
        seen = f"HTTP {response.status_code}, Location: {masked(target)}"
        raise GpuprovError(f"{masked(response.url)} leads from https to http", seen, "use a URL that stays with https")


# Where a login's environment is set, root's with sudo too.
_PROFILES = (
    "/etc/environment", "/root/.bashrc", "/root/.bash_profile", "/root/.profile", "/etc/profile", "/etc/bash.bashrc",
)  # fmt: skip
# Called for each answer before a redirect is followed.
HOOKS = {"response": refuse_downgrade}


def certificates(system: System) -> str | bool:
    """Return the file of trusted certificates: the environment's, the host's, or True for the default of requests.

    Raises GpuprovError if the environment's is missing, as a builder's is in an image.
    """
    for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        if path := os.environ.get(name):
            if not System().exists(path):
                what = "the file of trusted certificates does not exist"
                raise GpuprovError(what, f"{name}={path}", f"unset {name}, or correct it")
            return path
    return next((path for path in _CA_BUNDLES if system.exists(path)), True)


def proxy_for(system: System, url: str) -> str:
    """Return the proxy URL for a request to `url`: from gpuprov_proxy, else from the environment."""
    from requests.utils import get_environ_proxies, select_proxy, should_bypass_proxies

    try:
        if not system.proxy.url:
            return select_proxy(url, get_environ_proxies(url)) or ""
        # An empty list would make requests read the environment's.
        return "" if should_bypass_proxies(url, system.proxy.no_proxy or "-") else system.proxy.url
    except ValueError:
        # Not a URL: the request itself reports it.
        return ""


def proxy_source(system: System, url: str) -> str:
    """Return what names the proxy of a URL if gpuprov_proxy does not: the variable, and the file that sets it."""
    proxy = "" if system.proxy.url else proxy_for(system, url)
    # Other programs' variables end like these, PIP_PROXY.
    heeded = (f"{url.partition(':')[0].lower()}_proxy", "all_proxy")
    name = next((name for name in os.environ if name.lower() in heeded and os.environ[name] == proxy), "")
    if not proxy or not name:
        return ""
    profiles = [f"/etc/profile.d/{one}" for one in system.list_directory("/etc/profile.d")]
    files = (path for path in (*_PROFILES, *profiles) if proxy in (system.read_text(path) or ""))
    return f"{name} in {next(files, 'the environment of gpuprov')}"


def proxy_evidence(system: System, url: str) -> str:
    """Return a line that names the proxy, for an error's evidence; "" without a proxy."""
    proxy, source = proxy_for(system, url), proxy_source(system, url)
    return f"\nthrough the proxy {Proxy(proxy).address}{f' ({source})' if source else ''}" if proxy else ""


def session(system: System) -> requests.Session:
    """Return a session in which every request, also after a redirect, uses the proxy of its own URL."""
    import requests
    from requests.adapters import HTTPAdapter

    class _Proxied(HTTPAdapter):
        def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
            proxy = proxy_for(system, request.url or "")
            proxies = {"http": proxy, "https": proxy} if proxy else {}
            return super().send(request, *args, **{**kwargs, "proxies": proxies})

    made = requests.Session()
    for scheme in ("http://", "https://"):
        made.mount(scheme, _Proxied())
    return made


_Result = TypeVar("_Result")
_TIMEOUTS = (15, 60)  # seconds to connect, seconds of silence
_ASKING_TIMEOUTS = (10, 10)
_ATTEMPTS = 4
_LONGEST_PAUSE = 60.0  # limit, whatever a server asks for
# Too many requests, and servers or their proxies in trouble (RFC 9110, 15.5 and 15.6; RFC 6585).
_PASSING = (408, 429, 500, 502, 503, 504)
# The most that a broken connection loses; small, so that downloads over a poor line progress.
_CHUNK = 1 << 16
_LONGEST_SEEN = 400
_SMALL = 1 << 20
_SMALL_SECONDS = 300
# Limits where the server does not say how much will come: several times the largest .run, and a slow line's night.
LARGEST = 16 << 30
_LONGEST_SECONDS = 8 * 3600
# Such a download leaves this much room to others.
_LEAST_ROOM = 256 << 20
_PROGRESS_SECONDS = 0.5


def fetch(system: System, url: str, destination: str, *, sha256: str, tell: Tell) -> None:
    """Fetch `url` (http, https, file) to `destination` and verify its SHA-256 against `sha256`.

    A partial download in `destination`.part is resumed. `destination` exists only if its digest is right. Raises
    GpuprovError that says why the download failed.
    """
    if system.sha256(destination) == sha256:
        return
    _at_each_address(system, url, lambda place: _fetch_from(system, place, destination, sha256, tell))


def _at_each_address(system: System, url: str, attempt: Callable[[str], _Result]) -> _Result:
    """Return what `attempt` gives for the first address that has the file. Raises GpuprovError with all addresses."""
    missing: tuple[Problem, ...] = ()
    for place in system.tables.addresses(url):
        try:
            return attempt(place)
        except GpuprovError as error:
            missing += error.problems
            if not _is_missing(error):
                break
    raise GpuprovError.several(missing)


def _is_missing(error: GpuprovError) -> bool:
    last = str(error.problems[-1])
    return "HTTP 404" in last or "no file" in last


def _fetch_from(system: System, url: str, destination: str, sha256: str, tell: Tell) -> None:
    part = f"{destination}.part"
    resumed = system.status(part) is not None
    _bring(system, url, part, tell)
    if resumed and system.sha256(part) != sha256:
        tell("what an earlier download left does not belong to this file; starting again", 0, 0)
        system.remove(part)
        _bring(system, url, part, tell)
    _require_digest(system, url, part, sha256)
    system.rename(part, destination)


def _bring(system: System, url: str, part: str, tell: Tell) -> None:
    """Fetch or copy into `part`; a transfer resumes at its end."""
    if url.startswith("file://"):
        source = url[len("file://") :]
        if not system.exists(source):
            raise GpuprovError(f"there is no file {source}", "", "check the path")
        with system.path(source).open("rb") as reading, system.path(part).open("wb") as writing:
            shutil.copyfileobj(reading, writing)
        return
    _persistently(
        system, url, lambda: _transfer_once(system, url, part, tell), lambda: system.status(part) is not None, tell
    )


def _require_digest(system: System, url: str, part: str, sha256: str) -> None:
    """Raise GpuprovError, and remove the file, if its digest differs."""
    found = system.sha256(part)
    if found == sha256:
        return
    start = system.read_start(part, 512) or b""
    system.remove(part)
    if re.match(rb"\s*<(!doctype|html)", start, re.IGNORECASE):
        seen = start[:120].decode("utf-8", "replace").strip()
        what = f"{masked(url)} gave a web page instead of a file"
        raise GpuprovError(what, seen, "check the URL, and the proxy's log-in")
    seen = f"its SHA-256 is {found}, expected {sha256}"
    step = "correct the digest if it is wrong; else the mirror is damaged or hostile"
    raise GpuprovError(f"what {masked(url)} gave is not the file that was asked for", seen, step)


def fetch_small(system: System, url: str) -> bytes:
    """Return the content at `url`, at most 1 MiB. Raises GpuprovError if it is unavailable or larger."""

    def attempt() -> bytes:
        content = b""
        with _get(system, url, 0) as response:
            for chunk in _pieces(system, response, url, _SMALL_SECONDS):
                content += chunk
                if len(content) > _SMALL:
                    break
        return content

    if url.startswith("file://"):
        content = system.read_start(url[len("file://") :], _SMALL + 1)
        if content is None:
            raise GpuprovError(f"there is no file {url}", "", "check the path")
    else:
        content = _persistently(system, url, attempt, lambda: False, tell_nobody)
    if len(content) > _SMALL:
        raise GpuprovError(f"{masked(url)} is larger than expected", f"more than {_SMALL} bytes", "check the URL")
    return content


def unreachable(system: System, urls: Sequence[str]) -> tuple[Problem, ...]:
    """Return a problem for each URL that is unavailable now; all are queried at once, and nothing is transferred."""
    from concurrent.futures import ThreadPoolExecutor

    wanted = sorted({url for url in urls if not url.startswith("file://")})
    if not wanted:
        return ()

    def ask(url: str) -> tuple[Problem, ...]:
        try:
            _at_each_address(system, url, lambda place: _ask(system, place))
        except GpuprovError as error:
            return error.problems
        return ()

    with ThreadPoolExecutor(max_workers=8) as pool:
        return tuple(problem for found in pool.map(ask, wanted) for problem in found)


def _ask(system: System, url: str) -> None:
    import requests

    try:
        with session(system) as opened:
            status = opened.head(
                url, timeout=_ASKING_TIMEOUTS, verify=certificates(system), allow_redirects=True, hooks=HOOKS
            ).status_code
    except (requests.RequestException, ValueError) as error:
        raise _explained(system, url, error) from None
    known = first_match("http", [f"HTTP {status}"])
    # Other refusals may concern the HEAD request only: the download will show.
    if known and status != 403:
        seen = f"HTTP {status}{proxy_evidence(system, url)}"
        raise GpuprovError(f"{masked(url)} can't be had", seen, f"{known[0].what}: {known[0].next_step}")


def published_sha256(system: System, url: str) -> str:
    """Return the digest in the `.sha256sum` file beside `url`, or nothing if there is none."""
    try:
        content = _at_each_address(system, f"{url}.sha256sum", lambda place: fetch_small(system, place))
    except GpuprovError as error:
        if _is_missing(error):
            return ""
        raise
    found = re.match(r"\s*([0-9a-f]{64})\b", content.decode("ascii", "replace"))
    return found[1] if found else ""


def trusted_sha256(system: System, url: str) -> str:
    """Return the published digest, "" over http: an attacker who changes the file can change its digest too."""
    return "" if url.startswith("http:") else published_sha256(system, url)


class _Busy(Exception):  # noqa: N818 (it is no error yet: trying again may help)
    """A server that is busy; the delay that it asks for, in seconds, and the problem if it stays busy."""

    def __init__(self, error: GpuprovError, wait: float) -> None:
        super().__init__(str(error))
        self.error, self.wait = error, wait


def _persistently(
    system: System, url: str, attempt: Callable[[], _Result], begun: Callable[[], bool], tell: Tell
) -> _Result:
    """Retry, with growing pauses, after a broken connection or a busy server.

    `begun` says whether data arrived before: then even a refused connection is retried.
    """
    import requests

    for number in range(1, _ATTEMPTS + 1):
        try:
            return attempt()
        except _Busy as busy:
            if number == _ATTEMPTS:
                raise busy.error from None
            reason, pause = f"{busy.error.problems[0].evidence}", busy.wait
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            if number == _ATTEMPTS or _says(error, _HOPELESS) or not (begun() or _says(error, _BROKEN_OFF)):
                raise _explained(system, url, error) from None
            reason, pause = "connection lost", 0.0
        except (requests.RequestException, ValueError) as error:
            raise _explained(system, url, error) from None
        tell(f"{reason}, trying again ({number + 1} of {_ATTEMPTS})", 0, 0)
        system.sleep(max(2.0 ** (number - 1), pause))
    raise AssertionError("the last attempt returns or raises")


def _transfer_once(system: System, url: str, part: str, tell: Tell) -> None:
    found = system.status(part)
    have = found.size if found else 0
    with _get(system, url, have) as response:
        if response.status_code == 416:
            # The part is at least as long as the file: start again, because the digest would not show which one is
            # wrong.
            system.remove(part)
            _transfer_once(system, url, part, tell)
            return
        resumed = response.status_code == 206
        have = have if resumed else 0
        length = response.headers.get("Content-Length", "")
        total = have + int(length) if length.isdecimal() else 0
        _require_room(system, part, max(total - have, 0), url)
        told = system.now()
        with system.path(part).open("ab" if resumed else "wb") as file:
            for chunk in response.iter_content(_CHUNK) if total else _endless(system, response, part, url):
                file.write(chunk)
                have += len(chunk)
                if system.now() - told > _PROGRESS_SECONDS:
                    tell("downloading", have, total)
                    told = system.now()


def _pieces(system: System, response: requests.Response, url: str, seconds: float) -> Iterator[bytes]:
    """Yield the content in pieces, for at most so many seconds: a server may send a byte a minute."""
    import requests
    import urllib3

    end, piece = system.now() + seconds, b""
    try:
        while read := response.raw.read1(_CHUNK, decode_content=True):
            piece += read
            if system.now() > end:
                raise GpuprovError(f"{masked(url)} takes too long", f"no end after {seconds:.0f} s", "try again later")
            if len(piece) >= _CHUNK:
                yield piece[:_CHUNK]
                piece = piece[_CHUNK:]
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError(error) from None
    if piece:
        yield piece


def _endless(system: System, response: requests.Response, part: str, url: str) -> Iterator[bytes]:
    """Yield the pieces of a content of unknown length, within the limits of time, size and room."""
    size = 0
    for piece in _pieces(system, response, url, _LONGEST_SECONDS):
        size += len(piece)
        if size > LARGEST:
            system.remove(part)
            seen = f"more than {LARGEST >> 30} GiB"
            raise GpuprovError(f"{masked(url)} is larger than expected", seen, "check the URL")
        if system.free_bytes(part) < _LEAST_ROOM:
            system.remove(part)
            _require_room(system, part, _LEAST_ROOM, url)
        yield piece


def _get(system: System, url: str, start: int) -> requests.Response:
    """Return the open response. Raises GpuprovError for an HTTP error, _Busy for a temporary one."""
    # No content encoding: the part's length must match the file, and digests are of the file itself.
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={start}-"} if start else {})}
    response = session(system).get(
        url, headers=headers, stream=True, timeout=_TIMEOUTS, verify=certificates(system), hooks=HOOKS
    )
    if response.status_code in ((200, 206, 416) if start else (200,)):
        return response
    status, reason = response.status_code, response.reason
    asked = response.headers.get("Retry-After", "")
    response.close()
    known = first_match("http", [f"HTTP {status}"])
    next_step = _sourced(system, url, f"{known[0].what}: {known[0].next_step}" if known else "try again later")
    seen = f"HTTP {status} {reason}{proxy_evidence(system, url)}"
    error = GpuprovError(f"{masked(url)} can't be had", seen, next_step)
    if status in _PASSING:
        raise _Busy(error, min(float(asked), _LONGEST_PAUSE) if asked.isdecimal() else 0.0)
    raise error


def _require_room(system: System, path: str, size: int, url: str) -> None:
    free = system.free_bytes(path)
    if size > free:
        seen = f"{size // 2**20} MiB to come, {free // 2**20} MiB free for {path}"
        step = f"make room: {system.df(path.rpartition('/')[0])}"
        raise GpuprovError(f"not enough room for {masked(url)}", seen, step)


# An established connection was lost; a retry can't help: the name does not exist, the certificate is not trusted.
_BROKEN_OFF = ("Connection aborted", "reset by peer", "Connection broken", "Read timed out")
_HOPELESS = ("NameResolutionError", "CERTIFICATE_VERIFY_FAILED", "Name or service not known")


def _says(error: Exception, words: tuple[str, ...]) -> bool:
    return any(word in str(error) for word in words)


def _cause(said: str) -> str:
    """Return what requests names as the cause, whole; else the beginning of what it says."""
    found = re.search(r"\(Caused by (.+)\)$", said)
    return found[1] if found else said[:_LONGEST_SEEN]


def _sourced(system: System, url: str, next_step: str) -> str:
    """Return a next step with what names the proxy of this URL."""
    source = proxy_source(system, url)
    return next_step.replace("gpuprov_proxy", source, 1) if source else next_step


def _explained(system: System, url: str, error: Exception) -> GpuprovError:
    proxy, said = proxy_for(system, url), masked(str(error))
    if proxy and "connect to proxy" in said.lower() and "Tunnel connection failed" not in said:
        return GpuprovError.several((Proxy(proxy).problem(_cause(said), proxy_source(system, url)),))
    seen = f"{_cause(said)}{proxy_evidence(system, url)}"
    if found := first_match("download", [said]):
        next_step = _sourced(system, url, found[0].next_step)
        return GpuprovError(f"{masked(url)} can't be reached: {found[0].what}", seen, next_step)
    return GpuprovError(f"{masked(url)} can't be reached", seen, "check network and proxy, then run this again")
