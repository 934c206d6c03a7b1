"""The journal: the changes that a run began and finished, written before and after each change to survive a kill.

Each run has one file, `runs/NNNN.jsonl` in the state directory, with one JSON object per line. A line is synced before
the work that it announces, and after the work that it reports as done or undone. A truncated last line (power cut) is
ignored: its work was not begun.

The first line has the format's number and gpuprov's version; journals without a number are of format 1. The formats
differ only in the outcomes of changes: format 1 stores there how the run continued (`reboot`), which no code reads.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any

from gpuprov import __version__
from gpuprov.core.changes import Json, images_in
from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import ExitCode, GpuprovError, os_errors, require_format

STATE_DIRECTORY = "/var/lib/gpuprov"
RUNS_DIRECTORY = f"{STATE_DIRECTORY}/runs"
# The numbers of journals that were removed because no undo needs them, as pairs of first and last.
PRUNED = f"{RUNS_DIRECTORY}/pruned"
FORMAT = 2


@dataclass(frozen=True)
class Entry:
    """One change in a run. `state`: begun, done or undone."""

    number: int
    key: str
    kind: str
    state: str
    before: Json
    outcome: Json | None = None

    @property
    def paths(self) -> set[str]:
        """The paths whose state the change captured."""
        return {image["path"] for image in images_in(self.before)}


@dataclass(frozen=True)
class Run:
    """A run as recorded in its journal. `end` is empty while it is open, else done, failed or rolled-back.

    `run_id` is shared by the requests that make up this run; it is empty for the usual single request. `version`: of
    the gpuprov that began the run, empty in journals of those that did not record it.
    """

    path: str
    command: str
    entries: tuple[Entry, ...]
    end: str
    run_id: str = ""
    version: str = ""

    @property
    def interrupted(self) -> Entry | None:
        """The change that was begun and is neither done nor undone."""
        return next((entry for entry in self.entries if entry.state == "begun"), None)

    @property
    def undoable(self) -> tuple[Entry, ...]:
        """The changes that were not undone, latest first."""
        return tuple(entry for entry in reversed(self.entries) if entry.state != "undone")


@dataclass(frozen=True)
class DriverChoice:
    """The driver that a run installed or kept. `done`: the run ended well."""

    driver: str
    version: str
    done: bool


class Journal:
    """Writes one run's journal."""

    def __init__(self, system: System, path: str, next_number: int = 1) -> None:
        self._system = system
        self._next = next_number
        self.path = path

    def begin(self, key: str, kind: str, before: Json) -> int:
        """Record that a change is about to be made; return its number for done() and undone()."""
        number = self._next
        self._next += 1
        self._add({"begin": number, "key": key, "kind": kind, "before": before})
        return number

    def done(self, number: int, outcome: Json) -> None:
        """Record that the change is made."""
        self._add({"done": number, "outcome": outcome})

    def undone(self, number: int) -> None:
        """Record that the change is undone."""
        self._add({"undone": number})

    def chose(self, driver: str, version: str) -> None:
        """Record the source and the version of the driver that the run installs or keeps."""
        self._add({"chosen": {"driver": driver, "version": version}})

    def belongs_to(self, run_id: str) -> None:
        """Record that the run is resumed by requests with another identifier, which a rollback of theirs undoes too."""
        self._add({"id": run_id})

    def end(self, how: str) -> None:
        """Record the end of the run: done, failed or rolled-back."""
        self._add({"end": how})

    def _add(self, record: dict[str, Any]) -> None:
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        with os_errors(f"could not write the run's journal, {self.path}"):
            self._system.append(self.path, line)


def journal_for(system: System, command: str, run_id: str) -> Journal:
    """Start the journal of a new run, or continue the last one if this request belongs to that run."""
    last = next(reversed(read_runs(system)), None) if run_id else None
    if last is not None and last.run_id == run_id and last.end != "rolled-back":
        return resume_journal(system, last)
    return new_journal(system, command, run_id)


def new_journal(system: System, command: str, run_id: str = "") -> Journal:
    """Start the journal of a new run."""
    numbers = [int(name[:-6]) for name in _journal_names(system)]
    path = f"{RUNS_DIRECTORY}/{max(numbers, default=0) + 1:04}.jsonl"
    first = (json.dumps({"run": command, "id": run_id, "format": FORMAT, "version": __version__}) + "\n").encode()
    with os_errors(f"could not begin the run's journal, {path}"):
        system.make_directory(RUNS_DIRECTORY, 0o700)
        # Captured states may hold secrets (a proxy's password in daemon.json): only root may read them.
        system.write(path, first, mode=0o600, owner=None)
    return Journal(system, path)


def resume_journal(system: System, run: Run) -> Journal:
    """Continue the journal of an earlier run."""
    # Do not append the next line to a truncated one.
    if not (system.read_bytes(run.path) or b"").endswith(b"\n"):
        system.append(run.path, b"\n")
    return Journal(system, run.path, len(run.entries) + 1)


def read_runs(system: System) -> tuple[Run, ...]:
    """Return all runs on this host, oldest first. Raises GpuprovError for a journal of an unknown format."""
    paths = (f"{RUNS_DIRECTORY}/{name}" for name in _journal_names(system))
    return tuple(parse_run(path, _text_of(system, path)) for path in paths)


