"""Parse `nvidia-smi -L`: GPUs and their MIG devices. Pure; the text may come from a hostile image."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GPU = re.compile(r"GPU \d{1,4}: (.{1,200}?) \(UUID: (GPU-[0-9A-Za-z-]{1,64})\)\s*")
_MIG = re.compile(r"\s+MIG \S{1,40}\s+Device\s+\d{1,4}: \(UUID: (MIG-[0-9A-Za-z/-]{1,120})\)\s*")
_MOST_LINES = 2000


@dataclass(frozen=True)
class GpuList:
    """The devices that containers can be given: a GPU's UUID, or those of its MIG devices if it has some."""

    devices: tuple[str, ...]
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(self.devices) or "none"


def parse_list(text: str) -> GpuList | None:
    """Return the list, None if the text is invalid: nvidia-smi prints at least one known line, or an error."""
    gpus: list[tuple[str, list[str]]] = []
    names: list[str] = []
    for line in text.splitlines()[:_MOST_LINES]:
        if found := _GPU.fullmatch(line):
            names.append(found[1])
            gpus.append((found[2], []))
        elif gpus and (found := _MIG.fullmatch(line)):
            gpus[-1][1].append(found[1])
    if not gpus:
        return None
    return GpuList(tuple(device for gpu, parts in gpus for device in (parts or [gpu])), tuple(names))
