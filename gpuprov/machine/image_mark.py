"""The mark of an image's copies: on such a machine, a missing GPU is not an error."""

from __future__ import annotations

from gpuprov.core.system import System

MARK = "/etc/gpuprov/image"


def is_copy(system: System) -> bool:
    """Say whether this machine built an image or is a copy of one."""
    return system.status(MARK) is not None
