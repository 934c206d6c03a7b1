"""Where in an inventory a variable is set: file and line, for the message about a mistake; a plain text search."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gpuprov.wire.errors import Problem

_TOO_LARGE = 1 << 20
_SHOWN = 3


def with_origins(problems: Sequence[tuple[str, Problem]], sources: Sequence[str]) -> tuple[Problem, ...]:
    """Return (host, problem) pairs as problems that name hosts and places; the same mistake of many hosts is one."""
    by_problem: dict[Problem, list[str]] = {}
    for host, problem in problems:
        by_problem.setdefault(problem, []).append(host)
    texts = tuple(_texts(sources))
    return tuple(_with_origin(problem, hosts, texts) for problem, hosts in by_problem.items())


def find_variable(name: str, texts: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return `file:line` for every line of the (path, text) pairs that sets the variable."""
    sets = re.compile(rf"(?<![\w.]){re.escape(name)}[\"']?\s*[:=]")
    return tuple(
        f"{path}:{number}"
        for path, text in texts
        for number, line in enumerate(text.splitlines(), 1)
        if sets.search(line) and not line.lstrip().startswith(("#", ";"))
    )


def _with_origin(problem: Problem, hosts: Sequence[str], texts: Sequence[tuple[str, str]]) -> Problem:
    named = re.search(r"\b(gpuprov|ansible)_\w+", problem.what)
    places = find_variable(named.group(), texts) if named else ()
    more = f" and {len(hosts) - _SHOWN} more hosts" if len(hosts) > _SHOWN else ""
    evidence = (problem.evidence, ", ".join(places), "for " + ", ".join(hosts[:_SHOWN]) + more)
    return replace(problem, evidence="\n".join(part for part in evidence if part))


def _texts(sources: Sequence[str]) -> Iterator[tuple[str, str]]:
    for path in sorted(set(_files(sources))):
        if path.is_file() and path.stat().st_size < _TOO_LARGE:
            yield str(path), path.read_text("utf-8", "replace")


def _files(sources: Sequence[str]) -> Iterator[Path]:
    for source in map(Path, sources):
        folder = source if source.is_dir() else source.parent
        yield source
        if source.is_dir():
            yield from source.glob("*")
        for kind in ("group_vars", "host_vars"):
            yield from (folder / kind).rglob("*")
