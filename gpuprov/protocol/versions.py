"""Version numbers that compare, of drivers, packages and engines alike. Pure."""

from __future__ import annotations

import re

# Numbers that a version has; Python refuses to read those of thousands of digits.
_NUMBERS = re.compile(r"(?:[0-9]{1,9}:)?([0-9]{1,18}(?:\.[0-9]{1,18})*)(?![0-9])")


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version: 550.163.01 → (550, 163, 1), 5:20.10.24+dfsg1-2 → (20, 10, 24).

    A text that begins otherwise gives the empty tuple, which is smaller than all versions.
    """
    found = _NUMBERS.match(version)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def count_in(text: object) -> int | None:
    """Return the number that a text is, None if it is none, or more than anybody has GPUs."""
    return int(str(text)) if re.fullmatch("[0-9]{1,6}", str(text)) else None
