"""What a healthy part of a host has to show, in a few words each. Pure."""

from __future__ import annotations

from typing import Callable

from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import AREAS


def summary(x: Examined, area: str) -> str:
    """Return what was looked at in an area, as it is."""
    return _SUMMARIES[area](x)


def _gpus(x: Examined) -> str:
    return f"{len(x.host.gpus)} on the PCI bus"


def _module(x: Examined) -> str:
    return f"{x.driver.kernel_version or 'none'} loaded"


def _libraries(x: Examined) -> str:
    asked = f"; {x.smi.reason}" if x.smi.reason else ", nvidia-smi answers"
    return f"{x.driver.library_version or 'none'}{asked}"


def _nodes(x: Examined) -> str:
    return f"{len(x.driver.present)} there"


def _toolkit(x: Examined) -> str:
    return (x.host.docker.runtimes or {}).get("nvidia") or "none for docker"


def _specification(x: Examined) -> str:
    names = [name for name in x.texts if name.startswith(("/etc/cdi/", "/var/run/cdi/"))]
    return ", ".join(names) or "none"


def _docker(x: Examined) -> str:
    return x.host.docker.version or "none"


def _engines(x: Examined) -> str:
    return ", ".join(sorted(x.host.engines)) or "none asked for"


_SUMMARIES: dict[str, Callable[[Examined], str]] = dict(
    zip(AREAS, (_gpus, _module, _libraries, _nodes, _toolkit, _specification, _docker, _engines))
)
