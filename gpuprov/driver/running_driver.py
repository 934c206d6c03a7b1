"""A loaded driver that another one must replace: who uses it, how it is unloaded, and what is started again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from gpuprov.cdi.discover import discover, load_driver
from gpuprov.core.changes import Change, Json, NextAction, Tell, tell_nobody
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.places import STOPPED
from gpuprov.core.system import System
from gpuprov.driver.installer import knows
from gpuprov.driver.source import DriverSource
from gpuprov.engines.containers import stop_command
from gpuprov.facts.boot import CONFIDENTIAL, GPUDIRECT, IN_USE_MARK, MPS, PERSISTENCE, REBOOT_ASKED, gather_reboot
from gpuprov.facts.driver import GpuHolder, RunningDriver, gather_holders
from gpuprov.facts.gpus import FABRIC_UNIT
from gpuprov.facts.host import HostFacts
from gpuprov.machine.machine import gather_kernel
from gpuprov.packages.interface import require_answer
from gpuprov.protocol.codec import WrongDataError, json_at, load, parse
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.spec import HostSpec

# In the order of unloading: each before the modules that it depends on (modinfo --field=depends).
MODULES = (
    "nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia_peermem", "nvidia_fs", "gdrdrv", "nvidia_vgpu_vfio", "nvidia",
)  # fmt: skip
_STOP_SECONDS = 180
_UNLOAD_SECONDS = 60
Names = tuple[str, ...]
# A process that was terminated may take this long to release its GPU.
_LET_GO_SECONDS = 15
_SWARM_LABEL = "com.docker.swarm.task.id"


@dataclass(frozen=True)
class Unloading:
    """Units and containers to stop, then modules to unload, both in this order.

    `devices`: other nodes that also keep the modules in use (/dev/dri). `boot_id`: this boot, if a reboot may help
    after a failed unload.
    """

    version: str = ""
    modules: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    boot_id: str = ""

    @property
    def meanwhile(self) -> str:
        """What is stopped for it, as the end of a sentence, or ""."""
        stops = ", ".join((*self.containers, *self.units))
        return f"; stopped meanwhile: {stops}" if stops else ""

    def __str__(self) -> str:
        """Return the actions, one line each, for users."""
        stopped = (*(f"container {name}" for name in self.containers), *self.units)
        lines = [f"stop {name} (started again afterwards)" for name in stopped]
        return "\n".join((*lines, *(f"unload {name}" for name in self.modules)))


def stop_users(system: System, wanted: Unloading, tell: Tell) -> None:
    """Stop the named units and containers; `start_all_again` starts them. Raises GpuprovError if one does not stop."""
    # Added to the stored list: an earlier run may have been killed.
    before = _stopped(system.read_bytes(STOPPED))
    _write(system, (*before.modules, *wanted.modules), (*before.units, *wanted.units),
           (*before.containers, *wanted.containers))  # fmt: skip
    if wanted.containers:
        tell(f"stopping {', '.join(wanted.containers)}", 0, 0)
        system.require(("docker", "stop", *wanted.containers), "containers that use the GPUs do not stop", "docker ps",
                       timeout=_STOP_SECONDS)  # fmt: skip
    for unit in wanted.units:
        tell(f"stopping {unit}", 0, 0)
        system.require(("systemctl", "stop", unit), f"{unit} does not stop", f"systemctl status {unit}",
                       timeout=_STOP_SECONDS)  # fmt: skip


def still_held(system: System, devices: Names = (), minors: Collection[int] = ()) -> tuple[GpuHolder, ...]:
    """Return who still has a GPU open after the time in which a process that was stopped lets go of it."""
    deadline = system.now() + _LET_GO_SECONDS
    while (holders := gather_holders(system, devices, minors=minors)) and system.now() < deadline:
        system.sleep(0.5)
    return holders


def unload(system: System, wanted: Unloading, tell: Tell) -> None:
    """Stop the named units and containers and unload the modules.

    Raises GpuprovError that names who still uses them.
    """
    stop_users(system, wanted, tell)
    if holders := still_held(system, wanted.devices):
        raise _in_use(wanted.version, holders)
    for name in wanted.modules:
        # A module may be unloaded together with the only one that needed it.
        if not system.exists(f"/sys/module/{name}"):
            continue
        done = system.run(("rmmod", name), timeout=_UNLOAD_SECONDS)
        if not done.ok and system.exists(f"/sys/module/{name}"):
            lines = (system.read_text("/proc/modules") or "").splitlines()
            users = next((line for line in lines if line.split()[:1] == [name]), "")
            raise GpuprovError(
                f"the kernel module {name} can't be unloaded",
                f"{done.evidence(2)}\n/proc/modules: {users}".strip(),
                "no process has a GPU open: it is the kernel itself (a console on the GPU, nvidia_drm.fbdev=1) or "
                "another module; reboot with the new driver instead: gpuprov_reboot: if-needed",
            )


def end_command(holders: Sequence[GpuHolder]) -> str:
    """Return what ends these processes; systemd may start those of a service again."""
    units = shlex.join(sorted({one.unit for one in holders if one.unit and not one.unit.startswith("user@")}))
    again = f" (if they come again: systemctl stop {units})" if units else ""
    return f"kill {' '.join(str(one.pid) for one in holders)}{again}"


def _in_use(version: str, holders: Sequence[GpuHolder]) -> GpuprovError:
    what = f"driver {version} is still in use, so it can't be replaced"
    step = f"end them: {end_command(holders)}; then run the same command again. Or set gpuprov_reboot: if-needed"
    return GpuprovError(what, "\n".join(str(one) for one in holders), step)


@dataclass(frozen=True)
class ReloadDriver(Change):
    """Require that the kernel runs the driver that is installed, not the earlier one. If it can't be had without,
    a reboot is planned next.
    """

    unloading: Unloading
    version: str

    disturbs = True
    key = "load the driver that is installed"

    def summary(self) -> str:
        return f"load driver {self.version} instead of {self.unloading.version}{self.unloading.meanwhile}"

    def diff(self, system: System) -> str:
        return str(self.unloading)

    def apply(self, system: System, tell: Tell) -> Json:
        try:
            unload(system, self.unloading, tell)
        except GpuprovError as error:
            tell(f"{error.problems[0].what}: a reboot is needed", 0, 0)
            system.write(IN_USE_MARK, f"{self.unloading.boot_id}\n".encode())
            start_all_again(system, tell)
        start_again(system, tell)
        return {"loaded": discover(system).kernel_version}

    def next_action(self, outcome: Json) -> NextAction:
        return NextAction.CONTINUE if outcome["loaded"] == self.version else NextAction.PLAN_AGAIN

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Start again what was stopped: the earlier driver is no longer on the disk."""
        start_all_again(system, tell_nobody)


