"""Holding packages at their version under dnf 4, dnf 5 and zypper: the lists that each keeps, as text.

The lists are edited, not the programs called: dnf 4 would fetch all metadata for it and forget comments, and a
list can be shown as a diff and given back to the byte. Where dnf 4 lacks its plugin for versions, that plugin is
installed. `excludepkgs` in dnf.conf would do without, but hides the package from everything, the wanted version too,
and stands in a file that is the administrator's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Callable

from gpuprov.core.changes import Json, Tell, capture_path, parent_of, restore_path, text_diff
from gpuprov.core.system import System
from gpuprov.packages import interface
from gpuprov.protocol.dataclass import dataclass

_QUERY = "%{NAME} %|EPOCH?{%{EPOCH}}:{0}|:%{VERSION}-%{RELEASE}\\n"


@dataclass(frozen=True)
class LockTool:
    """What holds packages. `plugin`: its package, where it is none of the package manager's own.

    `configuration`: the plugin's, which may name another `path` of the list. `split` is the pattern between a list's
    entries (the rest of the text among them), `name` finds the package that an entry holds, `entry` writes one for a
    name and EPOCH:VERSION-RELEASE. `head` begins a new list.
    """

    path: str
    split: str
    name: str
    entry: Callable[[str, str], str]
    plugin: str = ""
    configuration: str = ""
    head: str = ""

    def entries(self, text: str) -> list[tuple[str, str]]:
        """Return each entry of a list with the name of the package that it holds, "" for the rest of the text."""
        parts = [part for part in re.split(self.split, text) if part]
        return [(part, match[1] if (match := re.search(self.name, part, re.MULTILINE)) else "") for part in parts]


# dnf-versionlock(8), dnf5-versionlock(8), yum-versionlock(1), zypper(8) and what zypper 1.14 writes.
LOCK_TOOLS: Mapping[str, LockTool] = {
    "dnf": LockTool(
        "/etc/dnf/plugins/versionlock.list", r"(?<=\n)", r"^([^#!\s][^\s]*?)(?:-(?:\d+:)?[^-\s]+-[^-\s]+)?\s*$",
        lambda name, evr: f"{name}-{evr}.*\n",
        plugin="python3-dnf-plugin-versionlock", configuration="/etc/dnf/plugins/versionlock.conf",
    ),
    # Old journals of CentOS 7 and Amazon Linux 2 name it; no plan does.
    "yum": LockTool(
        "/etc/yum/pluginconf.d/versionlock.list", r"(?<=\n)", r"^(?:\d+:)?([^#!\s:][^\s]*?)-[^-\s]+-[^-\s]+\s*$",
        lambda name, evr: f"{evr.partition(':')[0]}:{name}-{evr.partition(':')[2]}.*\n",
    ),
    "dnf5": LockTool(
        "/etc/dnf/versionlock.toml", r"(?m)^(?=\[\[packages\]\])", r'\A\[\[packages\]\][^\[]*?^name *= *"([^"]*)"',
        lambda name, evr: (
            f'[[packages]]\nname = "{name}"\ncomment = "held by gpuprov"\n'
            f'[[packages.conditions]]\nkey = "evr"\ncomparator = "="\nvalue = "{evr}"\n'
        ),
        head='version = "1.0"\n',
    ),
    # As zypper writes stanzas, one blank line before and one behind belong to each.
    "zypper": LockTool(
        "/etc/zypp/locks", r"(?<=[^\n]\n\n)", r"^solvable_name: *(\S+)",
        lambda name, evr: f"\ntype: package\nmatch_type: glob\ncase_sensitive: on\nsolvable_name: {name}\n\n",
    ),
}  # fmt: skip


def gather_locks(system: System, tool: str) -> interface.LockFacts:
    """Return what is held on a host where this tool holds packages."""
    how = LOCK_TOOLS[tool]
    configuration = system.read_text(how.configuration) if how.configuration else ""
    if configuration is None:
        return interface.LockFacts(tool, how.path, missing_plugin=(how.plugin,))
    named = re.search(r"^locklist *= *(/\S+)", configuration, re.MULTILINE)
    path = named[1] if named else how.path
    held = held_names(tool, system.read_text(path) or "")
    return interface.LockFacts(tool, path, held, held & interface.read_held(system))


def held_names(tool: str, text: str) -> frozenset[str]:
    """Return the packages that a list holds, in any version."""
    return frozenset(name for _, name in LOCK_TOOLS[tool].entries(text) if name)


def edited(tool: str, text: str, hold: Mapping[str, str], release: Iterable[str]) -> str:
    """Return a list's text that holds these packages (name → EPOCH:VERSION-RELEASE), and no longer `release`.

    Everything else in it stays as it is.
    """
    how = LOCK_TOOLS[tool]
    gone = {*release, *hold}
    kept = "".join(entry for entry, name in how.entries(text) if name not in gone)
    if hold and kept and not kept.endswith("\n"):
        kept += "\n"
    return (kept or (how.head if hold else "")) + "".join(how.entry(name, hold[name]) for name in sorted(hold))


def plan(
    facts: interface.LockFacts, wanted: Iterable[str] | None, lacking: Iterable[str]
) -> tuple[tuple[HoldRpmPackages, ...], tuple[HoldRpmPackages, ...]]:
    """Return the changes before and after an installation: holds removed, holds set.

    `wanted` are the packages that shall be held, None leaves all as they are; `lacking` those that are to be installed
    in another version than they have: dnf and zypper do not change held packages. The driver's are lifted together,
    and plan_driver sets them again.
    """
    if not facts.tool:
        return (), ()
    driver = interface.driver_set(facts.held_here)
    together = driver if any(map(interface.DRIVER_PACKAGES.match, lacking)) else frozenset()
    if wanted is None:
        return lift(facts, together), ()
    names, lifted = set(wanted), together.union(lacking) & facts.held
    hold, release = names - (facts.held - lifted), facts.held_here - names - lifted - driver
    before = lift(facts, lifted)
    after = HoldRpmPackages(facts.tool, facts.path, tuple(sorted(hold)), tuple(sorted(release)))
    return before, ((after,) if hold or release else ())


def lift(facts: interface.LockFacts, names: Iterable[str]) -> tuple[HoldRpmPackages, ...]:
    """Return the change that no longer holds these packages."""
    found = tuple(sorted(names))
    return (HoldRpmPackages(facts.tool, facts.path, (), found),) if found else ()


def plan_driver(packages: interface.PackageFacts, hold: bool, coming: bool) -> tuple[HoldRpmPackages, ...]:
    """Return the change that holds the driver's packages, or releases those that gpuprov holds."""
    facts = packages.locks
    if not facts.tool or not hold:
        return lift(facts, packages.driver_held)
    new = tuple(sorted(packages.driver - facts.held))
    return (HoldRpmPackages(facts.tool, facts.path, new, driver=True),) if new or coming else ()


