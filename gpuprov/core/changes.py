"""Changes: data that describes, applies and undoes itself; it never decides whether it is needed."""

from __future__ import annotations

import base64
import difflib
import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable, ClassVar

from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.secrets import masked_settings

LOADER_CACHE = "/etc/ld.so.cache"
_LDCONFIG_SECONDS = 120
_LARGEST = 1 << 28  # as System.read_bytes: another user's sparse file may have terabytes
Json = Mapping[str, Any]
Jsons = tuple[Json, ...]
# Reports progress of a change: a message, and done/total if known (0/0: unknown).
Tell = Callable[[str, int, int], None]


def tell_nobody(message: str, done: int, total: int) -> None:
    """Ignore progress: of a rollback's commands, and of queries that their caller announces."""


class NextAction(enum.Enum):
    """How a run continues after a change."""

    CONTINUE = "make the next change of the plan"
    PLAN_AGAIN = "the rest of the plan is stale: gather and plan again"
    REBOOT = "the host must reboot before the rest is planned"


class Change:
    """One thing to do to a host.

    A change may be undone by another process than the one that made it, perhaps after a crash. The journal stores the
    result of `capture` before `apply`, and the result of `apply` after it. `undo` uses these only.
    """

    # For an interrupted change: True undoes its partial effects before the next run makes a plan.
    undo_when_interrupted: ClassVar[bool] = True
    # The part of a bundle that it uses if a run has one: packages, driver, cuda, images, or nothing.
    bundle_part: ClassVar[str] = ""
    # Whether it needs the package manager's lock: a run waits for the lock before its first change.
    uses_package_manager: ClassVar[bool] = False
    # The folder in which it and its undo run programs that they unpack; "" if they unpack none.
    executes: ClassVar[str] = ""
    # Whether undoing several changes to the same files restores the first state directly, without the states between.
    undo_goes_to_first: ClassVar[bool] = False
    # Whether its undo restores captured files alone: of several to the same files an uninstall needs the oldest.
    undo_restores_files: ClassVar[bool] = False
    # Whether its undo may stop containers, or processes on the GPUs.
    undo_disturbs: ClassVar[bool] = False

    @property
    def key(self) -> str:
        """A name for this change that is the same in every run."""
        return self.summary()

    def summary(self) -> str:
        """Return one line that says what will be done."""
        raise TypeError(f"{type(self).__name__} does not describe itself")

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the URLs that it will fetch, so that an unreachable one is reported before any change."""
        return ()

    @property
    def disturbs(self) -> bool:
        """Say whether it may stop containers, or processes on the GPUs."""
        return False

    def diff(self, system: System) -> str:
        """Return a unified diff of the change, "" if there is no text to compare."""
        return ""

    def diff_in_short(self, system: System) -> str:
        """Return a few lines that summarise a diff too long to read, "" if the diff is short."""
        return ""

    def capture(self, system: System) -> Json:
        """Return the current state in a form from which `undo` can restore it. Reads only."""
        return {}

    def apply(self, system: System, tell: Tell) -> Json | None:
        """Make the change; return what `undo` needs besides `before`, if anything. Raises GpuprovError on failure."""
        raise TypeError(f"{type(self).__name__} can't be applied")

    def next_action(self, outcome: Json) -> NextAction:
        """Return how the run continues, from the result of `apply`."""
        return NextAction.CONTINUE

    def way_back(self, system: System) -> tuple[str, ...]:
        """Return, a sentence each, how an undo restores what it replaces by more than captured files. Reads only."""
        return ()

    @classmethod
    def restores(cls, system: System, before: Json, outcome: Json | None) -> tuple[str, ...]:
        """Return the same for a change that was made."""
        return ()

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Restore the earlier state. `outcome` is None if the change was interrupted. A second undo has no effect."""

    @classmethod
    def interrupted(cls, system: System, before: Json) -> Json:
        """Return the outcome of an interrupted change that is not undone now: what a later `undo` needs."""
        return {}

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        """Return one sentence for each thing that `undo` can't restore or also removes. Reads only.

        `earlier` holds the captured states of earlier changes of this kind that will also be undone.
        """
        return ()

    @classmethod
    def skipped_paths(cls, system: System, before: Json) -> tuple[str, ...]:
        """Return the paths in `before` that `undo` leaves alone, because others own them now. Reads only."""
        return ()


@dataclass(frozen=True)
class PathChange(Change):
    """A change of what is at one path; its undo restores what was there."""

    path: str

    def capture(self, system: System) -> Json:
        return capture_path(system, self.path)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if not cls.skipped_paths(system, before):
            restore_path(system, before)


