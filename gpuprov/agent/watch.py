"""Run the watch (gpuprov-watch.service): check, verify, judge the GPUs, then write the metrics.

It changes only its own file on the host. While another run holds the host's lock, it skips and says so.
"""

import sys
import time
from dataclasses import replace
from typing import Any

from gpuprov.agent.result import PENDING, HostResult, Recorder, metrics_text
from gpuprov.agent.run import run_request
from gpuprov.core.changes import parent_of
from gpuprov.core.files import write_whole
from gpuprov.core.lock import read_holder, try_lock
from gpuprov.core.proxy import Proxy
from gpuprov.core.system import System
from gpuprov.engines.docker_proxy import ENVIRONMENT
from gpuprov.facts.watch import STORED, stored
from gpuprov.plan.steps import STEPS
from gpuprov.protocol.advisories import advisories
from gpuprov.protocol.errors import ExitCode, GpuprovError, worst
from gpuprov.protocol.events import Kept, Note
from gpuprov.protocol.request import Request
from gpuprov.protocol.words import counted

_COMMAND = "watch"
_HOSTNAME = "/proc/sys/kernel/hostname"
# A host that was installed from a bundle reaches no repository: these steps can't be checked without the bundle.
_OF_A_BUNDLE = ("download", "repositories", "packages", "images")


def main() -> int:
    """Watch once, print the result for the journal, and return the exit code: 1 if nothing could be measured."""
    try:
        print(watch(System()))  # noqa: T201
    except (GpuprovError, OSError) as error:
        what = "the metrics were not written: " if isinstance(error, OSError) else ""
        print(f"{what}{error}", file=sys.stderr)  # noqa: T201
        return int(ExitCode.FAILED)
    return int(ExitCode.DONE)


def watch(system: System) -> str:
    """Check and verify the host and write the metrics; return a summary. Raises GpuprovError or OSError."""
    found = stored(system.read_bytes(STORED))
    spec = found.get("spec")
    if not isinstance(spec, dict) or not spec.get("watch_metrics"):
        raise GpuprovError("there is no specification to watch by", STORED, "gpuprov install writes it again")
    if busy := _busy(system):
        return busy
    begun = time.monotonic()
    tables, arguments = dict(found.get("tables") or {}), {"watch": True, "bundle": bool(found.get("bundle"))}
    request = Request("install", {**spec, "proxy": _proxy(system, spec)}, tables=tables, arguments=arguments)
    steps = tuple(step.name for step in STEPS if step.name not in _OF_A_BUNDLE) if found.get("bundle") else ()
    host = (system.read_text(_HOSTNAME) or "localhost").strip()
    plan, _ = _run(system, host, replace(request, check=True, steps=steps))
    proof, news = _run(system, host, replace(request, command="verify"))
    health, _ = _run(system, host, replace(request, command="health"))
    if busy := _busy(system):
        return busy
    code = worst((plan.exit_code, proof.exit_code, health.exit_code if health.has_failed else ExitCode.DONE))
    checks = (*proof.checks, *health.checks)
    versions = {**plan.versions, **{name: one for name, one in proof.versions.items() if one}}
    result = replace(plan, exit_code=code, checks=checks, health=health.health, versions=versions)
    planned = plan.exit_code == ExitCode.DONE
    text = metrics_text(
        _COMMAND, (result,), advisories(system.tables), ended=time.time(), seconds=round(time.monotonic() - begun, 1),
        changes=PENDING if planned else None,
    )  # fmt: skip
    _write(system, str(spec["watch_metrics"]), text)
    troubles = [str(problem) for one in (plan, proof, health) for problem in one.problems]
    failed = [f"{check.name}: {check.reason}" for check in checks if check.status == "failed"]
    changes = counted(plan.changed if planned else "unknown", "change")
    return "\n".join((f"{changes} pending, {counted(len(failed), 'check')} failed", *failed, *troubles, *news))


def _run(system: System, host: str, request: Request) -> tuple[HostResult, list[str]]:
    """Run the request; return its result, and its news: the next verification knows them already."""
    recorder = Recorder(host)
    notes = Kept(Note, recorder)
    run_request(request, notes, system)
    return recorder.result(), [note.message for note in notes.events if note.level == "info"]


def _busy(system: System) -> str:
    """Return a sentence naming the run that holds the host's lock; "" if none does."""
    with try_lock(system) as ours:
        if ours:
            return ""
    return f"skipped: a gpuprov run holds this host ({read_holder(system) or 'its name is not known'})"


def _proxy(system: System, spec: dict[str, Any]) -> str:
    """Return the proxy with its credentials.

    They are not stored twice: docker's file, readable by root only, has them.
    """
    for line in (system.read_text(ENVIRONMENT) or "").splitlines():
        name, _, value = line.partition("=")
        url = value.strip('"')
        if name in ("HTTP_PROXY", "HTTPS_PROXY") and Proxy(url).address == spec.get("proxy"):
            return url
    return str(spec.get("proxy", ""))


def _write(system: System, path: str, text: str) -> None:
    """Write the metrics atomically and without following links: other users may write into that folder."""
    if system.status(parent_of(path)) is None:
        seen = f"gpuprov_watch_metrics is {path}"
        raise GpuprovError(f"there is no folder {parent_of(path)} for the metrics", seen, f"mkdir -p {parent_of(path)}")
    write_whole(system.path(parent_of(path)) / path.rpartition("/")[2], text.encode(), 0o644, (0, 0))
