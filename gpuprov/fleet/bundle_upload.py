"""Upload a bundle to a host: once for each digest, resumed after a broken connection.

The uploaded content is not checked here: the agent compares every digest before it uses anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gpuprov.bundle.place import ASK, CACHE, STORE, Place, parse_there
from gpuprov.core.commands import Completed
from gpuprov.fleet import remote
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.events import Note, Sink

_CHUNK = 1 << 18

# Runs a command as root on the host: its words, its input, the receiver of its output.
AsRoot = Callable[[tuple[str, ...], Iterable[bytes], Callable[[str], None]], Completed]


def upload_bundle(path: str, digest: str, as_root: AsRoot, sink: Sink) -> str:
    """Upload the bundle at `path` to the host and return its path there. Raises GpuprovError on failure."""
    place = Place(digest, Path(path).stat().st_size)
    lines: list[str] = []
    asked = as_root(place.command(ASK), (), lines.append)
    there = parse_there(lines)
    if there is None:
        raise _error(Problem("the host does not say what it has of the bundle", _said(asked), "run it again"))
    if not there.whole:
        from_where = f", from byte {there.size} on" if there.size else ""
        sink(Note(f"uploading the bundle, {place.size / 2**20:.0f} MiB{from_where}"))
        _store(path, place, there.size, as_root)
    return place.path


def _store(path: str, place: Place, have: int, as_root: AsRoot) -> None:
    done = as_root(place.command(STORE), _from(path, have), lambda line: None)
    if done.ok:
        return
    if done.returncode == remote.CONNECTION_LOST:
        next_step = "run the same command again; it goes on where this one stopped"
        raise _error(Problem("the connection dropped while the bundle was uploaded", _said(done), next_step))
    what = "the bundle can't be stored on the host"
    raise _error(Problem(what, _said(done), f"is there room? df -h {CACHE}; df -i {CACHE}"))


def _from(path: str, start: int) -> Iterator[bytes]:
    with Path(path).open("rb") as file:
        file.seek(start)
        while chunk := file.read(_CHUNK):
            yield chunk


def _said(done: Completed) -> str:
    return "\n".join([f"exit code {done.returncode}", *done.stderr.strip().splitlines()[-6:]])


def _error(problem: Problem) -> GpuprovError:
    return GpuprovError(problem.what, problem.evidence, problem.next_step)
