"""Where a bundle lies on a host, and the commands by which a controller finds and stores it; pure.

Both ways to a host use it: `gpuprov --hosts`, and the action plugin of the playbooks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

CACHE = "/var/cache/gpuprov"
_SIZE = re.compile(r"[0-9]{1,15}")

# As in agent/push.py: no single quote, backslash or exclamation mark, because the login shell may be csh or fish; all
# as root. $1: the bundle's name, $2: its size in bytes.
# Prints how many bytes are stored; a file that is too long counts as none.
ASK = (
    f'f="{CACHE}/$1"; for p in "$f" "$f.part"; do '
    'if test -f "$p"; then n="$(stat -c %s "$p")"; '
    'if test "$n" -le "$2"; then if test "$p" = "$f"; then echo "whole $n"; else echo "part $n"; fi; exit 0; fi; '
    'rm -f "$p"; fi; done; echo "part 0"'
)
# Removes bundles of other digests: they are large, and none is in use while a new one is uploaded.
_KEEP = (
    'n="$(stat -c %s "$f.part")"; test "$n" = "$2" || { echo "$n of $2 bytes arrived" >&2; exit 1; }; '
    'mv -f "$f.part" "$f"; '
    'find "$d" -maxdepth 1 -type f -name "bundle-*.tar*" -not -name "$1" -exec rm -f {} +'
)
_BEGIN = f'umask 077; set -e; d={CACHE}; mkdir -p "$d"; f="$d/$1"; '
# The missing bytes come on standard input.
STORE = f'{_BEGIN}cat >> "$f.part"; {_KEEP}'
# $3: the file on the host to copy, whole.
TAKE = f'{_BEGIN}cat "$3" > "$f.part"; {_KEEP}'


@dataclass(frozen=True)
class Place:
    """A bundle of this digest and size, on any host."""

    digest: str
    size: int

    @property
    def name(self) -> str:
        return f"bundle-{self.digest[:32]}-{self.size}.tar"

    @property
    def path(self) -> str:
        return f"{CACHE}/{self.name}"

    def command(self, script: str, *arguments: str) -> tuple[str, ...]:
        """Return the words that run one of the scripts above."""
        return ("sh", "-c", script, "sh", self.name, str(self.size), *arguments)


@dataclass(frozen=True)
class There:
    """How many bytes of a bundle a host has, and whether they are complete and in place."""

    size: int
    whole: bool


def parse_there(lines: Iterable[str]) -> There | None:
    """Return the parsed output of ASK, ignoring any login banner before it; None if there is none."""
    for line in lines:
        word, _, size = line.strip().partition(" ")
        if word in ("whole", "part") and _SIZE.fullmatch(size):
            return There(int(size), word == "whole")
    return None
