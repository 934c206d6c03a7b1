"""Bounds on what gpuprov keeps on a host. A run that ended well removes what exceeds them, while it holds the lock.

Journals are removed only if an uninstall can do without them (`surplus_runs`). No entry that is a link is followed, and
only root's entries are removed. The container runtime bounds its own log and records (runtime_hook/record.py), the
agent its log (agent/agent.py) and the pushed agents (agent/push.py).
"""

import collections
import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from gpuprov.core.changes import Change
from gpuprov.core.files import FileStatus
from gpuprov.core.journal import PRUNED, RUNS_DIRECTORY, Run, pruned_numbers, read_runs, run_number, written_files
from gpuprov.core.places import CACHE_DIRECTORY, COPIES, KEPT, KEPT_PACKAGES, REPAIRS
from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass

_DAY = 86400


@dataclass(frozen=True)
class Bound:
    """The newest `number` entries of `folder` with such names stay, as long as they have `size` bytes in all.

    The newest stays whatever its size. So does an entry used within `idle` seconds: a command without the lock may
    still read it.
    """

    folder: str
    names: str
    number: int
    size: int
    idle: int = 0


JOURNALS = Bound(RUNS_DIRECTORY, r"\d+\.jsonl", 100, 64 << 20)
BOUNDS = (
    # Unpacked agents and one-file programs; each marks its folder when it starts.
    Bound(CACHE_DIRECTORY, r"\.?(agent|host)-\w+", 4, 256 << 20, _DAY),
    # Drivers and CUDA toolkits of runs that failed; a run that succeeds removes its own.
    Bound(CACHE_DIRECTORY, r".+\.run(\.part)?", 2, 8 << 30),
    # The installed driver's and the one before it.
    Bound(KEPT, r".+\.run(\.part)?", 2, 2 << 30),
    Bound(KEPT_PACKAGES, ".+", 2, 4 << 30),
    Bound(REPAIRS, r"\d+\.json", 100, 4 << 20),
    # Of migrations from nvidia-docker: a dozen packages, once. zypper has folders of its own here.
    Bound(COPIES, ".+", 100, 1 << 30),
    # A controller may be uploading one now.
    Bound(CACHE_DIRECTORY, r"bundle-.+\.tar(\.part)?", 2, 32 << 30, _DAY),
    # What killed commands left, as System.temporary_directory names it: an administrator's gpuprov-backup stays.
    *(Bound(folder, r"gpuprov-tmp-[a-z0-9_]{8}", 0, 0, _DAY) for folder in ("/run", "/tmp", "/var/tmp")),
)


def prune(system: System, kinds: Mapping[str, type[Change]], *, keep_driver: bool = True) -> None:
    """Remove what exceeds the bounds. A folder that can't be read or written is left for a later run."""
    none_kept = () if keep_driver else (Bound(KEPT, ".+", 0, 0), Bound(KEPT_PACKAGES, ".+", 0, 0))
    for bound in (*BOUNDS, *none_kept):
        with contextlib.suppress(OSError):
            for path in _surplus(system, bound):
                system.remove_all(path)
    with contextlib.suppress(OSError):
        _prune_journals(system, kinds)


def _surplus(system: System, bound: Bound) -> list[str]:
    """Return the paths that exceed a bound, the oldest first."""
    entries = sorted(_entries(system, bound), key=lambda entry: entry[1].modified, reverse=True)
    found, size = [], 0
    for index, (path, status) in enumerate(entries):
        size += _size(system, path, status)
        exceeds = index >= bound.number or (index > 0 and size > bound.size)
        if exceeds and not (bound.idle and system.clock() < status.modified + bound.idle):
            found.append(path)
    return found[::-1]


def _size(system: System, path: str, status: FileStatus) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    if status.kind != "directory":
        return status.size
    found = ((below, system.status(below)) for name in system.list_directory(path) for below in (f"{path}/{name}",))
    return sum(_size(system, below, one) for below, one in found if one is not None)


def _entries(system: System, bound: Bound) -> Iterable[tuple[str, FileStatus]]:
    folder = system.status(bound.folder)
    if folder is None or folder.kind != "directory":
        return
    for name in system.list_directory(bound.folder):
        status = system.status(f"{bound.folder}/{name}") if re.fullmatch(bound.names, name) else None
        if status is not None and status.uid == 0 and status.kind in ("file", "directory"):
            yield f"{bound.folder}/{name}", status


# -- journals ----------------------------------------------------------------------------------------------------------


def _prune_journals(system: System, kinds: Mapping[str, type[Change]]) -> None:
    if not _surplus(system, JOURNALS):
        return
    runs = read_runs(system)
    statuses = (system.status(run.path) for run in runs)
    surplus = surplus_runs(runs, [status.size if status else 0 for status in statuses], kinds)
    if not surplus:
        return
    numbers = sorted(pruned_numbers(system) | {run_number(run.path) for run in surplus})
    # As pairs of first and last: numbers in a row are equally far from their places.
    rows = (list(row) for _, row in itertools.groupby(enumerate(numbers), lambda one: one[1] - one[0]))
    ranges = [[row[0][1], row[-1][1]] for row in rows]
    # First, so that a kill between the two leaves no journal missing without a note.
    system.write(PRUNED, json.dumps(ranges).encode(), mode=0o600)
    for run in surplus:
        system.remove(run.path)


def surplus_runs(runs: Sequence[Run], sizes: Sequence[int], kinds: Mapping[str, type[Change]]) -> tuple[Run, ...]:
    """Return the old runs that an uninstall can do without: an older run restores the same files, or all is undone.

    `runs` and their `sizes` are ordered from old to new. The newest runs stay, within the bound of JOURNALS; so does
    the last run that wrote a file, because it shows whether somebody changed the file since.
    """
    totals = itertools.accumulate(reversed(sizes[-JOURNALS.number :]))
    # The newest stays, whatever its size.
    newest = len(sizes) - max(sum(total <= JOURNALS.size for total in totals), min(len(sizes), 1))
    written_later = written_files(runs[newest:])
    last_writers = {run.path for path, (_, run) in written_files(runs[:newest]).items() if path not in written_later}
    restored: dict[str, set[str]] = collections.defaultdict(set)
    surplus = []
    for run in runs[:newest]:
        ended = bool(run.end) and run.interrupted is None and run.path not in last_writers
        # Whether older changes of the same kind restore all that these restore.
        if ended and all(
            entry.kind in kinds and kinds[entry.kind].undo_restores_files and entry.paths <= restored[entry.kind]
            for entry in run.undoable
        ):
            surplus.append(run)
            continue
        for entry in run.undoable:
            restored[entry.kind] |= entry.paths
    return tuple(surplus)
