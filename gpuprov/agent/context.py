"""The context of a run: one request on one machine, with what all parts of the run need."""

from __future__ import annotations

from typing import Callable

from gpuprov.bundle.open import OpenBundle
from gpuprov.core.device_rules import register_devices, unregistered_devices
from gpuprov.core.system import BOOTED, ImageSystem, System
from gpuprov.driver.recommended import UNCHOSEN, Choice
from gpuprov.engines import docker, known
from gpuprov.facts.kernels import newest_kernel
from gpuprov.machine.machine import gather_displays
from gpuprov.machine.pci import gather_gpus
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import Level, Note, Sink
from gpuprov.protocol.request import CHANGING, Request
from gpuprov.protocol.spec import IMAGE, HostSpec

StopRequested = Callable[[], bool]


@dataclass(frozen=True)
class RunContext:
    """A request, its parsed spec, and the machine that it is carried out on.

    `sink` receives the events; `stop_requested` is asked between two changes; `bundle` replaces the network if given.
    `choice`: the driver of a resolved spec; its `why` is empty if gpuprov did not choose it.
    """

    request: Request
    spec: HostSpec
    system: System
    sink: Sink
    stop_requested: StopRequested = lambda: False
    bundle: OpenBundle | None = None
    choice: Choice = UNCHOSEN

    def note(self, message: str, level: Level = "info") -> None:
        """Tell the user one sentence."""
        self.sink(Note(message, level))

    def tell(self, message: str, _done: int = 0, _total: int = 0) -> None:
        """Tell the user of progress."""
        self.note(message)


def devices_to_lose(run: RunContext) -> tuple[str, ...]:
    """Report the running containers whose devices systemd does not know; return those that lose them by a change."""
    found = unregistered_devices(run.system)
    if kept := [str(one) for one in found if not one.fault]:
        run.note(f"before the first change, systemd is told of devices that running containers use: {', '.join(kept)}")
    lost = tuple(f"`systemctl daemon-reload` takes devices from {one}: {one.fault}" for one in found if one.fault)
    for sentence in lost:
        run.note(f"{sentence}; its device rules can't be read, so systemd can't be told of them", "warning")
    return lost


def keep_devices(run: RunContext) -> None:
    """Make systemd know the devices of running containers, before changes and packages make it read its units again.

    Raises GpuprovError if systemd refuses; containers whose rules can't be read were reported with the plan.
    """
    if refused := [(one, error) for one, error in register_devices(run.system) if not one.fault]:
        stop = "; ".join(one.stop for one, _ in refused)
        what = "running containers would lose their GPUs: systemd does not know their devices, and refuses to be told"
        seen = "\n".join(f"{one}: {error}" for one, error in refused)
        raise GpuprovError(what, seen, f"{stop}; then run the same command again")


def for_target(run: RunContext) -> RunContext:
    """Return the run for the kind of machine that the spec names: a host or an image.

    Raises GpuprovError if the machine is to become an image but shows signs of use.
    """
    # Read-only commands may look at the devices of the machine that they run on.
    if run.spec.target != IMAGE or (run.request.command not in CHANGING and run.system.exists(BOOTED)):
        return run
    signs = () if run.spec.image_force or run.request.command != "install" else _signs_of_use(run.system)
    if signs:
        what = "this machine looks as if it were in use, and an image loses its identity (machine-id, SSH host keys)"
        step = "build images on a machine of their own, in a chroot or in a container build"
        force = "if this is one: gpuprov_image_force: true. To install this very machine: leave gpuprov_target out"
        raise GpuprovError(what, "\n".join(signs), f"{step}; {force}")
    return replace(run, system=ImageSystem(run.system, newest_kernel(run.system)))


def _signs_of_use(system: System) -> tuple[str, ...]:
    """Return the signs that this machine is in use, one per line; a chroot or a container build has no such signs."""
    if not system.exists(BOOTED):
        return ()
    gpus = tuple(f"GPU {gpu.bus_id} is on the PCI bus" for gpu in gather_gpus(system))
    containers = docker.gather(system).running_containers
    running = (f"containers run: {', '.join(containers)}",) if containers else ()
    cluster = ("a kubelet is here",) if known.KUBELET in known.kubernetes_programs(system) else ()
    return (*gpus, *running, *gather_displays(system), *cluster)
