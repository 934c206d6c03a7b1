"""gpuprov_watch: a timer that makes the host check and verify itself; agent/watch.py does the work."""

from __future__ import annotations

import json
import re
from typing import Any

from gpuprov.boot.prepare import content_of, python_command
from gpuprov.core import changes
from gpuprov.core.changes import Change, Json, Tell, parent_of
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.proxy import Proxy
from gpuprov.core.system import System, sha256_of
from gpuprov.core.units import daemon_reload, systemctl
from gpuprov.facts.host import HostFacts
from gpuprov.facts.watch import LINK, OFF, PROGRAM, SERVICE, SERVICE_FILE, STAMP, STORED, TIMER, TIMER_FILE, stored
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec, spec_to_json

# Random delay, so that the hosts of a fleet do not all query a mirror at once.
_DELAYS = {"hourly": "10min", "daily": "2h", "weekly": "12h"}
_LOGIN_IN_URL = re.compile(r"//[^/@\s]+@")
# What the service sees of its own (PrivateTmp=), or cannot write (ProtectSystem=full, ProtectHome=).
UNWRITABLE = ("/tmp/", "/var/tmp/", "/etc/", "/usr/", "/boot/", "/efi/", "/home/", "/root/", "/run/user/")
# What says how a run goes, not what the host shall be; and what holds a licence's token.
_OF_A_RUN = ("reboot", "lock_timeout", "vgpu")


def plan(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the change that installs, updates or removes the watch, if any."""
    if spec.watch == OFF:
        return (RemoveWatch(),) if facts.watch.is_there else ()
    # Without secrets, and without fields that describe a run.
    values = {name: value for name, value in spec_to_json(spec).items() if name not in _OF_A_RUN}
    values["proxy"] = Proxy(spec.proxy).address
    text = json.dumps({"spec": values, **facts.watch.extra}, sort_keys=True, indent=1)
    wanted = {
        SERVICE_FILE: (content_of(SERVICE_FILE, python=python_command(facts.interpreter.path)), 0o644),
        TIMER_FILE: (content_of(TIMER_FILE, schedule=spec.watch, delay=_DELAYS[spec.watch]), 0o644),
        STORED: (text.encode() + b"\n", 0o600),
    }
    wrong = tuple(
        (path, content, mode)
        for path, (content, mode) in wanted.items()
        if (found := facts.watch.files.get(path)) is None or not found.is_roots(content, mode)
    )
    # If the agent's file is not available, the installed program stays.
    stale = bool(facts.watch.agent) and facts.watch.agent != facts.watch.program
    if not wrong and not stale and facts.watch.link == TIMER_FILE:
        return ()
    return (SetWatch(spec.watch, spec.watch_metrics, wrong, facts.watch.agent_path if stale else "",
                     facts.watch.agent),)  # fmt: skip


def has_login(value: Any) -> bool:
    """Say whether a URL in a value has a login."""
    # JSON has a blank between two texts, which no match contains.
    return _LOGIN_IN_URL.search(json.dumps(value)) is not None


@dataclass(frozen=True)
class SetWatch(Change):
    """Install the timer by which the host checks and verifies itself.

    `files`: path, content, mode; `agent`: the file to install as the program, empty if the installed one stays;
    `digest`: its SHA-256.
    """

    schedule: str
    metrics: str
    files: tuple[tuple[str, bytes, int], ...]
    agent: str = ""
    digest: str = ""

    key = "watch this host"

    def summary(self) -> str:
        return f"watch this host {self.schedule} ({TIMER}), metrics in {self.metrics}"

    def diff(self, system: System) -> str:
        program = [f"+{PROGRAM}"] if self.agent else []
        texts = (changes.text_diff(path, system.read_bytes(path), content) for path, content, _ in self.files)
        return "\n".join(part for part in (*texts, *program) if part)

    def capture(self, system: System) -> Json:
        paths = (*(path for path, *_ in self.files), *([PROGRAM] if self.agent else []))
        images = [*(changes.capture_path(system, path) for path in paths), changes.capture_path_itself(system, LINK)]
        return {"files": images, "metrics": self.metrics, "before": _metrics(system)}

    def apply(self, system: System, tell: Tell) -> None:
        system.make_directory(STATE_DIRECTORY, 0o700)
        if self.agent:
            content = system.read_bytes(self.agent) or b""
            if sha256_of(content) != self.digest:
                what = f"{self.agent} has changed since the plan was made"
                raise GpuprovError(what, f"its SHA-256 is not {self.digest}", "run the same command again")
            changes.write_files(system, ((PROGRAM, content, 0o644),))
        if (old := _metrics(system)) != self.metrics:
            remove_metrics(system, old)
        changes.write_files(system, self.files)
        system.make_directory(parent_of(LINK))
        system.make_link(LINK, TIMER_FILE)
        daemon_reload(system)
        if trouble := systemctl(system, "restart", TIMER):
            raise GpuprovError(f"{TIMER} does not start", trouble, f"systemctl status {TIMER}")

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        _stop(system)
        if before["metrics"] != before["before"]:
            remove_metrics(system, before["metrics"])
        _restore(system, before)


@dataclass(frozen=True)
class RemoveWatch(Change):
    """Remove everything of the watch: timer, unit, program, stored specification, metrics."""

    key = "remove the watch"

    def summary(self) -> str:
        return f"remove the watch ({TIMER}) with its specification and metrics"

    def diff(self, system: System) -> str:
        return "\n".join(
            changes.text_diff(path, system.read_bytes(path), None) for path in (SERVICE_FILE, TIMER_FILE, STORED)
        )

    def capture(self, system: System) -> Json:
        paths = (SERVICE_FILE, TIMER_FILE, STORED, PROGRAM)
        return {
            "files": [
                *(changes.capture_path(system, path) for path in paths),
                changes.capture_path_itself(system, LINK),
            ]
        }

    def apply(self, system: System, tell: Tell) -> None:
        remove_metrics(system, _metrics(system))
        _stop(system)
        for path in (LINK, TIMER_FILE, SERVICE_FILE, STORED, PROGRAM, STAMP):
            system.remove(path)
        daemon_reload(system)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        _restore(system, before)


def remove_metrics(system: System, path: str) -> None:
    """Remove the metrics file if the watch wrote it."""
    status = system.status(path)
    is_file = status is not None and status.kind == "file"
    if is_file and (system.read_start(path, 100) or b"").startswith(b"# HELP gpuprov_"):
        system.remove(path)


def _metrics(system: System) -> str:
    """Return the metrics file that the stored specification names, "" if none is stored."""
    spec = stored(system.read_bytes(STORED)).get("spec")
    return str(spec.get("watch_metrics", "")) if isinstance(spec, dict) else ""


def _stop(system: System) -> None:
    systemctl(system, "stop", TIMER, SERVICE)
    # A failed unit would otherwise stay listed as failed.
    systemctl(system, "reset-failed", SERVICE)


def _restore(system: System, before: Json) -> None:
    changes.restore_paths(system, before["files"])
    if system.status(TIMER_FILE) is None:
        system.remove(STAMP)
    daemon_reload(system)
    if system.status(LINK) is not None:
        systemctl(system, "restart", TIMER)
