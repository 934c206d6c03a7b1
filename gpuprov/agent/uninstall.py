"""Undo the last run, or remove gpuprov from a host: undo all runs, newest first, then what no journal lists.

Each uninstall derives its work from the host, so the next one resumes an interrupted one. The journals are removed
last: they exist as long as there is something to undo.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from gpuprov.agent.context import RunContext, devices_to_lose, keep_devices
from gpuprov.agent.install import forget_resume
from gpuprov.boot.reboot import forget_asked
from gpuprov.cdi.discover import discover
from gpuprov.checks.engines import images_left
from gpuprov.core import journal
from gpuprov.core.apply import kind_of, undo_obstacles, undo_runs
from gpuprov.core.changes import Json, file_digest, image_content, images_in, text_diff
from gpuprov.core.journal import RUNS_DIRECTORY, STATE_DIRECTORY, Entry, Run
from gpuprov.core.places import CACHE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.driver import run_files
from gpuprov.engines.containers import stop_command
from gpuprov.engines.docker_change import RUNTIME
from gpuprov.engines.docker_unit import failure
from gpuprov.facts.boot import MANAGED, PROGRAM, gather_reboot, is_ours
from gpuprov.facts.driver import INSTALLER_LOG
from gpuprov.packages.interface import require_answer
from gpuprov.plan.steps import CHANGE_KINDS
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, Stopped
from gpuprov.protocol.events import Finished, Planned, PlannedChange
from gpuprov.protocol.words import counted
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, LIBRARY_PATH
from gpuprov.toolkit import follow_driver

_NOTHING = {"rollback": "there is no run to roll back", "uninstall": "there is nothing of gpuprov on this host"}
# The container runtime's state; the log of internal errors; MPS' logs, in a folder that systemd makes for its unit.
_OWN = ("/run/gpuprov", "/var/log/gpuprov.log", "/var/log/gpuprov-mps")
# Engine → the template that prints runtime, restart policy, whether devices are requested, and name of a container.
_USES = {
    "docker": '{{.HostConfig.Runtime}} {{or .HostConfig.RestartPolicy.Name "no"}} '
    "{{if .HostConfig.DeviceRequests}}gpus{{else}}-{{end}} {{.Name}}",
    "podman": "{{.OCIRuntime}} - - {{.Name}}",
}
_STOPPED = ("--all", "--filter", "status=exited", "--filter", "status=created")
# Where an uninstall moves the journals before it removes them.
_REMOVED = f"{STATE_DIRECTORY}/removed"
_DRIVER_LOGS = (INSTALLER_LOG, "/var/log/nvidia-uninstall.log")
_LINKS = "/dev/char"
# Identifies links made by the runtime: links of nvidia-ctk are absolute, and udev makes none for these nodes.
_OUR_LINK = "../nvidia"


@dataclass(frozen=True)
class _Removal:
    """What a rollback or an uninstall has to do. `irreversible`: sentences on what it can't restore or also removes.

    `images`: the images that `verify` built, each with the command that removes it. `problems`: what prevents it.
    """

    runs: tuple[Run, ...]
    irreversible: tuple[str, ...]
    problems: tuple[Problem, ...]
    leftovers: tuple[str, ...] = ()
    images: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The changes to undo, latest first."""
        return tuple(entry for run in self.runs for entry in run.undoable)

    @property
    def drivers(self) -> tuple[Entry, ...]:
        """The installations of a driver among them."""
        return tuple(entry for entry in self.entries if entry.kind == "InstallDriver")

    @property
    def count(self) -> int:
        """Return how many items there are to remove or undo."""
        return len(self.entries) + len(self.leftovers) + len(self.images)


def check(run: RunContext) -> Finished:
    """Report what a rollback or an uninstall would do, and what it can't restore."""
    removal, command = _announced(run), run.request.command
    made = f"{counted(removal.count, 'change')} would be {'made' if command == 'uninstall' else 'undone'}"
    summary = made if removal.count else _NOTHING[command]
    return Finished(int(ExitCode.DONE), changed=removal.count, summary=summary)


def roll_back(run: RunContext) -> Finished:
    """Undo the last run. Raises GpuprovError or Stopped."""
    forget_resume(run.system)
    forget_asked(run.system)
    with run.system.interruptible(run.stop_requested):
        removal = _announced(run)
    count, summary = 0, _NOTHING["rollback"]
    if removal.runs:
        keep_devices(run)
        driver = discover(run.system).library_version
        count = undo_runs(run.system, removal.runs, CHANGE_KINDS, run.sink, run.stop_requested)
        summary = f"{counted(count, 'change')} undone"
        follow_driver(run.system, driver)  # what wrote them behind the run's back is not in its journal
        for reason in gather_reboot(run.system).asked_for:
            run.note(f"reboot this host: {reason}", "warning")
    code, problems = (ExitCode.FAILED, (problem,)) if (problem := failure(run.system)) else (ExitCode.DONE, ())
    return Finished(int(code), changed=count, problems=problems, summary=summary)


