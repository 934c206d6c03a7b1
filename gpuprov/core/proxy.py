"""The site's HTTP proxy (`gpuprov_proxy`): what a run gives to downloads and package managers; never written anywhere.

A password in it travels in environments alone, which only root and the user of a process can read: every local user
sees command lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuprov.wire.errors import Problem

if TYPE_CHECKING:
    from urllib.parse import SplitResult

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Proxy:
    """A proxy by its URL, and the hosts that are reached without it (commas between); an empty URL is no proxy."""

    url: str = ""
    no_proxy: str = ""

    @property
    def _parts(self) -> SplitResult:
        # What runs at boots has no proxy, and does not pay for this.
        from urllib.parse import urlsplit

        return urlsplit(self.url)

    @property
    def address(self) -> str:
        """Return its URL without user and password."""
        parts = self._parts
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if self.url else ""

    @property
    def host(self) -> str:
        return self._parts.hostname or ""

    @property
    def port(self) -> int:
        parts = self._parts
        return parts.port or _DEFAULT_PORTS[parts.scheme]

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the variables that name it: curl and apt read small letters, others capitals; empty without a proxy.

        An empty variable takes the place of one that the caller's environment has.
        """
        if not self.url:
            return {}
        values = {"http_proxy": self.url, "https_proxy": self.url, "ftp_proxy": self.url, "no_proxy": self.no_proxy}
        return {**values, **{name.upper(): value for name, value in values.items()}}

    def problem(self, seen: str) -> Problem:
        """Return the problem of a proxy that can't be reached."""
        return Problem(
            f"the proxy {self.address} does not answer", seen, "start it, or correct gpuprov_proxy; a host that needs "
            "no proxy: leave gpuprov_proxy out",
        )  # fmt: skip


NO_PROXY = Proxy()