@dataclass(frozen=True)
class HoldRpmPackages(interface.PackageHold):
    """Hold these packages (`names`) at the version that they have, and no longer hold those of `release`."""

    tool: str
    path: str
    names: tuple[str, ...]
    release: tuple[str, ...] = ()
    driver: bool = False

    def diff(self, system: System) -> str:
        """Return what will change for packages that are there; a version that is yet to come is not known."""
        return text_diff(self.path, system.read_bytes(self.path), self._wanted(system).encode())

    def _wanted(self, system: System) -> str:
        return edited(self.tool, system.read_text(self.path) or "", self._versions(system), self.release)

    def _versions(self, system: System) -> Mapping[str, str]:
        """Return name → EPOCH:VERSION-RELEASE of the packages to hold."""
        if not (self.driver or self.names):
            return {}
        words = ("-qa", "--queryformat", _QUERY) if self.driver else ("-q", "--queryformat", _QUERY, *self.names)
        what = "rpm does not tell which versions are installed"
        told = interface.require_answer(system.run(("rpm", *words)), what).stdout
        there: dict[str, str] = dict(re.findall(r"^(\S+) (\S+)$", told, re.MULTILINE))
        if not self.driver:
            return {name: version for name, version in there.items() if name in self.names}
        names = interface.driver_set(there) - held_names(self.tool, system.read_text(self.path) or "")
        return {name: there[name] for name in names}

    def capture(self, system: System) -> Json:
        return {
            "tool": self.tool,
            "names": sorted({*self.names, *self._versions(system)}),
            "release": list(self.release),
            "file": capture_path(system, self.path),
            "text": system.read_text(self.path) or "",
            "list": capture_path(system, interface.HELD_LIST),
        }

    def apply(self, system: System, tell: Tell) -> Json:
        text, names = self._wanted(system), {*self.names, *self._versions(system)}
        system.make_directory(parent_of(self.path))
        system.write(self.path, text.encode())
        interface.write_held(system, names, self.release)
        return {"text": text}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Restore the list byte for byte, but keep what others have added to it since."""
        path = before["file"]["path"]
        now = system.read_text(path) or ""
        if outcome is None or now == outcome["text"]:
            restore_path(system, before["file"])
        else:
            touched = {*before["names"], *before["release"]}
            entries = LOCK_TOOLS[before["tool"]].entries(before["text"])
            earlier = [entry for entry, name in entries if name in touched]
            kept = edited(before["tool"], now, {}, touched)
            end = "\n" if earlier and kept and not kept.endswith("\n") else ""
            system.write(path, (kept + end + "".join(earlier)).encode())
        restore_path(system, before["list"])
