"""Remove gpuprov from a host: undo all runs, newest first, then remove what no journal lists.

Each uninstall derives its work from the host, so the next one resumes an interrupted one. The journals are removed
last: they exist as long as there is something to undo.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Callable

from gpuprov.checks.engines import images_left
from gpuprov.core.apply import Kinds, kind_of, last_undoable_run, undo_obstacles, undo_runs
from gpuprov.core.changes import Json, file_digest, image_content, images_in, text_diff
from gpuprov.core.journal import RUNS_DIRECTORY, STATE_DIRECTORY, Entry, Run, pruned_numbers, read_runs, run_number
from gpuprov.core.places import CACHE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError, Problem, Stopped
from gpuprov.protocol.events import PlannedChange, Sink
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, LIBRARY_PATH

_RUNTIME = "nvidia"
# The container runtime's state; the log of internal errors.
_OWN = ("/run/gpuprov", "/var/log/gpuprov.log")
# Engine → the template that prints runtime, restart policy, whether devices are requested, and name of a container.
_USES = {
    "docker": "{{.HostConfig.Runtime}} {{or .HostConfig.RestartPolicy.Name \"no\"}} "
              "{{if .HostConfig.DeviceRequests}}gpus{{else}}-{{end}} {{.Name}}",
    "podman": "{{.OCIRuntime}} - - {{.Name}}",
}  # fmt: skip
_STOPPED = ("--all", "--filter", "status=exited", "--filter", "status=created")
_DRIVER_LOGS = ("/var/log/nvidia-installer.log", "/var/log/nvidia-uninstall.log")
_LINKS = "/dev/char"
# Identifies links made by the runtime: links of nvidia-ctk are absolute, and udev makes none for these nodes.
_OUR_LINK = "../nvidia"


@dataclass(frozen=True)
class Removal:
    """What an uninstall has to do. `irreversible`: what it can't restore or also removes, a sentence each.

    `images`: the images that `verify` built, each with the command that removes it. `lost`: the evidence that journals
    are gone, "" if none is.
    """

    runs: tuple[Run, ...]
    leftovers: tuple[str, ...]
    images: Mapping[str, tuple[str, ...]]
    irreversible: tuple[str, ...]
    lost: str = ""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The changes to undo, latest first."""
        return tuple(entry for run in self.runs for entry in run.undoable)

    def disturbs(self, kinds: Kinds) -> bool:
        """Say whether an undo may stop containers, or processes on the GPUs."""
        return any(kinds[entry.kind].undo_disturbs for entry in self.entries if entry.kind in kinds)

    @property
    def count(self) -> int:
        """Return how many items there are to remove or undo."""
        return len(self.entries) + len(self.leftovers) + len(self.images)


def survey(system: System, kinds: Kinds) -> Removal:
    """Return what an uninstall has to do. Raises GpuprovError if a journal names an unknown change."""
    every = read_runs(system)
    runs = tuple(run for run in reversed(every) if run.undoable)
    for run in runs:
        for entry in run.undoable:
            kind_of(run, entry, kinds)
    sentences = (*irreversible(system, runs, kinds), *_stopped(system, runs))
    return Removal(runs, _leftovers(system, runs), images_left(system), sentences, _lost(system, every))


def last_run(system: System, kinds: Kinds) -> Removal:
    """Return what a rollback has to do: the latest run that is not fully undone, if there is one."""
    run = last_undoable_run(system)
    runs = (run,) if run else ()
    return Removal(runs, (), {}, (*irreversible(system, runs, kinds), *_stopped(system, runs)))


def problems(system: System, removal: Removal, kinds: Kinds) -> tuple[Problem, ...]:
    """Return what prevents an uninstall: lost journals, containers that run, files that can't be written."""
    if removal.lost:
        return (Problem(
            "what gpuprov changed on this host is not known any more, so it can't be undone: journals are gone",
            removal.lost,
            f"put {STATE_DIRECTORY} back from a backup, then run the same command again",
        ),)  # fmt: skip
    if not removal.entries:
        return ()
    return (*_container_problems(system), *undo_obstacles(system, removal.runs, kinds))


