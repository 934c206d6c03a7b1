"""What a host's package sources say: apt's entries, components and pins, the sections of .repo files."""

from __future__ import annotations

import configparser
import fnmatch
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpuprov.core.commands import TIMED_OUT
from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import Problem

if TYPE_CHECKING:
    from gpuprov.core.changes import FileFact

SOURCES = "/etc/apt/sources.list.d"
_PREFERENCES = ("/etc/apt/preferences", "/etc/apt/preferences.d")
_PIN = re.compile(r"^(Package|Pin-Priority):[ \t]*(.*?)[ \t]*$", re.MULTILINE | re.IGNORECASE)
_POLICY_SECONDS = 60
OURS = "gpuprov-"
# What apt reads besides our own files: it passes over names with other endings or letters (sources.list(5)).
_FOREIGN_SOURCE = re.compile(rf"/etc/apt/sources\.list|{SOURCES}/(?!{OURS})[A-Za-z0-9_.-]+\.(list|sources)")
# How apt spells "no" (apt-pkg/contrib/strutl.cc, StringToBool).
_NO = ("no", "false", "0", "off", "without", "disable")
# dnf (libdnf, OptionBool) and zypper.
_DISABLED = ("0", "no", "false", "off")
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


def foreign_entries(files: Mapping[str, FileFact]) -> Iterator[tuple[str, Entry]]:
    """Yield (path, entry) of these sources."""
    for path, file in foreign_sources(files):
        yield from ((path, entry) for entry in entries(path, text_of(file)))


def text_of(file: FileFact) -> str:
    """Return a source's text, such that encoding it in the same way gives the same bytes."""
    return file.content.decode("utf-8", "surrogateescape")


def entries(path: str, text: str) -> list[Entry]:
    """Return the active entries of a .list or .sources file."""
    return _deb822_entries(text) if path.endswith(".sources") else _one_line_entries(text)


def _one_line_entries(text: str) -> list[Entry]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := _ONE_LINE.match(line):
            kind, options, uri, suite, components = match.groups()
            pairs = (word.partition("=") for word in (options or "").split())
            fields = tuple((_field(name), value.replace(",", " ")) for name, _, value in pairs if value)
            found.append(Entry(number, uri, suite, (number, number + 1), (kind,), tuple(components.split()), fields))
    return found


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
    words = {name: [(number, word) for number, line in lower.get(name, ()) for word in line.split()]
             for name in _NO_OPTIONS}  # fmt: skip
    if any(word.lower() in _NO for _, word in words["enabled"]):
        return []
    types, components = (tuple(word for _, word in words[name]) for name in ("types", "components"))
    options = tuple(
        (name, "\n".join(line for _, line in lines))
        for name, lines in stanza.items()
        if name and name.lower() not in _NO_OPTIONS and not name.lower().startswith("x-")
    )
    return [Entry(place, uri, suite, block, types, components, options)
            for place, uri in words["uris"] for _, suite in words["suites"]]  # fmt: skip


def repo_sections(text: str) -> list[tuple[str, Mapping[str, str]]]:
    """Return the enabled sections of a .repo file, each with its name. Raises configparser.Error."""
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(text)
    sections = ((name, dict(parser.items(name))) for name in parser.sections())
    return [(name, one) for name, one in sections if one.get("enabled", "1").strip().lower() not in _DISABLED]


# Components of the distribution's archive that a driver needs are a separate source. The host's sources stay as they
# are: gpuprov's source names the same mirrors and suites with the missing components. apt requires equal options for
# all sources of one URI and suite (Signed-By, Check-Valid-Until, …), so gpuprov copies them.
COMPONENTS_PATH = f"{SOURCES}/{OURS}driver-components.sources"
_HEAD = "# By gpuprov: components that the distribution's NVIDIA driver comes from.\n"
_ALIASES = "stable|oldstable|oldoldstable"
# A source that is trusted without a signature stays with the host: gpuprov writes none.
_UNSAFE = ("trusted", "allow-insecure", "allow-weak", "allow-downgrade-to-insecure")


def component_source(
    files: Mapping[str, FileFact], codename: str, components: Sequence[str], keyrings: Sequence[str]
) -> str:
    """Return the text of gpuprov's source, "" if the host's own sources have all these components.

    `keyrings`: possible paths of the distribution's keyring; used if the host's source names no key.
    """
    keyring = next((path for path in keyrings if path in files), "")
    groups: dict[tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]], list[str]] = {}
    for path, entry, lacking in _lacking(files, codename, components):
        options = tuple(pair for pair in entry.options if pair[0].lower() not in _UNSAFE)
        # apt takes Signed-By after a source that names no key, and refuses one without it after a source that has it.
        if keyring and path <= COMPONENTS_PATH and not entry.option("Signed-By"):
            options = (*options, ("Signed-By", keyring))
        groups.setdefault((entry.uri, lacking, options), []).append(entry.suite)
    stanzas = []
    for (uri, lacking, options), suites in groups.items():
        lines = ["Types: deb", f"URIs: {uri}", f"Suites: {' '.join(suites)}", f"Components: {' '.join(lacking)}"]
        lines += [f"{field}: {value}".replace(": \n", ":\n") for field, value in options]
        stanzas.append("".join(f"{line}\n" for line in lines))
    return _HEAD + "\n".join(stanzas) if stanzas else ""


