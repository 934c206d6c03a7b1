"""Return plain docker flags for one container on this host, for `docker-args` and `serve`. The runtime decides them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from gpuprov.cdi.discover import ask_nvml, discover
from gpuprov.cdi.generate import specification
from gpuprov.cdi.specification import render_json
from gpuprov.core.system import System
from gpuprov.engines.plain_flags import PlainFlags, plain_flags
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook.explain import explain
from gpuprov.runtime_hook.settings import read_settings

# What flags never provide on any host; docs/engines.md explains.
NEVER = (
    "no loader cache is written: an image whose loader searches neither /usr/lib/MULTIARCH nor /usr/lib64 needs "
    "LD_LIBRARY_PATH",
    "the image's NVIDIA_REQUIRE_* and its compatibility libraries are not considered",
)


def granted_flags(gpus: str, capabilities: str = "") -> PlainFlags:
    """Return the flags for GPUs as NVIDIA_VISIBLE_DEVICES names them.

    Raises GpuprovError if the host can't provide them, ValueError for a path that docker's flags can't express.
    """
    flags = plain_flags(_edits(gpus, capabilities), f"/usr/lib/{os.uname().machine}-linux-gnu")
    _require_nodes(flags)
    return flags


def _edits(gpus: str, capabilities: str) -> dict[str, Any]:
    """Return the edits that the runtime would make for a container with the same request in its environment."""
    asked = [f"NVIDIA_VISIBLE_DEVICES={gpus}"]
    if capabilities:
        asked.append(f"NVIDIA_DRIVER_CAPABILITIES={capabilities}")
    config = {"process": {"env": asked, "user": {}}}
    settings, trouble = read_settings()
    # That setting restricts requests of images and users; this request comes from the host's own command.
    settings.accept_envvar_when_unprivileged = True
    with tempfile.TemporaryDirectory(prefix="gpuprov-tmp-") as folder:
        if not any(Path(place, "nvidia.json").is_file() for place in settings.spec_dirs):
            # Only for this call, on hosts where gpuprov is not installed.
            Path(folder, "nvidia.json").write_bytes(_described())
            settings.spec_dirs = (folder,)
        found = explain(json.dumps(config), settings, trouble)
    if found["error"]:
        raise GpuprovError(found["error"], f"--gpus {gpus}", "gpuprov doctor")
    edits: dict[str, Any] = found["edits"]
    return edits


def _described() -> bytes:
    """Return a specification of this host's driver. Raises GpuprovError if there is none."""
    system = System()
    driver = discover(system)
    if not driver.library_version:
        raise GpuprovError("there is no NVIDIA driver here", "no libnvidia-ml.so.1 below /", "sudo gpuprov install")
    return render_json(specification(ask_nvml(system, driver)))


def _require_nodes(flags: PlainFlags) -> None:
    for device in flags.devices:
        if not Path(device.source).is_char_device():
            raise GpuprovError(
                f"the device node {device.source} is missing",
                f"ls: {device.source}: not a device",
                "nvidia-modprobe -u -c 0",
            )
