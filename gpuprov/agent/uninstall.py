"""Remove gpuprov from a host: undo all runs, newest first, then remove what no journal lists.

Each uninstall derives its work from the host, so the next one resumes an interrupted one. The journals are removed
last: they exist as long as there is something to undo.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Callable

from gpuprov.core.apply import Kinds, kind_of, undo_runs
from gpuprov.core.changes import Json, file_digest, image_content, images_in, text_diff
from gpuprov.core.journal import STATE_DIRECTORY, Entry, Run, read_runs
from gpuprov.core.places import CACHE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.verify.image import REPOSITORY
from gpuprov.wire.errors import GpuprovError, Problem
from gpuprov.wire.events import PlannedChange, Sink

_STEP = "uninstall"
_RUNTIME = "nvidia"
# The container runtime's state; the log of internal errors.
_OWN = ("/run/gpuprov", "/var/log/gpuprov.log")
_DRIVER_LOGS = ("/var/log/nvidia-installer.log", "/var/log/nvidia-uninstall.log")
_LINKS = "/dev/char"
# Identifies links made by the runtime: nvidia-ctk's are absolute, and udev makes none for these nodes.
_OUR_LINK = "../nvidia"


@dataclass(frozen=True)
class Removal:
    """What an uninstall has to do. `lasting`: what it can't restore or also removes, a sentence each."""

    runs: tuple[Run, ...]
    leftovers: tuple[str, ...]
    images: tuple[str, ...]
    lasting: tuple[str, ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The changes to undo, latest first."""
        return tuple(entry for run in self.runs for entry in run.undoable)

    @property
    def count(self) -> int:
        """How many things there are to do."""
        return len(self.entries) + len(self.leftovers) + len(self.images)


def survey(system: System, kinds: Kinds) -> Removal:
    """Return what an uninstall has to do. Raises GpuprovError if a journal names a change that is not known here."""
    runs = tuple(run for run in reversed(read_runs(system)) if run.undoable)
    for run in runs:
        for entry in run.undoable:
            kind_of(run, entry, kinds)
    return Removal(runs, _leftovers(system, runs), _images(system), lasting(system, runs, kinds))


def problems(system: System, removal: Removal) -> tuple[Problem, ...]:
    """Return what prevents an uninstall: a running container needs its runtime until it stops."""
    running = _containers_of_the_runtime(system) if removal.entries else ()
    if not running:
        return ()
    return (
        Problem(
            f"containers still run with runtime {_RUNTIME}; without it docker could not end them properly",
            f"docker ps: {', '.join(running)}",
            f"docker stop {' '.join(running)}, then run the same command again",
        ),
    )


def planned(system: System, removal: Removal, *, diff: bool) -> tuple[PlannedChange, ...]:
    """Return the changes in the form of a plan."""
    contents: dict[str, bytes | None] = {}
    undone = tuple(
        PlannedChange(entry.key, _STEP, f"undo: {entry.key}", _diff(system, entry, contents) if diff else "")
        for entry in removal.entries
    )
    images = tuple(PlannedChange(f"remove image {image}", _STEP, f"remove image {image}") for image in removal.images)
    paths = tuple(PlannedChange(f"remove {path}", _STEP, f"remove {path}") for path in removal.leftovers)
    return images + undone + paths


def carry_out(
    system: System, removal: Removal, kinds: Kinds, sink: Sink, stop_requested: Callable[[], bool] = lambda: False
) -> None:
    """Carry it out. Raises GpuprovError if a change can't be undone, or if files differ from before in the end."""
    # First, while docker is still installed.
    for image in removal.images:
        system.run(("docker", "rmi", "--force", image))
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


def _images(system: System) -> tuple[str, ...]:
    """Return the tags of the images built by `verify`."""
    if system.which("docker") is None:
        return ()
    listed = system.run(("docker", "images", "--format", "{{.Repository}}:{{.Tag}}", REPOSITORY), timeout=20)
    return tuple(sorted(listed.stdout.split())) if listed.ok else ()


def _containers_of_the_runtime(system: System) -> tuple[str, ...]:
    if system.which("docker") is None:
        return ()
    ids = system.run(("docker", "ps", "--quiet", "--no-trunc"), timeout=20).stdout.split()
    if not ids:
        return ()
    form = "{{.HostConfig.Runtime}} {{.Name}}"
    lines = system.run(("docker", "inspect", "--format", form, *ids), timeout=20).stdout.splitlines()
    rows = (line.split(" /", 1) for line in lines)
    return tuple(sorted(row[1] for row in rows if len(row) == 2 and row[0] == _RUNTIME))


def lasting(system: System, runs: tuple[Run, ...], kinds: Kinds) -> tuple[str, ...]:
    """Return, for runs given from the newest to the oldest, what can't be brought back, and what others changed since.

    In the order in which it was done; a change of a kind that is not known here says nothing.
    """
    entries = [entry for run in reversed(runs) for entry in reversed(run.undoable)]
    told: list[str] = []
    for number, entry in enumerate(entries):
        earlier = tuple(one.before for one in entries[:number] if one.kind == entry.kind)
        if entry.kind in kinds:
            told += kinds[entry.kind].lasting(system, entry.before, entry.outcome, earlier)
    written: dict[str, str] = {}
    for entry in entries:
        written.update((entry.outcome or {}).get("written", {}))
    changed = [path for path, digest in written.items() if (now := file_digest(system, path)) and now != digest]
    told += [f"{path} was changed after gpuprov wrote it; that change goes too" for path in changed]
    return tuple(dict.fromkeys(told))


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
            for path in kinds[entry.kind].kept(system, entry.before):
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
