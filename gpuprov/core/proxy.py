"""The site's HTTP proxy (`gpuprov_proxy`), which a run passes to downloads and package managers; never written to disk.

Its password is passed only in environments, which only root and the process's user can read; all local users can see
command lines.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import Problem

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Proxy:
    """A proxy by its URL, and the hosts reached without it (separated by commas); an empty URL means no proxy."""

    url: str = ""
    no_proxy: str = ""

    @property
    def address(self) -> str:
        """Return its URL without user and password."""
        scheme, _, rest = self.url.rpartition("://")  # urlsplit() refuses some of what an environment may hold
        return f"{scheme or 'http'}://{rest.partition('/')[0].rpartition('@')[2]}" if self.url else ""

    @property
    def host_and_port(self) -> tuple[str, int]:
        # Imported here: programs that run at boot have no proxy and do not need it.
        from urllib.parse import urlsplit

        # The environment's may be HOST:PORT.
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        return parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme]

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the variables that name it: curl and apt read lower case, others upper case; empty without a proxy.

        An empty variable overrides one in the caller's environment.
        """
        if not self.url:
            return {}
        values = {"http_proxy": self.url, "https_proxy": self.url, "ftp_proxy": self.url, "no_proxy": self.no_proxy}
        return {**values, **{name.upper(): value for name, value in values.items()}}

    def problem(self, seen: str, source: str = "") -> Problem:
        """Return the problem of an unreachable proxy; `source`: what names it, if not gpuprov_proxy."""
        step = "start it, or correct gpuprov_proxy; a host that needs no proxy: leave gpuprov_proxy out"
        if source:
            step = f"start it, or correct or remove {source}; gpuprov_proxy has precedence over it"
        return Problem(f"the proxy {self.address} does not answer", seen, step)


NO_PROXY = Proxy()
