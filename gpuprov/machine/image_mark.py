"""What says that a machine is a copy of an image: one without a GPU is not broken then."""

from __future__ import annotations

from gpuprov.core.system import System

MARK = "/etc/gpuprov/image"


def is_copy(system: System) -> bool:
    """Say whether this machine is one that built an image, or a copy of one."""
    return system.status(MARK) is not None
