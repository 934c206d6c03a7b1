"""What is stored under ~/.local/state/gpuprov: the last runs of this user as JSON, which hosts runs have
drained, and logs of internal errors.

Only results are stored: no passwords, no diffs, no raw facts; of -e what commands to type show. The text of hosts is
still searched for the passwords of the run and for passwords in URLs.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import itertools
import json
import os
import re
import shlex
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, TypeVar

from gpuprov import __version__
from gpuprov.agent.result import Drain, HostResult, machines, overall_exit_code
from gpuprov.core.files import make_user_folder, write_whole
from gpuprov.fleet.grouping import listed
from gpuprov.protocol import codec
from gpuprov.protocol.advisories import DRIVER, advisories, vulnerabilities
from gpuprov.protocol.codec import WrongDataError
from gpuprov.protocol.dataclass import asdict, dataclass, field, replace
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, UsageError, require_format, resource_problem
from gpuprov.protocol.events import ChosenDriver, MaybeChosen
from gpuprov.protocol.secrets import masked
from gpuprov.protocol.tables import PACKAGED, RELEASES
from gpuprov.protocol.versions import version_numbers

MOST_RUNS = 50
_FORMAT = 2  # Format 1 had other names of a check's fields
_IDENTIFIER = re.compile(r"\d{8}T\d{6}Z?-\d+")
_HIDDEN = "•••"
_SHORTEST_SECRET = 4  # shorter ones would mask half of every sentence
_LONGEST_TEXT = 20_000
_GONE, _NEW = "not in this run", "new in this run"
_PASSWORD_IN_URL = re.compile(r"(://[^/\s:@]{0,255}:)[^/\s@]{1,255}@")
_Signal = Optional[ExitCode]
T = TypeVar("T")
_FOLDER = "drains"


@dataclass(frozen=True)
class Run:
    """One run: `began` is local time with its offset, `seconds` its wall time, `inventory` what --hosts named.

    `ended_by`: the exit code of the signal that ended it.
    """

    identifier: str
    command: str
    began: str
    seconds: float
    results: tuple[HostResult, ...]
    check: bool = False
    inventory: tuple[str, ...] = ()
    limit: str = ""
    version: str = __version__
    ended_by: _Signal = None

    @property
    def exit_code(self) -> ExitCode:
        return overall_exit_code(self.results, self.ended_by)


def state_folder(name: str = "runs") -> Path:
    """Return a folder of what gpuprov stores of this user's runs, by default that of their results."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # A relative one is to be ignored (XDG Base Directory Specification).
    return (Path(state if state.startswith("/") else "~/.local/state") / "gpuprov" / name).expanduser()