def uninstall(run: RunContext) -> Finished:
    """Remove gpuprov.

    Raises GpuprovError if a change can't be undone, or if files differ from their original state at the end; Stopped.
    """
    system = run.system
    with system.interruptible(run.stop_requested):
        removal = _announced(run)
    keep_devices(run)
    if run.stop_requested():
        raise Stopped([f"undo: {entry.key}" for entry in removal.entries])
    forget_resume(system)
    # First, while the engines are still installed.
    for command in removal.images.values():
        system.run(command)
    undo_runs(system, removal.runs, CHANGE_KINDS, run.sink, run.stop_requested)
    for path in removal.leftovers:
        system.remove_all(path)
    different = _differences(system, removal.runs)
    system.remove_tree(CACHE_DIRECTORY)
    # All journals at once: the next uninstall takes a part of them for a loss.
    system.remove_tree(_REMOVED)
    with contextlib.suppress(OSError):
        system.rename(RUNS_DIRECTORY, _REMOVED)
    system.remove_tree(STATE_DIRECTORY)
    if different:
        seen = "\n".join(different)
        step = "something on the host changed it since (a package's own scripts?); look at it and put it right by hand"
        raise GpuprovError("everything is undone, but not all is as it was before gpuprov's first run", seen, step)
    undone = f"{counted(removal.count, 'change')} undone: the host is as before gpuprov's first run"
    summary = undone if removal.count else _NOTHING["uninstall"]
    return Finished(int(ExitCode.DONE), changed=removal.count, summary=summary)


def _announced(run: RunContext) -> _Removal:
    """Plan and report a rollback or an uninstall, warnings first. Raises GpuprovError with all problems."""
    rolls_back = run.request.command == "rollback"
    removal = _last_run(run) if rolls_back else _survey(run.system)
    if removal.problems:
        raise GpuprovError.several(removal.problems)
    for sentence in (*removal.irreversible, *(() if run.request.check else _fetch_driver(run, removal))):
        run.note(sentence, "warning")
    # What is restored besides files; an uninstall restores no driver between.
    for entry in removal.entries if rolls_back else removal.drivers[-1:]:
        for sentence in CHANGE_KINDS[entry.kind].restores(run.system, entry.before, entry.outcome):
            run.note(sentence)
    changes = _planned(run, removal)
    disturbs = any(CHANGE_KINDS[entry.kind].undo_disturbs for entry in removal.entries)
    lost = devices_to_lose(run) if changes else ()
    if run.request.check or not rolls_back:
        run.sink(Planned(changes, disturbs or bool(lost)))
    return removal


def _fetch_driver(run: RunContext, removal: _Removal) -> tuple[str, ...]:
    """Fetch the driver to restore; return a warning if an uninstall goes on without it.

    Raises GpuprovError for a rollback: nothing is undone yet. One that nobody watches removes no driver for nothing.
    """
    try:
        run_files.fetch_former(run.system, removal.drivers, required=bool(run.request.arguments.get("this_run")))
    except GpuprovError as error:
        if run.request.command == "rollback":
            raise
        return (f"{error.problems[0].what}; no driver will remain installed",)
    return ()


def _survey(system: System) -> _Removal:
    every = journal.read_runs(system)
    runs = tuple(run for run in reversed(every) if run.undoable)
    problems: tuple[Problem, ...]
    if lost := _lost(system, every):
        problems = (_journals_gone(lost),)
    else:
        hindered = (*_orphans(system, runs), *undo_obstacles(system, runs, CHANGE_KINDS))
        problems = (*_container_problems(system), *hindered) if runs else ()
    return _Removal(runs, _irreversible(system, runs), problems, _leftovers(system, runs), images_left(system))


def _journals_gone(seen: str) -> Problem:
    what = "what gpuprov changed on this host is not known any more, so it can't be undone: journals are gone"
    return Problem(what, seen, f"put {STATE_DIRECTORY} back from a backup, then run the same command again")


