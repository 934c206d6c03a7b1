"""An image's files with the driver's, as the container runtime adds them when a container starts. Starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from gpuprov.cdi.loader_cache import CACHE
from gpuprov.runtime_hook import ldcache
from gpuprov.runtime_hook.compat import compatibility_libraries
from gpuprov.runtime_hook.equipment import choose
from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.links import cache_entries
from gpuprov.runtime_hook.request import DeviceRequest
from gpuprov.runtime_hook.settings import Settings, read_settings
from gpuprov.runtime_hook.specification import Specifications
from gpuprov.verify.cuda.trees import FILE, LINK, ArchiveTree, Tree, read_start


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
        equipment = choose(specifications, request, settings, root)
    except Refused as refused:
        return f"without the driver's files, which the container runtime adds at the start: {refused}"
    for mount in equipment.edits.get("mounts") or ():
        tree.add_file(mount["containerPath"], Path(mount["hostPath"]))
    for target, path in equipment.links:
        tree.add_link(path, target)
    compat, names = compatibility_libraries(root, equipment.host_driver) if settings.cuda_compat else ("", [])
    flags = ldcache.FLAGS["x86_64" if tree.real_folder("/lib64") is not None else "aarch64"]
    entries = [*cache_entries(equipment), *((name, f"{compat}/{name}", flags) for name in names)]
    cache = folder / "ld.so.cache"
    cache.write_bytes(ldcache.merge(read_start(tree, CACHE, ldcache.LARGEST), entries))
    tree.add_file(CACHE, cache)
    return f"with the files of driver {equipment.host_driver}, as the container runtime adds them at the start"
