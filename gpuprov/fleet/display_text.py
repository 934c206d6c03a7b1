"""Names and long texts of hosts, made short enough to read."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpuprov.protocol.words import counted

_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})(\D*)", re.DOTALL)
_SHORTEST_ROW = 3


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return names with commas, rows of numbered ones as Ansible's ranges, and how many there are beyond `most`."""
    rows = folded(names)
    rest = sum(number for _, number in rows[most:])
    return ", ".join(text for text, _ in rows[:most]) + (f" and {rest} more" if rest else "")


def folded(names: Iterable[str]) -> list[tuple[str, int]]:
    """Return (text, number of names): `gpu[01:37].example.org` and 37 for a row without a gap, of three or more."""
    rows: list[list[str]] = []
    for name in names:
        if rows and _follows(rows[-1][-1], name):
            rows[-1].append(name)
        else:
            rows.append([name])
    return [one for row in rows for one in _folded_row(row)]


def _follows(one: str, other: str) -> bool:
    (before, number, after), (prefix, next_number, suffix) = _parts(one), _parts(other)
    same = before == prefix and after == suffix and len(number) == len(next_number)
    return same and bool(number) and int(next_number) == int(number) + 1


def _parts(name: str) -> tuple[str, str, str]:
    """Split a name at the last number of its first label; in gpu07.dc1, dc1 is not part of the host's number."""
    label, dot, domain = name.partition(".")
    found = _NUMBERED.fullmatch(label)
    return (found.group(1), found.group(2), found.group(3) + dot + domain) if found else (name, "", "")


def _folded_row(row: list[str]) -> list[tuple[str, int]]:
    if len(row) < _SHORTEST_ROW:
        return [(name, 1) for name in row]
    (before, first, after), (_, last, _) = _parts(row[0]), _parts(row[-1])
    return [(f"{before}[{first}:{last}]{after}", len(row))]


def shortened(text: str, *, lines: int = 20, columns: int = 400) -> str:
    """Return a host's text, cut if it is too long to read."""
    said = text.rstrip("\n").splitlines()
    shown = [line if len(line) <= columns else line[:columns] + " …" for line in said[:lines]]
    more = [f"… {counted(len(said) - lines, 'line')} more"] if len(said) > lines else []
    return "\n".join(shown + more)
