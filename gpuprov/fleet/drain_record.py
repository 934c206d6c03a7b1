"""Which hosts runs have drained: a record for each run, so that the next one finds what a killed controller left.

A run holds the lock beside its record, which ends with the process, however that ends. The next run over the same
inventory takes over the records that nobody holds; one that names no drained host is removed at the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpuprov.agent.result import Drain
from gpuprov.core.files import make_user_folder, write_whole
from gpuprov.fleet.grouping import listed
from gpuprov.fleet.history import MOST_RUNS, state_folder
from gpuprov.protocol import codec

_FOLDER = "drains"


@dataclass(frozen=True)
class DrainRecord:
    """`order`: the batches by name, and their hosts. `ended`: the run came to its report, so it was not cut off."""

    run: str
    command: str
    inventory: tuple[str, ...]
    order: Mapping[str, tuple[str, ...]]
    window: str = ""
    ended: bool = False
    drains: Mapping[str, Drain] = field(default_factory=dict)
    format: int = 1

    def sentences(self, hosts: Collection[str]) -> Iterator[str]:
        """Yield what the next run, over these hosts, says of this one."""
        if not self.ended:
            order = "; ".join(
                f"{name}: {listed(names)}" if name else listed(names) for name, names in self.order.items()
            )
            window = f"; window: {self.window}" if self.window else ""
            yield f"the run {self.run} was cut off: {self.command}; its order: {order}{window}"
        for name, drain in self.drains.items():
            state = "drained" if drain.state == "drained" else "maybe drained in part"
            here = "this run undrains it once verify is green" if name in hosts else "this run does not have it"
            todo = f"{here}; by hand: {drain.after}" if drain.after else f"drained by: {drain.before}"
            yield f"{name} is {state} since {drain.since}, by the run {self.run}: {todo}"


def left_records(inventory: Sequence[str]) -> tuple[DrainRecord, ...]:
    """Return the records of this inventory that no process holds, the oldest first; broken ones are left out."""
    found = []
    for path in sorted(state_folder(_FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            record = codec.load(DrainRecord, json.loads(path.read_text("utf-8")), trusted=True)
            if record.inventory == tuple(inventory) and not _is_held(path):
                found.append(record)
    return tuple(found)


def _is_held(path: Path) -> bool:
    try:
        with path.with_suffix(".lock").open() as file:
            # Shared: two runs may look at once, and NFS takes no exclusive lock on a file opened for reading.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


class DrainKeeper:
    """Writes this run's record at each new state of a drain; it begins with what the `left` ones name.

    `warn` is called with a sentence about a record that can't be written, which ends no run.
    """

    def __init__(self, record: DrainRecord, left: Sequence[DrainRecord], warn: Callable[[str], None]) -> None:
        self._drains: dict[str, Drain] = {name: one for old in left for name, one in old.drains.items() if one.lasts}
        self._record, self._warn = record, warn
        self._lock = threading.Lock()
        self._path = state_folder(_FOLDER) / f"{record.run}.json"
        self._held = contextlib.ExitStack()
        with self._warning():
            make_user_folder(self._path.parent)
            fcntl.flock(self._held.enter_context(self._path.with_suffix(".lock").open("w")), fcntl.LOCK_EX)
            self._write()
            paths = sorted(self._path.parent.glob("*.json"))
            surplus = [one for one in paths[:-MOST_RUNS] if not _is_held(one)]
            for path in {self._path.with_name(f"{old.run}.json") for old in left}.union(surplus) - {self._path}:
                _remove(path)

    def keep(self, host: str, drain: Drain) -> None:
        """Record the state of a host."""
        with self._lock, self._warning():
            self._drains[host] = drain
            self._write()

    def end(self) -> None:
        """Keep the record of hosts that are still drained, or remove it."""
        with self._warning(), self._held:
            self._record = replace(self._record, ended=True)
            if any(one.lasts for one in self._drains.values()):
                self._write()
                self._path.with_suffix(".lock").unlink()
            else:
                _remove(self._path)

    def _write(self) -> None:
        record = replace(self._record, drains={name: one for name, one in self._drains.items() if one.lasts})
        write_whole(self._path, codec.dump(record).encode(), 0o600, None)

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._warn(f"warning: it is not recorded which hosts are drained: {error}")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_suffix(".lock").unlink(missing_ok=True)
