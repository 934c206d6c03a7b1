"""Words for people that several packages need: a number with its noun."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return `1 host`, `2 hosts`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
