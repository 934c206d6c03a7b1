"""apt repositories and their keys: which a host needs, and the changes that add them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuprov.core.changes import Change, RemoveFile, WriteFile
from gpuprov.packaging.keys import InstallKey, problems_of_any
from gpuprov.packaging.pgp import dearmored, fingerprints
from gpuprov.packaging.toolkit_channels import toolkit_channels
from gpuprov.wire.errors import GpuprovError, Problem
from gpuprov.wire.spec import HostSpec

if TYPE_CHECKING:
    from gpuprov.core.changes import FileFact
    from gpuprov.machine.distros import ExtraRepository
    from gpuprov.wire.spec import SiteRepository

_SOURCES = "/etc/apt/sources.list.d"
_KEYRINGS = "/etc/apt/keyrings"
_OURS = "gpuprov-"
# Debian's name of an architecture, from `uname -m`.
_DEBIAN_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# What apt reads besides our own files: it passes over names with other endings or letters (sources.list(5)).
_FOREIGN_SOURCE = re.compile(rf"/etc/apt/sources\.list|{_SOURCES}/(?!{_OURS})[A-Za-z0-9_.-]+\.(list|sources)")
# NVIDIA's repositories for single distributions, and of nvidia-docker; the one for all has replaced them. Beside it
# they offer older packages of the same names, and mostly another Signed-By. Source: the toolkit's installation guide.
_RETIRED = re.compile(
    r"https?://nvidia\.github\.io/"
    r"(nvidia-docker|nvidia-container-runtime|libnvidia-container/(?!(stable|experimental)/deb))\b"
)
# How apt spells "no" (apt-pkg/contrib/strutl.cc, StringToBool).
_NO = ("no", "false", "0", "off", "without", "disable")


@dataclass(frozen=True)
class AptRepository:
    """A signed apt repository; `str()` is its deb822 source (sources.list(5)).

    A `suite` that ends in a slash is a path, and such a flat repository has no components.
    """

    name: str
    uri: str
    suite: str
    components: str
    key_url: str
    key_fingerprint: str
    architecture: str

    @property
    def source_path(self) -> str:
        return f"{_SOURCES}/{_OURS}{self.name}.sources"

    @property
    def key_path(self) -> str:
        # apt takes the format from the name: a binary key must end in .gpg, an armored one in .asc.
        return f"{_KEYRINGS}/{_OURS}{self.name}.gpg"

    def __str__(self) -> str:
        lines = ["Types: deb", f"URIs: {self.uri}", f"Suites: {self.suite}"]
        if not self.suite.endswith("/"):
            lines.append(f"Components: {self.components or 'main'}")
        lines += [f"Architectures: {self.architecture}", f"Signed-By: {self.key_path}"]
        return "".join(f"{line}\n" for line in lines)


def repositories(
    spec: HostSpec, architecture: str, extra: tuple[ExtraRepository, ...] = ()
) -> tuple[AptRepository, ...]:
    """Return the repositories that a host needs besides its distribution's: the user's, the toolkit's, and `extra`."""
    debian = _DEBIAN_ARCHITECTURES.get(architecture, architecture)
    known: tuple[SiteRepository | ExtraRepository, ...] = (*spec.repositories, *extra)
    found = [
        AptRepository(one.name, one.uri, one.suite, one.components, one.key_url, one.key_fingerprint, debian)
        for one in known
    ]
    # docs.nvidia.com, Container Toolkit installation guide: one flat repository for all Debian and Ubuntu releases.
    found += [
        AptRepository(one.name, f"{one.base}/deb/{debian}", "/", "", one.key_url, spec.toolkit_key_fingerprint, debian)
        for one in toolkit_channels(spec)
    ]
    return tuple(found)


def problems(
    files: Mapping[str, FileFact], spec: HostSpec, architecture: str, extra: tuple[ExtraRepository, ...] = ()
) -> tuple[Problem, ...]:
    """Return what gpuprov can't correct in the host's or the user's sources."""
    wanted = repositories(spec, architecture, extra)
    mixed = tuple(
        Problem(
            f"{path} names {entry.uri} too, among others; apt would report conflicting values for Signed-By",
            f"{path}, line {entry.line}",
            f"remove that line: gpuprov keeps this repository in {_SOURCES}/{_OURS}*.sources",
        )
        for path, file in _foreign(files)
        for entry in _inseparable(path, file, _unwanted(path, file, wanted, spec))
    )
    return problems_of_any(wanted) + mixed


def plan_repositories(
    files: Mapping[str, FileFact], spec: HostSpec, architecture: str, extra: tuple[ExtraRepository, ...] = ()
) -> tuple[Change, ...]:
    """Return the keys and sources to write, and the conflicting ones to remove."""
    wanted = repositories(spec, architecture, extra)
    changes: list[Change] = []
    for one in wanted:
        key = files.get(one.key_path)
        if key is None or key.mode != 0o644 or not _is_pinned(key.content, one.key_fingerprint):
            changes.append(InstallKey(one.key_path, one.key_url, one.key_fingerprint))
        source = files.get(one.source_path)
        if source is None or source.content != str(one).encode() or source.mode != 0o644:
            changes.append(WriteFile(one.source_path, str(one).encode()))
    for path, file in _foreign(files):
        changes += _cleaned(path, file, _unwanted(path, file, wanted, spec))
    ours = {path for one in wanted for path in (one.source_path, one.key_path)}
    for path in files:
        if path.startswith((f"{_SOURCES}/{_OURS}", f"{_KEYRINGS}/{_OURS}")) and path not in ours:
            changes.append(RemoveFile(path, "no longer asked for"))
    return tuple(changes)


