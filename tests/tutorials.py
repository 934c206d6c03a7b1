"""Tutorials as tests read them: files to write, commands to type, and the lines that the page shows for each."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TUTORIALS = Path(__file__).parents[1] / "docs/tutorials"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LEFT_OUT = "…"


@dataclass(frozen=True)
class Step:
    """A command, and the lines that the page shows below it."""

    command: str
    shown: tuple[str, ...]


def files(page: str) -> dict[str, str]:
    """Return the files that a page has the reader write: blocks whose first line is a comment with a file's name."""
    found = (re.match(r"# (\S+\.\w+)\n", body) for _, body in _BLOCK.findall(page))
    return {match[1]: match.string for match in found if match}


def steps(page: str) -> Iterator[Step]:
    """Yield the commands of a page's `console` blocks, in their order."""
    for kind, body in _BLOCK.findall(page):
        if kind != "console":
            continue
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE):
            yield Step(command, tuple(shown.splitlines()))


def differs(step: Step, printed: str) -> str:
    """Return the first line of the page that was not printed in its place, "" if all were.

    Widths of columns may differ, and lines between may be left out of the page. The page marks with `…` what varies.
    """
    lines = iter([_comparable(line) for line in printed.splitlines()])
    for shown in step.shown:
        wanted = _comparable(shown)
        if wanted not in ("", _LEFT_OUT) and not any(_is(wanted, line) for line in lines):
            return shown
    return ""


def _is(wanted: str, line: str) -> bool:
    return re.fullmatch(".*".join(re.escape(part) for part in wanted.split(_LEFT_OUT)), line) is not None


def _comparable(line: str) -> str:
    """Return the line with single blanks."""
    return " ".join(line.split())
