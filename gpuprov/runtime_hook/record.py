"""What is kept of a start: what each running container was given, and a line in the log. Never fails a start.

The record is for `gpuprov hook explain`, in a root-owned file, because config.json no longer says it: the runtime has
rewritten it by then. No value of the container's environment is kept, for it may hold secrets: names of this host's
devices and files alone. `delete` removes the file; so does the next start where a container has gone without it (plain
runc with the prestart hook, a killed engine). The log, off by default, goes where the settings say.
"""

from __future__ import annotations

import posix
from typing import Any

from . import jsonio
from .errors import now, printable
from .files import make_folder, read_start, remove_file, replace_file
from .settings import Settings

FOLDER = "/run/gpuprov/containers"
FORMAT = 1
_LONGEST_NAME = 128
# At one start: each is read and parsed, which takes 0.1 ms.
_MOST_LOOKED_AT = 4
# A container whose record would be larger has none. Of more records than these, the oldest go.
_MOST_BYTES = 256 << 10
_MOST_RECORDS = 1000
_JOURNAL = "/run/systemd/journal/socket"
_LONGEST_LINE = 4000
# A file this large gets another name, and replaces the one before it: two are kept.
_LARGEST_LOG = 16 << 20
_ORDER = {"debug": 0, "info": 1, "warning": 2, "error": 3}
# As syslog(3) counts.
_PRIORITIES = (7, 6, 4, 3)
_APPEND = posix.O_WRONLY | posix.O_APPEND | posix.O_CREAT | posix.O_NOFOLLOW | posix.O_CLOEXEC | posix.O_NONBLOCK


def keep(container: str, bundle: str, decided: dict[str, Any]) -> None:
    """Record what a container was given (Decision.record), and remove the files of ended containers."""
    if not is_name(container):
        return
    bundle = bundle if bundle.startswith("/") else f"{posix.getcwd()}/{bundle}"
    try:
        make_folder(FOLDER.rpartition("/")[0])
        make_folder(FOLDER, 0o700)
        text = jsonio.dumps({"format": FORMAT, "container": container, "bundle": bundle, **decided})
        if len(text.encode()) <= _MOST_BYTES:
            replace_file(f"{FOLDER}/{container}", text, 0o600)
        _sweep(container)
    except (OSError, ValueError):
        pass  # a full disk, or a rootless engine: the container is none the worse for it


def is_name(container: str) -> bool:
    """Say whether this is a container's id as low-level runtimes take it; it becomes a file's name."""
    begins_well = 0 < len(container) <= _LONGEST_NAME and container[0] != "."
    return begins_well and all(sign.isascii() and (sign.isalnum() or sign in "_+-.") for sign in container)


def read(container: str) -> dict[str, Any] | None:
    """Return the record of a container, None if there is none. Raises OSError if it can't be read."""
    try:
        return parse(read_start(f"{FOLDER}/{container}", _MOST_BYTES).decode("utf-8", "replace"))
    except FileNotFoundError:
        return None


def parse(text: str) -> dict[str, Any] | None:
    """Return what a file says, None for one of another version, or none of ours."""
    try:
        document = jsonio.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) and document.get("format") == FORMAT else None


def names() -> list[str]:
    """Return the ids of all containers with a record. Raises OSError if the folder can't be read."""
    try:
        return sorted(name for name in posix.listdir(FOLDER) if is_name(name))
    except FileNotFoundError:
        return []


def _sweep(own: str) -> None:
    """Remove the files of containers whose bundle is gone; where there are many, some at each start."""
    others = [name for name in names() if name != own]
    if len(others) >= _MOST_RECORDS:
        others.sort(key=lambda name: posix.stat(f"{FOLDER}/{name}").st_mtime)
        while len(others) >= _MOST_RECORDS:
            posix.unlink(f"{FOLDER}/{others.pop(0)}")
    first = posix.getpid() % max(len(others), 1)
    for name in [*others[first:], *others[:first]][:_MOST_LOOKED_AT]:
        found = read(name)
        try:
            if found is None:
                posix.unlink(f"{FOLDER}/{name}")
            else:
                posix.stat(f"{found.get('bundle')}/config.json")
        except (FileNotFoundError, NotADirectoryError):
            remove_file(f"{FOLDER}/{name}")


def log(settings: Settings, level: str, text: str, journal: str = _JOURNAL) -> None:
    """Add one line, if the settings want a log, and lines of this level in it."""
    if not settings.debug or _ORDER[level] < _ORDER[settings.log_level]:
        return
    # What containers ask for stands in it, and they may start again and again.
    line = printable(text, _LONGEST_LINE)
    try:
        if settings.debug == "journal":
            _to_journal(journal, _PRIORITIES[_ORDER[level]], line)
        else:
            _to_file(settings.debug, level, line)
    except (OSError, ValueError):
        pass  # a full disk, or a path that can't be one, must not keep containers from starting


def _to_file(path: str, level: str, line: str) -> None:
    handle = posix.open(path, _APPEND, 0o600)
    # Only regular files have a size.
    if posix.fstat(handle).st_size > _LARGEST_LOG:
        posix.close(handle)
        posix.rename(path, f"{path}.1")
        handle = posix.open(path, _APPEND, 0o600)
    try:
        posix.write(handle, f"{now()} {level} {line}\n".encode("utf-8", "replace"))
    finally:
        posix.close(handle)


def _to_journal(path: str, priority: int, line: str) -> None:
    """Send one datagram in the journal's own protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL)."""
    import _socket

    fields = f"MESSAGE={line}\nPRIORITY={priority}\nSYSLOG_IDENTIFIER=gpuprov-container-runtime\n"
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    try:
        connection.setblocking(False)
        connection.sendto(fields.encode("utf-8", "replace"), path)
    finally:
        connection.close()
