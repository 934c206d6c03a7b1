"""What a container gets: of all that the CDI specification has, what this request asks for, and where it goes.

Changes nothing; looks into the container's root for the folder in which its loader searches.
"""

from __future__ import annotations

import posix

from . import driver_files
from .edits import merge_edits
from .errors import Refused
from .host_paths import is_trusted
from .specification import unusable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    from .request import DeviceRequest
    from .settings import Settings
    from .specification import Specifications

    class HasFolders(Protocol):
        """A container's root, or what stands for it: the folders that it has are all that counts."""

        def is_directory(self, path: str) -> bool:
            """Say whether there is a folder."""


_MULTIARCH = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
_LIB64 = "/usr/lib64"
_32_BIT = ("/usr/lib/i386-linux-gnu", "/usr/lib32")
# Where RHEL's and SUSE's images have them; /usr/lib is more than that on other hosts.
_RHEL_32_BIT = "/usr/lib"


class Equipment:
    """What a container gets.

    `edits`: CDI's edits, ready to be applied; `links` (target, path) to be made in its root; `libraries`: their paths
    in the container; `host_driver`: the driver's version, "" if unknown; `decisions`: sentences that say which rule
    decided.
    """

    __slots__ = ("decisions", "edits", "host_driver", "libraries", "links")

    def __init__(self, edits: dict[str, Any], links: list[tuple[str, str]], host_driver: str) -> None:
        self.edits = edits
        self.links = links
        self.host_driver = host_driver
        mounted = [mount["containerPath"] for mount in edits.get("mounts") or ()]
        self.libraries = [path for path in mounted if ".so" in path.rpartition("/")[2]]
        self.decisions: list[str] = []


def choose(
    specifications: Specifications, request: DeviceRequest, settings: Settings, root: HasFolders | None
) -> Equipment:
    """Return what a GPU container's request gets; without a root to look into, all stays where the host has it.

    Raises Refused if something that was asked for is not there, or if a specification is not one.
    """
    devices = specifications.edits_of(request.devices or [], by_annotation=request.by_annotation)
    special = []
    if request.imex_channels or request.mig_config or request.mig_monitor or request.extras:
        from .special_devices import special_edits  # few containers ask for these

        special = special_edits(specifications, request)
    parts = [*devices, *special]
    try:
        return _chosen(parts, request, settings, _Folders(root), specifications)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Refused(unusable(specifications.own.path, error)) from None


def _chosen(
    parts: list[dict[str, Any]], request: DeviceRequest, settings: Settings, folders: _Folders,
    specifications: Specifications,
) -> Equipment:  # fmt: skip
    capabilities = request.capabilities
    edits = merge_edits([_wanted(part, capabilities, folders) for part in parts])
    if not settings.additional_gids:
        edits.pop("additionalGids", None)
    # A hook without `env` would be given the image's environment by runc 1.1, LD_PRELOAD included (CVE-2025-23266).
    hooks = [{**hook, "env": hook.get("env") or []} for hook in edits.pop("hooks", [])]
    own = next((hook for hook in hooks if _is_own(hook)), None)
    links = _links(own, capabilities, folders) if own else []
    others = [hook for hook in hooks if not _is_own(hook)]
    if others:
        edits["hooks"] = others
    equipment = Equipment(edits, links, _host_driver(specifications, links))
    mounts = len(edits.get("mounts") or ())
    equipment.decisions = [
        f"driver capabilities {', '.join(sorted(capabilities)) or 'none'}: files: {mounts}, links: {len(links)}",
        *folders.decisions,
    ]
    return equipment


def _is_own(hook: dict[str, Any]) -> bool:
    """By its name alone: a specification may have been made for another root."""
    return bool(hook["path"].rpartition("/")[2] == driver_files.HOOK_PATH.rpartition("/")[2])


def _host_driver(specifications: Specifications, links: list[tuple[str, str]]) -> str:
    return specifications.own.host.get("driver", "") if links else ""