def written_files(runs: Iterable[Run]) -> dict[str, tuple[str, Run]]:
    """Return the files that these runs (oldest first) wrote and did not undo: path → (SHA-256, the last run)."""
    done = ((run, entry.outcome or {}) for run in runs for entry in run.entries if entry.state == "done")
    return {path: (digest, run) for run, outcome in done for path, digest in outcome.get("written", {}).items()}


def unfinished_run(system: System) -> Run | None:
    """Return the latest run that did not end, or None. Raises GpuprovError for a journal of an unknown format.

    The last run also counts if it ended as failed and its failed change could not be undone.
    """
    latest = True
    for name in reversed(_journal_names(system)):
        path = f"{RUNS_DIRECTORY}/{name}"
        text = _text_of(system, path)
        _require_known_format(path, text)
        # The last line of most runs says that they ended: the lines before it, perhaps megabytes, need no parsing.
        ends = [record["end"] for record in _records(text.rstrip().rpartition("\n")[2]) if "end" in record]
        if not ends or (latest and ends != ["done"]):
            run = parse_run(path, text)
            if not run.end or (latest and run.interrupted is not None):
                return run
        latest = False
    return None


def last_undoable_run(system: System) -> Run | None:
    """Return the latest run with changes that can be undone, or None."""
    return next((run for run in reversed(read_runs(system)) if run.undoable and run.end != "rolled-back"), None)


def last_choice(system: System) -> DriverChoice | None:
    """Return the driver of the latest run that was not rolled back, None if no run recorded one."""
    for name in reversed(_journal_names(system)):
        text = _text_of(system, f"{RUNS_DIRECTORY}/{name}")
        # Most lines hold what a file was before, perhaps megabytes.
        found: dict[str, Any] = {}
        for record in _records("\n".join(one for one in text.splitlines() if one.startswith(_SHORT))):
            found |= {"end": "", **record}
        if "chosen" in found and found["end"] != "rolled-back":
            return DriverChoice(found["chosen"]["driver"], found["chosen"]["version"], found["end"] == "done")
    return None


_SHORT = ('{"chosen":', '{"end":')


def _text_of(system: System, path: str) -> str:
    _require_roots(system, path)
    return system.read_text(path) or ""


def _require_roots(system: System, *paths: str) -> None:
    """Raise GpuprovError if others than root can change one of these: a rollback does as root what journals say."""
    for path in paths:
        found = system.status(system.real_path(path))
        if found and (found.uid not in (0, system.user_id()) or found.mode & (0o022 if found.gid else 0o002)):
            seen = f"stat {path}: user {found.uid}, group {found.gid}, mode {found.mode:o}"
            step = f"if nobody did: chown -R root:root {STATE_DIRECTORY}; chmod -R go-w {STATE_DIRECTORY}"
            raise GpuprovError("others than root can change the journals of earlier runs", seen, step)


def _journal_names(system: System) -> tuple[str, ...]:
    """Return the journals' file names by number, which may exceed 9999."""
    _require_roots(system, STATE_DIRECTORY, RUNS_DIRECTORY)
    names = system.list_directory(RUNS_DIRECTORY)
    ours = (name for name in names if name.endswith(".jsonl") and name[:-6].isdecimal())
    return tuple(sorted(ours, key=lambda name: int(name[:-6])))


def run_number(path: str) -> int:
    """Return the number of a run by its journal's path."""
    return int(path.rpartition("/")[2].partition(".")[0])


def pruned_numbers(system: System) -> set[int]:
    """Return the numbers of the journals that were removed because no undo needs them."""
    try:
        ranges = json.loads(system.read_text(PRUNED) or "[]")
        return {number for first, last in ranges for number in range(first, last + 1)}
    except (ValueError, TypeError):
        return set()


def parse_run(path: str, text: str) -> Run:
    """Return the run in a journal's text. Raises GpuprovError for an unknown format, and for a damaged journal."""
    _require_known_format(path, text)
    command, end, run_id, version = "", "", "", ""
    entries: dict[int, Entry] = {}
    try:
        for record in _records(text):
            if "run" in record:
                command, run_id, version = record["run"], record.get("id", ""), str(record.get("version", ""))
            elif "id" in record:
                run_id = record["id"]
            elif "begin" in record:
                number = record["begin"]
                entries[number] = Entry(number, record["key"], record["kind"], "begun", record["before"])
                end = ""
            elif "done" in record:
                entry = entries[record["done"]]
                entries[entry.number] = replace(entry, state="done", outcome=record["outcome"] or entry.outcome)
            elif "undone" in record:
                entries[record["undone"]] = replace(entries[record["undone"]], state="undone")
            elif "end" in record:
                end = record["end"]
    except (LookupError, TypeError) as error:
        raise _damaged(path, f"a line lacks, or names a change that is not there: {error}") from None
    return Run(path, command, tuple(entries.values()), end, run_id, version)


def _damaged(path: str, fault: str) -> GpuprovError:
    step = f"restore it from a backup; or mv {path} {path}.damaged: what that run changed can't be undone then"
    return GpuprovError("the journal of an earlier run is damaged", f"{path}: {fault}", step)


def _require_known_format(path: str, text: str) -> None:
    first = next(iter(_records(text.partition("\n")[0])), {})
    require_format(first, FORMAT, "the journal of an earlier run", path, ExitCode.FAILED)
    if first.get("format", 1) not in range(1, FORMAT + 1):
        raise _damaged(path, f"its format is {first['format']!r:.20}")


def _records(text: str) -> list[dict[str, Any]]:
    records = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]
