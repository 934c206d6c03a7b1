"""The root file system in which libraries are looked for, and the driver's files added to it. Starts nothing.

A folder, or an image's files from an engine's archive. Both are hostile: a link never leads out of the root, and only
regular files are opened. A folder is walked by runtime_hook.rootfs, as the container runtime does it.
"""

from __future__ import annotations

import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from gpuprov.cdi.files import CACHE
from gpuprov.runtime_hook import ldcache
from gpuprov.runtime_hook.edits import choose
from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.links import cache_entries, find_compatibility
from gpuprov.runtime_hook.request import DeviceRequest
from gpuprov.runtime_hook.rootfs import Root
from gpuprov.runtime_hook.settings import Settings, read_settings
from gpuprov.runtime_hook.specification import Specifications

_MOST_LINKS = 40
_MOST_NAMES = 20_000
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
FILE, FOLDER, LINK = "file", "folder", "link"


class Tree(Protocol):
    """A root file system. Folders are given without links, as real_folder returns them; "" is the root."""

    def real_folder(self, path: str) -> str | None:
        """Return a folder's path without links, None if there is no folder."""

    def kind(self, folder: str, name: str) -> str:
        """Return `file`, `folder` or `link`, nothing for anything else."""

    def target(self, folder: str, name: str) -> str:
        """Return a link's text."""

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder, none if there is no folder."""

    def everywhere(self, stem: str) -> list[str]:
        """Return the files whose names begin so, wherever they lie, if the tree knows them without a search."""

    def open(self, real: str) -> BinaryIO:
        """Open a regular file by its path without links. Raises OSError."""


def chain(tree: Tree, path: str) -> tuple[str, ...]:
    """Return the path and what its links lead to, all in folders without links; () if no file is at the end."""
    found: list[str] = []
    for _ in range(_MOST_LINKS):
        above, _, name = path.rpartition("/")
        folder = tree.real_folder(above)
        if folder is None or name in ("", ".", ".."):
            return ()
        found.append(f"{folder}/{name}")
        kind = tree.kind(folder, name)
        if kind != LINK:
            return tuple(found) if kind == FILE else ()
        path = posixpath.join(f"{folder}/", tree.target(folder, name))
    return ()


def read_start(tree: Tree, path: str, size: int) -> bytes:
    """Return the first bytes of the file that a path leads to; nothing if there is no file, or it can't be read."""
    real = chain(tree, path)
    if not real:
        return b""
    try:
        with tree.open(real[-1]) as file:
            return file.read(size)
    except OSError:
        return b""


class RootTree:
    """A folder that is a root file system: this host's `/`, or the root of a process (/proc/PID/root)."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def real_folder(self, path: str) -> str | None:
        """Return a folder's path without links, None if there is no folder."""
        try:
            found = self._root.real_path(path)
        except (OSError, ValueError):
            return None
        return "" if found == "/" else found

    def kind(self, folder: str, name: str) -> str:
        """Return `file`, `folder` or `link`, nothing for anything else."""
        status = self._root.status(f"{folder}/{name}")
        if status is None:
            return ""
        kinds = {stat.S_IFREG: FILE, stat.S_IFDIR: FOLDER, stat.S_IFLNK: LINK}
        return kinds.get(stat.S_IFMT(status.st_mode), "")

    def target(self, folder: str, name: str) -> str:
        """Return a link's text."""
        try:
            return os.readlink(name, dir_fd=self._root.open_directory(folder))
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder, none if there is no folder."""
        return self._root.names(path, _MOST_NAMES)

    def everywhere(self, stem: str) -> list[str]:
        """Return nothing: a root file system is too large to search."""
        return []

    def open(self, real: str) -> BinaryIO:
        """Open a regular file by its path without links, in a volume too: the driver's files are mounts themselves."""
        folder, _, name = real.rpartition("/")
        above = self._root.open_directory(folder)
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{real} is no regular file")
            # A file of /proc has no size: reading it may wait for ever.
            return os.fdopen(os.open(f"/proc/self/fd/{handle}", _READ), "rb") if status.st_size else io.BytesIO()
        finally:
            os.close(handle)


