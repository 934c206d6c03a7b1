"""From a container's config.json to what it gets: the one place where request, requirements and specification meet.

Nothing is changed here: the runtime and the hook make what is decided, `gpuprov hook explain` prints it.
"""

from __future__ import annotations

from typing import Any

from . import record
from .config import config_id, owner_of, parse_config, root_of
from .device_nodes import masking_hook
from .edits import ContainerEdits, choose, merge_edits
from .errors import Refused, reason
from .files import read_text
from .links import find_compatibility, refuse_covered, statement_on_loader
from .request import DeviceRequest, parse_request
from .rootfs import Root, open_root
from .settings import NVIDIA_SETTINGS_PATH, SETTINGS_PATH, Settings, read_settings
from .specification import Specifications
from .volumes import Volume, cover, mounts_to_make, volumes_of

SETTINGS = (SETTINGS_PATH, NVIDIA_SETTINGS_PATH)
# Who makes what is decided: the runtime before the volumes are mounted, the prestart hook after that.
RUNTIME, HOOK = "runtime", "hook"


class Decision:
    """A GPU container: its configuration, request, edits, root file system, volumes, and the settings that held.

    `way`: RUNTIME or HOOK. `root` is None where there is no bundle.
    """

    def __init__(
        self, config: dict[str, Any], request: DeviceRequest, edits: ContainerEdits, root: Root | None, path: str,
        volumes: list[Volume], settings: Settings, way: str,
    ) -> None:  # fmt: skip
        self.config = config
        self.request = request
        self.edits = edits
        self.root = root
        self.root_path = path
        self.volumes = volumes
        self.settings = settings
        self.way = way

    @property
    def sentences(self) -> list[str]:
        """Which rules decided."""
        return [*self.request.decisions, *self.edits.decisions]

    @property
    def record(self) -> dict[str, Any]:
        """What is kept of it. What the host does not have was refused before: so all names here are the host's."""
        request, edits = self.request, self.edits
        return {
            "way": self.way, "legacy": request.legacy, "privileged": request.privileged,
            "devices": list(request.devices or [""]), "capabilities": sorted(request.capabilities),
            "requirements": len(request.requirements), "imex_channels": request.imex_channels,
            "mig_config": bool(request.mig_config), "mig_monitor": bool(request.mig_monitor),
            "nodes": [node["path"] for node in edits.cdi.get("deviceNodes") or ()],
            "files": [mount["containerPath"] for mount in edits.cdi.get("mounts") or ()],
            "links": [f"{target}::{path}" for target, path in edits.links],
            "decisions": self.sentences,
        }  # fmt: skip


def decide(bundle: str, way: str, settings_paths: tuple[str, str] = SETTINGS) -> Decision | None:
    """Return what the container of a bundle gets, None if it asks for no GPU. Raises Refused if it can't have it."""
    path = f"{bundle}/config.json"
    text = read_text(path)
    # Missing, or no object: runc reads it next, and says so.
    if text is None:
        return None
    settings, trouble = read_settings(*settings_paths)
    config = parse_config(path, text)
    request = parse_request(config, settings)
    if request.devices is None:
        return None
    try:
        return given(config, request, settings, trouble, bundle, way)
    except Refused as refused:
        record.log(settings, "error", f"{config_id(bundle)}: refused: {refused}")
        raise


def given(
    config: dict[str, Any], request: DeviceRequest, settings: Settings, trouble: str, bundle: str, way: str = RUNTIME
) -> Decision:
    """Return what a GPU container gets; without a bundle, nobody looks into its root. Raises Refused.

    `trouble` is what is wrong with our own configuration: that concerns none but GPU containers.
    """
    if trouble:
        raise Refused(trouble)
    specifications = Specifications(settings)
    if request.requirements:
        from .requirements import require  # images without CUDA have none

        require(request.requirements, specifications.own.host)
        request.decisions.append("the host satisfies every requirement")
    path, volumes = root_of(config, bundle), volumes_of(config, bundle)
    root = open_root(path, owner_of(config)) if bundle else None
    if root:
        cover(root, volumes)
    edits = choose(specifications, request, settings, root)
    if root:
        find_compatibility(root, edits, wanted=settings.cuda_compat)
        if way == RUNTIME:  # the hook sees the volumes themselves, and is refused by them
            edits.cdi["mounts"] = mounts_to_make(root, volumes, edits.cdi.get("mounts") or [])
            refuse_covered(root, edits)
            edits.masking = masking_hook(config, path)
        edits.decisions += statement_on_loader(root)
    return Decision(config, request, edits, root, path, volumes, settings, way)


def explain(text: str, settings: Settings, trouble: str, bundle: str = "") -> dict[str, Any]:
    """Return the decision on a config.json's text as JSON values.

    `devices` is None for a container that asks for no GPU, `error` None or why it is refused; without a bundle nobody
    looks into the container's root.
    """
    request = DeviceRequest(legacy=False, privileged=False)
    edits: dict[str, Any] = {}
    error = None
    try:
        config = parse_config(f"{bundle}/config.json" if bundle else "config.json", text)
        request = parse_request(config, settings)
        if request.devices is not None:
            decision = given(config, request, settings, trouble, bundle)
            if decision.root is not None:
                decision.root.close()
            links = [f"{target}::{path}" for target, path in decision.edits.links]
            masking = {"hooks": [decision.edits.masking]} if decision.edits.masking else {}
            edits = {**merge_edits([decision.edits.cdi, masking]), "links": links}
            request.decisions += decision.edits.decisions
    except (Refused, OSError) as refused:
        error = reason(refused)
        if isinstance(refused, Refused) and isinstance(refused.request, DeviceRequest):
            request = refused.request
    return {
        "legacy": request.legacy, "privileged": request.privileged, "gpu_container": request.devices is not None,
        # `none` is an empty name in NVIDIA's own list: files without a device.
        "devices": [""] if request.devices == [] else request.devices, "imex_channels": request.imex_channels,
        "capabilities": sorted(request.capabilities), "requirements": request.requirements,
        "mig_config": request.mig_config, "mig_monitor": request.mig_monitor, "edits": edits,
        "decisions": request.decisions, "error": error,
    }  # fmt: skip
