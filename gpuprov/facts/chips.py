"""The GPUs that a driver file serves (supported-gpus.json); driver/supported_gpus.py reads them."""

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
