"""What a driver file says of the GPUs that it serves (supported-gpus.json); driver/supported_gpus.py reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """A GPU in the list. `legacy_branch` is the last branch for it, such as 470, or nothing."""

    name: str
    legacy_branch: str
    open_modules: bool
    proprietary_modules: bool


Chips = Mapping[str, Chip]
