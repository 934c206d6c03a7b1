"""What a container asks for and gets, and which rule decided: the runtime's own decision, for people. Reads only."""

from __future__ import annotations

from .decision import owner_of, root_of
from .edits import merge_edits
from .equipment import choose
from .errors import Refused
from .links import statement_on_loader
from .request import Request, parse_request
from .requirements import require
from .rootfs import Root
from .specification import Specifications

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .settings import Settings


def explain(config: dict[str, Any], settings: Settings, trouble: str, bundle: str = "") -> dict[str, Any]:
    """Return the decision as JSON values.

    `devices` is None for a container that asks for no GPU, `error` None or why it is refused; without a bundle nobody
    looks into the container's root.
    """
    request = Request(legacy=False, privileged=False)
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
        request = refused.request if isinstance(refused.request, Request) else request
    return {
        "legacy": request.legacy, "privileged": request.privileged, "gpu_container": request.devices is not None,
        # `none` is an empty name in NVIDIA's own list: files without a device.
        "devices": [""] if request.devices == [] else request.devices, "imex_channels": request.imex_channels,
        "capabilities": sorted(request.capabilities), "requirements": request.requirements,
        "mig_config": request.mig_config, "mig_monitor": request.mig_monitor, "edits": edits,
        "decisions": request.decisions, "error": error or None,
    }  # fmt: skip


def _edits(config: dict[str, Any], request: Request, settings: Settings, bundle: str) -> dict[str, Any]:
    specifications = Specifications(settings)
    if request.requirements:
        require(request.requirements, specifications.own.host)
        request.decisions.append("the host satisfies every requirement")
    root = _root(config, bundle) if bundle else None
    try:
        equipment = choose(specifications, request, settings, root)
        request.decisions += equipment.decisions
        if root is not None:
            statement = statement_on_loader(root)
            request.decisions += [statement] if statement else []
    finally:
        if root is not None:
            root.close()
    links = [f"{target}::{path}" for target, path in equipment.links]
    return {**merge_edits([equipment.edits]), "links": links}


def _root(config: dict[str, Any], bundle: str) -> Root | None:
    try:
        return Root(root_of(config, bundle), owner_of(config))
    except (OSError, ValueError):
        return None