def _container_problems(system: System) -> tuple[Problem, ...]:
    found = []
    for engine in _USES:
        by_runtime, restarted = _users(system, engine)
        if by_runtime:
            found.append(Problem(
                f"containers still run with runtime {_RUNTIME}; without it {engine} could not end them properly",
                f"{engine} ps: {', '.join(by_runtime)}",
                f"{engine} stop {' '.join(by_runtime)}, then run the same command again",
            ))  # fmt: skip
        if restarted:
            found.append(Problem(
                f"containers with GPUs still run and have a restart policy; {engine} could never start them again",
                f"{engine} inspect: {', '.join(f'{name} (restart: {policy})' for name, policy in restarted.items())}",
                f"{engine} stop {' '.join(restarted)}, then run the same command again",
            ))  # fmt: skip
    return tuple(found)


def planned(system: System, removal: Removal, step: str, *, diff: bool) -> tuple[PlannedChange, ...]:
    """Return the changes in the form of a plan."""
    contents: dict[str, bytes | None] = {}
    undone = tuple(
        PlannedChange(entry.key, step, f"undo: {entry.key}", _diff(system, entry, contents) if diff else "")
        for entry in removal.entries
    )
    images = tuple(PlannedChange(f"remove image {image}", step, f"remove image {image}") for image in removal.images)
    paths = tuple(PlannedChange(f"remove {path}", step, f"remove {path}") for path in removal.leftovers)
    return images + undone + paths


def carry_out(
    system: System, removal: Removal, kinds: Kinds, sink: Sink, stop_requested: Callable[[], bool] = lambda: False
) -> None:
    """Carry it out.

    Raises GpuprovError if a change can't be undone, or if files differ from their original state at the end.
    """
    if stop_requested():
        raise Stopped([f"undo: {entry.key}" for entry in removal.entries])
    # First, while the engines are still installed.
    for command in removal.images.values():
        system.run(command)
    undo_runs(system, removal.runs, kinds, sink, stop_requested)
    for path in removal.leftovers:
        remove_all(system, path)
    different = _differences(system, removal.runs, kinds)
    system.remove_tree(CACHE_DIRECTORY)
    system.remove_tree(STATE_DIRECTORY)
    if different:
        raise GpuprovError(
            "everything is undone, but not all is as it was before gpuprov's first run",
            "\n".join(different),
            "something on the host changed it since (a package's own scripts?); look at it and put it right by hand",
        )


def remove_all(system: System, path: str) -> None:
    """Remove a file, or a folder with its content."""
    found = system.status(path)
    if found is not None and found.kind == "directory":
        system.remove_tree(path)
    else:
        system.remove(path)


def _leftovers(system: System, runs: tuple[Run, ...]) -> tuple[str, ...]:
    links = (f"{_LINKS}/{name}" for name in system.list_directory(_LINKS))
    ours = [path for path in links if (found := system.status(path)) and found.target.startswith(_OUR_LINK)]
    # The installer overwrites its log at each run, so it is ours if gpuprov ran it.
    logs = _DRIVER_LOGS if any(entry.kind == "InstallDriver" for run in runs for entry in run.entries) else ()
    return tuple(path for path in (*ours, *_OWN, *logs) if system.status(path) is not None)


def _lost(system: System, every: tuple[Run, ...]) -> str:
    """Return what shows that journals are gone: their numbers have no gaps, and are there as long as the runtime is."""
    numbers = {run_number(run.path) for run in every} | pruned_numbers(system)
    missing = sorted(set(range(1, max(numbers, default=0) + 1)) - numbers)
    if missing:
        return f"{RUNS_DIRECTORY} lacks {', '.join(f'{number:04}.jsonl' for number in missing)}"
    there = [path for path in (LAUNCHER_PATH, LIBRARY_PATH) if system.status(path) is not None]
    if there and not any(run.undoable for run in every):
        return (
            f"{RUNS_DIRECTORY} has no run to undo, and {' and '.join(there)} {'is' if len(there) == 1 else 'are'} there"
        )
    return ""


