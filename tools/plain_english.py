"""Fails on phrases that have a plainer form, also in names (`_` is a blank); prints file, line, phrase, form to use.

python -m tools.plain_english
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_CLONE = Path(__file__).resolve().parents[1]
_KINDS = ("*.py", "*.md", "*.yml", "*.j2", "Makefile", "*options.json")
# Phrase (a regular expression) and what to write instead.
_PLAINER = {
    r"mend(?:s|ed|ing)?": "fix, correct",
    r"(?:by|on) whatever": "by any, on any",
    r"whoever": "name who: the user, the process",
    r"is none that": "is not a …",
    r"(?:gone|goes|go|going) on with": "resume",
    r"machine outside|outer machine": "host, container host",
    r"anew": "again; write anew: rewrite, refresh",
    r"stands before": "overrides, precedes",
    r"as far as": "if, where",
    r"odd ones out": "exceptions",
    r"so read it": "read it that way",
    r"whose turn": "package lock",
    r"met a defect": "internal error",
    r"is no (?:TOML|JSON|YAML)": "is invalid TOML, JSON, YAML",
    r"ask(?:s|ed|ing)? again": "retry",
    r"unasked": "by default",
    r"ends nobody": "kills no process",
    r"lets us in": "accepts the login",
    r"hangs up before": "closes the connection before",
    r"has stopped to": "stopped …ing",
    r"shall run": "is configured to run, must run",
    r"brings it not": "does not include it",
    r"nobody keeps": "is not kept",
    r"stands twice": "duplicate",
    r"where people read": "on a console",
    r"may be used by root alone": "requires root",
}
_ANY = re.compile(rf"\b(?:{'|'.join(f'({phrase})' for phrase in _PLAINER)})\b", re.IGNORECASE)


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, phrase, plainer form) for each phrase in `text`."""
    forms = tuple(_PLAINER.values())
    for number, line in enumerate(text.splitlines(), 1):
        for match in _ANY.finditer(line.replace("_", " ")):
            yield number, match[0], forms[(match.lastindex or 1) - 1]


def main() -> int:
    """Check the files that git knows; return the exit code."""
    listed = subprocess.run(
        ("git", "ls-files", "--cached", "--others", "--exclude-standard", *_KINDS),
        cwd=_CLONE, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    found = 0
    for name in listed:
        path = _CLONE / name
        if path == Path(__file__).resolve() or not path.is_file():
            continue
        for number, phrase, form in findings(path.read_text("utf-8")):
            found += 1
            print(f"{name}:{number}: “{phrase}”: write {form}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