class ArchiveTree:
    """Files by their paths: a link's text, or where the content lies on this host. Folders are those that hold them."""

    def __init__(self) -> None:
        self._links: dict[str, str] = {}
        self._files: dict[str, Path | None] = {}
        self._folders: dict[str, set[str]] = {"": set()}

    def add_folder(self, path: str) -> None:
        """Add a folder and those above it."""
        missing = []
        while path not in self._folders:
            missing.append(path)
            path = path.rpartition("/")[0]
        for one in reversed(missing):
            above, _, name = one.rpartition("/")
            self._folders[one] = set()
            self._folders[above].add(name)

    def add_link(self, path: str, target: str) -> None:
        """Add a link; what was at the path is gone."""
        self._add(path)
        self._links[path] = target

    def add_file(self, path: str, content: Path | None) -> None:
        """Add a file; without a content it can't be opened."""
        self._add(path)
        self._files[path] = content

    def _add(self, path: str) -> None:
        self._links.pop(path, None)
        self._files.pop(path, None)
        above, _, name = path.rpartition("/")
        self.add_folder(above)
        self._folders[above].add(name)

    def real_folder(self, path: str) -> str | None:
        """Return a folder's path without links, None if there is no folder."""
        todo = path.split("/")[::-1]
        real = ""
        links = 0
        while todo:
            name = todo.pop()
            if name in ("", "."):
                continue
            if name == "..":
                real = real.rpartition("/")[0]
                continue
            below = f"{real}/{name}"
            target = self._links.get(below)
            if target is None and below not in self._folders:
                return None
            if target is None:
                real = below
                continue
            links += 1
            if links > _MOST_LINKS:
                return None
            real = "" if target.startswith("/") else real
            todo += target.split("/")[::-1]
        return real

    def kind(self, folder: str, name: str) -> str:
        """Return `file`, `folder` or `link`, nothing for anything else."""
        path = f"{folder}/{name}"
        if path in self._links:
            return LINK
        return FILE if path in self._files else FOLDER if path in self._folders else ""

    def target(self, folder: str, name: str) -> str:
        """Return a link's text."""
        return self._links.get(f"{folder}/{name}", "")

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder, none if there is no folder."""
        real = self.real_folder(path)
        return sorted(self._folders[real]) if real is not None else []

    def everywhere(self, stem: str) -> list[str]:
        """Return the files whose names begin so."""
        return sorted(path for path in self._files if path.rpartition("/")[2].startswith(stem))

    def open(self, real: str) -> BinaryIO:
        """Open a file by its path without links. Raises OSError."""
        content = self._files.get(real)
        if content is None:
            raise OSError(f"{real} was not kept")
        return content.open("rb")


def read_archive(
    archive: tarfile.TarFile, is_kept: Callable[[str], bool], folder: Path, most_bytes: int
) -> ArchiveTree:
    """Return an archive's tree; `folder` takes the contents of the files that are kept, up to `most_bytes` together.

    Nothing is unpacked under a name of the archive's. Raises tarfile.TarError and OSError.
    """
    tree = ArchiveTree()
    left = most_bytes
    for number, member in enumerate(archive):
        path = _absolute(member.name)
        if member.isdir():
            tree.add_folder(path.rstrip("/"))
        elif member.issym():
            tree.add_link(path, member.linkname)
        elif member.islnk():
            # The archive has the content at the first name; a second name is as good as a link to it.
            tree.add_link(path, _absolute(member.linkname))
        elif member.isreg():
            kept = is_kept(path) and member.size <= left
            tree.add_file(path, _kept(archive, member, folder / str(number)) if kept else None)
            left -= member.size if kept else 0
    return tree


def _absolute(name: str) -> str:
    return posixpath.normpath("/" + name.lstrip("/"))


def _kept(archive: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> Path:
    source = archive.extractfile(member)
    with place.open("wb") as file:
        while source is not None and (part := source.read(1 << 20)):
            file.write(part)
    return place


class _AsRoot:
    """A tree with the methods by which the runtime looks into a container's root."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def is_directory(self, path: str) -> bool:
        return self._tree.real_folder(path) is not None

    def names(self, path: str, most: int) -> list[str]:
        found = self._tree.names(path)
        return found if len(found) <= most else []

    def real_path(self, path: str) -> str:
        return self._tree.real_folder(path) or "/"


