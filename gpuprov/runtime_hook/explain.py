"""What a container asks for and gets, and which rule decided: the runtime's own decision, for people. Reads only."""

from __future__ import annotations

from .config import owner_of, root_of
from .edits import Equipment, choose, merge_edits
from .errors import Refused
from .links import CACHE, COMPAT_CONFIGURATION, compatibility_libraries, statement_on_loader
from .request import DeviceRequest, parse_request
from .requirements import require
from .rootfs import Root
from .specification import Specifications
from .volumes import cover, mounts_to_make, volumes_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .settings import Settings


def explain(config: dict[str, Any], settings: Settings, trouble: str, bundle: str = "") -> dict[str, Any]:
    """Return the decision as JSON values.

    `devices` is None for a container that asks for no GPU, `error` None or why it is refused; without a bundle nobody
    looks into the container's root.
    """
    request = DeviceRequest(legacy=False, privileged=False)
    edits: dict[str, Any] = {}
    error = ""
    try:
        request = parse_request(config, settings)
        if request.devices is not None:
            if trouble:
                raise Refused(trouble)
            edits = _edits(config, request, settings, bundle)
    except Refused as refused:
        error = str(refused)
        request = refused.request if isinstance(refused.request, DeviceRequest) else request
    return {
        "legacy": request.legacy, "privileged": request.privileged, "gpu_container": request.devices is not None,
        # `none` is an empty name in NVIDIA's own list: files without a device.
        "devices": [""] if request.devices == [] else request.devices, "imex_channels": request.imex_channels,
        "capabilities": sorted(request.capabilities), "requirements": request.requirements,
        "mig_config": request.mig_config, "mig_monitor": request.mig_monitor, "edits": edits,
        "decisions": request.decisions, "error": error or None,
    }  # fmt: skip


def _edits(config: dict[str, Any], request: DeviceRequest, settings: Settings, bundle: str) -> dict[str, Any]:
    specifications = Specifications(settings)
    if request.requirements:
        require(request.requirements, specifications.own.host)
        request.decisions.append("the host satisfies every requirement")
    root = _root(config, bundle) if bundle else None
    try:
        volumes = volumes_of(config, bundle)
        if root is not None:
            cover(root, volumes)
        equipment = choose(specifications, request, settings, root)
        request.decisions += equipment.decisions
        if root is not None:
            mounts = equipment.edits.get("mounts") or []
            equipment.edits["mounts"] = mounts_to_make(root, volumes, mounts)
            request.decisions += _in_volumes(root, equipment, cuda_compat=settings.cuda_compat)
            statement = statement_on_loader(root)
            request.decisions += [statement] if statement else []
    finally:
        if root is not None:
            root.close()
    links = [f"{target}::{path}" for target, path in equipment.links]
    return {**merge_edits([equipment.edits]), "links": links}


def _in_volumes(root: Root, equipment: Equipment, *, cuda_compat: bool) -> list[str]:
    """Return what stays as it is because a volume has it. Raises Refused for what must be made in a volume."""
    for target, path in equipment.links:
        if _covered(root, path) and not root.has_link(path, target):
            raise Refused(_refusal(root, path))
    folder, _ = compatibility_libraries(root, equipment.host_driver) if cuda_compat else ("", [])
    for path in (COMPAT_CONFIGURATION, CACHE) if folder else ():
        if _covered(root, path):
            raise Refused(_refusal(root, path))
    if (equipment.links or equipment.libraries) and _covered(root, CACHE):
        return [f"{CACHE} stays as it is: {root.volume_over(root.resolve(CACHE))}"]
    return []


def _covered(root: Root, path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return root.cover_of(f"{root.resolve(folder)}/{name}") is not None


def _refusal(root: Root, path: str) -> str:
    folder = path.rpartition("/")[0]
    return f"{path} can't be made in the container's root file system: {root.volume_over(root.resolve(folder))}"


def _root(config: dict[str, Any], bundle: str) -> Root | None:
    try:
        return Root(root_of(config, bundle), owner_of(config))
    except (OSError, ValueError):
        return None
