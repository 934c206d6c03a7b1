"""The runtime's configuration, under the names that NVIDIA's config.toml has for the same things.

/etc/gpuprov/container-runtime.json, read at every container start, so an edit counts at the next one; without it
NVIDIA's defaults hold.
"""

from __future__ import annotations

from . import driver_files, jsonio
from .errors import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SETTINGS_PATH = "/etc/gpuprov/container-runtime.json"
SPECIFICATION_PATH = "/etc/cdi/nvidia.json"
_KINDS = {
    "accept-nvidia-visible-devices-envvar-when-unprivileged": bool,
    "accept-nvidia-visible-devices-as-volume-mounts": bool,
    "disable-require": bool,
    "supported-driver-capabilities": str,
    "swarm-resource": str,
    "specification": str,
}


class Settings:
    """What the configuration says."""

    __slots__ = (
        "accept_envvar_when_unprivileged", "accept_volume_mounts", "disable_require", "specification",
        "supported_capabilities", "swarm_resources",
    )  # fmt: skip

    def __init__(self, values: dict[str, Any]) -> None:
        self.accept_envvar_when_unprivileged: bool = values.get(
            "accept-nvidia-visible-devices-envvar-when-unprivileged", True
        )
        self.accept_volume_mounts: bool = values.get("accept-nvidia-visible-devices-as-volume-mounts", False)
        self.disable_require: bool = values.get("disable-require", False)
        self.specification: str = values.get("specification", SPECIFICATION_PATH)
        self.supported_capabilities = _capabilities(values.get("supported-driver-capabilities", "all"))
        names = values.get("swarm-resource", "").split(",")
        self.swarm_resources = [name.strip() for name in names if name.strip()]


def parse_settings(text: str) -> Settings:
    """Return the settings in a configuration's text. Raises Refused, naming the key, if it is wrong."""
    try:
        values = jsonio.loads(text)
    except ValueError as error:
        raise Refused(f"{SETTINGS_PATH} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise Refused(f"{SETTINGS_PATH} does not hold an object")
    for key, value in values.items():
        if key not in _KINDS:
            raise Refused(f"{SETTINGS_PATH} has no key {key!r}; known are {', '.join(_KINDS)}")
        if not isinstance(value, _KINDS[key]):
            raise Refused(f"{SETTINGS_PATH}: {key} must be {'true or false' if _KINDS[key] is bool else 'text'}")
    return Settings(values)


def _capabilities(text: str) -> tuple[str, ...]:
    asked = [item.strip() for item in text.split(",") if item.strip()]
    if "all" in asked:
        return driver_files.ALL
    unknown = [item for item in asked if item not in driver_files.ALL]
    if unknown:
        raise Refused(f"{SETTINGS_PATH}: there is no driver capability {unknown[0]!r}")
    return tuple(sorted(set(asked)))
