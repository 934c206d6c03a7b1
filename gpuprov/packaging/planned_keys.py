"""Keys of repositories that are yet to be set up: laid where a question can use them, sources pointed to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Callable, Protocol

from gpuprov.core.system import System
from gpuprov.packaging.keys import fetch_pinned_key


class PlannedKey(Protocol):
    """What apt's and rpm's changes that install a key have in common."""

    @property
    def path(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...


def lay(system: System, folder: str, keys: Collection[PlannedKey], form: Callable[[bytes], bytes]) -> Mapping[str, str]:
    """Write the keys to `folder`, in the form that their reader wants; return where each will lie → where it does.

    Raises GpuprovError if one is not the pinned key.
    """
    places = {key.path: f"{folder}/{key.path.rpartition('/')[2]}" for key in keys}
    for key in keys:
        system.write(places[key.path], form(fetch_pinned_key(system, key.url, key.fingerprint)))
    return places


def pointed(source: bytes, places: Mapping[str, str]) -> bytes:
    """Return a source whose keys lie elsewhere yet."""
    for path, place in places.items():
        source = source.replace(path.encode(), place.encode())
    return source
