"""Which packages restart a container engine when they change; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ENGINES = re.compile(r"(docker|moby|containerd|runc|crun|cri-o|podman|nvidia-driver|nvidia-open|cuda-drivers)[^=]*=")


def restarts_engine(names: Iterable[str]) -> bool:
    """Say whether a package of an engine or of the driver is asked for in a version: it may replace the one that runs.

    A package without a version is only installed where it is missing, so nothing runs on it yet.
    """
    return any(_ENGINES.match(name) for name in names)
