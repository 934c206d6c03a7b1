"""The CDI specification that provisioning wrote: reading it, and finding in it the devices that a container names."""

from __future__ import annotations

from . import jsonio
from .errors import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KIND = "nvidia.com/gpu"
_ANNOTATIONS = "gpuprov.io/"


class Specification:
    """Devices by name, what all of them share, and what the host is (driver, cuda, … → value)."""

    __slots__ = ("common", "devices", "host")

    def __init__(self, devices: dict[str, dict[str, Any]], common: dict[str, Any], host: dict[str, str]) -> None:
        self.devices = devices
        self.common = common
        self.host = host


def load_specification(path: str) -> Specification:
    """Return the specification in a file. Raises Refused, saying what to type, if it is missing or not one."""
    try:
        with open(path, encoding="utf-8") as file:
            document = jsonio.loads(file.read())
        devices = {device["name"]: device["containerEdits"] for device in document["devices"]}
        annotations = document.get("annotations") or {}
        host = {
            name: str(annotations[f"{_ANNOTATIONS}{key}"])
            for name, key in (
                ("driver", "driver-version"), ("cuda", "cuda-version"), ("arch", "gpu-architecture"),
                ("brand", "gpu-brand"),
            )
            if f"{_ANNOTATIONS}{key}" in annotations
        }  # fmt: skip
        return Specification(devices, document.get("containerEdits") or {}, host)
    except FileNotFoundError:
        raise Refused(f"there is no CDI specification {path} on this host: run gpuprov install there") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(unusable(path, error)) from None


def unusable(path: str, error: Exception) -> str:
    """Return what to say of a specification that is not one."""
    fault = f"{type(error).__name__}: {error}"
    return f"the CDI specification {path} can't be used ({fault}): run gpuprov install on this host"


def find_devices(specification: Specification, names: list[str]) -> list[dict[str, Any]]:
    """Return the edits of the named devices: by index, UUID, PCI bus id, `all`, or qualified (nvidia.com/gpu=0).

    Raises Refused if there is no such device, naming those that there are.
    """
    found = []
    for name in names:
        plain = name.removeprefix("runtime.").removeprefix(f"{KIND}=")
        edits = specification.devices.get(plain)
        if edits is None:
            edits = specification.devices.get(_sysfs_bus_id(plain))
        if edits is None:
            raise Refused(f"there is no GPU {name!r} on this host; there are {_numbers(specification)}")
        found.append(edits)
    return found


def _sysfs_bus_id(name: str) -> str:
    """Return a PCI bus id as the specification has it: 00000000:1B:00.0, as nvidia-smi writes it, is 0000:1b:00.0."""
    domain, colon, rest = name.partition(":")
    return f"{domain[-4:].lower()}:{rest.lower()}" if colon and len(domain) in (4, 8) else name


def _numbers(specification: Specification) -> str:
    numbers = sorted((int(name) for name in specification.devices if name.isdigit()))
    return ", ".join(str(number) for number in numbers) or "none"
