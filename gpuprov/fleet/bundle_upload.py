"""A bundle onto a host: once for each digest, gone on with where an earlier connection broke off.

What arrived is not looked at here: the agent compares every digest before it uses anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gpuprov.errors import GpuprovError, Problem
from gpuprov.events import Note, Sink
from gpuprov.fleet import remote
from gpuprov.system import Completed

_CACHE = "/var/cache/gpuprov"
_CHUNK = 1 << 18

# A command as root on the host: its words, what it reads, what sees its output.
AsRoot = Callable[[tuple[str, ...], Iterable[bytes], Callable[[str], None]], Completed]

# As the agent's own: no single quote, backslash or exclamation mark, for the login shell may be csh or fish.
# $1: the bundle's name, $2: its size in bytes. Says how much of it is there. A part that is too long is none of it.
_ASK = (
    'f="/var/cache/gpuprov/$1"; for p in "$f" "$f.part"; do '
    'if test -f "$p"; then n="$(stat -c %s "$p")"; '
    'if test "$n" -le "$2"; then echo "have $n"; exit 0; fi; rm -f "$p"; fi; done; echo "have 0"'
)
# Bundles of other digests go: they are large, and none is used while a new one comes.
_STORE = (
    'umask 077; set -e; d=/var/cache/gpuprov; mkdir -p "$d"; f="$d/$1"; cat >> "$f.part"; '
    'n="$(stat -c %s "$f.part")"; test "$n" = "$2" || { echo "$n of $2 bytes arrived" >&2; exit 1; }; '
    'mv -f "$f.part" "$f"; '
    'find "$d" -maxdepth 1 -type f -name "bundle-*.tar*" -not -name "$1" -exec rm -f {} +'
)


def upload_bundle(path: str, digest: str, as_root: AsRoot, sink: Sink) -> str:
    """Bring the bundle at `path` onto the host and return where it lies there. Raises GpuprovError if it can't be."""
    size = Path(path).stat().st_size
    name = f"bundle-{digest[:32]}-{size}.tar"
    lines: list[str] = []
    asked = as_root(("sh", "-c", _ASK, "sh", name, str(size)), (), lines.append)
    have = next((int(line[5:]) for line in lines if line.startswith("have ") and line[5:].isdecimal()), None)
    if have is None:
        raise _error(Problem("the host does not say what it has of the bundle", _said(asked), "run it again"))
    if have < size or not size:
        from_where = f", from byte {have} on" if have else ""
        sink(Note(f"uploading the bundle, {size / 2**20:.0f} MiB{from_where}"))
        _store(path, name, size, have, as_root)
    return f"{_CACHE}/{name}"


def _store(path: str, name: str, size: int, have: int, as_root: AsRoot) -> None:
    done = as_root(("sh", "-c", _STORE, "sh", name, str(size)), _from(path, have), lambda line: None)
    if done.ok:
        return
    if done.returncode == remote.CONNECTION_LOST:
        next_step = "run the same command again; it goes on where this one stopped"
        raise _error(Problem("the connection dropped while the bundle was uploaded", _said(done), next_step))
    what = "the bundle can't be stored on the host"
    raise _error(Problem(what, _said(done), f"is there room? df -h {_CACHE}"))


def _from(path: str, start: int) -> Iterator[bytes]:
    with Path(path).open("rb") as file:
        file.seek(start)
        while chunk := file.read(_CHUNK):
            yield chunk


def _said(done: Completed) -> str:
    return "\n".join([f"exit code {done.returncode}", *done.stderr.strip().splitlines()[-6:]])


def _error(problem: Problem) -> GpuprovError:
    return GpuprovError(problem.what, problem.evidence, problem.next_step)
