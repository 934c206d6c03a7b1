"""Version numbers that compare, of drivers, packages and engines alike. Pure."""

from __future__ import annotations

import re

_NUMBERS = re.compile(r"(?:\d+:)?(\d+(?:\.\d+)*)")


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version: 550.163.01 → (550, 163, 1), 5:20.10.24+dfsg1-2 → (20, 10, 24).

    A text that begins otherwise gives the empty tuple, which is smaller than all versions.
    """
    found = _NUMBERS.match(version)
    return tuple(int(part) for part in found[1].split(".")) if found else ()
