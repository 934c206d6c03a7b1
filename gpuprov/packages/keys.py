"""Repository keys: fetched, compared with the pinned fingerprint, installed; for all package managers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, Protocol

from gpuprov.core.changes import Change, Json, Tell, capture_path, parent_of, restore_path
from gpuprov.core.download import fetch_small
from gpuprov.core.system import System
from gpuprov.packages.pgp import dearmored, fingerprints
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.secrets import masked, split_login

# Keys that were withdrawn, and why; gpuprov never accepts one, even if an inventory names it.
# Source: NVIDIA's blog, 27 April 2022.
_WITHDRAWN = {"AE09FE4BBD223A84B2CCFCE3F60F4B3D7FA2AF80": "NVIDIA replaced its CUDA repository key in April 2022"}


# What apt_auth.conf(5), and the .repo files of dnf and zypper, take without quotes.
_LOGIN = re.compile(r"[A-Za-z0-9!%&()*+,./:;<=>?@^_~-]+")


class Named(Protocol):
    """What all kinds of repositories have."""

    @property
    def name(self) -> str: ...
    @property
    def uri(self) -> str: ...
    @property
    def key_fingerprint(self) -> str: ...


def problems_of_any(wanted: Sequence[Named]) -> tuple[Problem, ...]:
    """Return what is wrong with repositories of any package manager."""
    withdrawn = tuple(
        Problem(
            f"the key of repository {one.name} is withdrawn",
            f"{one.key_fingerprint}: {_WITHDRAWN[one.key_fingerprint]}",
            "set the fingerprint of the current key",
        )
        for one in wanted
        if one.key_fingerprint in _WITHDRAWN
    )
    names = [one.name for one in wanted]
    same = tuple(
        Problem(f"two repositories have the name {name}", "", "give each of gpuprov_repositories its own name")
        for name in sorted({name for name in names if names.count(name) > 1})
    )
    return withdrawn + same + tuple(filter(None, map(_login_problem, wanted)))


def _login_problem(one: Named) -> Problem | None:
    _, *login = split_login(one.uri)
    if "@" not in one.uri.partition("://")[2].partition("/")[0] or all(map(_LOGIN.fullmatch, login)):
        return None
    return Problem(
        f"the login in the URL of repository {one.name} can't be given to the package manager", masked(one.uri),
        "use USER:PASSWORD, each of letters, digits and !%&()*+,-./:;<=>?@^_~; or a mirror that needs no login",
    )  # fmt: skip


@dataclass(frozen=True)
class InstallKey(Change):
    """Install the key at a URL, if it is the pinned one and nothing else."""

    path: str
    url: str
    fingerprint: str

    def summary(self) -> str:
        return f"install key {self.fingerprint} to {self.path}"

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,)

    def capture(self, system: System) -> Json:
        return capture_path(system, self.path)

    def apply(self, system: System, tell: Tell) -> Json:
        key = fetch_pinned_key(system, self.url, self.fingerprint)
        system.make_directory(parent_of(self.path))
        system.write(self.path, dearmored(key))
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        restore_path(system, before)


def fetch_pinned_key(system: System, url: str, fingerprint: str) -> bytes:
    """Return the key at a URL. Raises GpuprovError if it is another one, or not the only one there."""
    key = fetch_small(system, url)
    found = fingerprints(key)
    if found != (fingerprint,):
        raise GpuprovError(
            "the repository's key is not the one that is pinned",
            f"{masked(url)} holds {', '.join(found)}; pinned is {fingerprint}",
            "if the repository announced a new key, set its fingerprint; else somebody put another key there",
        )
    return key


class PlannedKey(Protocol):
    """What the changes that install a key, apt's and rpm's, have in common."""

    @property
    def path(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...


def place_keys(
    system: System, folder: str, keys: Collection[PlannedKey], convert: Callable[[bytes], bytes]
) -> Mapping[str, str]:
    """Write keys that are yet to be installed to `folder`, converted; return the path each will have → where it is.

    Raises GpuprovError if one is not the pinned key.
    """
    places = {key.path: f"{folder}/{key.path.rpartition('/')[2]}" for key in keys}
    for key in keys:
        system.write(places[key.path], convert(fetch_pinned_key(system, key.url, key.fingerprint)))
    return places


def with_placed_keys(source: bytes, places: Mapping[str, str]) -> bytes:
    """Return a source that names its keys where `place_keys` wrote them."""
    for path, place in places.items():
        source = source.replace(path.encode(), place.encode())
    return source