def _last_run(context: RunContext) -> _Removal:
    """Return what a rollback has to do: the latest run that is not fully undone, if there is one.

    With `this_run` it must be the run of the request.
    """
    system, request, run = context.system, context.request, journal.last_undoable_run(context.system)
    if run is not None and request.arguments.get("this_run") and run.run_id != request.run_id:
        if any(one.undoable for one in journal.read_runs(system) if one.run_id == request.run_id):
            what = "another run has changed this host since, so this one can't be rolled back alone"
            raise GpuprovError(what, run.path, "gpuprov rollback --check shows what it would undo first")
        run = None
    runs = (run,) if run else ()
    if not runs and not request.arguments.get("this_run") and (lost := _lost(system, journal.read_runs(system))):
        return _Removal((), (), (_journals_gone(lost),))
    problems = (*_orphans(system, runs), *undo_obstacles(system, runs, CHANGE_KINDS))
    return _Removal(runs, _irreversible(system, runs), problems)


def _orphans(system: System, runs: tuple[Run, ...]) -> Iterator[Problem]:
    """Yield the problem of podman's containers that run on without podman, which these runs installed."""
    added = (name for run in runs for entry in run.undoable for name in (entry.outcome or {}).get("added", ()))
    goes = any(re.match(r"podman(-[\d:]|$)", name) for name in added)
    if names := sorted(row[3] for row in _containers(system, "podman")) if goes else []:
        what = "containers of podman still run, and without podman, which this removes, nothing can stop them"
        step = f"{stop_command(names, 'podman')}, then run the same command again"
        yield Problem(what, f"podman ps: {', '.join(names)}", step)


def _container_problems(system: System) -> Iterator[Problem]:
    for engine in _USES:
        rows = sorted(_containers(system, engine), key=lambda row: row[3])
        by_runtime = [name for runtime, *_, name in rows if runtime == RUNTIME]
        # With `--gpus` or CDI.
        restarted = {name: policy for runtime, policy, requests, name in rows
                     if runtime != RUNTIME and policy not in ("no", "-") and requests == "gpus"}  # fmt: skip
        if by_runtime:
            what = f"containers still run with runtime {RUNTIME}; without it {engine} could not end them properly"
            seen = f"{engine} ps: {', '.join(by_runtime)}"
            yield Problem(what, seen, f"{stop_command(by_runtime, engine)}, then run the same command again")
        if restarted:
            what = f"containers with GPUs still run and have a restart policy; {engine} could never start them again"
            seen = f"{engine} inspect: {', '.join(f'{name} (restart: {policy})' for name, policy in restarted.items())}"
            yield Problem(what, seen, f"{stop_command(restarted, engine)}, then run the same command again")


def _planned(run: RunContext, removal: _Removal) -> tuple[PlannedChange, ...]:
    """Return the changes in the form of a plan."""
    contents: dict[str, bytes | None] = {}
    step = run.request.command
    diffs = [_diff(run.system, entry, contents) if run.request.diff else "" for entry in removal.entries]
    return (
        *(PlannedChange(f"remove image {image}", step, f"remove image {image}") for image in removal.images),
        *(PlannedChange(entry.key, step, f"undo: {entry.key}", diff) for entry, diff in zip(removal.entries, diffs)),
        *(PlannedChange(f"remove {path}", step, f"remove {path}") for path in removal.leftovers),
    )


def _leftovers(system: System, runs: tuple[Run, ...]) -> tuple[str, ...]:
    links = (f"{_LINKS}/{name}" for name in system.list_directory(_LINKS))
    ours = [path for path in links if (found := system.status(path)) and found.target.startswith(_OUR_LINK)]
    # The installer overwrites its log at each run, so it is ours if gpuprov ran it.
    logs = _DRIVER_LOGS if any(entry.kind == "InstallDriver" for run in runs for entry in run.entries) else ()
    return tuple(path for path in (*ours, *_OWN, *logs) if system.status(path) is not None)


def _lost(system: System, every: tuple[Run, ...]) -> str:
    """Return what shows that journals are gone: their numbers have no gaps, and are there as long as the runtime is."""
    numbers = {journal.run_number(run.path) for run in every} | journal.pruned_numbers(system)
    if missing := sorted(set(range(1, max(numbers, default=0) + 1)) - numbers):
        return f"{RUNS_DIRECTORY} lacks {', '.join(f'{number:04}.jsonl' for number in missing)}"
    there = [path for path in (LAUNCHER_PATH, LIBRARY_PATH) if system.status(path) is not None]
    if there and not any(run.undoable for run in every):
        verb = "is" if len(there) == 1 else "are"
        return f"{RUNS_DIRECTORY} has no run to undo, and {' and '.join(there)} {verb} there"
    return ""


