"""The files of gpuprov_watch on a host: units, program, stored specification; no decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuprov.core.changes import FileFact, file_digest
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.facts.boot import UNITS
from gpuprov.protocol.codec import json_at
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.runtime_hook.deploy import LIBRARY_PATH

OFF = "off"
SERVICE = "gpuprov-watch.service"
TIMER = "gpuprov-watch.timer"
SERVICE_FILE = f"{UNITS}/{SERVICE}"
TIMER_FILE = f"{UNITS}/{TIMER}"
LINK = f"{UNITS}/timers.target.wants/{TIMER}"
# A copy of the agent's file in a folder that only root can write: a root timer must not run a file from a home.
PROGRAM = f"{LIBRARY_PATH}/watch.pyz"
STORED = f"{STATE_DIRECTORY}/watch.json"
# When systemd last ran a persistent timer (systemd.timer(5)).
STAMP = f"/var/lib/systemd/timers/stamp-{TIMER}"
TEXTS = (SERVICE_FILE, TIMER_FILE, STORED)


@dataclass(frozen=True)
class WatchFacts:
    """What is there. `files`: path → file of TEXTS. `program` and `agent`: SHA-256 of the program that lies there, and
    of the agent's file at `agent_path`, which becomes the program. `folders`: those of the metrics that exist.

    `extra` is what the request has besides the specification, to be stored with it.
    """

    files: Mapping[str, FileFact] = field(default_factory=dict)
    program: str = ""
    agent: str = ""
    agent_path: str = ""
    link: str = ""
    folders: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        """Say whether any file of the watch exists on the host."""
        return bool(self.files or self.program or self.link)


def gather_watch(system: System, metrics: str, agent_path: str, extra: Mapping[str, Any]) -> WatchFacts:
    """Return the watch's files. `metrics` is the requested metrics file, empty without a watch."""
    found = {}
    for path in TEXTS:
        status, content = system.status(path), system.read_bytes(path)
        if status is not None and content is not None:
            found[path] = FileFact(content, status.mode, status.uid, status.gid)
    link = system.status(LINK)
    folder = metrics.rpartition("/")[0]
    has_folder = bool(folder) and (status := system.status(folder)) is not None and status.kind == "directory"
    return WatchFacts(
        files=found,
        program=file_digest(system, PROGRAM),
        agent=file_digest(system, agent_path) if metrics and agent_path else "",
        agent_path=agent_path,
        link=link.target if link is not None else "",
        folders=(folder,) if has_folder else (),
        extra=dict(extra),
    )


def stored(content: bytes | None) -> dict[str, Any]:
    """Return the content of a stored specification, empty if unreadable: then it is written again."""
    data = json_at(content or b"")
    return data if isinstance(data, dict) else {}
