"""Divide GPUs into MIG devices: read the current state and apply a layout with nvidia-smi.

Source: NVIDIA's Multi-Instance GPU User Guide. A layout is one text for all GPUs, or one for each, by index:

    disabled                 no MIG
    all-1g.10gb              as many of this profile as fit
    3g.40gb,2g.20gb,2g.20gb  exactly these
    enabled                  MIG and no devices; only in files of mig-parted's format
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

from gpuprov.core.changes import Change, Json, Jsons, Tell, tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.core.units import systemctl
from gpuprov.driver.running_driver import MONITORS, active_units
from gpuprov.driver.source import DriverSource
from gpuprov.facts.driver import gather_holders
from gpuprov.facts.gpus import CORRUPT_INFOROM, MIG_QUERY, NOT_FOUND, SMI, SMI_SECONDS, MigGpu, gather_mig
from gpuprov.facts.host import HostFacts
from gpuprov.machine.pci import FOR_GUESTS, own_ids
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.mig_configs import DISABLED, ENABLED, layout_of
from gpuprov.protocol.models import models
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.words import counted

_ALL = "all-"


def profiles_of(text: str, gpu: MigGpu) -> tuple[str, ...]:
    """Return the sorted profiles that a layout's text means on a GPU; all-… needs a GPU with MIG on."""
    if text in (DISABLED, ENABLED):
        return ()
    if not text.startswith(_ALL):
        return tuple(sorted(text.split(",")))
    profile = text[len(_ALL) :]
    return (profile,) * gpu.most.get(profile, 0)


def largest_first(profiles: Sequence[str]) -> str:
    """Return them as `-cgi` takes them: behind smaller ones there may be no room (MIG User Guide, geometry)."""
    return ",".join(sorted(profiles, key=lambda one: (-int(one.partition("g")[0]), one)))


def is_right(text: str, gpu: MigGpu) -> bool:
    """Say whether a GPU is divided as a layout's text requires."""
    if not text:
        return True
    if text == DISABLED:
        return gpu.current in ("Disabled", "[N/A]", "N/A")
    profiles = profiles_of(text, gpu)
    is_on = gpu.current == "Enabled" and not gpu.incomplete
    return is_on and gpu.instances == profiles and (profiles != () or text == ENABLED)


@dataclass(frozen=True)
class DivideGpus(Change):
    """Divide the GPUs as `layout` says (index → text)."""

    layout: tuple[tuple[int, str], ...]

    undo_disturbs: ClassVar[bool] = True
    disturbs = True
    key = "divide GPUs by MIG"

    def summary(self) -> str:
        return "divide GPUs by MIG: " + "; ".join(f"GPU {index}: {text}" for index, text in self.layout)

    def diff(self, system: System) -> str:
        now = {gpu.index: _shown(gpu) or gpu.current for gpu in gather_mig(system)}
        return "\n".join(f"-GPU {index}: {now.get(index, '?')}\n+GPU {index}: {text}" for index, text in self.layout)

    def capture(self, system: System) -> Json:
        ours = [gpu for gpu in gather_mig(system) if gpu.index in dict(self.layout)]
        texts = {str(gpu.index): ",".join(gpu.instances) if gpu.current == "Enabled" else DISABLED for gpu in ours}
        return {"before": texts}

    def apply(self, system: System, tell: Tell) -> None:
        with _without_monitors(system, tell):
            for index, text in self.layout:
                tell(f"GPU {index}: {text}", 0, 0)
                # The plan knew no better if nvidia-smi was silent then.
                if not is_right(text, _look(system, index)):
                    _bring(system, index, text)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        there = {str(gpu.index) for gpu in gather_mig(system)}
        for index, text in before["before"].items():
            if index not in there:
                continue
            gpu = _look(system, int(index))
            # A GPU with MIG on and no instances corresponds to the empty text.
            done = gpu.current == "Enabled" and not gpu.instances if text == "" else is_right(text, gpu)
            if not done:
                with _without_monitors(system, tell_nobody):
                    _bring(system, int(index), text)

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        gone = sorted({*before["before"]} - {str(gpu.index) for gpu in gather_mig(system)})
        return tuple(f"GPU {index} is gone, or has no driver: its MIG layout stays" for index in gone)


