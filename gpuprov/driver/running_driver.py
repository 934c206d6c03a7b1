"""A loaded driver that another one must replace: who uses it, and how it can be replaced. Changes nothing.

Modules can be unloaded once no process has a GPU open. Services of the driver are stopped; containers and the display
are stopped if the site allows it. Other processes are named, never killed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuprov.core.changes import Change
from gpuprov.core.places import STOPPED
from gpuprov.core.system import System
from gpuprov.driver.installer import knows
from gpuprov.driver.source import DriverSource
from gpuprov.driver.unload import MODULES, StartContainers, Unloading, stopped_containers
from gpuprov.facts.boot_files import PERSISTENCE
from gpuprov.facts.fabric import UNIT
from gpuprov.facts.holders import GpuHolder, RunningDriver, gather_holders
from gpuprov.facts.host import HostFacts
from gpuprov.facts.reboot_state import IN_USE_MARK
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec

# In the order of stopping: clients, then their servers (units of NVIDIA's packages, and of dcgm-exporter's).
UNITS = (
    "dcgm-exporter.service", "nvidia-dcgm-exporter.service", "nvidia-dcgm.service", "dcgm.service",
    "nvidia-powerd.service", "nvidia-gridd.service", "nvidia-topologyd.service", "nvidia-imex.service",
    UNIT, PERSISTENCE,
)  # fmt: skip
# An alias of gdm, lightdm, sddm and all others (systemd.special(7): display-manager.service).
DISPLAY_MANAGER = "display-manager.service"


def is_in_the_way(driver: DriverSource) -> bool:
    """Say whether a loaded driver or a running display prevents loading another driver."""
    facts = driver.facts
    if not driver.brings_modules or facts.kernel.container:
        return False
    if not driver.replaces:
        return is_other(facts)
    return bool(facts.driver_loaded_version or "nvidia" in facts.kernel.loaded_modules or facts.displays)


def is_other(facts: HostFacts) -> bool:
    """Say whether the kernel runs another version than the installed one."""
    loaded, installed = facts.driver_loaded_version, facts.driver_installed_version
    return "" not in (loaded, installed) and loaded != installed


def gather_running(system: System, facts: HostFacts) -> RunningDriver:
    """Return the users of the loaded driver; reads only, by four commands."""
    holders = gather_holders(system, _drm_nodes(facts))
    names = (*UNITS, DISPLAY_MANAGER)
    # `is-active` prints one word per unit, in order (systemctl(1)).
    words = system.run(("systemctl", "is-active", *names)).stdout.split()
    active = tuple(name for name, word in zip(names, words) if word in ("active", "activating", "reloading"))
    return RunningDriver(
        version=facts.driver_loaded_version,
        modules=tuple(name for name in MODULES if name in facts.kernel.loaded_modules),
        units=tuple(name for name in active if name != DISPLAY_MANAGER),
        containers=_containers(system, facts, {one.container for one in holders}),
        display_manager=_own_name(system) if DISPLAY_MANAGER in active else "",
        holders=holders,
    )


def _drm_nodes(facts: HostFacts) -> tuple[str, ...]:
    return tuple(node.path for gpu in facts.driver.gpus for node in gpu.drm_nodes)


def _own_name(system: System) -> str:
    shown = system.run(("systemctl", "show", "--property=Id", "--value", DISPLAY_MANAGER)).stdout.strip()
    return shown or DISPLAY_MANAGER


def _containers(system: System, facts: HostFacts, holding: set[str]) -> Mapping[str, str]:
    if not facts.docker.running_containers:
        return {}
    ids = system.run(("docker", "ps", "--quiet", "--no-trunc"), timeout=20).stdout.split()
    shown = system.run(("docker", "inspect", *ids), timeout=20).stdout if ids else ""
    return parse_containers(shown, holding)


def parse_containers(text: str, holding: set[str]) -> Mapping[str, str]:
    """Return id → name of the containers in `docker inspect` that have a GPU; `holding`: ids that have one open.

    A container with the GPU closed counts too: it has the old driver's libraries, and would fail with the new driver.
    """
    try:
        rows: Any = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {str(row["Id"]): str(row["Name"]).lstrip("/") for row in rows if row["Id"] in holding or _asks_for_gpus(row)}


def _asks_for_gpus(row: Any) -> bool:
    host = row.get("HostConfig") or {}
    if host.get("DeviceRequests"):
        return True
    if any(str(device.get("PathOnHost", "")).startswith("/dev/nvidia") for device in host.get("Devices") or ()):
        return True
    environment = dict(str(line).partition("=")[::2] for line in (row.get("Config") or {}).get("Env") or ())
    asked = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    return host.get("Runtime") == "nvidia" and asked not in ("", "void", "none")


@dataclass(frozen=True)
class Way:
    """How another driver replaces the loaded one: by `unloading` it first, or at the next boot (`keep_loaded`).

    With `obstacles` neither is possible: a sentence for each.
    """

    unloading: Unloading | None = None
    keep_loaded: bool = False
    obstacles: tuple[str, ...] = ()


def way(driver: DriverSource) -> Way:
    """Return how the requested driver replaces the loaded one."""
    facts, spec, running = driver.facts, driver.spec, driver.facts.running
    if running is None or not is_in_the_way(driver):
        return Way()
    found = _obstacles(running, spec)
    can_wait = _may_wait_for_a_reboot(driver)
    if can_wait and (found or _could_not_unload(facts)):
        return Way(keep_loaded=True)
    if found:
        return Way(obstacles=found)
    display = (running.display_manager,) if spec.stop_display_manager and running.display_manager else ()
    return Way(
        Unloading(
            version=running.version,
            modules=running.modules,
            units=(*display, *running.units),
            containers=tuple(sorted(running.containers.values())),
            devices=_drm_nodes(facts),
            boot_id=facts.reboot.boot_id if can_wait else "",
        )
    )


def _may_wait_for_a_reboot(driver: DriverSource) -> bool:
    """Say whether a new driver may wait on the disk for a reboot: its .run must be able to, or it be there already."""
    if not driver.replaces:
        return True
    able = not driver.installs or knows(driver.spec.driver_version, "--skip-module-load")
    return able and driver.spec.reboot == "if-needed"


def _could_not_unload(facts: HostFacts) -> bool:
    mark = facts.files.get(IN_USE_MARK)
    return mark is not None and mark.content.decode("utf-8", "replace").strip() == facts.reboot.boot_id


def _obstacles(running: RunningDriver, spec: HostSpec) -> tuple[str, ...]:
    """Return a sentence for each user of the GPUs that may not, or can't, be stopped."""
    containers = () if spec.stop_containers else tuple(sorted(running.containers.values()))
    return (*(f"container {name} uses a GPU" for name in containers), *map(str, _others(running, spec)))


