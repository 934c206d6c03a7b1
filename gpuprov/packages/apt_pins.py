"""Packages that a pin in apt's preferences keeps out, though a repository has them (apt_preferences(5)). Reads only."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpuprov.core.system import System
from gpuprov.protocol.errors import Problem

_FILE, _FOLDER = "/etc/apt/preferences", "/etc/apt/preferences.d"
_SECONDS = 60


@dataclass(frozen=True)
class PinnedOut:
    """A package without a candidate. `places`: `file:line` of the pins on it with a negative priority."""

    name: str
    versions: tuple[str, ...]
    places: tuple[str, ...]


def gather_pinned_out(system: System, names: Sequence[str]) -> tuple[PinnedOut, ...]:
    """Return those of the packages that no version may be installed of; asks apt only on hosts with preferences."""
    plain = [name for name in names if "=" not in name]
    texts = _preferences(system) if plain else {}
    if not texts:
        return ()
    done = system.run(("apt-cache", "policy", *plain), timeout=_SECONDS)
    found = parse_policy(done.stdout) if done.ok else {}
    return tuple(PinnedOut(name, versions, pins_on(texts, name)) for name, versions in found.items())


def _preferences(system: System) -> Mapping[str, str]:
    # apt reads files with no extension or with .pref alone.
    listed = (f"{_FOLDER}/{name}" for name in system.list_directory(_FOLDER) if re.fullmatch(r"[\w-]+(\.pref)?", name))
    texts = {path: system.read_text(path) for path in (_FILE, *listed)}
    return {path: text for path, text in texts.items() if text}


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
            fields = dict(
                re.findall(r"^(Package|Pin-Priority):[ \t]*(.*?)[ \t]*$", record, re.MULTILINE | re.IGNORECASE)
            )
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


def problems(pinned: Iterable[PinnedOut]) -> tuple[Problem, ...]:
    """Return what a person must change before apt can install the packages."""
    return tuple(
        Problem(
            f"a pin in apt's preferences keeps {one.name} out",
            "\n".join((*(f"{place}: negative priority" for place in one.places),
                       f"apt-cache policy {one.name}: Candidate: (none), of {', '.join(one.versions[:3])}")),
            _way_out(one),
        )
        for one in pinned
    )  # fmt: skip


def _way_out(one: PinnedOut) -> str:
    if not one.places:
        return f"grep -rn -A3 Package: {_FILE} {_FOLDER}  # take the pin on {one.name} out"
    path, _, line = one.places[0].rpartition(":")
    return f"${{EDITOR:-vi}} +{line} {path}  # take the pin on {one.name} out"
