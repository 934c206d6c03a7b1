"""Holding packages at their version under dnf 4, dnf 5 and zypper: the lists that each keeps, as text.

The lists are edited, not the programs called: dnf 4 would fetch all metadata for it and forget comments, and a
list can be shown as a diff and given back to the byte. Where dnf 4 lacks its plugin for versions, that plugin is
installed. `excludepkgs` in dnf.conf would do without, but hides the package from everything, the wanted version too,
and stands in a file that is the administrator's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Callable

from gpuprov.core.changes import Change, Json, Tell, capture_path, parent_of, restore_path, text_diff
from gpuprov.core.system import System
from gpuprov.packages.held import HELD_LIST, hold_summary, read_held, write_held

_QUERY = "%{NAME} %|EPOCH?{%{EPOCH}}:{0}|:%{VERSION}-%{RELEASE}\\n"


@dataclass(frozen=True)
class LockTool:
    """What holds packages. `plugin`: its package, where it is none of the package manager's own.

    `configuration`: the plugin's, which may name another `path` of the list. `entries` parts a list's text into entries
    (the rest of the text among them), `name` tells what one holds, nothing for what is none, `entry` writes one for a
    name and EPOCH:VERSION-RELEASE. `head` begins a new list.
    """

    path: str
    entries: Callable[[str], list[str]]
    name: Callable[[str], str]
    entry: Callable[[str, str], str]
    plugin: str = ""
    configuration: str = ""
    head: str = ""


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _blocks(text: str) -> list[str]:
    """Part TOML at each table of the array `packages`."""
    return [part for part in re.split(r"^(?=\[\[packages\]\])", text, flags=re.MULTILINE) if part]


def _stanzas(text: str) -> list[str]:
    """Part text between blank lines; as zypper writes them, one before and one behind belong to a stanza."""
    return [match[0] for match in re.finditer(r"\n*(?:.+\n?)+\n?|\n+", text)]


def _field(pattern: str) -> Callable[[str], str]:
    def name(entry: str) -> str:
        match = re.search(pattern, entry, re.MULTILINE)
        return match[1] if match else ""

    return name


# dnf-versionlock(8), dnf5-versionlock(8), yum-versionlock(1), zypper(8) and what zypper 1.14 writes.
LOCK_TOOLS: Mapping[str, LockTool] = {
    "dnf": LockTool(
        "/etc/dnf/plugins/versionlock.list", _lines, _field(r"^([^#!\s][^\s]*?)(?:-(?:\d+:)?[^-\s]+-[^-\s]+)?\s*$"),
        lambda name, evr: f"{name}-{evr}.*\n",
        plugin="python3-dnf-plugin-versionlock", configuration="/etc/dnf/plugins/versionlock.conf",
    ),
    # Old journals of CentOS 7 and Amazon Linux 2 name it; no plan does.
    "yum": LockTool(
        "/etc/yum/pluginconf.d/versionlock.list", _lines, _field(r"^(?:\d+:)?([^#!\s:][^\s]*?)-[^-\s]+-[^-\s]+\s*$"),
        lambda name, evr: f"{evr.partition(':')[0]}:{name}-{evr.partition(':')[2]}.*\n",
    ),
    "dnf5": LockTool(
        "/etc/dnf/versionlock.toml", _blocks, _field(r'\A\[\[packages\]\][^\[]*?^name *= *"([^"]*)"'),
        lambda name, evr: (
            f'[[packages]]\nname = "{name}"\ncomment = "held by gpuprov"\n'
            f'[[packages.conditions]]\nkey = "evr"\ncomparator = "="\nvalue = "{evr}"\n'
        ),
        head='version = "1.0"\n',
    ),
    "zypper": LockTool(
        "/etc/zypp/locks", _stanzas, _field(r"^solvable_name: *(\S+)"),
        lambda name, evr: f"\ntype: package\nmatch_type: glob\ncase_sensitive: on\nsolvable_name: {name}\n\n",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class LockFacts:
    """Which tool holds packages here, where its list lies (nothing: its plugin is missing), and what is in it."""

    tool: str = ""
    path: str = ""
    held: frozenset[str] = frozenset()
    held_here: frozenset[str] = frozenset()

    @property
    def missing_plugin(self) -> tuple[str, ...]:
        """The package that the tool needs and that is not installed."""
        return (LOCK_TOOLS[self.tool].plugin,) if self.tool and not self.path else ()


NO_LOCKS = LockFacts()


def gather_locks(system: System, tool: str) -> LockFacts:
    """Return what is held on a host where this tool holds packages."""
    path = _list_path(system, LOCK_TOOLS[tool])
    held = held_names(tool, (system.read_text(path) or "") if path else "")
    return LockFacts(tool, path, held, held & read_held(system))


def _list_path(system: System, tool: LockTool) -> str:
    if not tool.configuration:
        return tool.path
    configuration = system.read_text(tool.configuration)
    if configuration is None:
        return ""
    named = re.search(r"^locklist *= *(/\S+)", configuration, re.MULTILINE)
    return named[1] if named else tool.path


def held_names(tool: str, text: str) -> frozenset[str]:
    """Return the packages that a list holds, in any version."""
    how = LOCK_TOOLS[tool]
    return frozenset(name for entry in how.entries(text) if (name := how.name(entry)))


def edited(tool: str, text: str, hold: Mapping[str, str], release: Iterable[str]) -> str:
    """Return a list's text that holds these packages (name → EPOCH:VERSION-RELEASE), and no longer `release`.

    Everything else in it stays as it is.
    """
    how = LOCK_TOOLS[tool]
    gone = {*release, *hold}
    kept = "".join(entry for entry in how.entries(text) if how.name(entry) not in gone)
    if hold and kept and not kept.endswith("\n"):
        kept += "\n"
    return (kept or (how.head if hold else "")) + "".join(how.entry(name, hold[name]) for name in sorted(hold))


def plan(
    facts: LockFacts, wanted: Iterable[str] | None, lacking: Iterable[str]
) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
    """Return the changes before and after an installation: holds removed, holds set; none if `wanted` is None.

    `wanted` are the packages that shall be held, `lacking` those that are to be installed in another version than they
    have: dnf and zypper do not change held packages.
    """
    if not facts.tool or wanted is None:
        return (), ()
    names, lifted = set(wanted), set(lacking) & facts.held
    hold, release = names - (facts.held - lifted), facts.held_here - names - lifted
    path = facts.path or LOCK_TOOLS[facts.tool].path
    before = (HoldRpmPackages(facts.tool, path, (), tuple(sorted(lifted))),) if lifted else ()
    behind = HoldRpmPackages(facts.tool, path, tuple(sorted(hold)), tuple(sorted(release)))
    return before, ((behind,) if hold or release else ())


@dataclass(frozen=True)
class HoldRpmPackages(Change):
    """Hold these packages (`names`) at the version that they have, and no longer hold those of `release`."""

    tool: str
    path: str
    names: tuple[str, ...]
    release: tuple[str, ...] = ()

    def summary(self) -> str:
        return hold_summary(self.names, self.release)

    def diff(self, system: System) -> str:
        """Return what will change for packages that are there; a version that is yet to come is not known."""
        return text_diff(self.path, system.read_bytes(self.path), self._wanted(system).encode())

    def _wanted(self, system: System) -> str:
        return edited(self.tool, system.read_text(self.path) or "", _installed(system, self.names), self.release)

    def capture(self, system: System) -> Json:
        return {
            "tool": self.tool,
            "names": list(self.names),
            "release": list(self.release),
            "file": capture_path(system, self.path),
            "text": system.read_text(self.path) or "",
            "list": capture_path(system, HELD_LIST),
        }

    def apply(self, system: System, tell: Tell) -> Json:
        text = self._wanted(system)
        system.make_directory(parent_of(self.path))
        system.write(self.path, text.encode())
        write_held(system, self.names, self.release)
        return {"text": text}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Restore the list byte for byte, but keep what others have added to it since."""
        path = before["file"]["path"]
        now = system.read_text(path) or ""
        if outcome is None or now == outcome["text"]:
            restore_path(system, before["file"])
        else:
            how = LOCK_TOOLS[before["tool"]]
            touched = {*before["names"], *before["release"]}
            earlier = [entry for entry in how.entries(before["text"]) if how.name(entry) in touched]
            text = edited(before["tool"], now, {}, touched) + "".join(earlier)
            system.write(path, text.encode())
        restore_path(system, before["list"])


def _installed(system: System, names: tuple[str, ...]) -> Mapping[str, str]:
    """Return name → EPOCH:VERSION-RELEASE of those that are installed."""
    if not names:
        return {}
    done = system.run(("rpm", "-q", "--queryformat", _QUERY, *names))
    rows = (line.split(" ") for line in done.stdout.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2 and row[0] in names}
