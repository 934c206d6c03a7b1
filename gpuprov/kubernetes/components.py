"""Which releases of NVIDIA's Kubernetes components gpuprov names: components.json, each with its public source. Pure.

An image can be taken from a mirror, which holds it under the same path without the registry's name.
"""

from __future__ import annotations

import functools
import json
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpuprov.wire.errors import ExitCode, GpuprovError

# A registry's host with its port, and a path as the OCI distribution specification allows it.
_MIRROR = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*(?::\d{1,5})?(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_LONGEST_MIRROR = 200


@dataclass(frozen=True)
class Component:
    """A component's release: `image` and `chart` where it has them, `repository` of a chart that needs one."""

    version: str
    sources: tuple[str, ...]
    image: str = ""
    chart: str = ""
    repository: str = ""


@functools.cache
def components() -> Mapping[str, Component]:
    """Return the table: device-plugin, gpu-operator, dra-driver, and the image of test pods."""
    content = json.loads(pkgutil.get_data(__package__, "components.json") or b"")
    return {
        name: Component(**{**fields, "sources": tuple(fields["sources"])})
        for name, fields in content["components"].items()
    }


def mirrored(image: str, mirror: str) -> str:
    """Return the image's name on a mirror: `nvcr.io/nvidia/x:1` on `registry.example.org/hub` is `…/hub/nvidia/x:1`.

    Raises GpuprovError (exit code 2) if the mirror is no name of a registry.
    """
    if not mirror:
        return image
    mirror = mirror.rstrip("/")
    if len(mirror) > _LONGEST_MIRROR or not _MIRROR.fullmatch(mirror):
        raise GpuprovError(
            "the mirror is no registry's name", f"--image-mirror {mirror[:_LONGEST_MIRROR]}",
            "give host and path, without https://: --image-mirror registry.example.org/nvidia",
            exit_code=ExitCode.USAGE,
        )  # fmt: skip
    return f"{mirror}/{image.partition('/')[2]}"