def component_problems(
    files: Mapping[str, FileFact], name: str, codename: str, components: Sequence[str]
) -> tuple[Problem, ...]:
    """Return why the host's mirrors can't provide these components; `name` is the distribution's, for messages."""
    if not any(_archives(files, codename)):
        read = ", ".join(path for path, _ in foreign_sources(files)) or "there is none"
        named = " ".join(components)
        what = f"no source of this host is {name}'s own archive, whose components {named} have the driver"
        seen = f"apt's sources ({read}) have no entry with suite {codename} and component main"
        return (Problem(what, seen, f"add {name}'s archive to {SOURCES}, or set gpuprov_driver: runfile"),)
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
    for path, entry in foreign_entries(files):
        if "deb" in entry.types and "main" in entry.components and suites.fullmatch(entry.suite):
            yield path, entry


def _lacking(
    files: Mapping[str, FileFact], codename: str, components: Sequence[str]
) -> Iterator[tuple[str, Entry, tuple[str, ...]]]:
    """Yield (path, entry, components that no source has of its archive), each archive once."""
    there: dict[tuple[str, str], set[str]] = {}
    for _, entry in foreign_entries(files):
        if "deb" in entry.types:
            there.setdefault((entry.uri.rstrip("/"), entry.suite), set()).update(entry.components)
    seen = set()
    for path, entry in _archives(files, codename):
        place = (entry.uri.rstrip("/"), entry.suite)
        lacking = tuple(one for one in components if one not in there[place])
        if lacking and place not in seen:
            seen.add(place)
            yield path, entry, lacking


@dataclass(frozen=True)
class PinnedOut:
    """A package without a candidate. `places`: `file:line` of the pins on it with a negative priority."""

    name: str
    versions: tuple[str, ...]
    places: tuple[str, ...]


def gather_pinned_out(system: System, names: Sequence[str]) -> tuple[PinnedOut, ...]:
    """Return those of the packages that no version may be installed of; asks apt only on hosts with preferences."""
    plain = [name for name in names if "=" not in name]
    file, folder = _PREFERENCES
    # apt reads files with no extension or with .pref alone; 10.nvidia.pref is one of them.
    in_folder = (name for name in system.list_directory(folder) if re.fullmatch(r"[\w-]+|[\w.-]+\.pref", name))
    listed = (f"{folder}/{name}" for name in in_folder)
    texts = {path: text for path in (file, *listed) if (text := system.read_text(path))}
    if not (plain and texts):
        return ()
    done = system.run(("apt-cache", "policy", *plain), timeout=_POLICY_SECONDS)
    found = parse_policy(done.stdout) if done.ok else {}
    return tuple(PinnedOut(name, versions, pins_on(texts, name)) for name, versions in found.items())


def parse_policy(text: str) -> Mapping[str, tuple[str, ...]]:
    """Return name → versions of the packages in `apt-cache policy` that have versions, and none as a candidate."""
    found = {}
    for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        name = block.partition(":\n")[0]
        versions = re.findall(r"^ (?:\*\*\*|   ) (\S+) -?\d+$", block, re.MULTILINE)
        if re.search(r"^  Candidate: \(none\)$", block, re.MULTILINE) and versions:
            found[name] = tuple(versions)
    return found


