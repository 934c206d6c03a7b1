"""The agent's file: the one of an installed wheel, or in a clone the one that tools/zipapps.py builds."""

from __future__ import annotations

import contextlib
import hashlib
import runpy
from pathlib import Path

from gpuprov.core.files import make_user_folder, write_whole
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError

# In the wheel, beside this module; tools/wheel_hook.py puts it there.
RELEASED = "gpuprov-agent.pyz"
_CACHE = "~/.cache/gpuprov"


@dataclass(frozen=True)
class Agent:
    """The zipapp to run on hosts, and its SHA-256."""

    content: bytes
    digest: str


def build_agent(cache: Path | None = None) -> Agent:
    """Return the zipapp: of an installed wheel, or built from a clone and kept in `cache` (default ~/.cache/gpuprov).

    Raises GpuprovError if there is neither, or a locked wheel is missing.
    """
    released = Path(__file__).resolve().with_name(RELEASED)
    try:
        if released.is_file():
            content = released.read_bytes()
        else:  # Run by its path: others may have a package `tools` too.
            builder = runpy.run_path(f"{released.parents[2]}/tools/zipapps.py")
            content = builder["agent"](cache or Path(_CACHE).expanduser())
    except OSError as error:
        what = "the agent can't be built: this gpuprov has neither an agent nor its sources"
        raise GpuprovError(what, str(error), "pip install a release's wheel, or run gpuprov in a clone") from None
    return Agent(content, hashlib.sha256(content).hexdigest())


def stored_agent() -> Path:
    """Return the zipapp as a file, for a run on this machine. Raises GpuprovError as build_agent does."""
    path = Path(_CACHE).expanduser() / "local-agent.pyz"
    keep(path, build_agent().content)
    if not path.is_file():
        raise GpuprovError(f"the agent can't be stored at {path}", "", "is there room, and may it be written?")
    return path


def keep(path: Path, content: bytes) -> None:
    """Store a file for the next run; an unwritable cache only costs time."""
    with contextlib.suppress(OSError):
        make_user_folder(path.parent)
        write_whole(path, content, 0o600, None)
