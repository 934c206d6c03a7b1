"""Answer requests to `gpuprov serve`: map a path and query to a response in the form of nvidia-docker-plugin 1.0.

It does not use sockets. Form: NVIDIA's wiki of nvidia-docker 1.0, page nvidia-docker-plugin, "REST API".
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Callable
from urllib.parse import parse_qs

from gpuprov.boot.plain_gpus import granted_flags
from gpuprov.cdi.discover import discover, missing_nodes
from gpuprov.cdi.nvml import run_child
from gpuprov.core.system import System
from gpuprov.engines.plain_flags import Device, PlainFlags, shell_words
from gpuprov.protocol.errors import GpuprovError

# DNS rebinding: a page in a browser on this host can use a name that resolves to 127.0.0.1. The browser then sends that
# name as Host.
_HOSTS = frozenset(f"{name}{port}" for name in ("localhost", "127.0.0.1") for port in ("", ":3476"))
_GPU = r"(\d{1,3}(:\d{1,3})?|(GPU|MIG)-[0-9a-fA-F/-]{1,80})"
_GPUS = re.compile(rf"all|{_GPU}(,{_GPU}){{0,63}}")
# Only the container's path if it equals the host's path with all rights: old programs read the text as a path.
_RIGHTS = "rwm"
# An HTTP status, and the body.
Answer = tuple[int, str]


def refusal(status: int, sentence: str) -> Answer:
    """Return an error as one option that docker does not know: `docker run $(curl …)` then starts no container.

    The first word of a sentence would be an image there.
    """
    option = re.sub(r"[^A-Za-z0-9_./]+", "-", sentence[:300]).strip("-")
    return status, f"--gpuprov-error-{option}\n"


class Answers:
    """The table of paths. `report` returns what NVML reports, `flags` the plain flags of some GPUs."""

    def __init__(
        self, report: Callable[[], Mapping[str, Any]], flags: Callable[[str], PlainFlags] = granted_flags
    ) -> None:
        self._flags = flags
        # One child process for all who ask at once.
        lock = threading.Lock()

        def asked() -> Mapping[str, Any]:
            with lock:
                return report()

        table: dict[str, Callable[[str], str]] = {
            "/docker/cli": lambda query: " ".join(shell_words(self._asked(query))),
            "/docker/cli/json": lambda query: json.dumps(_as_json(self._asked(query))),
            "/gpu/info/json": lambda _: json.dumps(_info(asked())),
            "/gpu/status/json": lambda _: json.dumps({"Devices": asked()["Status"]}),
        }
        self._table = {f"{version}{path}": answer for version in ("", "/v1.0") for path, answer in table.items()}

    def answer(self, target: str, hosts: list[str]) -> Answer:
        """Return the answer to a GET. `hosts`: the values of the header Host; exactly one must name this machine."""
        if len(hosts) != 1 or hosts[0].strip().lower() not in _HOSTS:
            return refusal(403, "only requests to localhost are answered")
        path, _, query = target.partition("?")
        if path not in self._table:
            return refusal(404, f"there is no such path; there are {' '.join(list(self._table)[:4])}")
        try:
            return 200, self._table[path](query)
        except ValueError as error:
            return refusal(400, str(error))
        except GpuprovError as error:
            return refusal(500, error.problems[0].what)
        except Exception as error:  # a client that hears nothing takes the empty answer for no flags
            return refusal(500, f"{type(error).__name__}: {error}")

    def _asked(self, query: str) -> PlainFlags:
        # `vol` chose among the plugin's volumes; gpuprov mounts the driver's files one by one.
        names = " ".join(parse_qs(query).get("dev", ())).replace(",", " ").split()
        gpus = "all" if not names or "*" in names else ",".join(names)
        if not _GPUS.fullmatch(gpus):
            raise ValueError(f"{gpus} is no list of up to 64 indexes or UUIDs of GPUs")
        return self._flags(gpus)


def _as_json(flags: PlainFlags) -> dict[str, Any]:
    return {
        "VolumeDriver": "",
        "Volumes": [f"{mount.source}:{mount.target}:ro" for mount in flags.mounts],
        "Devices": [_device(device) for device in flags.devices],
        # Not the plugin's; a client that ignores them still has the devices and the files.
        "Environment": list(flags.environment),
        "GroupAdd": [str(group) for group in flags.groups],
    }


def _device(device: Device) -> str:
    plain = device.source == device.target and device.access == _RIGHTS
    return device.source if plain else f"{device.source}:{device.target}:{device.access}"


def _info(report: Mapping[str, Any]) -> dict[str, Any]:
    return {"Version": report["Version"], "Devices": report["Info"]}


@lru_cache(maxsize=1)
def gpu_report(system: System, second: int) -> Mapping[str, Any]:
    """Return what NVML reports: `Version`, `Info` and `Status`. Raises GpuprovError if the driver does not answer.

    `second`: of the clock; the requests of one second share a report.
    """
    driver = discover(system)
    # NVML would load the driver, and make device nodes.
    if not driver.kernel_version:
        raise GpuprovError("the NVIDIA driver is not loaded", "no /proc/driver/nvidia/version", "gpuprov doctor")
    missing = missing_nodes(driver)
    if missing:
        raise GpuprovError(f"the device node {missing[0].path} is missing", "", "nvidia-modprobe -u -c 0")
    library = next((one.path for one in driver.libraries if "/libnvidia-ml.so." in one.path), "")
    if not library:
        raise GpuprovError("there is no NVML on this host", "no libnvidia-ml.so.1", "gpuprov doctor")
    done = run_child(system, library, "gpuprov.boot.gpu_report_child")
    if not done.ok:
        raise GpuprovError("NVML does not answer", done.evidence(), "nvidia-smi; gpuprov doctor")
    document: dict[str, Any] = json.loads(done.stdout)
    return document