def pins_on(texts: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return `file:line` of each record of the preferences that has a negative priority for a package."""
    places = []
    for path, text in texts.items():
        number = 1
        for record in re.split(r"(?<=\n)(?=[ \t]*\n)", text):
            fields = dict(_PIN.findall(record))
            patterns, priority = fields.get("Package", "").split(), fields.get("Pin-Priority", "0")
            if priority.startswith("-") and any(_matches(one, name) for one in patterns):
                before = record[: re.search(r"^Package:", record, re.MULTILINE | re.IGNORECASE).start()]  # type: ignore[union-attr]
                places.append(f"{path}:{number + before.count(chr(10))}")
            number += record.count("\n")
    return tuple(places)


def _matches(pattern: str, name: str) -> bool:
    if len(pattern) > 2 and pattern.startswith("/") and pattern.endswith("/"):
        try:
            return re.search(pattern[1:-1], name) is not None
        except re.error:
            return False
    return fnmatch.fnmatchcase(name, pattern)


def pin_problems(pinned: Iterable[PinnedOut]) -> tuple[Problem, ...]:
    """Return what a person must change before apt can install the packages."""
    found = []
    for one in pinned:
        way_out = f"grep -rn -A3 Package: {' '.join(_PREFERENCES)}"
        if one.places:
            path, _, line = one.places[0].rpartition(":")
            way_out = f"${{EDITOR:-vi}} +{line} {path}"
        seen = [f"{place}: negative priority" for place in one.places]
        seen.append(f"apt-cache policy {one.name}: Candidate: (none), of {', '.join(one.versions[:3])}")
        what = f"a pin in apt's preferences keeps {one.name} out"
        found.append(Problem(what, "\n".join(seen), f"{way_out}  # take the pin on {one.name} out"))
    return tuple(found)


# -- names: whether those of the sources can be looked up -----------------------------------------------------------

# A second server is asked after five seconds (resolv.conf(5)).
_SECONDS = 8
_MOST_SECONDS = 12
_RESOLVER = "/etc/resolv.conf"
# With a proxy, the proxy looks the names up.
_PROXY_FILES = ("/etc/apt/apt.conf", "/etc/dnf/dnf.conf", "/etc/yum.conf", "/root/.curlrc", "/etc/rhsm/rhsm.conf")
_PROXY_FOLDERS = ("/etc/apt/apt.conf.d", "/etc/yum.repos.d", "/etc/zypp/repos.d")
_PROXY = re.compile(r"^[^#;/\n]*proxy\S*\s*\S*[\w:\"]", re.IGNORECASE | re.MULTILINE)
_SUSE = "/etc/sysconfig/proxy"
_APT_SOURCE = re.compile(r"/etc/apt/sources\.list(\.d/[^/]+\.(list|sources))?")
_REPO_FILE = re.compile(r"/etc/(yum\.|zypp/)repos\.d/[^/]+\.repo")


def dns_problem(system: System, manager: str, files: Mapping[str, FileFact]) -> Problem | None:
    """Return the problem of a host on which no source's name can be looked up; None if one can, or it is not needed."""
    names = _names(manager, files)
    if not names or system.which("getent") is None or _has_proxy(system):
        return None
    begun, seen = system.now(), ""
    for name in names:
        done = system.run(("getent", "ahosts", name), timeout=_SECONDS)
        if done.ok:
            return None
        ended = f"no answer in {_SECONDS} s" if done.returncode == TIMED_OUT else f"exit code {done.returncode}"
        seen = seen or f"getent ahosts {name}: {ended}"
        if system.now() - begun > _MOST_SECONDS:
            break
    text = system.read_text(_RESOLVER)
    servers = re.findall(r"^nameserver\s+\S+", text or "", re.MULTILINE)
    seen = f"{seen}\n{_RESOLVER}: {', '.join(servers) or ('no such file' if text is None else 'no nameserver')}"
    step = f"correct {_RESOLVER} or the network, then check: getent ahosts {names[0]}; or set gpuprov_proxy"
    return Problem("DNS does not answer: no package source's name can be looked up", seen, step)


def _names(manager: str, files: Mapping[str, FileFact]) -> tuple[str, ...]:
    """Return the hosts of all enabled sources; none if one needs no network, or can't be read."""
    found: list[str] = []
    try:
        for path, file in files.items():
            if manager == "apt" and _APT_SOURCE.fullmatch(path):
                found += (entry.uri for entry in entries(path, text_of(file)))
            elif manager != "apt" and _REPO_FILE.fullmatch(path):
                sections = (section for _, section in repo_sections(text_of(file)))
                texts = (one.get(key, "") for one in sections for key in ("baseurl", "mirrorlist", "metalink"))
                found += (word for text in texts for word in re.split(r"[\s,]+", text) if word)
        urls = [urlsplit(url) for url in found]
    except (ValueError, configparser.Error):
        return ()
    if any(url.scheme not in ("http", "https") or "$" in url.netloc or not url.hostname for url in urls):
        return ()
    return tuple(dict.fromkeys(url.hostname for url in urls if url.hostname))


def _has_proxy(system: System) -> bool:
    if system.proxy.url or any(os.environ.get(f"{kind}_proxy") for kind in ("http", "https", "all", "HTTP", "HTTPS")):
        return True
    listed = (f"{folder}/{name}" for folder in _PROXY_FOLDERS for name in system.list_directory(folder))
    texts = (system.read_text(path) or "" for path in (*_PROXY_FILES, *listed))
    return any(map(_PROXY.search, texts)) or 'PROXY_ENABLED="yes"' in (system.read_text(_SUSE) or "")