def _wanted(edits: dict[str, Any], capabilities: frozenset[str], folders: _Folders) -> dict[str, Any]:
    """Return the edits without what no capability needs, and at the places where the image looks for it."""
    found = dict(edits)
    if edits.get("deviceNodes"):
        found["deviceNodes"] = [
            node for node in edits["deviceNodes"] if driver_files.node_is_needed(node["path"], capabilities)
        ]
        # Groups come with nodes that not everybody may open: none for a node that is left out.
        left_out = {node.get("gid") for node in edits["deviceNodes"] if node not in found["deviceNodes"]}
        still = {node.get("gid") for node in found["deviceNodes"]}
        found["additionalGids"] = [
            gid for gid in edits.get("additionalGids") or () if gid in still or gid not in left_out
        ]
    if edits.get("mounts"):
        found["mounts"] = [
            {**mount, "containerPath": folders.in_container(mount["containerPath"])}
            for mount in edits["mounts"]
            if _is_wanted(mount["containerPath"], capabilities) and _source_is_there(mount)
        ]
    return found


def _is_wanted(path: str, capabilities: frozenset[str]) -> bool:
    return bool(capabilities.intersection(driver_files.capabilities_of(path)))


def _source_is_there(mount: dict[str, Any]) -> bool:
    """Sockets come and go with their services (persistenced, fabric manager): one that is gone must not stop us."""
    return "noexec" not in (mount.get("options") or ()) or is_trusted(mount["hostPath"])


def _links(hook: dict[str, Any], capabilities: frozenset[str], folders: _Folders) -> list[tuple[str, str]]:
    """Return the links (target, path) that the hook would make, those alone that a capability needs."""
    arguments = hook.get("args") or []
    pairs = [value.split("::", 1) for flag, value in zip(arguments, arguments[1:]) if flag == "--link"]
    return [(target, folders.in_container(path)) for target, path in pairs if _is_wanted(path, capabilities)]


class _Folders:
    """Where a library that lies in one of the host's library folders goes in the container.

    The folder is one that the image's loader searches by itself: /usr/lib/MULTIARCH on Debian and Ubuntu, /usr/lib64 on
    RHEL, Fedora and SUSE. So libraries are found also after the image's own ldconfig has rewritten the cache.
    """

    __slots__ = ("_found", "_root", "decisions")

    def __init__(self, root: HasFolders | None) -> None:
        self._root = root
        self._found: dict[str, str] = {}
        self.decisions: list[str] = []

    def in_container(self, path: str) -> str:
        """Return the container's path for a path of the CDI specification; only libraries ever move."""
        folder, _, name = path.rpartition("/")
        if ".so" not in name or self._root is None:
            return path
        moved = self._found.get(folder)
        if moved is None:
            moved = self._found[folder] = self._moved(folder)
        return f"{moved}/{name}"

    def _moved(self, folder: str) -> str:
        for known in (*_MULTIARCH, _LIB64, *_32_BIT):
            if folder == known:
                return self._choose(folder)
            if folder.startswith(f"{known}/"):  # those below it too: vdpau, gbm
                return self._moved(known) + folder[len(known) :]
        return folder

    def _choose(self, folder: str) -> str:
        """Return the folder that the image's loader searches, the host's own if the image has none.

        Debian's images have a /usr/lib64 too, for the loader's own path, and don't search it: MULTIARCH goes first.
        """
        assert self._root is not None
        multiarch = f"/usr/lib/{posix.uname().machine}-linux-gnu"
        if folder in _32_BIT:
            like_rhel = self._root.is_directory(_LIB64) and not self._root.is_directory(multiarch)
            candidates = (*_32_BIT, *((_RHEL_32_BIT,) if like_rhel else ()))
        else:
            candidates = (multiarch if folder == _LIB64 else folder, _LIB64)
        chosen = next((one for one in candidates if self._root.is_directory(one)), folder)
        if chosen != folder:
            self.decisions.append(f"libraries go to {chosen}, where this image's loader searches, not to {folder}")
        return chosen
