"""The refusal of a container that can't have its GPUs, and the one line that an error gets."""

from __future__ import annotations

import posix
import sys
from typing import NoReturn

from . import jsonio

_LONGEST_LINE = 2000


class Refused(Exception):  # noqa: N818 (an expected refusal, not a bug)
    """The container asks for GPUs in a way that must not start; the message is docker's error line, so one line.

    `request` is the part of the container's DeviceRequest that was read before the refusal, or None. Its type is not
    named here: request.py imports this module.
    """

    request: object = None


def reason(error: Exception) -> str:
    """Return why a container does not start: what a file system does is no fault of ours."""
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"the container's files can't be prepared: {error.filename or 'a file'}: {error.strerror}"
    return f"internal error {type(error).__name__}: {error}: please report this"


def printable(message: str, longest: int = _LONGEST_LINE) -> str:
    """Return one line: an image's words stand in it, and are no commands to a terminal."""
    text = "".join(character if character.isprintable() else " " for character in message[:longest])
    return " ".join(text.split())


def now() -> str:
    """Return the time as logs have it."""
    import time

    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def refuse(log: str, message: str) -> NoReturn:
    """End with the message where the engine looks for it: in the low-level runtime's log, and on stderr."""
    line = printable(message)
    if log:
        try:
            with open(log, "a", encoding="utf-8") as file:
                file.write(jsonio.dumps({"level": "error", "msg": line, "time": now()}) + "\n")
        except OSError:
            pass  # stderr has it too
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    posix._exit(1)
