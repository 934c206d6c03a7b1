"""From a container's config.json to what it gets: the one place where request, requirements and specification meet."""

from __future__ import annotations

import posix

from . import config_keys, jsonio, log
from .equipment import Equipment, choose
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
    config, odd, text = _read_config(path)
    if config is None:
        return None
    settings, trouble = read_settings(*settings_paths)
    if odd and _asks_in_any_reading(config, text, settings):
        raise Refused(_ambiguous(path, odd))
    request = parse_request(config, settings)
    if request.devices is None:
        return None
    # What is wrong with our own configuration concerns none but GPU containers.
    if trouble:
        raise Refused(trouble)
    try:
        return _decided(config, request, settings, bundle)
    except Refused as refused:
        log.write(settings, "error", f"{config_id(bundle)}: refused: {refused}")
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


def load_config(path: str) -> dict[str, Any] | None:
    """Return a GPU container's config.json, None if it is missing or no object: runc reads it next, and says so.

    Raises Refused for what is not JSON: runc takes some things for it that are none (something after the end), and a
    GPU container must not slip by; and for keys that runc reads in another way.
    """
    config, odd, _ = _read_config(path)
    if odd:
        raise Refused(_ambiguous(path, odd))
    return config


def _read_config(path: str) -> tuple[dict[str, Any] | None, str, str]:
    """Return the configuration, what is odd about one of its keys ("" for nothing), and its text."""
    twice: list[str] = []
    try:
        # runc too reads what is no UTF-8 as U+FFFD.
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
        config = jsonio.loads(text, jsonio.noting_duplicates(twice))
    except OSError:
        return None, "", ""
    except ValueError as error:
        raise Refused(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        return None, "", ""
    return config, config_keys.duplicate(twice) or config_keys.odd_key(config, config_keys.CONFIG), text


def _ambiguous(path: str, odd: str) -> str:
    return f"{path} has {odd}: runc, crun and this program would read different containers: remove that key"


def _asks_in_any_reading(config: dict[str, Any], text: str, settings: Settings) -> bool:
    for reading in (config, config_keys.as_runc_reads(text)):
        try:
            if parse_request(reading, settings).devices is not None:
                return True
        except Refused:
            return True
    return False


def root_of(config: dict[str, Any], bundle: str) -> str:
    """Return the folder of the container's root file system."""
    root = config.get("root")
    path = root.get("path", "") if isinstance(root, dict) else ""
    return path if str(path).startswith("/") else f"{_real_folder(bundle)}/{path}"


def _real_folder(bundle: str) -> str:
    """Return a bundle's folder without links: runc takes a relative path from there."""
    try:
        handle = posix.open(bundle, posix.O_PATH | posix.O_DIRECTORY | posix.O_CLOEXEC)
    except (OSError, ValueError):
        return bundle
    try:
        return posix.readlink(f"/proc/self/fd/{handle}")
    finally:
        posix.close(handle)


def owner_of(config: dict[str, Any]) -> tuple[int, int]:
    """Return the host's numbers for the container's root user and group: what we make there shall be theirs."""
    linux = config.get("linux")
    mappings = linux if isinstance(linux, dict) else {}
    return _mapped(mappings.get("uidMappings")), _mapped(mappings.get("gidMappings"))


def _mapped(mappings: Any) -> int:
    for mapping in mappings if isinstance(mappings, list) else ():
        if isinstance(mapping, dict) and mapping.get("containerID", 0) == 0 and isinstance(mapping.get("hostID"), int):
            return int(mapping["hostID"])
    return 0


def config_id(bundle: str) -> str:
    """Return by what a container is named in the log: engines call the bundle's folder by its id."""
    return bundle.rstrip("/").rpartition("/")[2]
