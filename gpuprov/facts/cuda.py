"""The CUDA toolkits on a host, and which one is the default: reads only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuprov.core.system import System

# Adds a toolkit's programs to users' PATH; the second if the first is another program's.
PROFILE, OTHER_PROFILE = "/etc/profile.d/cuda.sh", "/etc/profile.d/gpuprov-cuda.sh"
_FOLDER = "/usr/local"


@dataclass(frozen=True)
class CudaFacts:
    """`toolkits`: folder → version of each whole one in /usr/local; `link`: where /usr/local/cuda leads, or nothing."""

    toolkits: Mapping[str, str] = field(default_factory=dict)
    link: str = ""


def gather_cuda(system: System) -> CudaFacts:
    """Return the facts, from the toolkits' own version.json."""
    folders = [f"{_FOLDER}/{name}" for name in system.list_directory(_FOLDER) if re.fullmatch(r"cuda-\d+\.\d+", name)]
    found = {folder: version_in(system, folder) for folder in folders if system.exists(f"{folder}/bin/nvcc")}
    link = system.status(f"{_FOLDER}/cuda")
    return CudaFacts(found, link.target if link is not None else "")


def version_in(system: System, folder: str) -> str:
    """Return the version that a toolkit reports, or ""."""
    try:
        return str(json.loads(system.read_text(f"{folder}/version.json") or "")["cuda"]["version"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