@contextlib.contextmanager
def _without_monitors(system: System, tell: Tell) -> Iterator[None]:
    """Stop DCGM and its exporter meanwhile: they have the GPUs open, which can't be divided then."""
    units = active_units(system, MONITORS)
    for unit in units:
        systemctl(system, "stop", unit)
    try:
        yield
    finally:
        for unit in reversed(units):
            if trouble := systemctl(system, "start", unit):
                tell(f"{unit} did not start again: {trouble}", 0, 0)


def _bring(system: System, index: int, text: str) -> None:
    """Apply a layout's text to a GPU. Raises GpuprovError with nvidia-smi's output."""
    gpu = _look(system, index)
    if gpu.current not in ("Enabled", "Disabled"):
        if text == DISABLED:
            return
        names = ", ".join(dict.fromkeys(model.name for model in models(system.tables).models if model.mig))
        what = f"GPU {index} can't be divided: it has no MIG"
        seen = f"{SMI} {' '.join(MIG_QUERY)}: {index}, {gpu.current}, {gpu.pending}"
        raise GpuprovError(what, seen, f"take it out of the MIG layout (disabled); these have MIG: {names}")
    if gpu.instances:
        for option in ("-dci", "-dgi"):
            # A GPU instance may have no compute instances.
            what = "its instances can't be removed"
            _smi(system, index, ("mig", "-i", str(index), option), what, accepted=(0, NOT_FOUND))
    _switch(system, index, "Disabled" if text == DISABLED else "Enabled")
    profiles = profiles_of(text, _look(system, index)) if text else ()
    if text.startswith(_ALL) and not profiles:
        names = ", ".join(_look(system, index).most) or "none"
        what = f"GPU {index} has no MIG profile {text[len(_ALL) :]}"
        raise GpuprovError(what, f"{SMI} mig -lgip: {names}", "choose one of these")
    if profiles:
        words = ("mig", "-i", str(index), "-cgi", largest_first(profiles), "-C")
        done = _smi(system, index, words, f"{','.join(profiles)} can't be made")
        # nvidia-smi exits with 0 after many failures.
        made = _look(system, index)
        if made.instances != profiles or made.incomplete:
            what = f"GPU {index} is not divided as asked, though nvidia-smi reported success"
            seen = f"there is {_shown(made) or 'nothing'}, asked for was {','.join(profiles)}\n{done.stdout.strip()}"
            raise GpuprovError(what, seen, f"{SMI} mig -lgi; {SMI} mig -lgip")


def _shown(gpu: MigGpu) -> str:
    return ",".join(gpu.instances) + (" (without compute instances)" if gpu.incomplete else "")


def _look(system: System, index: int) -> MigGpu:
    found = next((gpu for gpu in gather_mig(system) if gpu.index == index), None)
    if found is None:
        what = f"there is no GPU {index} to divide"
        raise GpuprovError(what, f"{SMI} {' '.join(MIG_QUERY)}", f"{SMI} -L shows which there are")
    return found


def _switch(system: System, index: int, mode: str) -> None:
    """Switch MIG on or off. Before Hopper this needs a reset of the GPU, which must be unused."""
    if _look(system, index).current == mode:
        return
    number = {"Enabled": "1", "Disabled": "0"}[mode]
    done = _smi(system, index, ("-i", str(index), "-mig", number), f"MIG can't be switched {mode.lower()}")
    if _look(system, index).current != mode:
        system.run((SMI, "--gpu-reset", "-i", str(index)), timeout=SMI_SECONDS)
    gpu = _look(system, index)
    if gpu.current != mode:
        what = f"MIG on GPU {index} is {gpu.current}, {mode} only after a reset of the GPU"
        step = f"end what uses the GPU, then {SMI} --gpu-reset -i {index}; or reboot; then run the same command again"
        raise GpuprovError(what, _with_users(system, done.stdout.strip()), step)


