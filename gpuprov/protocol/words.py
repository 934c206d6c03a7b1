"""Words for people that several packages need: a number with its noun, and text from elsewhere made safe to show."""

from __future__ import annotations

import re

# ECMA-48 control sequences (CSI …), operating system commands (OSC … BEL or ST) and the other escapes, C0 and C1
# controls, and Unicode's direction overrides, which make a line read differently from what it is (CVE-2021-42574).
# Lone surrogates, which JSON can bring, can't be printed.
_CONTROLS = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?|[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\u202a-\u202e\u2066-\u2069]|[\ud800-\udfff]"
)

_LINE_ENDS = re.compile(r"[\t\n\u2028\u2029]+")


def counted(number: int | str, noun: str, plural: str = "") -> str:
    """Return `1 host`, `2 hosts`; of a text, as it stands: `2 + 4 GPUs`."""
    return f"{number} {noun}" if str(number) == "1" else f"{number} {plural or noun + 's'}"


def plain(text: object) -> str:
    """Return the text without control sequences; line ends and tabs stay."""
    return _CONTROLS.sub("", str(text))


def line(text: object) -> str:
    """Return the text without control sequences and line ends; its spaces stay."""
    return _LINE_ENDS.sub(" ", plain(text))


def one_line(text: object) -> str:
    """Return the text as one line without control sequences."""
    return " ".join(plain(text).split())