def stored(folder: str, kind: type[T]) -> Iterator[tuple[Path, T]]:
    """Yield the files of one of these folders, by name, as values; broken ones are left out."""
    for path in sorted(state_folder(folder).glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            yield path, codec.load(kind, codec.parse(path.read_bytes()), trusted=True)


def new_identifier(now: float) -> str:
    """Return a name, in UTC, for the run that began at that time (seconds since the epoch)."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}-{os.getpid()}"


def moment(now: float) -> str:
    """Return a time as ISO 8601 has it, local, with its offset."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now))


def inventory_names(hosts: Iterable[str]) -> tuple[str, ...]:
    """Return what --hosts named, files by their whole path: each site has an inventory.ini."""
    return tuple(one if "," in one else os.path.abspath(one) for one in hosts)  # noqa: PTH100 (Path keeps `..`)


def save(run: Run, secrets: Iterable[str] = ()) -> Path:
    """Write the run, readable by its user only, and delete the oldest beyond 50. Raises OSError on failure."""
    place = state_folder()
    make_user_folder(place)
    place.chmod(0o700)
    path = place / f"{run.identifier}.json"
    text = json.dumps(without_secrets(to_json(run), secrets), ensure_ascii=False, separators=(",", ":"))
    write_whole(path, text.encode("utf-8", "replace"), 0o600, None)
    # A clock that was set back, or a name in local time, may make this run the oldest.
    for old in [one for one in identifiers() if one != run.identifier][MOST_RUNS - 1 :]:
        (place / f"{old}.json").unlink(missing_ok=True)
    return path


def identifiers() -> list[str]:
    """Return the stored runs, the latest first."""
    try:
        names = [path.stem for path in state_folder().glob("*.json")]
    except OSError:
        return []
    return sorted(filter(_IDENTIFIER.fullmatch, names), reverse=True)


def load(identifier: str = "") -> Run:
    """Return a run by its identifier or a prefix of it, the last one by default. Raises GpuprovError (code 2)."""
    known = identifiers()
    found = [identifier] if identifier in known else [name for name in known if name.startswith(identifier)]
    if not known:
        step = "each run of install, verify, doctor, health, accept, facts, rollback and uninstall is"
        raise UsageError("no run is kept here", f"{state_folder()} holds none that this user can read", step)
    if not found or (identifier and len(found) > 1):
        what = f"more than one run begins with {identifier}" if found else f"there is no run {identifier}"
        raise UsageError(what, f"the last ones: {', '.join(known[:5])}", "gpuprov report --list shows all")
    path = state_folder() / f"{found[0]}.json"
    try:
        return from_json(json.loads(path.read_text("utf-8")), str(path))
    except (OSError, ValueError, RecursionError) as error:
        seen = f"{path}: {error}"
        raise UsageError(f"the run {found[0]} cannot be read", seen, f"if it is broken: rm {path}") from None


def before(run: Run) -> Run | None:
    """Return the last earlier run of the same command over the same inventory, or None; broken ones are ignored.

    A check and an installation are two kinds.
    """
    for identifier in (one for one in identifiers() if one < run.identifier):
        with contextlib.suppress(GpuprovError):
            found = load(identifier)
            if (found.command, found.check, found.inventory) == (run.command, run.check, run.inventory):
                return found
    return None


@dataclass(frozen=True)
class _HostChoice:
    host: str
    exit_code: ExitCode
    choice: MaybeChosen = None


@dataclass(frozen=True)
class _Choices:
    """What a run says of drivers; all of it takes seconds to load for a thousand hosts."""

    command: str
    results: tuple[_HostChoice, ...]
    check: bool = False
    inventory: tuple[str, ...] = ()
    limit: str = ""


def latest_choices(inventory: tuple[str, ...] | None = None) -> dict[str, ChosenDriver]:
    """Return host → the driver that gpuprov chose in its last stored installation, over any inventory or this one."""
    latest: dict[str, ChosenDriver | None] = {}
    for identifier in identifiers():
        with contextlib.suppress(OSError, ValueError, RecursionError):
            data = json.loads((state_folder() / f"{identifier}.json").read_bytes())
            run = codec.load(_Choices, data, trusted=True)
            if (run.command, run.check) == ("install", False) and inventory in (None, run.inventory):
                done = {one.host: one.choice for one in run.results if one.exit_code == ExitCode.DONE}
                latest = {**done, **latest}
                if inventory is not None and not run.limit and len(done) == len(run.results):
                    break
    return {host: choice for host, choice in latest.items() if choice}


def drivers_by_gpus(inventory: tuple[str, ...]) -> dict[str, str]:
    """Return GPU models → the driver's version that most hosts of an inventory with these have."""
    latest = latest_choices(inventory).values()
    counts = collections.Counter((one.gpus, one.version) for one in latest if one.can_be_named)
    return {gpus: version for (gpus, version), _ in reversed(counts.most_common())}


def driver_choices(results: Sequence[HostResult], inventory: Sequence[str]) -> list[str]:
    """Return a sentence for each driver that gpuprov chose; where hosts with the same GPUs differ, a command too."""
    hosts: dict[ChosenDriver, list[str]] = collections.defaultdict(list)
    versions: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for result in machines(results):
        if one := result.choice:
            hosts[one].append(result.host)
            versions[one.gpus].update([one.version] if one.can_be_named else ())
    found = [f"driver {one.version} on {listed(names)}: {one.why}" for one, names in hosts.items()]
    source = inventory[0] if inventory and "," not in inventory[0] else ""
    # Ansible reads group_vars in an inventory that is a folder, and beside one that is a file.
    place = source if os.path.isdir(source) else source.rpartition("/")[0]  # noqa: PTH112 (Path raises)
    file = f"{place or '.'}/group_vars/{'GROUP' if len(versions) > 1 else 'gpu_hosts'}.yml"
    where = [word for source in inventory for word in ("--hosts", source)]
    table, known = PACKAGED.table(RELEASES), advisories(PACKAGED)
    # A host can send any version.
    releases = {*table["newest"].values(), *itertools.chain(*table["sha256"].values())}
    for gpus, several in versions.items():
        if len(several) > 1:
            sound = {one for one in several if one in releases and not vulnerabilities(DRIVER, one, known)}
            best = max(several, key=lambda one: (one in sound, several[one], version_numbers(one)))
            words = ("gpuprov", "options", *where, "-e", f"gpuprov_driver_version={best}", "--write", file)
            found.append(f"hosts with {gpus} differ in the driver; for one version: {shlex.join(words)}")
    return found


def to_json(run: Run) -> dict[str, Any]:
    """Return the run as JSON."""
    results = [
        {**asdict(result), "facts": None, "plan": [{**asdict(change), "diff": ""} for change in result.plan]}
        for result in run.results
    ]
    return {"format": _FORMAT, **asdict(run), "exit_code": int(run.exit_code), "results": results}


def from_json(data: Any, origin: str = "") -> Run:
    """Return the run that JSON holds. Raises WrongDataError for anything else, UsageError for a later format."""
    require_format(data, _FORMAT, "the stored run", origin)
    found = data.get("format") if isinstance(data, Mapping) else None
    if found not in (1, _FORMAT):
        raise WrongDataError(f"format {found!s:.20} is not known to gpuprov {__version__}")
    return codec.load(Run, data, trusted=True)


def without_secrets(value: Any, secrets: Iterable[str]) -> Any:
    """Return JSON with every secret, and every password in a URL, masked in its texts."""
    hidden = sorted({secret for secret in secrets if len(secret) >= _SHORTEST_SECRET}, key=len, reverse=True)

    def clean(part: Any) -> Any:
        if isinstance(part, str):
            for secret in hidden:
                part = part.replace(secret, _HIDDEN)
            return _PASSWORD_IN_URL.sub(rf"\1{_HIDDEN}@", part)[:_LONGEST_TEXT]
        if isinstance(part, Mapping):
            return {clean(key): clean(item) for key, item in part.items()}
        return [clean(item) for item in part] if isinstance(part, (list, tuple)) else part

    return clean(value)


@dataclass(frozen=True)
class Difference:
    """One change and its hosts; `kind`: good, bad or nothing, as it improved or worsened."""

    sentence: str
    kind: str
    hosts: tuple[str, ...]


def differences(before: Run, now: Run) -> tuple[Difference, ...]:
    """Return the changes, the worsened first."""
    hosts: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    earlier = {result.host: result for result in before.results}
    for result in now.results:
        old = earlier.pop(result.host, None)
        for sentence, kind in _of_host(old, result) if old else [(_NEW, "")]:
            hosts[sentence, kind].append(result.host)
    if earlier:
        hosts[_GONE, ""] = list(earlier)
    made = (Difference(sentence, kind, tuple(names)) for (sentence, kind), names in hosts.items())
    return tuple(sorted(made, key=lambda one: (one.kind != "bad", one.kind == "", -len(one.hosts))))


def _of_host(old: HostResult, new: HostResult) -> Iterator[tuple[str, str]]:
    if old.word != new.word:
        worse = new.has_failed and not old.has_failed
        yield f"{old.word} → {new.word}", "bad" if worse else "good" if old.has_failed and not new.has_failed else ""
    was = {check.name: check.status for check in old.checks}
    for check in new.checks:
        status = was.get(check.name, check.status)
        if status != check.status:
            kind = "bad" if check.status == "failed" else "good" if check.status == "ok" else ""
            yield f"{check.name}: {status} → {check.status}", kind
    for name, version in new.versions.items():
        if old.versions and old.versions.get(name, "") != version:
            yield f"{name} {old.versions.get(name) or 'none'} → {version or 'none'}", ""


def write_log(error: BaseException) -> Problem:
    """Write the traceback into ~/.local/state/gpuprov/log and return the message for the user."""
    if problem := resource_problem(error):
        return problem
    what = f"internal error: {type(error).__name__}"
    path = state_folder("log") / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
    try:
        make_user_folder(path.parent)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file:
            file.write(f"gpuprov {__version__}\n" + masked("".join(traceback.format_exception(error))) + "\n")
    except OSError as refusal:
        seen = f"{error}\nthe log {path} cannot be written: {refusal}"
        return Problem(what, seen, "make room or set HOME, then again")
    return Problem(what, str(error), f"the log {path} has the whole story; please report it with that file")


# -- drained hosts -----------------------------------------------------------------------------------------------------
#
# A record for each run, so that the next one finds what a killed controller left. A run holds the lock beside its
# record, which ends with the process, however that ends. The next run over the same inventory takes over the records
# that nobody holds; one that names no drained host is removed at the end.


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
        """Yield what the next run, which undrains these hosts, says of this one."""
        if not self.ended:
            batches = (f"{name}: {listed(names)}" if name else listed(names) for name, names in self.order.items())
            window = f"; window: {self.window}" if self.window else ""
            yield f"the run {self.run} was cut off: {self.command}; its order: {'; '.join(batches)}{window}"
        for name, drain in self.drains.items():
            state = "drained" if drain.state == "drained" else "maybe drained in part"
            here = "this run undrains it once verify is green" if name in hosts else "this run does not undrain it"
            todo = f"{here}; by hand: {drain.after}" if drain.after else f"drained by: {drain.before}"
            yield f"{name} is {state} since {drain.since}, by the run {self.run}: {todo}"


def left_records(inventory: Sequence[str]) -> tuple[DrainRecord, ...]:
    """Return the records of this inventory that no process holds, the oldest first; broken ones are left out."""
    found = []
    for path, record in stored(_FOLDER, DrainRecord):
        with contextlib.suppress(OSError):
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
            surplus = [one for one in sorted(self._path.parent.glob("*.json"))[:-MOST_RUNS] if not _is_held(one)]
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