def _others(running: RunningDriver, spec: HostSpec) -> tuple[GpuHolder, ...]:
    """Return the processes that belong to nothing that may be stopped."""
    display = running.display_manager if spec.stop_display_manager else ""
    found = []
    for holder in running.holders:
        ours = holder.container in running.containers or holder.unit in running.units
        # Processes in a desktop session end with the display; if not, the unloading fails and names them.
        desktop = display and not holder.container and holder.unit in ("", display)
        if not ours and not desktop:
            found.append(holder)
    return tuple(found)


def plan_containers(driver: DriverSource) -> tuple[Change, ...]:
    """Return the start of the containers that were or will be stopped for another driver, as the last change."""
    found = driver.facts.files.get(STOPPED)
    unloading = way(driver).unloading
    names = (*(stopped_containers(found.content) if found else ()), *(unloading.containers if unloading else ()))
    return (StartContainers(tuple(dict.fromkeys(names))),) if names else ()


def problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return what prevents replacing the loaded driver, and what to do about it."""
    spec, running = driver.spec, driver.facts.running
    found = way(driver).obstacles if driver.replaces else ()
    if not found or running is None:
        return ()
    steps = []
    if running.containers and not spec.stop_containers:
        names = " ".join(sorted(running.containers.values()))
        steps.append(f"docker stop {names}, or set gpuprov_stop_containers: true (they are started again)")
    if running.display_manager and not spec.stop_display_manager:
        steps.append(f"systemctl stop {running.display_manager}, or set gpuprov_stop_display_manager: true")
    # A display's own process is ended by its unit.
    pids = " ".join(str(one.pid) for one in _others(running, spec) if one.unit != (running.display_manager or None))
    if pids:
        steps.append(f"end what holds the GPUs: kill {pids}")
    if spec.reboot != "if-needed":
        steps.append("or set gpuprov_reboot: if-needed, which leaves it to a reboot")
    return (
        Problem(
            f"driver {running.version or '(unknown)'} is loaded and in use, so "
            f"{spec.driver_version or 'another'} can't replace it",
            "\n".join(found),
            "; ".join(steps) or "end them, then run the same command again",
        ),
    )
