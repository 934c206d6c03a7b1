"""A rule of the doctor and its finding: a cause, its evidence, its confidence, and the next command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional

from gpuprov.doctor.examined import Examined
from gpuprov.doctor.remedy import Remedy

# The confidence of a finding. An aside prevents no container from using its GPUs now: a warning only.
CERTAIN, LIKELY, POSSIBLE, ASIDE = CONFIDENCES = ("certain", "likely", "possible", "aside")

# The examined areas, in the order in which they depend on each other.
AREAS = (
    "GPUs", "kernel module", "driver libraries", "device nodes", "container toolkit", "CDI specification", "docker",
    "other engines", "containers",
)  # fmt: skip
GPUS, MODULE, DRIVER, NODES, TOOLKIT, CDI, DOCKER, ENGINES, CONTAINERS = AREAS


def unknown_areas(x: Examined) -> frozenset[str]:
    """Return the areas that need a GPU or a running engine: an image that is not booted has neither."""
    of_gpus = frozenset((GPUS, MODULE, DRIVER, NODES, CDI))
    return of_gpus if x.is_booted else of_gpus | {TOOLKIT, DOCKER, ENGINES, CONTAINERS}


ANY_ROOT = ("*",)


@dataclass(frozen=True)
class Finding:
    """One cause found on a host. `evidence`: a file with its line, or a command with its output.

    `remedies`: what gpuprov can do instead of the next step; empty if a person must act.
    """

    what: str
    evidence: str
    next_step: str
    confidence: str = CERTAIN
    remedies: tuple[Remedy, ...] = ()


Look = Callable[[Examined], Optional[Finding]]


@dataclass(frozen=True)
class Rule:
    """A cause that the doctor looks for. `sign`: the evidence for it, for the documentation.

    `follows`: rules of which this one is a consequence if they match. ANY_ROOT marks a symptom, which follows from any
    other finding in its own area or an earlier one.
    """

    name: str
    area: str
    sign: str
    look: Look
    follows: tuple[str, ...] = ()