def _is_pinned(content: bytes, fingerprint: str) -> bool:
    try:
        # Armored, it would be the right key in a form that apt does not read from this file.
        return fingerprints(content) == (fingerprint,) and dearmored(content) == content
    except GpuprovError:
        return False


def _foreign(files: Mapping[str, FileFact]) -> list[tuple[str, FileFact]]:
    """Return what apt reads besides our own sources."""
    return [(path, file) for path, file in files.items() if _FOREIGN_SOURCE.fullmatch(path)]


def _unwanted(path: str, file: FileFact, wanted: tuple[AptRepository, ...], spec: HostSpec) -> dict[_Entry, str]:
    """Return the entries of a source that stand in the way of `wanted`, each with the reason.

    To apt a repository is a URI with a suite: another suite of the same mirror is another one, with a key of its own.
    """
    ours = {(_plain(one.uri, one.architecture), suite): one for one in wanted for suite in one.suite.split()}
    architecture = wanted[0].architecture if wanted else ""
    found = {}
    for entry in _entries(path, _text(file)):
        double = ours.get((_plain(entry.uri, architecture), entry.suite.replace("$(ARCH)", architecture)))
        if double is not None:
            found[entry] = f"a second source for {double.uri}"
        elif spec.toolkit == "nvidia" and _RETIRED.match(entry.uri):
            found[entry] = "NVIDIA has retired this repository"
    return found


def _inseparable(path: str, file: FileFact, unwanted: Mapping[_Entry, str]) -> list[_Entry]:
    """Return the entries that share their lines with others, so that only their owner may take them out."""
    kept = {entry.block for entry in _entries(path, _text(file)) if entry not in unwanted}
    return [entry for entry in unwanted if entry.block in kept]


def _cleaned(path: str, file: FileFact, unwanted: Mapping[_Entry, str]) -> list[Change]:
    """Return the change that takes the entries out: the file goes if it has no other, else their lines are commented.

    What the journal keeps of the file is the way back.
    """
    if not unwanted or _inseparable(path, file, unwanted):
        return []
    reason = next(iter(unwanted.values()))
    if all(entry in unwanted for entry in _entries(path, _text(file))):
        return [RemoveFile(path, reason)]
    blocks = [range(*entry.block) for entry in unwanted]
    lines = [
        f"# {line}" if any(number in block for block in blocks) else line
        for number, line in enumerate(_text(file).splitlines(keepends=True), 1)
    ]
    return [WriteFile(path, "".join(lines).encode("utf-8", "surrogateescape"), file.mode)]


def _text(file: FileFact) -> str:
    return file.content.decode("utf-8", "surrogateescape")


def _plain(uri: str, architecture: str) -> str:
    """Return a URI as apt compares it: sources.list(5) has one variable, and a final slash makes no difference."""
    return uri.replace("$(ARCH)", architecture).rstrip("/")


@dataclass(frozen=True)
class _Entry:
    """An active entry of a source: its line, URI, suite; `block`: the lines (first, behind the last) of its stanza."""

    line: int
    uri: str
    suite: str
    block: tuple[int, int]


def _entries(path: str, text: str) -> list[_Entry]:
    """Return the active entries of a .list or .sources file."""
    return _deb822_entries(text) if path.endswith(".sources") else _one_line_entries(text)


def _one_line_entries(text: str) -> list[_Entry]:
    pattern = re.compile(r"\s*deb(?:-src)?\s+(?:\[[^]]*\]\s*)?([^\s\[#]+)\s+([^\s#]+)")
    matches = ((number, pattern.match(line)) for number, line in enumerate(text.splitlines(), 1))
    return [_Entry(number, match[1], match[2], (number, number + 1)) for number, match in matches if match]


def _deb822_entries(text: str) -> list[_Entry]:
    """Stanzas are parted by blank lines; names of fields know no case, a value may go on in indented lines."""
    found: list[_Entry] = []
    stanza: dict[str, list[tuple[int, str]]] = {}
    field, first = "", 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if not line.strip():
            enabled = not any(word.lower() in _NO for _, word in stanza.get("enabled", ()))
            uris, suites = (stanza.get(name, []) if enabled else [] for name in ("uris", "suites"))
            found += [_Entry(place, uri, suite, (first, number)) for place, uri in uris for _, suite in suites]
            stanza, field, first = {}, "", number + 1
        if line.startswith("#"):
            continue
        if not line[:1].isspace():
            field, _, line = line.partition(":")
        stanza.setdefault(field.lower(), []).extend((number, word) for word in line.split())
    return found
