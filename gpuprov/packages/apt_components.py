"""Components of the distribution's archive that a driver needs, as a separate source. Pure.

The host's sources stay as they are: gpuprov's source names the same mirrors and suites with the missing components. apt
requires equal options for all sources of one URI and suite (Signed-By, Check-Valid-Until, …), so gpuprov copies them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gpuprov.packages.apt_sources import OURS, SOURCES, Entry, entries, foreign_sources, text_of
from gpuprov.protocol.errors import Problem

if TYPE_CHECKING:
    from gpuprov.core.changes import FileFact

PATH = f"{SOURCES}/{OURS}driver-components.sources"
_HEAD = "# By gpuprov: components that the distribution's NVIDIA driver comes from.\n"
_ALIASES = "stable|oldstable|oldoldstable"
# A source that is trusted without a signature stays with the host: gpuprov writes none.
_UNSAFE = ("trusted", "allow-insecure", "allow-weak", "allow-downgrade-to-insecure")


def source(files: Mapping[str, FileFact], codename: str, components: Sequence[str], keyrings: Sequence[str]) -> str:
    """Return the text of gpuprov's source, "" if the host's own sources have all these components.

    `keyrings`: possible paths of the distribution's keyring; used if the host's source names no key.
    """
    keyring = next((path for path in keyrings if path in files), "")
    groups: dict[tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]], list[str]] = {}
    for path, entry, lacking in _lacking(files, codename, components):
        groups.setdefault((entry.uri, lacking, _options(path, entry, keyring)), []).append(entry.suite)
    stanzas = [_stanza(uri, suites, lacking, options) for (uri, lacking, options), suites in groups.items()]
    return _HEAD + "\n".join(stanzas) if stanzas else ""


def problems(files: Mapping[str, FileFact], name: str, codename: str, components: Sequence[str]) -> tuple[Problem, ...]:
    """Return why the host's mirrors can't provide these components; `name` is the distribution's, for messages."""
    if not list(_archives(files, codename)):
        read = ", ".join(path for path, _ in foreign_sources(files)) or "there is none"
        return (
            Problem(
                f"no source of this host is {name}'s own archive, whose components {' '.join(components)} have the "
                "driver",
                f"apt's sources ({read}) have no entry with suite {codename} and component main",
                f"add {name}'s archive to {SOURCES}, or set gpuprov_driver: runfile",
            ),
        )
    return tuple(
        Problem(
            f"{path} trusts {entry.uri} without a signature, and the driver would come from there",
            f"{path}, line {entry.line}: {field}",
            f"take {field} out, so that apt checks the archive's signature",
        )
        for path, entry, _ in _lacking(files, codename, components)
        for field, _ in entry.options
        if field.lower() in _UNSAFE
    )


def _archives(files: Mapping[str, FileFact], codename: str) -> Iterator[tuple[str, Entry]]:
    """Yield (path, entry) of the distribution's archive in the host's sources: the release, its updates, security."""
    suites = re.compile(rf"({re.escape(codename)}|{_ALIASES})(-updates|-security|/updates)?")
    for path, file in foreign_sources(files):
        for entry in entries(path, text_of(file)):
            if "deb" in entry.types and "main" in entry.components and suites.fullmatch(entry.suite):
                yield path, entry


def _lacking(
    files: Mapping[str, FileFact], codename: str, components: Sequence[str]
) -> Iterator[tuple[str, Entry, tuple[str, ...]]]:
    """Yield (path, entry, components that no source has of its archive), each archive once."""
    there: dict[tuple[str, str], set[str]] = {}
    for path, file in foreign_sources(files):
        for entry in entries(path, text_of(file)):
            if "deb" in entry.types:
                there.setdefault((entry.uri.rstrip("/"), entry.suite), set()).update(entry.components)
    seen = set()
    for path, entry in _archives(files, codename):
        place = (entry.uri.rstrip("/"), entry.suite)
        lacking = tuple(one for one in components if one not in there[place])
        if lacking and place not in seen:
            seen.add(place)
            yield path, entry, lacking


def _options(path: str, entry: Entry, keyring: str) -> tuple[tuple[str, str], ...]:
    """Return the options of our entry: the host's, and the keyring where apt takes one.

    apt takes Signed-By after a source that names no key, and refuses one without it after a source that has it.
    """
    options = tuple(pair for pair in entry.options if pair[0].lower() not in _UNSAFE)
    if entry.option("Signed-By") or not keyring or path > PATH:
        return options
    return (*options, ("Signed-By", keyring))


def _stanza(uri: str, suites: Sequence[str], components: Sequence[str], options: Sequence[tuple[str, str]]) -> str:
    lines = ["Types: deb", f"URIs: {uri}", f"Suites: {' '.join(suites)}", f"Components: {' '.join(components)}"]
    lines += [f"{field}: {value}".replace(": \n", ":\n") for field, value in options]
    return "".join(f"{line}\n" for line in lines)
