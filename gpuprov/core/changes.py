"""Changes: data that describes, applies and undoes itself; never decides whether it is needed."""

from __future__ import annotations

import base64
import difflib
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Callable, ClassVar

from gpuprov.core.system import System

Json = Mapping[str, Any]
# Reports progress of a change: a message, and done/total where they are known (0/0: unknown).
Tell = Callable[[str, int, int], None]


class Then(enum.Enum):
    """How a run continues after a change."""

    CONTINUE = "make the next change of the plan"
    PLAN_AGAIN = "the rest of the plan is stale: gather and plan again"
    REBOOT = "the host must reboot before the rest is planned"


class Change:
    """One thing to do to a host.

    A change is undone by another process than the one that made it, perhaps after a crash: so what `capture` returns
    goes into the journal before `apply`, what `apply` returns goes there after it, and `undo` works from these alone.
    """

    # What an interrupted change needs before the next run plans afresh: True undoes what it had begun.
    undo_when_interrupted: ClassVar[bool] = True
    # What it takes of a bundle where a run has one: packages, driver, cuda, images, or nothing.
    bundle_part: ClassVar[str] = ""
    # Whether it needs the package manager's lock: a run waits for that before its first change.
    uses_package_manager: ClassVar[bool] = False
    # Whether an undo of several changes to the same files goes to the first state at once, not through those between.
    undo_goes_to_first: ClassVar[bool] = False

    @property
    def key(self) -> str:
        """A name for this change that is the same in every run."""
        return self.summary()

    def summary(self) -> str:
        """Return one line that says what will be done."""
        raise TypeError(f"{type(self).__name__} does not describe itself")

    @property
    def urls(self) -> tuple[str, ...]:
        """Return what it will fetch, so that a place that can't be reached is known before anything is changed."""
        return ()

    def diff(self, system: System) -> str:
        """Return a unified diff of what will change, or nothing where there is no text to compare."""
        return ""

    def diff_in_short(self, system: System) -> str:
        """Return a few lines that stand for a diff that is too long to read, or nothing where the diff is short."""
        return ""

    def capture(self, system: System) -> Json:
        """Return what is there before, such that `undo` can bring it back. Reads only."""
        return {}

    def apply(self, system: System, tell: Tell) -> Json:
        """Make the change; return what `undo` must know besides `before`. Raises GpuprovError if that fails."""
        raise TypeError(f"{type(self).__name__} can't be applied")

    def then(self, outcome: Json) -> Then:
        """Return how the run continues, by what `apply` returned."""
        return Then.CONTINUE

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Bring back what was there. `outcome` is None if the change was interrupted. Undoing twice is harmless."""

    @classmethod
    def cut_off(cls, system: System, before: Json) -> Json:
        """Return the outcome of an interrupted change that is not undone at once: what `undo` must know later."""
        return {}

    @classmethod
    def lasting(cls, system: System, before: Json, outcome: Json | None, earlier: tuple[Json, ...]) -> tuple[str, ...]:
        """Return, a sentence each, what `undo` can't bring back or what it takes along. Reads only.

        `earlier` is what earlier changes of this kind captured that will be undone too.
        """
        return ()

    @classmethod
    def kept(cls, system: System, before: Json) -> tuple[str, ...]:
        """Return the paths in `before` that `undo` leaves alone, for they are somebody else's by now. Reads only."""
        return ()


@dataclass(frozen=True)
class WriteFile(Change):
    """A file shall have this content and mode. `secret` keeps its content out of diffs."""

    path: str
    content: bytes
    mode: int = 0o644
    secret: bool = False

    def summary(self) -> str:
        return f"write {self.path}"

    def diff(self, system: System) -> str:
        if self.secret:
            return ""
        return file_diff(system, self.path, self.content, self.mode)

    def capture(self, system: System) -> Json:
        return capture_path(system, self.path)

    def apply(self, system: System, tell: Tell) -> Json:
        system.make_directory(parent_of(self.path))
        system.write(self.path, self.content, mode=self.mode)
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        restore_path(system, before)


@dataclass(frozen=True)
class RemoveFile(Change):
    """A file or link shall not be there."""

    path: str
    reason: str

    def summary(self) -> str:
        return f"remove {self.path} ({self.reason})"

    @property
    def key(self) -> str:
        return f"remove {self.path}"

    def diff(self, system: System) -> str:
        return text_diff(self.path, system.read_bytes(self.path), None)

    def capture(self, system: System) -> Json:
        return capture_path(system, self.path)

    def apply(self, system: System, tell: Tell) -> Json:
        system.remove(self.path)
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        restore_path(system, before)


