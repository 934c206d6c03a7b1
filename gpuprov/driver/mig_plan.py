"""Whether a host's GPUs must be divided otherwise, and what keeps them from it. Pure."""

from __future__ import annotations

from gpuprov.core.changes import Change
from gpuprov.driver.mig import DivideGpus, is_right, wanted_for
from gpuprov.driver_run import installs
from gpuprov.facts.host import HostFacts
from gpuprov.wire.errors import Problem
from gpuprov.wire.spec import HostSpec


def wanted(facts: HostFacts, spec: HostSpec) -> tuple[tuple[int, str], ...]:
    """Return index → text of each GPU that the layout speaks of; NVML counts them in the order of the bus."""
    found = ((index, wanted_for(spec.mig_layout, index)) for index in range(len(facts.gpus)))
    return tuple((index, text) for index, text in found if text)


def plan(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the division of the GPUs that are not divided as they should be."""
    now = {gpu.index: gpu for gpu in facts.mig}
    # A driver that is yet to come has not been asked; one that does not answer will say why.
    unknown = installs(facts, spec) or not now
    wrong = tuple(
        (index, text)
        for index, text in wanted(facts, spec)
        if unknown or index not in now or not is_right(text, now[index])
    )
    return (DivideGpus(wrong),) if wrong else ()


def problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return what keeps the GPUs from being divided."""
    if not spec.mig_layout:
        return ()
    if facts.kernel.container:
        return (
            Problem(
                "GPUs are divided by the machine outside, not in a system container",
                f"inside {facts.kernel.container}; gpuprov_mig_layout is set",
                "leave gpuprov_mig_layout out here, and set it for the machine outside",
            ),
        )
    if len(spec.mig_layout) > max(len(facts.gpus), 1):
        return (
            Problem(
                f"gpuprov_mig_layout speaks of {len(spec.mig_layout)} GPUs, this host has {len(facts.gpus)}",
                ", ".join(gpu.bus_id for gpu in facts.gpus),
                "give one text for all GPUs, or as many as there are",
            ),
        )
    return ()
