"""Unload a loaded driver and restart what was stopped for it; never decides what may be stopped."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

from gpuprov.cdi.discover import discover
from gpuprov.core.changes import Change, Json, NextAction, Tell
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.places import STOPPED
from gpuprov.core.system import System
from gpuprov.driver.load import load_driver
from gpuprov.facts.holders import GpuHolder, gather_holders
from gpuprov.facts.reboot_state import IN_USE_MARK
from gpuprov.protocol.errors import GpuprovError

# In the order of unloading: each before the modules that it depends on (modinfo --field=depends).
MODULES = (
    "nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia_peermem", "nvidia_fs", "gdrdrv", "nvidia_vgpu_vfio", "nvidia",
)  # fmt: skip
_STOP_SECONDS = 180
_UNLOAD_SECONDS = 60
# A process that was terminated may take this long to release its GPU.
_LET_GO_SECONDS = 15


@dataclass(frozen=True)
class Unloading:
    """Units and containers to stop, then modules to unload, both in this order.

    `devices`: other nodes that also keep the modules in use (/dev/dri). `boot_id`: this boot, if a reboot may help
    after a failed unload.
    """

    version: str
    modules: tuple[str, ...]
    units: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    boot_id: str = ""

    def lines(self) -> tuple[str, ...]:
        """Return the actions, one line each, for users."""
        stopped = (*(f"container {name}" for name in self.containers), *self.units)
        return (
            *(f"stop {name} (started again afterwards)" for name in stopped),
            *(f"unload {name}" for name in self.modules),
        )


def unload(system: System, wanted: Unloading, tell: Tell) -> None:
    """Stop the named units and containers and unload the modules.

    Raises GpuprovError that names who still uses them.
    """
    _write_down(system, wanted)
    if wanted.containers:
        tell(f"stopping {', '.join(wanted.containers)}", 0, 0)
        system.require(("docker", "stop", *wanted.containers), "containers that use the GPUs do not stop", "docker ps",
                       timeout=_STOP_SECONDS)  # fmt: skip
    for unit in wanted.units:
        tell(f"stopping {unit}", 0, 0)
        system.require(("systemctl", "stop", unit), f"{unit} does not stop", f"systemctl status {unit}",
                       timeout=_STOP_SECONDS)  # fmt: skip
    holders = _wait_for_holders(system, wanted.devices)
    if holders:
        pids = " ".join(str(one.pid) for one in holders)
        raise GpuprovError(
            f"driver {wanted.version} is still in use, so it can't be replaced",
            "\n".join(str(one) for one in holders),
            f"end them: kill {pids}; then run the same command again. Or set gpuprov_reboot: if-needed",
        )
    for name in wanted.modules:
        _unload_module(system, name)


@dataclass(frozen=True)
class ReloadDriver(Change):
    """Require that the kernel runs the driver that is installed, not the earlier one. If it can't be had without,
    a reboot is planned next.
    """

    unloading: Unloading
    version: str

    @property
    def disturbs(self) -> bool:
        return True

    def summary(self) -> str:
        stops = ", ".join((*self.unloading.containers, *self.unloading.units))
        meanwhile = f"; stopped meanwhile: {stops}" if stops else ""
        return f"load driver {self.version} instead of {self.unloading.version}{meanwhile}"

    @property
    def key(self) -> str:
        return "load the driver that is installed"

    def diff(self, system: System) -> str:
        return "\n".join(self.unloading.lines())

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
        start_all_again(system, lambda message, done, total: None)


def _write_down(system: System, wanted: Unloading) -> None:
    """Add to the stored list: an earlier run may have been killed."""
    before = _stopped(system)
    _write(
        system,
        Unloading(
            "",
            (*before.modules, *wanted.modules),
            (*before.units, *wanted.units),
            (*before.containers, *wanted.containers),
        ),
    )


def _write(system: System, stopped: Unloading) -> None:
    lists = {"modules": stopped.modules, "units": stopped.units, "containers": stopped.containers}
    system.make_directory(STATE_DIRECTORY, 0o700)
    content = json.dumps({name: list(dict.fromkeys(values)) for name, values in lists.items()})
    system.write(STOPPED, f"{content}\n".encode(), mode=0o600)


def _stopped(system: System) -> Unloading:
    return _parse(system.read_text(STOPPED) or "")


def _parse(text: str) -> Unloading:
    try:
        found = json.loads(text)
        return Unloading("", tuple(found["modules"]), tuple(found["units"]), tuple(found["containers"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return Unloading("", ())


def _wait_for_holders(system: System, devices: tuple[str, ...]) -> tuple[GpuHolder, ...]:
    deadline = system.now() + _LET_GO_SECONDS
    while (holders := gather_holders(system, devices)) and system.now() < deadline:
        system.sleep(0.5)
    return holders


def _unload_module(system: System, name: str) -> None:
    # A module may be unloaded together with the only one that needed it.
    if not system.exists(f"/sys/module/{name}"):
        return
    done = system.run(("rmmod", name), timeout=_UNLOAD_SECONDS)
    if not done.ok and system.exists(f"/sys/module/{name}"):
        lines = (system.read_text("/proc/modules") or "").splitlines()
        users = next((line for line in lines if line.split()[:1] == [name]), "")
        raise GpuprovError(
            f"the kernel module {name} can't be unloaded",
            f"{done.evidence(2)}\n/proc/modules: {users}".strip(),
            "no process has a GPU open: it is the kernel itself (a console on the GPU, nvidia_drm.fbdev=1) or another "
            "module; reboot with the new driver instead: gpuprov_reboot: if-needed",
        )


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
    wanted = _stopped(system)
    if (wanted.modules or wanted.units) and discover(system).library_version:
        load_driver(system)
        for name in reversed(wanted.modules):
            if not system.exists(f"/sys/module/{name}"):
                system.run(("modprobe", name), timeout=_UNLOAD_SECONDS)
    for unit in reversed(wanted.units):
        done = system.run(("systemctl", "start", unit), timeout=_STOP_SECONDS)
        tell(f"{unit} runs again" if done.ok else f"{unit} did not start again: {done.evidence(2)}", 0, 0)
    if wanted.containers:
        _write(system, Unloading("", (), (), wanted.containers))
    else:
        system.remove(STOPPED)


def start_all_again(system: System, tell: Tell) -> None:
    """Do the same including containers, if the restored driver is the one that they used."""
    start_again(system, tell)
    _start_containers(system, _stopped(system).containers, tell)


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

    def summary(self) -> str:
        return f"start again: {', '.join(self.names)}"

    @property
    def key(self) -> str:
        return "start the containers again"

    def apply(self, system: System, tell: Tell) -> Json:
        _start_containers(system, self.names, tell)
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Do nothing: the containers ran before."""


def stopped_containers(content: bytes) -> tuple[str, ...]:
    """Return the stopped containers that the stored list names."""
    return _parse(content.decode("utf-8", "replace")).containers
