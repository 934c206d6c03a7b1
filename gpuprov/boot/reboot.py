"""Decide whether a host needs a reboot and why; the change that ends a run for it. agent/install.py reboots."""

import re

from gpuprov.cdi.discover import discover, load_driver
from gpuprov.core.changes import Change, Json, NextAction, Tell
from gpuprov.core.system import System
from gpuprov.driver import running_driver
from gpuprov.driver.nouveau import MODULES, bound
from gpuprov.driver.running_driver import ReloadDriver
from gpuprov.driver.source import DriverSource
from gpuprov.facts.boot import IN_USE_MARK, REBOOT_ASKED
from gpuprov.facts.kernels import LOADED_OPTIONS
from gpuprov.machine.machine import gather_kernel
from gpuprov.machine.pci import gather_gpus
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem

_UNLOAD_SECONDS = 60


def reasons(driver: DriverSource) -> tuple[str, ...]:
    """Return why this host needs a reboot; none inside a system container, whose kernel stays."""
    facts = driver.facts
    if facts.kernel.container:
        return ()
    # NVIDIA's installer refuses to run while nouveau is loaded, even without a GPU.
    hinders = "nouveau" in facts.kernel.loaded_modules and driver.installs and driver.brings_modules
    found = [*bound(facts.gpus), *(("the module nouveau is loaded",) if hinders else ()), *_other_driver_loaded(driver)]
    options, asked = facts.files.get(LOADED_OPTIONS), driver.spec.coherent_memory
    mode = re.search(rb'^CoherentGPUMemoryMode: "(\w*)"', options.content, re.MULTILINE) if options else None
    # Another driver is loaded with the option; a driver without modes has no such line.
    if asked and not driver.installs and mode is not None and mode[1].decode() != asked:
        found.append(f"the driver is loaded with CoherentGPUMemoryMode {mode[1].decode() or 'unset'}, not {asked}")
    return tuple(found)


def _other_driver_loaded(driver: DriverSource) -> tuple[str, ...]:
    facts = driver.facts
    if driver.installs or not running_driver.is_other(facts):
        return ()
    return (running_driver.other_driver_loaded(facts.driver_loaded_version, facts.driver_installed_version),)


def problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return the reboot reasons that no reboot resolves: one has not, or no kernel has the driver's module."""
    facts, known = driver.facts, driver.facts.reboot
    if _other_driver_loaded(driver) and not (facts.has_module or facts.later_module or driver.replaces):
        release, version, loaded = facts.kernel.release, facts.driver_installed_version, facts.driver_loaded_version
        if facts.kernel.container:
            what = f"driver {version} is installed, but {driver.outside} runs {loaded}: the two must match"
            step = (
                f"install {loaded} here (gpuprov install --upgrade takes the newest), or {version} on {driver.outside}"
            )
            return (Problem(what, "/proc/driver/nvidia/version", step),)
        what = f"driver {version} is installed, but kernel {release} has no module of it that it takes"
        seen = f"driver {loaded} is loaded; modinfo -k {release} -F version nvidia"
        step = f"dkms status; dkms autoinstall -k {release}, or install the package of its modules for this kernel"
        return (Problem(what, seen, step),)
    if known.asked_in in ("", known.boot_id):
        return ()
    seen = f"kernel {facts.kernel.release}, command line: {facts.kernel.command_line}"
    step = (
        "what loads it so early? dmesg | grep -i -e nouveau -e nova -e nvrm; lsinitramfs /boot/initrd.img-$(uname "
        "-r) | grep modprobe.d"
    )
    still = (reason for reason in reasons(driver) if reason in known.asked_for)
    return tuple(Problem(f"{reason}, and a reboot has not changed that", seen, step) for reason in still)


def plan(driver: DriverSource) -> tuple[Change, ...]:
    """Return the reboot that the rest of the plan needs, empty if none."""
    facts, found = driver.facts, reasons(driver)
    if not found:
        return ()
    replacement = running_driver.replacement(driver)
    if replacement.unloading is not None and facts.has_module and found == _other_driver_loaded(driver):
        return (ReloadDriver(replacement.unloading, facts.driver_installed_version),)
    return (Reboot(found, facts.reboot.boot_id, driver.spec.reboot == "if-needed", facts.docker.running_containers),)


def forget_asked(system: System) -> None:
    """Remove the record: the reasons no longer apply."""
    system.remove(REBOOT_ASKED)
    system.remove(IN_USE_MARK)


@dataclass(frozen=True)
class Reboot(Change):
    """Require a reboot of the host. `allowed`: gpuprov reboots it; otherwise the run ends with a message."""

    reasons: tuple[str, ...]
    boot_id: str
    allowed: bool
    containers: tuple[str, ...] = ()

    disturbs = True
    key = "reboot"

    def summary(self) -> str:
        stops = f"; containers that stop: {', '.join(self.containers)}" if self.containers else ""
        what = "reboot" if self.allowed else "stop until somebody has rebooted this host"
        return f"{what} ({'; '.join(self.reasons)}){stops}"

    def apply(self, system: System, tell: Tell) -> Json:
        """Try to unload the modules instead; otherwise note the reasons.

        Raises GpuprovError if gpuprov may not reboot.
        """
        if _goes_without(system):
            tell("no reboot is needed after all: nothing used the module, and it is unloaded", 0, 0)
            return {"needed": False}
        running_driver.note_asked(system, self.boot_id, self.reasons)
        if self.allowed:
            return {"needed": True}
        stops = f" (it stops the containers {', '.join(self.containers)})" if self.containers else ""
        what, seen = "this host needs a reboot before the rest can be done", "\n".join(self.reasons)
        again = "systemctl reboot; then run the same command again. With gpuprov_reboot: if-needed gpuprov does both"
        raise GpuprovError(what, seen, f"reboot it{stops}: {again}", exit_code=ExitCode.REBOOT_NEEDED)

    def next_action(self, outcome: Json) -> NextAction:
        return NextAction.REBOOT if outcome["needed"] else NextAction.PLAN_AGAIN


def _goes_without(system: System) -> bool:
    """Unload nouveau and nova if unused, which modprobe itself checks; say whether the GPUs are free."""
    loaded = [name for name in MODULES if system.exists(f"/sys/module/{name}")]
    if not loaded or not system.run(("modprobe", "-r", *loaded), timeout=_UNLOAD_SECONDS).ok:
        return False
    if discover(system).library_version:
        load_driver(system)
    driver, is_loaded = discover(system), "nouveau" in gather_kernel(system).loaded_modules
    is_one = driver.kernel_version in ("", driver.library_version)
    return is_one and not is_loaded and not bound(gather_gpus(system))
