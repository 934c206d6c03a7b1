"""HTTP sessions for downloads: the host's certificates, the proxy of each request, no redirect from https to http."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from gpuprov.core.proxy import Proxy
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError
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
        raise GpuprovError(
            f"{masked(response.url)} leads to something that is not a URL",
            f"HTTP {response.status_code}, Location: {masked(target)}: {error}", "check the URL, and the server",
        ) from None  # fmt: skip
    if response.url.startswith("https:") and scheme == "http":
        raise GpuprovError(
            f"{masked(response.url)} leads from https to http",
            f"HTTP {response.status_code}, Location: {masked(target)}", "use a URL that stays with https",
        )  # fmt: skip


# Called for each answer before a redirect is followed.
# Where a login's environment is set, root's with sudo too.
_PROFILES = (
    "/etc/environment", "/root/.bashrc", "/root/.bash_profile", "/root/.profile", "/etc/profile", "/etc/bash.bashrc",
)  # fmt: skip
HOOKS = {"response": refuse_downgrade}


def certificates(system: System) -> str | bool:
    """Return the file of trusted certificates: the environment's, the host's, or True for the default of requests."""
    named = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
    return named or next((path for path in _CA_BUNDLES if system.exists(path)), True)


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


def through(system: System, url: str) -> str:
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