def _stopped(system: System, runs: tuple[Run, ...]) -> Iterator[str]:
    """Yield a sentence for each engine whose stopped containers need what these runs installed."""
    for engine in _USES if runs else ():
        rows = _containers(system, engine, *_STOPPED)
        names = sorted(name for runtime, _, requests, name in rows if runtime == RUNTIME or requests == "gpus")
        if names:
            yield f"stopped containers with GPUs can't start again without gpuprov: {', '.join(names)} ({engine})"


def _containers(system: System, engine: str, *which: str) -> list[tuple[str, str, str, str]]:
    """Return runtime, restart policy, requests and name of an engine's containers, by default those that run."""
    listed = (engine, "ps", "--quiet", "--no-trunc", *which)
    what = f"{engine} does not tell which containers it has"
    ids = require_answer(system.run(listed, timeout=20), what).stdout.split() if system.which(engine) else []
    if not ids:
        return []
    shown = require_answer(system.run((engine, "inspect", "--format", _USES[engine], *ids), timeout=20), what).stdout
    rows = (line.split(" ", 3) for line in shown.splitlines())
    return [(row[0], row[1], row[2], row[3].lstrip("/")) for row in rows if len(row) == 4]


def _irreversible(system: System, runs: tuple[Run, ...]) -> tuple[str, ...]:
    """Return, for runs given from newest to oldest, what can't be restored, and what others changed since.

    In the order of the changes. Raises GpuprovError if a journal names an unknown change.
    """
    entries = [(run, entry) for run in reversed(runs) for entry in reversed(run.undoable)]
    sentences: list[str] = []
    skipped: set[str] = set()
    for number, (run, entry) in enumerate(entries):
        earlier = tuple(one.before for _, one in entries[:number] if one.kind == entry.kind)
        kind = kind_of(run, entry, CHANGE_KINDS)
        sentences += kind.irreversible(system, entry.before, entry.outcome, earlier)
        skipped.update(kind.skipped_paths(system, entry.before))
    written = journal.written_files(reversed(runs))
    changed = [path for path, (digest, _) in written.items() if (now := file_digest(system, path)) and now != digest]
    sentences += [
        f"{path} was changed after gpuprov wrote it; that change goes too" for path in changed if path not in skipped
    ]
    return (*dict.fromkeys(sentences), *_stopped(system, runs))


def _diff(system: System, entry: Entry, contents: dict[str, bytes | None]) -> str:
    """Return what an undo changes in /etc; `contents` holds the files as earlier undos leave them."""
    parts = []
    for image in (image for image in images_in(entry.before) if image["path"].startswith("/etc/")):
        path, after = image["path"], image_content(image)
        before = contents[path] if path in contents else system.read_bytes(path)
        parts.append(text_diff(path, before, after))
        contents[path] = after
    return "\n".join(part for part in parts if part)


def _differences(system: System, runs: tuple[Run, ...]) -> tuple[str, ...]:
    """Return the files that differ from their oldest image, and those of gpuprov that no journal names."""
    oldest: dict[str, Json] = {}
    for run in runs:
        for entry in run.undoable:
            images = tuple(images_in(entry.before))
            for folder in {parent for image in images for parent in image["missing_parents"]}:
                # Nothing was below it, whatever later images show there (byte code, say).
                below = (path for path in oldest if path.startswith(f"{folder}/"))
                oldest |= {path: {"path": path, "kind": "missing"} for path in below}
            oldest.update((image["path"], image) for image in images)
            for path in CHANGE_KINDS[entry.kind].skipped_paths(system, entry.before):
                del oldest[path]
    different = {path: seen for path, image in oldest.items() if (seen := _difference(system, image))}
    # Journals from a backup do not know the runs that came after it.
    ours = (PROGRAM, LAUNCHER_PATH, *(path for path in MANAGED if is_ours(system.read_bytes(path) or b"")))
    unknown = (path for path in ours if path not in oldest and system.exists(path))
    different |= dict.fromkeys(unknown, "it is gpuprov's, and no journal names it")
    return tuple(f"{path}: {seen}" for path, seen in sorted(different.items()))


def _difference(system: System, image: Mapping[str, object]) -> str:
    path, kind = str(image["path"]), image["kind"]
    now = system.status(path)
    if kind == "missing":
        # A node may come back by itself: the driver's own helper makes it.
        return "" if now is None or now.kind == "char" else "it was not there before"
    if kind not in ("file", "link"):
        return ""
    if now is None:
        return "it is gone"
    if kind == "link":
        return "" if now.target == image["target"] else "it is another link"
    if (now.mode, now.uid, now.gid) != (image["mode"], image["uid"], image["gid"]):
        return "its mode or owner is another"
    return "" if system.read_bytes(path) == image_content(image) else "its content is another"