@dataclass(frozen=True)
class WriteFile(PathChange):
    """Write a file with this content and mode."""

    undo_restores_files: ClassVar[bool] = True

    content: bytes
    mode: int = 0o644

    def summary(self) -> str:
        return f"write {self.path}"

    def diff(self, system: System) -> str:
        return file_diff(system, self.path, self.content, self.mode)

    def apply(self, system: System, tell: Tell) -> None:
        system.make_directory(parent_of(self.path))
        system.write(self.path, self.content, mode=self.mode)


@dataclass(frozen=True)
class SetMode(Change):
    """Set the mode of a path; its content and its owner stay."""

    path: str
    mode: int

    def summary(self) -> str:
        return f"chmod {self.mode:04o} {self.path}"

    def diff(self, system: System) -> str:
        found = system.status(self.path)
        return "\n".join(mode_heads(self.path, found.mode, self.mode)) if found is not None else ""

    def capture(self, system: System) -> Json:
        found = system.status(self.path)
        return {"path": self.path, "mode": found.mode if found is not None else None}

    def apply(self, system: System, tell: Tell) -> None:
        system.change_mode(self.path, self.mode)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if before["mode"] is not None and system.status(before["path"]) is not None:
            system.change_mode(before["path"], before["mode"])


@dataclass(frozen=True)
class RefreshLoaderCache(PathChange):
    """Refresh the loader's cache so that it lists the present libraries."""

    undo_restores_files: ClassVar[bool] = True

    path: str = LOADER_CACHE

    def summary(self) -> str:
        return f"write {self.path} (ldconfig)"

    def apply(self, system: System, tell: Tell) -> None:
        what = "the loader's cache can't be written"
        system.require(("ldconfig",), what, "ldconfig -v shows where", timeout=_LDCONFIG_SECONDS)


@dataclass(frozen=True)
class RemoveFile(PathChange):
    """Remove a file or link."""

    undo_restores_files: ClassVar[bool] = True

    reason: str

    def summary(self) -> str:
        return f"remove {self.path} ({self.reason})"

    @property
    def key(self) -> str:
        return f"remove {self.path}"

    def diff(self, system: System) -> str:
        return text_diff(self.path, system.read_bytes(self.path), None)

    def capture(self, system: System) -> Json:
        return capture_path_itself(system, self.path)

    def apply(self, system: System, tell: Tell) -> None:
        system.remove(self.path)


@dataclass(frozen=True)
class MakeNode(PathChange):
    """Make a character device node."""

    major: int
    minor: int
    mode: int = 0o666
    group: int = 0

    def summary(self) -> str:
        return f"make device node {self.path} (c {self.major}:{self.minor})"

    def apply(self, system: System, tell: Tell) -> None:
        system.make_directory(parent_of(self.path))
        system.remove(self.path)
        system.make_node(self.path, self.major, self.minor, self.mode, self.group)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        now = system.status(before["path"])
        numbers = (now.kind, now.major, now.minor) if now is not None else None
        if before["kind"] == "char" and numbers == ("char", before["major"], before["minor"]):
            # A plan makes missing nodes only, so this one came from the run's own units, which were started before.
            before = {**before, "kind": "missing", "missing_parents": [parent_of(before["path"])]}
        restore_path(system, before)


def parent_of(path: str) -> str:
    """Return the directory of an absolute path."""
    return path.rpartition("/")[0] or "/"


def text_diff(path: str, before: bytes | None, after: bytes | None) -> str:
    """Return a unified diff; for binary files only a note that they differ. None means: no file.

    Passwords are hidden in it: of proxies in daemon.json, of registries, of package repositories.
    """
    if before == after:
        return ""
    try:
        old, new = (b"" if content is None else content for content in (before, after))
        source, target = ("/dev/null" if content is None else path for content in (before, after))
        lines = difflib.unified_diff(old.decode().splitlines(), new.decode().splitlines(), source, target, lineterm="")
    except UnicodeDecodeError:
        return f"binary file {path} differs"
    return masked_settings("\n".join(lines))


def file_diff(system: System, path: str, content: bytes, mode: int) -> str:
    """Return the diff of a file's content and mode; the mode of a new file is not shown."""
    status, before = system.status(path), system.read_bytes(path)
    diff = text_diff(path, before, content)
    if status is None or status.kind != "file" or status.mode == mode:
        return diff
    # The modes replace the first two lines. Binary files have one line.
    return "\n".join((*mode_heads(path, status.mode, mode), *diff.splitlines()[2:]))


def mode_heads(path: str, before: int, after: int) -> tuple[str, str]:
    """Return the first two lines of a diff that changes a mode."""
    return f"--- {path} (mode {before:04o})", f"+++ {path} (mode {after:04o})"