def _smi(system: System, index: int, words: tuple[str, ...], what: str, accepted: tuple[int, ...] = (0,)) -> Completed:
    done = system.run((SMI, *words), timeout=SMI_SECONDS)
    if done.returncode not in (*accepted, CORRUPT_INFOROM):
        # nvidia-smi says on stdout why it failed.
        said = "\n".join((done.stdout.strip() or done.stderr.strip()).splitlines()[-12:])
        seen = _with_users(system, f"`{' '.join(done.argv)}` exited {done.returncode}\n{said}")
        step = f"{SMI} mig -lgip shows what there is room for, {SMI} who uses the GPU"
        raise GpuprovError(f"GPU {index}: {what}", seen, step)
    return done


def _with_users(system: System, seen: str) -> str:
    return "\n".join((seen, *map(str, gather_holders(system)))).strip()


def wanted(facts: HostFacts, spec: HostSpec) -> tuple[tuple[str, str], ...]:
    """Return PCI address → text of each GPU that the layout names: not of those of virtual machines."""
    own = _own(facts)
    layout = layout_of(spec.mig_config, own_ids(facts.gpus), facts.tables) if spec.mig_config else spec.mig_layout
    texts = layout * len(own) if len(layout) == 1 else layout
    # A list is for these, or by index for those that the driver serves.
    served = tuple(gpu.bus_id for gpu in facts.driver.gpus)
    return tuple((one, text) for one, text in zip(served if len(served) == len(texts) else own, texts) if text)


def _own(facts: HostFacts) -> tuple[str, ...]:
    return tuple(gpu.bus_id for gpu in facts.gpus if gpu.driver not in FOR_GUESTS)


def plan(driver: DriverSource) -> tuple[Change, ...]:
    """Return the change that divides the GPUs whose layout differs."""
    facts, now = driver.facts, {gpu.index: gpu for gpu in driver.facts.mig}
    # A driver to be installed was not queried; one that does not respond will report why.
    unknown = driver.installs or not now
    # NVML numbers, in bus order, the GPUs that the driver serves.
    served = () if driver.installs else tuple(gpu.bus_id for gpu in facts.driver.gpus)
    numbers = {address: number for number, address in enumerate(served or _own(facts))}
    wrong = tuple(
        (index, text)
        for address, text in wanted(facts, driver.spec)
        if (index := numbers.get(address)) is not None
        and (unknown or index not in now or not is_right(text, now[index]))
    )
    return (DivideGpus(wrong),) if wrong else ()


def problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return what prevents the division of the GPUs."""
    if spec.mig_layout and spec.mig_config:
        both = f"gpuprov_mig_layout is {','.join(spec.mig_layout)}, gpuprov_mig_config is {spec.mig_config}"
        return (Problem("two MIG layouts are given", both, "leave one of them out"),)
    if facts.kernel.container:
        return ()
    if spec.mig_config and facts.gpus and not wanted(facts, spec):
        what = f"the MIG configuration {spec.mig_config} has no entry for the GPUs of this host"
        ids = ", ".join(f"0x{gpu.device_id.upper()}10DE" for gpu in facts.gpus)
        return (Problem(what, ids, "add an entry for them, or set gpuprov_mig_config to another"),)
    own = _own(facts)
    if len(spec.mig_layout) > max(len(own), 1):
        what = f"gpuprov_mig_layout speaks of {counted(len(spec.mig_layout), 'GPU')}, this host has {len(own)}"
        step = "give one text for all GPUs, or as many as there are, without those of virtual machines"
        return (Problem(what, ", ".join(own), step),)
    return ()
