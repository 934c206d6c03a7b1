"""The entries of apt's sources, read from .list and .sources files (sources.list(5)). Pure; changes nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuprov.core.changes import FileFact

SOURCES = "/etc/apt/sources.list.d"
OURS = "gpuprov-"
# What apt reads besides our own files: it passes over names with other endings or letters (sources.list(5)).
_FOREIGN_SOURCE = re.compile(rf"/etc/apt/sources\.list|{SOURCES}/(?!{OURS})[A-Za-z0-9_.-]+\.(list|sources)")
# How apt spells "no" (apt-pkg/contrib/strutl.cc, StringToBool).
_NO = ("no", "false", "0", "off", "without", "disable")
_ONE_LINE = re.compile(r"\s*(deb(?:-src)?)\s+(?:\[([^]]*)\]\s*)?([^\s\[#]+)\s+([^\s#]+)([^#]*)")
# Fields that say which entries a stanza has, or whether it counts; all others are options of each entry.
_NO_OPTIONS = ("types", "uris", "suites", "components", "enabled")
# Options of one line whose deb822 field has another name; of all others it is the same.
_FIELDS = {"arch": "Architectures", "lang": "Languages", "target": "Targets", "pdiffs": "PDiffs"}
_ENDS = {"+": "-Add", "-": "-Remove"}


@dataclass(frozen=True)
class Entry:
    """An active entry of a source: one URI with one suite.

    `line`: where its URI stands; `block`: the lines (first, behind the last) that it shares with the other entries of
    its stanza. `types`: deb, deb-src. `options`: deb822 fields and their values, in their order.
    """

    line: int
    uri: str
    suite: str
    block: tuple[int, int]
    types: tuple[str, ...] = ("deb",)
    components: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    def option(self, field: str) -> str:
        """Return the value of an option by its deb822 field, nothing if it is not set."""
        return next((value for name, value in self.options if name.lower() == field.lower()), "")


def foreign_sources(files: Mapping[str, FileFact]) -> list[tuple[str, FileFact]]:
    """Return what apt reads besides our own sources, in apt's order."""
    found = [(path, file) for path, file in files.items() if _FOREIGN_SOURCE.fullmatch(path)]
    return sorted(found, key=lambda pair: (pair[0].startswith(SOURCES), pair[0]))


def text_of(file: FileFact) -> str:
    """Return a source's text, such that encoding it in the same way gives the same bytes."""
    return file.content.decode("utf-8", "surrogateescape")


def entries(path: str, text: str) -> list[Entry]:
    """Return the active entries of a .list or .sources file."""
    return _deb822_entries(text) if path.endswith(".sources") else _one_line_entries(text)


def _one_line_entries(text: str) -> list[Entry]:
    matches = ((number, _ONE_LINE.match(line)) for number, line in enumerate(text.splitlines(), 1))
    return [
        Entry(
            number, match[3], match[4], (number, number + 1), (match[1],), tuple(match[5].split()),
            _one_line_options(match[2] or ""),
        )
        for number, match in matches if match
    ]  # fmt: skip


def _one_line_options(text: str) -> tuple[tuple[str, str], ...]:
    pairs = (word.partition("=") for word in text.split())
    return tuple((_field(name), value.replace(",", " ")) for name, _, value in pairs if value)


def _field(option: str) -> str:
    end = _ENDS.get(option[-1:], "")
    name = option[: -1 if end else None].lower()
    return _FIELDS.get(name, "-".join(part.capitalize() for part in name.split("-"))) + end


def _deb822_entries(text: str) -> list[Entry]:
    """Stanzas are parted by blank lines; names of fields know no case, a value may go on in indented lines."""
    found: list[Entry] = []
    stanza: dict[str, list[tuple[int, str]]] = {}
    first = 1
    field = ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if not line.strip():
            found += _stanza_entries(stanza, (first, number))
            stanza, field, first = {}, "", number + 1
        if line.startswith("#"):
            continue
        if not line[:1].isspace():
            field, _, line = line.partition(":")
            line = line.strip()
        stanza.setdefault(field, []).append((number, line.rstrip()))
    return found


def _stanza_entries(stanza: Mapping[str, list[tuple[int, str]]], block: tuple[int, int]) -> list[Entry]:
    """Return an entry for each URI and suite of a stanza: field → numbered lines of its value."""
    lower = {name.lower(): lines for name, lines in stanza.items()}
    words = {
        name: [(number, word) for number, line in lower.get(name, ()) for word in line.split()] for name in _NO_OPTIONS
    }
    if any(word.lower() in _NO for _, word in words["enabled"]):
        return []
    types, components = (tuple(word for _, word in words[name]) for name in ("types", "components"))
    options = tuple(
        (name, "\n".join(line for _, line in lines))
        for name, lines in stanza.items()
        if name and name.lower() not in _NO_OPTIONS and not name.lower().startswith("x-")
    )
    return [
        Entry(place, uri, suite, block, types, components, options)
        for place, uri in words["uris"]
        for _, suite in words["suites"]
    ]
