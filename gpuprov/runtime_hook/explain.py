"""What a container asks for and gets, and which rule decided: the runtime's own decision, as JSON values."""

from __future__ import annotations

from .decision import asked, given
from .edits import merge_edits
from .errors import Refused, reason
from .request import DeviceRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .settings import Settings


def explain(text: str, settings: Settings, trouble: str, bundle: str = "") -> dict[str, Any]:
    """Return the decision on a config.json's text as JSON values.

    `devices` is None for a container that asks for no GPU, `error` None or why it is refused; without a bundle nobody
    looks into the container's root.
    """
    request = DeviceRequest(legacy=False, privileged=False)
    edits: dict[str, Any] = {}
    error = None
    decisions = request.decisions
    try:
        config, request = asked(f"{bundle}/config.json" if bundle else "config.json", text, settings)
        decisions = request.decisions
        if request.devices is not None:
            decision = given(config, request, settings, trouble, bundle)
            if decision.root is not None:
                decision.root.close()
            links = [f"{target}::{path}" for target, path in decision.edits.links]
            masking = {"hooks": [decision.edits.masking]} if decision.edits.masking else {}
            edits, decisions = {**merge_edits([decision.edits.cdi, masking]), "links": links}, decision.sentences
    except (Refused, OSError) as refused:
        error = reason(refused)
        if isinstance(refused, Refused) and isinstance(refused.request, DeviceRequest):
            request = refused.request
            decisions = request.decisions
    return {
        "legacy": request.legacy, "privileged": request.privileged, "gpu_container": request.devices is not None,
        # `none` is an empty name in NVIDIA's own list: files without a device.
        "devices": [""] if request.devices == [] else request.devices, "imex_channels": request.imex_channels,
        "capabilities": sorted(request.capabilities), "requirements": request.requirements,
        "mig_config": request.mig_config, "mig_monitor": request.mig_monitor, "edits": edits,
        "decisions": decisions, "error": error,
    }  # fmt: skip
