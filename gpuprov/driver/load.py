"""Load the driver's modules if they are not loaded; used at each boot and by the installation."""

from __future__ import annotations

from gpuprov.cdi.nodes import parse_devices
from gpuprov.core.system import System

_LOAD_SECONDS = 120
# nvidia-modprobe loads the modules and makes the first nodes; without it modprobe loads them and we make all.
_LOADERS = (("nvidia-modprobe", "-u", "-c", "0"), ("modprobe", "-a", "nvidia", "nvidia-uvm"))


def load_driver(system: System) -> None:
    """Load nvidia and nvidia-uvm if nothing has yet."""
    loader = next((words for words in _LOADERS if system.which(words[0])), None)
    if loader is not None and "nvidia-uvm" not in parse_devices(system.read_text("/proc/devices") or ""):
        system.run(loader, timeout=_LOAD_SECONDS)
