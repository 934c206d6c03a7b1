"""From a container's config.json to what it gets: the one place where request, requirements and specification meet."""

from __future__ import annotations

from . import record
from .config import ambiguous, as_runc_reads, config_id, owner_of, read_config, root_of
from .edits import Equipment, choose
from .errors import Refused
from .request import DeviceRequest, parse_request
from .rootfs import Root
from .settings import NVIDIA_SETTINGS_PATH, SETTINGS_PATH, Settings, read_settings
from .specification import Specifications
from .volumes import Volume, cover, volumes_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Decision:
    """A GPU container: its configuration, request, equipment, root file system, volumes, and the settings that held."""

    __slots__ = ("config", "equipment", "request", "root", "root_path", "settings", "volumes")

    def __init__(
        self, config: dict[str, Any], request: DeviceRequest, equipment: Equipment, root: Root, path: str,
        volumes: list[Volume], settings: Settings,
    ) -> None:  # fmt: skip
        self.config = config
        self.request = request
        self.equipment = equipment
        self.root = root
        self.root_path = path
        self.volumes = volumes
        self.settings = settings


SETTINGS = (SETTINGS_PATH, NVIDIA_SETTINGS_PATH)


def decide(bundle: str, settings_paths: tuple[str, str] = SETTINGS) -> Decision | None:
    """Return what the container of a bundle gets, None if it asks for no GPU. Raises Refused if it can't have it."""
    path = f"{bundle}/config.json"
    config, odd, text = read_config(path)
    if config is None:
        return None
    settings, trouble = read_settings(*settings_paths)
    if odd and _asks_in_any_reading(config, text, settings):
        raise Refused(ambiguous(path, odd))
    request = parse_request(config, settings)
    if request.devices is None:
        return None
    # What is wrong with our own configuration concerns none but GPU containers.
    if trouble:
        raise Refused(trouble)
    try:
        return _decided(config, request, settings, bundle)
    except Refused as refused:
        record.log(settings, "error", f"{config_id(bundle)}: refused: {refused}")
        raise


def _decided(config: dict[str, Any], request: DeviceRequest, settings: Settings, bundle: str) -> Decision:
    specifications = Specifications(settings)
    if request.requirements:
        from .requirements import require  # images without CUDA have none

        require(request.requirements, specifications.own.host)
    path, volumes = root_of(config, bundle), volumes_of(config, bundle)
    try:
        root = Root(path, owner_of(config))
    except (OSError, ValueError) as error:
        raise Refused(f"the container's root folder {path} can't be opened: {error}") from None
    cover(root, volumes)
    return Decision(config, request, choose(specifications, request, settings, root), root, path, volumes, settings)


def _asks_in_any_reading(config: dict[str, Any], text: str, settings: Settings) -> bool:
    for reading in (config, as_runc_reads(text)):
        try:
            if parse_request(reading, settings).devices is not None:
                return True
        except Refused:
            return True
    return False
