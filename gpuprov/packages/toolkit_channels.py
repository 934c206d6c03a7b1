"""The repositories of NVIDIA's container toolkit, one for each channel, for any package manager. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprov.protocol.spec import HostSpec


@dataclass(frozen=True)
class ToolkitChannel:
    """One of the NVIDIA container toolkit's repositories, for apt and the others alike."""

    name: str
    base: str
    key_url: str


def toolkit_channels(spec: HostSpec) -> tuple[ToolkitChannel, ...]:
    """Return the toolkit's repositories that a host needs.

    The repository of release candidates does not replace the stable one: the installation guide enables both.
    """
    if spec.toolkit != "nvidia":
        return ()
    base = spec.toolkit_repository.rstrip("/")
    names = {"stable": "nvidia-container-toolkit"}
    if spec.toolkit_channel == "experimental":
        names["experimental"] = "nvidia-container-toolkit-experimental"
    return tuple(ToolkitChannel(name, f"{base}/{channel}", f"{base}/gpgkey") for channel, name in names.items())
