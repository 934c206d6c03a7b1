"""The plain flags that this host's GPUs and driver need, for `gpuprov docker-args` and `gpuprov serve`."""

import json
import os
import tempfile
from pathlib import Path

from gpuprov.cdi.discover import ask_nvml, discover
from gpuprov.cdi.generate import specification
from gpuprov.cdi.specification import render_json
from gpuprov.core.system import System
from gpuprov.engines.plain_flags import PlainFlags, plain_flags
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook.decision import explain
from gpuprov.runtime_hook.settings import read_settings

# What flags never provide on any host; docs/engines.md explains.
NEVER = (
    "no loader cache is written: an image whose loader searches neither /usr/lib/MULTIARCH nor /usr/lib64 needs "
    "LD_LIBRARY_PATH",
    "the image's NVIDIA_REQUIRE_* and its compatibility libraries are not considered",
)


def granted_flags(gpus: str, capabilities: str = "") -> PlainFlags:
    """Return the flags for GPUs as NVIDIA_VISIBLE_DEVICES names them.

    They are the runtime's edits for a container with the same request in its environment. Raises GpuprovError if the
    host can't provide them, ValueError for a path that docker's flags can't express.
    """
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
            system = System()
            driver = discover(system)
            if not driver.library_version:
                seen = "no libnvidia-ml.so.1 below /"
                raise GpuprovError("there is no NVIDIA driver here", seen, "sudo gpuprov install")
            Path(folder, "nvidia.json").write_bytes(render_json(specification(ask_nvml(system, driver))))
            settings.spec_dirs = (folder,)
        found = explain(json.dumps(config), settings, trouble)
    if found["error"]:
        raise GpuprovError(found["error"], f"--gpus {gpus}", "gpuprov doctor")
    flags = plain_flags(found["edits"], f"/usr/lib/{os.uname().machine}-linux-gnu")
    for device in flags.devices:
        if not Path(device.source).is_char_device():
            missing, seen = f"the device node {device.source} is missing", f"ls: {device.source}: not a device"
            raise GpuprovError(missing, seen, "nvidia-modprobe -u -c 0")
    return flags