@dataclass(frozen=True)
class MakeNode(Change):
    """A character device node shall be there."""

    path: str
    major: int
    minor: int
    mode: int = 0o666
    group: int = 0

    def summary(self) -> str:
        return f"make device node {self.path} (c {self.major}:{self.minor})"

    def capture(self, system: System) -> Json:
        return capture_path(system, self.path)

    def apply(self, system: System, tell: Tell) -> Json:
        system.make_directory(parent_of(self.path))
        system.remove(self.path)
        system.make_node(self.path, self.major, self.minor, self.mode, self.group)
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        restore_path(system, before)


def parent_of(path: str) -> str:
    """Return the directory of an absolute path."""
    return path.rpartition("/")[0] or "/"


def text_diff(path: str, before: bytes | None, after: bytes | None) -> str:
    """Return a unified diff; a binary file is only said to differ. None means: no file."""
    if before == after:
        return ""
    try:
        old, new = (b"" if content is None else content for content in (before, after))
        lines = difflib.unified_diff(
            old.decode().splitlines(),
            new.decode().splitlines(),
            "/dev/null" if before is None else path,
            "/dev/null" if after is None else path,
            lineterm="",
        )
    except UnicodeDecodeError:
        return f"binary file {path} differs"
    return "\n".join(lines)


def file_diff(system: System, path: str, content: bytes, mode: int) -> str:
    """Return how a file's content and mode will change; a new file's mode is not told."""
    status, before = system.status(path), system.read_bytes(path)
    diff = text_diff(path, before, content)
    if before is None or status is None or status.kind != "file" or status.mode == mode:
        return diff
    body = [] if diff.startswith("binary") else diff.splitlines()[2:]
    return "\n".join((*mode_heads(path, status.mode, mode), *body))


def mode_heads(path: str, before: int, after: int) -> tuple[str, str]:
    """Return the first two lines of a diff in which a mode changes."""
    return f"--- {path} (mode {before:04o})", f"+++ {path} (mode {after:04o})"


def capture_path(system: System, path: str) -> Json:
    """Return all that lies at `path` as JSON values: kind, mode, owner, content; and which parents are missing."""
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
        "target": status.target, "major": status.major, "minor": status.minor, "missing_parents": [],
    }  # fmt: skip
    if status.kind == "file":
        image["content"] = base64.b64encode(system.read_bytes(real) or b"").decode("ascii")
    return image


def images_in(before: Any) -> Iterator[Json]:
    """Yield every image by `capture_path` in what a change captured."""
    if isinstance(before, Mapping) and "missing_parents" in before:
        yield before
    elif isinstance(before, Mapping):
        for value in before.values():
            yield from images_in(value)
    elif isinstance(before, list):
        for value in before:
            yield from images_in(value)


def image_content(image: Json) -> bytes | None:
    """Return the content of the file that an image shows, or None if it shows none."""
    return base64.b64decode(image["content"]) if image["kind"] == "file" else None


def file_digest(system: System, path: str) -> str:
    """Return the SHA-256 of a file, nothing where there is none or something else."""
    found = system.status(path)
    return system.sha256(path) if found is not None and found.kind == "file" else ""


def _is_as_shown(system: System, image: Json) -> bool:
    """Say whether the file that an image by `capture_path` shows lies there: content, mode and owner."""
    now = system.status(image["path"]) if image["kind"] == "file" else None
    return (
        now is not None
        and (now.kind, now.mode, now.uid, now.gid) == ("file", image["mode"], image["uid"], image["gid"])
        and system.read_bytes(image["path"]) == image_content(image)
    )


def restore_path(system: System, image: Json) -> None:
    """Bring back what `capture_path` saw: content, mode and owner, and the absence of parents that were missing."""
    path, kind = image["path"], image["kind"]
    if system.status(parent_of(path)) is not None:
        system.remove_leftover(path)
    if _is_as_shown(system, image):
        # Nothing is written, for which a full disk might have no room.
        return
    if kind == "file":
        system.make_directory(parent_of(path))
        system.write(path, image_content(image) or b"", mode=image["mode"], owner=(image["uid"], image["gid"]))
    elif kind == "link":
        system.make_link(path, image["target"])
    elif kind == "char":
        now = system.status(path)
        if now is None or (now.major, now.minor) != (image["major"], image["minor"]):
            system.remove(path)
            system.make_node(path, image["major"], image["minor"], image["mode"])
    elif kind == "missing":
        system.remove(path)
        for parent in image["missing_parents"]:
            if system.list_directory(parent):
                break
            system.remove(parent)


@dataclass(frozen=True)
class FileFact:
    """A file that plans look at."""

    content: bytes
    mode: int
    uid: int
    gid: int

    def is_roots(self, content: bytes, mode: int = 0o644) -> bool:
        """Say whether this is a file of root's with this content and mode."""
        return (self.content, self.mode, self.uid) == (content, mode, 0)


def capture_path_itself(system: System, path: str) -> Json:
    """Return what lies at a path as capture_path does; of a link the link, not what it leads to."""
    status = system.status(path)
    if status is None or status.kind != "link":
        return capture_path(system, path)
    return {"path": path, "kind": "link", "target": status.target}
