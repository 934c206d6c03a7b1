"""Report an unexpected exception to users: one sentence, and a log file with the traceback."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path

from gpuprov import __version__
from gpuprov.core.disk import make_user_folder
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.secrets import masked


def write_log(error: BaseException) -> Problem:
    """Write the traceback into ~/.local/state/gpuprov/log and return the message for the user."""
    what = f"internal error: {type(error).__name__}"
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = (Path(state) / "gpuprov" / "log").expanduser()
    path = folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
    try:
        make_user_folder(folder)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(handle, "a", encoding="utf-8") as file:
            file.write(f"gpuprov {__version__}\n" + masked("".join(traceback.format_exception(error))) + "\n")
    except OSError as refusal:
        return Problem(
            what, f"{error}\nthe log {path} cannot be written: {refusal}", "make room or set HOME, then again"
        )
    return Problem(what, str(error), f"the log {path} has the whole story; please report it with that file")
