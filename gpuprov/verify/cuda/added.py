"""An image's files with the driver's, as the container runtime adds them when a container starts. Starts nothing."""

from __future__ import annotations

from pathlib import Path

from gpuprov.cdi.loader_cache import CACHE
from gpuprov.runtime_hook import ldcache
from gpuprov.runtime_hook.compat import compatibility_libraries
from gpuprov.runtime_hook.equipment import choose
from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.links import cache_entries
from gpuprov.runtime_hook.request import DeviceRequest
from gpuprov.runtime_hook.settings import Settings, read_settings
from gpuprov.runtime_hook.specification import Specifications
from gpuprov.verify.cuda.trees import ArchiveTree, Tree, read_start


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


def add_driver(tree: ArchiveTree, folder: Path, settings: Settings | None = None) -> str:
    """Add the driver's libraries, links and entries of the loader's cache; return what was added, as a sentence.

    `folder` takes the new cache. Nothing is added, and the sentence says why, on a host without a CDI specification.
    """
    trouble = ""
    if settings is None:
        settings, trouble = read_settings()
    request = DeviceRequest(legacy=False, privileged=False)
    request.devices = ["all"]
    request.capabilities = frozenset(("compute", "utility"))
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