def _write(system: System, modules: Names, units: Names, containers: Names) -> None:
    lists = {"modules": modules, "units": units, "containers": containers}
    system.make_directory(STATE_DIRECTORY, 0o700)
    content = json.dumps({name: list(dict.fromkeys(values)) for name, values in lists.items()})
    system.write(STOPPED, f"{content}\n".encode(), mode=0o600)


def _stopped(content: bytes | None) -> Unloading:
    """Return what the file STOPPED names."""
    try:
        return load(Unloading, parse((content or b"").decode("utf-8", "replace")), trusted=True)
    except WrongDataError:
        return Unloading()


def unload_unused(system: System) -> None:
    """Unload the modules of a driver that was removed from the disk, if unused."""
    for name in MODULES:
        if system.exists(f"/sys/module/{name}"):
            system.run(("rmmod", name), timeout=_UNLOAD_SECONDS)


def start_again(system: System, tell: Tell) -> None:
    """Load the installed modules and start the stopped units; report what does not start.

    Containers stay in the stored list: they need the new driver's CDI specification. Safe to repeat.
    """
    if system.status(STOPPED) is None:
        return
    wanted = _stopped(system.read_bytes(STOPPED))
    if (wanted.modules or wanted.units) and discover(system).library_version:
        load_driver(system)
        for name in reversed(wanted.modules):
            if not system.exists(f"/sys/module/{name}"):
                system.run(("modprobe", name), timeout=_UNLOAD_SECONDS)
    for unit in reversed(wanted.units):
        done = system.run(("systemctl", "start", unit), timeout=_STOP_SECONDS)
        tell(f"{unit} runs again" if done.ok else f"{unit} did not start again: {done.evidence(2)}", 0, 0)
    if wanted.containers:
        _write(system, (), (), wanted.containers)
    else:
        system.remove(STOPPED)


def start_all_again(system: System, tell: Tell) -> None:
    """Do the same including containers, if the restored driver is the one that they used."""
    start_again(system, tell)
    _start_containers(system, _stopped(system.read_bytes(STOPPED)).containers, tell)


def _start_containers(system: System, names: tuple[str, ...], tell: Tell) -> None:
    for name in names:
        done = system.run(("docker", "start", name), timeout=_STOP_SECONDS)
        tell(f"container {name} runs again" if done.ok else f"{name} did not start again: {done.evidence(2)}", 0, 0)
    system.remove(STOPPED)


