"""What a container asks for beside GPUs: IMEX channels, rights over MIG, storage and network that go with GPUs.

What these need is looked up on the host at that moment, by name: no device is opened.
"""

from __future__ import annotations

import posix

from .errors import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .request import DeviceRequest
    from .specification import Specifications

_IMEX = "/dev/nvidia-caps-imex-channels"
# A channel's number is a device minor.
_MOST_IMEX = 1 << 20
_MIG_MINORS = "/proc/driver/nvidia-caps/mig-minors"
_CAPABILITIES = "/dev/nvidia-caps"


def special_edits(specifications: Specifications, request: DeviceRequest) -> list[dict[str, Any]]:
    """Return CDI edits, one for each such request. Raises Refused for what is not on this host."""
    found = [_channel(name) for name in request.imex_channels]
    for value, name in ((request.mig_config, "config"), (request.mig_monitor, "monitor")):
        if value:
            found.append(_mig(name))
    for extra in request.extras:
        kind = f"nvidia.com/{extra}"
        found += specifications.edits_of([f"{kind}=all"])
    return found


def _channel(name: str) -> dict[str, Any]:
    if not (name.isascii() and name.isdigit() and len(name) < 8 and int(name) < _MOST_IMEX):
        raise Refused(f"NVIDIA_IMEX_CHANNELS asks for {name!r}: channels are numbers below {_MOST_IMEX}")
    return _node(f"{_IMEX}/channel{int(name)}", "IMEX channel", "nvidia-modprobe --help shows how channels are made")


def _mig(name: str) -> dict[str, Any]:
    """Return the node of the capability to configure, or to monitor, MIG: it stands for all GPUs."""
    try:
        with open(_MIG_MINORS, encoding="ascii", errors="replace") as file:
            minors = dict(line.split() for line in file if len(line.split()) == 2)
    except OSError:
        minors = {}
    if not minors.get(name, "").isdigit():
        raise Refused(f"this host's driver has no MIG capability {name!r} ({_MIG_MINORS}): no GPU here knows MIG")
    return _node(f"{_CAPABILITIES}/nvidia-cap{minors[name]}", f"MIG {name}", "run gpuprov install on this host")


def _node(path: str, what: str, hint: str) -> dict[str, Any]:
    try:
        posix.stat(path)
    except OSError:
        raise Refused(f"the {what} {path} is not on this host: {hint}") from None
    return {"deviceNodes": [{"path": path, "permissions": "rw"}]}