def capture_path(system: System, path: str) -> Json:
    """Return everything at `path` as JSON values: kind, mode, owner, content; and which parents are missing."""
    real = system.real_path(path) if (found := system.status(path)) and found.kind == "link" else path
    status = system.status(real)
    missing = []
    place = parent_of(real)
    while system.status(place) is None:
        missing.append(place)
        place = parent_of(place)
    if status is None:
        return {"path": real, "kind": "missing", "missing_parents": missing}
    image: dict[str, Any] = {
        "path": real, "kind": status.kind, "mode": status.mode, "uid": status.uid, "gid": status.gid,
        "major": status.major, "minor": status.minor, "missing_parents": [],
    }  # fmt: skip
    if status.kind == "file":
        image["content"] = base64.b64encode(system.read_bytes(real) or b"").decode("ascii")
    return image


def images_in(before: Any, *, links: bool = False) -> Iterator[Json]:
    """Yield every image by `capture_path` in a captured state; `links`: those of links by `capture_path_itself` too."""
    if isinstance(before, Mapping) and ("missing_parents" in before or (links and before.get("kind") == "link")):
        yield before
    elif isinstance(before, (Mapping, list)):
        for value in before.values() if isinstance(before, Mapping) else before:
            yield from images_in(value, links=links)


def image_content(image: Json) -> bytes | None:
    """Return the file content in an image, or None if it has none."""
    return base64.b64decode(image["content"]) if image["kind"] == "file" else None


def file_digest(system: System, path: str) -> str:
    """Return the SHA-256 of a file, "" if it is missing or not a regular file, its size if no run writes as much."""
    found = system.status(path)
    if found is None or found.kind != "file":
        return ""
    return system.sha256(path) if found.size <= _LARGEST else f"size {found.size}"


def is_as_shown(system: System, image: Json) -> bool:
    """Say whether the disk matches an image by `capture_path`: content, mode and owner of a file, or no file."""
    now = system.status(image["path"])
    if image["kind"] != "file" or now is None:
        return image["kind"] == "missing" and now is None
    is_same = (now.kind, now.mode, now.uid, now.gid) == ("file", image["mode"], image["uid"], image["gid"])
    return is_same and system.read_bytes(image["path"]) == image_content(image)


def write_files(system: System, files: Iterable[tuple[str, bytes, int]]) -> None:
    """Write files (path, content, mode) that belong to root, and make missing folders."""
    for path, content, mode in files:
        system.make_directory(parent_of(path))
        system.write(path, content, mode=mode, owner=(0, 0))


def restore_path(system: System, image: Json) -> None:
    """Restore the state that `capture_path` saved: content, mode and owner, and the absence of missing parents."""
    path, kind = image["path"], image["kind"]
    if system.status(parent_of(path)) is not None:
        system.remove_leftover(path)
    if kind == "file" and is_as_shown(system, image):
        # Nothing to write: a full disk might have no room for it.
        return
    if kind == "file":
        system.make_directory(parent_of(path))
        now = system.status(path)
        if now is not None and now.kind != "file":
            # A link came later, for the image is of none: what it leads to is somebody else's.
            system.remove(path)
        system.write(path, image_content(image) or b"", mode=image["mode"], owner=(image["uid"], image["gid"]))
    elif kind == "link":
        system.make_link(path, image["target"])
    elif kind == "char":
        now = system.status(path)
        if now is None or (now.major, now.minor) != (image["major"], image["minor"]):
            system.remove(path)
            system.make_node(path, image["major"], image["minor"], image["mode"], image["gid"])
    elif kind == "missing":
        system.remove(path)
        for parent in image["missing_parents"]:
            now = system.status(parent)
            # A link came later: somebody has moved the folder.
            if system.list_directory(parent) or (now is not None and now.kind == "link"):
                break
            system.remove(parent)


def restore_paths(system: System, images: Iterable[Json]) -> None:
    """Restore each of these states, in their order."""
    for image in images:
        restore_path(system, image)


@dataclass(frozen=True)
class FileFact:
    """A file that plans examine."""

    content: bytes
    mode: int
    uid: int
    gid: int

    def is_roots(self, content: bytes, mode: int = 0o644) -> bool:
        """Say whether root owns this file and it has this content and mode."""
        return (self.content, self.mode, self.uid) == (content, mode, 0)


def capture_path_itself(system: System, path: str) -> Json:
    """Return the state of a path as capture_path does; for a link, the link itself and not its target."""
    status = system.status(path)
    if status is None or status.kind != "link":
        return capture_path(system, path)
    return {"path": path, "kind": "link", "target": status.target}
