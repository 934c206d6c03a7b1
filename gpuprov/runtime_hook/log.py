"""The runtime's log: a line for each GPU container's start, to the file or the journal that the settings name.

Off by default, and never a reason for a start to fail.
"""

from __future__ import annotations

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .settings import Settings

_JOURNAL = "/run/systemd/journal/socket"
_LONGEST_LINE = 4000
_ORDER = {"debug": 0, "info": 1, "warning": 2, "error": 3}
# As syslog(3) counts.
_PRIORITIES = (7, 6, 4, 3)
_APPEND = posix.O_WRONLY | posix.O_APPEND | posix.O_CREAT | posix.O_NOFOLLOW | posix.O_CLOEXEC | posix.O_NONBLOCK


def write(settings: Settings, level: str, text: str) -> None:
    """Add one line, if the settings want a log, and lines of this level in it."""
    if not settings.debug or _ORDER[level] < _ORDER[settings.log_level]:
        return
    # What containers ask for stands in it, and they may start again and again.
    text = text[:_LONGEST_LINE]
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    try:
        if settings.debug == "journal":
            _to_journal(_PRIORITIES[_ORDER[level]], line)
        else:
            _to_file(settings.debug, level, line)
    except (OSError, ValueError):
        pass  # a full disk, or a path that can't be one, must not keep containers from starting


def _to_file(path: str, level: str, line: str) -> None:
    import time

    handle = posix.open(path, _APPEND, 0o600)
    try:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        posix.write(handle, f"{stamp} {level} {line}\n".encode("utf-8", "replace"))
    finally:
        posix.close(handle)


def _to_journal(priority: int, line: str) -> None:
    """Send one datagram in the journal's own protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL)."""
    import _socket

    fields = f"MESSAGE={line}\nPRIORITY={priority}\nSYSLOG_IDENTIFIER=gpuprov-container-runtime\n"
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    try:
        connection.setblocking(False)
        connection.sendto(fields.encode("utf-8", "replace"), _JOURNAL)
    finally:
        connection.close()