class AddedTree:
    """A tree with files and links added to it; those of the same path are replaced. The tree itself stays as it is."""

    def __init__(self, base: Tree) -> None:
        self._base = base
        self._added = ArchiveTree()

    def add_file(self, path: str, content: Path) -> None:
        """Add a file."""
        self._added.add_file(self._real(path), content)

    def add_link(self, path: str, target: str) -> None:
        """Add a link."""
        self._added.add_link(self._real(path), target)

    def _real(self, path: str) -> str:
        """Return a path whose folders have no links; those that do not exist stay as they are."""
        above, _, name = path.rpartition("/")
        missing = [name]
        while (real := self.real_folder(above)) is None:
            above, _, name = above.rpartition("/")
            missing.append(name)
        return "/".join((real, *reversed(missing)))

    def real_folder(self, path: str) -> str | None:
        """Return a folder's path without links, None if there is no folder."""
        found = self._base.real_folder(path)
        return found if found is not None else self._added.real_folder(self._real(path))

    def kind(self, folder: str, name: str) -> str:
        """Return `file`, `folder` or `link`, nothing for anything else."""
        ours = self._added.kind(folder, name)
        return ours if ours in (FILE, LINK) else self._base.kind(folder, name) or ours

    def target(self, folder: str, name: str) -> str:
        """Return a link's text."""
        return self._added.target(folder, name) or self._base.target(folder, name)

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder, none if there is no folder."""
        real = self.real_folder(path)
        return sorted({*self._base.names(real), *self._added.names(real)}) if real is not None else []

    def everywhere(self, stem: str) -> list[str]:
        """Return the added files whose names begin so, and those of the tree if it knows them."""
        return sorted({*self._base.everywhere(stem), *self._added.everywhere(stem)})

    def open(self, real: str) -> BinaryIO:
        """Open a file by its path without links. Raises OSError."""
        folder, _, name = real.rpartition("/")
        return (self._added if self._added.kind(folder, name) == FILE else self._base).open(real)


def request_for_all() -> DeviceRequest:
    """Return the request of a container that asks for all GPUs with the default capabilities."""
    request = DeviceRequest(legacy=False, privileged=False)
    request.devices = ["all"]
    request.capabilities = frozenset(("compute", "utility"))
    return request


def add_driver(
    tree: ArchiveTree | AddedTree, folder: Path, settings: Settings | None = None, request: DeviceRequest | None = None
) -> str:
    """Add the driver's libraries, links and entries of the loader's cache; return what was added, as a sentence.

    `folder` takes the new cache; `request` is what the container asks for, all GPUs by default. Nothing is added, and
    the sentence says why, on a host without a CDI specification.
    """
    trouble = ""
    if settings is None:
        settings, trouble = read_settings()
    request = request or request_for_all()
    specifications = Specifications(settings)
    root = _AsRoot(tree)
    try:
        if trouble:
            raise Refused(trouble)
        edits = choose(specifications, request, settings, root)
    except Refused as refused:
        return f"without the driver's files, which the container runtime adds at the start: {refused}"
    for mount in edits.cdi.get("mounts") or ():
        tree.add_file(mount["containerPath"], Path(mount["hostPath"]))
    for target, path in edits.links:
        tree.add_link(path, target)
    find_compatibility(root, edits, wanted=settings.cuda_compat)
    flags = ldcache.FLAGS["x86_64" if tree.real_folder("/lib64") is not None else "aarch64"]
    cache = folder / "ld.so.cache"
    cache.write_bytes(ldcache.merge(read_start(tree, CACHE, ldcache.LARGEST), cache_entries(edits, flags)))
    tree.add_file(CACHE, cache)
    return f"with the files of driver {edits.host_driver}, as the container runtime adds them at the start"