def _stopped(system: System, runs: tuple[Run, ...]) -> tuple[str, ...]:
    """Return a sentence for each engine whose stopped containers need what these runs installed."""
    found = {
        engine: sorted(name for runtime, _, requests, name in _containers(system, engine, *_STOPPED)
                       if runtime == _RUNTIME or requests == "gpus")
        for engine in (_USES if runs else ())
    }  # fmt: skip
    return tuple(
        f"stopped containers with GPUs can't start again without gpuprov: {', '.join(names)} ({engine})"
        for engine, names in found.items() if names
    )  # fmt: skip


def _users(system: System, engine: str) -> tuple[list[str], dict[str, str]]:
    """Return the names of an engine's running containers with the runtime, and those with `--gpus` or CDI → policy."""
    by_runtime, restarted = [], {}
    for runtime, policy, requests, name in _containers(system, engine):
        if runtime == _RUNTIME:
            by_runtime.append(name)
        elif policy not in ("no", "-") and requests == "gpus":
            restarted[name] = policy
    return sorted(by_runtime), dict(sorted(restarted.items()))


def _containers(system: System, engine: str, *which: str) -> list[tuple[str, str, str, str]]:
    """Return runtime, restart policy, requests and name of an engine's containers, by default those that run."""
    listed = (engine, "ps", "--quiet", "--no-trunc", *which)
    ids = system.run(listed, timeout=20).stdout.split() if system.which(engine) else []
    if not ids:
        return []
    shown = system.run((engine, "inspect", "--format", _USES[engine], *ids), timeout=20).stdout
    rows = (line.split(" ", 3) for line in shown.splitlines())
    return [(row[0], row[1], row[2], row[3].lstrip("/")) for row in rows if len(row) == 4]


def irreversible(system: System, runs: tuple[Run, ...], kinds: Kinds) -> tuple[str, ...]:
    """Return, for runs given from newest to oldest, what can't be restored, and what others changed since.

    In the order of the changes; an unknown kind of change adds nothing.
    """
    entries = [entry for run in reversed(runs) for entry in reversed(run.undoable)]
    sentences: list[str] = []
    for number, entry in enumerate(entries):
        earlier = tuple(one.before for one in entries[:number] if one.kind == entry.kind)
        if entry.kind in kinds:
            sentences += kinds[entry.kind].irreversible(system, entry.before, entry.outcome, earlier)
    written: dict[str, str] = {}
    for entry in entries:
        written.update((entry.outcome or {}).get("written", {}))
    changed = [path for path, digest in written.items() if (now := file_digest(system, path)) and now != digest]
    sentences += [f"{path} was changed after gpuprov wrote it; that change goes too" for path in changed]
    return tuple(dict.fromkeys(sentences))


def _diff(system: System, entry: Entry, contents: dict[str, bytes | None]) -> str:
    """Return what an undo changes in /etc; `contents` holds the files as earlier undos leave them."""
    parts = []
    for image in (image for image in images_in(entry.before) if image["path"].startswith("/etc/")):
        path, after = image["path"], image_content(image)
        before = contents[path] if path in contents else system.read_bytes(path)
        parts.append(text_diff(path, before, after))
        contents[path] = after
    return "\n".join(part for part in parts if part)


def _differences(system: System, runs: tuple[Run, ...], kinds: Kinds) -> tuple[str, ...]:
    """Return the files that differ from their oldest image."""
    oldest: dict[str, Json] = {}
    for run in runs:
        for entry in run.undoable:
            images = tuple(images_in(entry.before))
            _forget_below(oldest, {parent for image in images for parent in image["missing_parents"]})
            oldest.update((image["path"], image) for image in images)
            for path in kinds[entry.kind].skipped_paths(system, entry.before):
                del oldest[path]
    return tuple(f"{path}: {seen}" for path, image in sorted(oldest.items()) if (seen := _difference(system, image)))


def _forget_below(images: dict[str, Json], missing: Collection[str]) -> None:
    """Replace what later images show in folders that were missing earlier: nothing was there (byte code, say)."""
    for path in images:
        if any(path.startswith(f"{folder}/") for folder in missing):
            images[path] = {"path": path, "kind": "missing"}


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