@dataclass(frozen=True)
class StartContainers(Change):
    """Start the containers that were stopped for another driver."""

    names: tuple[str, ...]

    undo_when_interrupted: ClassVar[bool] = False
    key = "start the containers again"

    def summary(self) -> str:
        return f"start again: {', '.join(self.names)}"

    def apply(self, system: System, tell: Tell) -> None:
        start_again(system, tell)  # units that a killed repair has stopped
        _start_containers(system, self.names, tell)


# In the order of stopping: clients, then their servers (units of NVIDIA's packages, and of dcgm-exporter's).
MONITORS = ("dcgm-exporter.service", "nvidia-dcgm-exporter.service", "nvidia-dcgm.service", "dcgm.service")
UNITS = (
    *MONITORS, "nvidia-powerd.service", "nvidia-gridd.service", "nvidia-topologyd.service", "nvidia-imex.service",
    MPS, GPUDIRECT, CONFIDENTIAL, FABRIC_UNIT, PERSISTENCE,
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
    active = active_units(system, (*UNITS, DISPLAY_MANAGER))
    named = ("systemctl", "show", "--property=Id", "--value", DISPLAY_MANAGER)
    display = (system.run(named).stdout.strip() or DISPLAY_MANAGER) if DISPLAY_MANAGER in active else ""
    listed, what = ("docker", "ps", "--quiet", "--no-trunc"), "docker does not tell which containers use the GPUs"
    ids = require_answer(system.run(listed, timeout=20), what).stdout.split() if facts.docker.running_containers else []
    shown = require_answer(system.run(("docker", "inspect", *ids), timeout=20), what).stdout if ids else ""
    containers = parse_containers(shown, {one.container for one in holders})
    once = _single_use(shown) if containers else set()
    return RunningDriver(
        version=facts.driver_loaded_version,
        modules=tuple(name for name in MODULES if name in facts.kernel.loaded_modules),
        units=tuple(name for name in active if name != DISPLAY_MANAGER),
        containers=containers,
        display_manager=display,
        holders=holders,
        single_use=tuple(sorted(name for key, name in containers.items() if key in once)),
    )


def active_units(system: System, units: Names) -> Names:
    """Return those of the units that are active or about to be. Raises GpuprovError if systemd does not answer."""
    # `is-active` prints one word per unit, in order (systemctl(1)).
    told = system.run(("systemctl", "is-active", *units))
    words = require_answer(told, "systemd does not tell which services use the GPUs").stdout.split()
    return tuple(name for name, word in zip(units, words) if word in ("active", "activating", "reloading"))


def _drm_nodes(facts: HostFacts) -> tuple[str, ...]:
    return tuple(node.path for gpu in facts.driver.gpus for node in gpu.drm_nodes)


def parse_containers(text: str, holding: set[str]) -> Mapping[str, str]:
    """Return id → name of the containers in `docker inspect` that have a GPU; `holding`: ids that have one open.

    A container with the GPU closed counts too: it has the old driver's libraries, and would fail with the new driver.
    """
    rows = json_at(text) or ()
    return {str(row["Id"]): str(row["Name"]).lstrip("/") for row in rows if row["Id"] in holding or _asks_for_gpus(row)}


def _single_use(text: str) -> set[str]:
    """Return the ids of the containers that docker removes when they stop (--rm), or swarm replaces."""
    rows = [(row["Id"], row.get("HostConfig") or {}, row.get("Config") or {}) for row in json.loads(text)]
    return {key for key, host, own in rows if host.get("AutoRemove") or _SWARM_LABEL in (own.get("Labels") or {})}


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
class Replacement:
    """How another driver replaces the loaded one: by `unloading` it first, or at the next boot (`keep_loaded`).

    With `obstacles` neither is possible: a sentence for each.
    """

    unloading: Unloading | None = None
    keep_loaded: bool = False
    obstacles: tuple[str, ...] = ()


def replacement(driver: DriverSource) -> Replacement:
    """Return how the requested driver replaces the loaded one."""
    facts, spec, running = driver.facts, driver.spec, driver.facts.running
    if running is None or not is_in_the_way(driver):
        return Replacement()
    containers = running.single_use if spec.stop_containers else tuple(sorted(running.containers.values()))
    once = dict.fromkeys(running.single_use, ", and once stopped it can't be started again (--rm, or swarm)")
    found = (
        *(f"container {name} uses a GPU{once.get(name, '')}" for name in containers), *map(str, _others(running, spec)),
    )  # fmt: skip
    # A new driver may wait on the disk for a reboot: its .run must be able to, or it be there already.
    able = not driver.installs or knows(spec.driver_version, "--skip-module-load")
    can_wait = not driver.replaces or (able and spec.reboot == "if-needed")
    mark = facts.files.get(IN_USE_MARK)
    could_not = mark is not None and mark.content.decode("utf-8", "replace").strip() == facts.reboot.boot_id
    if can_wait and (found or could_not):
        return Replacement(keep_loaded=True)
    if found:
        return Replacement(obstacles=found)
    display = (running.display_manager,) if spec.stop_display_manager and running.display_manager else ()
    unloading = Unloading(
        version=running.version,
        modules=running.modules,
        units=(*display, *running.units),
        containers=tuple(sorted(running.containers.values())),
        devices=_drm_nodes(facts),
        boot_id=facts.reboot.boot_id if can_wait else "",
    )
    return Replacement(unloading)


def _others(running: RunningDriver, spec: HostSpec) -> tuple[GpuHolder, ...]:
    """Return the processes that belong to nothing that may be stopped."""
    display = running.display_manager if spec.stop_display_manager else ""
    foreign = (one for one in running.holders if one.container not in running.containers)
    # Processes in a desktop session end with the display; if not, the unloading fails and names them.
    ending = {*running.units, *(("", display) if display else ())}
    return tuple(one for one in foreign if one.unit not in (running.units if one.container else ending))


def plan_containers(driver: DriverSource) -> tuple[Change, ...]:
    """Return the start of the containers that were or will be stopped for another driver, as the last change."""
    found = driver.facts.files.get(STOPPED)
    unloading = replacement(driver).unloading
    names = (*(_stopped(found.content).containers if found else ()), *(unloading.containers if unloading else ()))
    return (StartContainers(tuple(dict.fromkeys(names))),) if names else ()


def problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return what prevents replacing the loaded driver, and what to do about it."""
    spec, running = driver.spec, driver.facts.running
    found = replacement(driver).obstacles
    if not found or running is None:
        return ()
    steps = []
    if running.single_use:
        steps.append(stop_command(running.single_use))
    lasting = sorted({*running.containers.values()} - {*running.single_use})
    if lasting and not spec.stop_containers:
        steps.append(f"{stop_command(lasting)}, or set gpuprov_stop_containers: true (they are started again)")
    if running.display_manager and not spec.stop_display_manager:
        steps.append(f"systemctl stop {running.display_manager}, or set gpuprov_stop_display_manager: true")
    # A display's own process is ended by its unit.
    if others := [one for one in _others(running, spec) if one.unit != (running.display_manager or None)]:
        steps.append(f"end what holds the GPUs: {end_command(others)}")
    if spec.reboot != "if-needed":
        steps.append("or set gpuprov_reboot: if-needed, which leaves it to a reboot")
    other = spec.driver_version or "another"
    what = f"driver {running.version or '(unknown)'} is loaded and in use, so {other} can't replace it"
    return (Problem(what, "\n".join(found), "; ".join(steps) or "end them, then run the same command again"),)


def unload_for_undo(system: System) -> GpuprovError | None:
    """Stop the driver's services and unload it. If a process uses it, start them again and return the error."""
    modules = tuple(name for name in MODULES if system.exists(f"/sys/module/{name}"))
    try:
        units = active_units(system, UNITS)
        # Before anything stops: CUDA programs end with the fabric manager.
        if others := tuple(one for one in gather_holders(system) if one.unit not in units):
            return _in_use(discover(system).kernel_version, others)
        unload(system, Unloading(discover(system).kernel_version, modules, units), tell_nobody)
    except GpuprovError as error:
        start_all_again(system, tell_nobody)
        return error
    return None


def load_installed(system: System) -> None:
    """Load the installed driver if only services use the loaded one; if that stays, note that a reboot is needed."""
    installed = discover(system).library_version
    if discover(system).kernel_version in ("", installed) or gather_kernel(system).container:
        return
    if unload_for_undo(system) is None:
        load_driver(system)
    start_all_again(system, tell_nobody)
    note_other_driver(system, discover(system).kernel_version, installed)


def other_driver_loaded(loaded: str, installed: str) -> str:
    """Return the reboot reason for another loaded driver: NVML and CUDA refuse a different version (NVML error 18)."""
    return f"the kernel still runs driver {loaded}, installed is {installed}"


def note_other_driver(system: System, loaded: str, installed: str) -> None:
    """Record that a reboot is requested if another driver than the installed one stays loaded."""
    if loaded not in ("", installed):
        note_asked(system, gather_reboot(system).boot_id, (other_driver_loaded(loaded, installed),))


def note_asked(system: System, boot_id: str, reasons: Sequence[str]) -> None:
    """Record that a reboot is requested."""
    system.make_directory(STATE_DIRECTORY, 0o700)
    content = json.dumps({"boot_id": boot_id, "reasons": list(reasons)}) + "\n"
    system.write(REBOOT_ASKED, content.encode(), mode=0o600)
