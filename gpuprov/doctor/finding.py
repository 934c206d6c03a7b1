"""What a rule of the doctor is, and what it finds: a cause, its evidence, how sure it is, and what to type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional

from gpuprov.doctor.examined import Examined
from gpuprov.doctor.remedy import Remedy

# How sure a finding is. An aside prevents no container from using its GPUs now: it is told, and fails nothing.
CERTAIN, LIKELY, POSSIBLE, ASIDE = CONFIDENCES = ("certain", "likely", "possible", "aside")

# What is looked at, in the order in which things depend on each other.
AREAS = (
    "GPUs", "kernel module", "driver libraries", "device nodes", "container toolkit", "CDI specification", "docker",
    "other engines", "containers",
)  # fmt: skip
GPUS, MODULE, DRIVER, NODES, TOOLKIT, CDI, DOCKER, ENGINES, CONTAINERS = AREAS


def unknown_areas(x: Examined) -> frozenset[str]:
    """Return what shows only where a GPU is, and where engines run: in an image that is not booted neither does."""
    of_gpus = frozenset((GPUS, MODULE, DRIVER, NODES, CDI))
    return of_gpus if x.is_booted else of_gpus | {TOOLKIT, DOCKER, ENGINES, CONTAINERS}


ANY_ROOT = ("*",)


@dataclass(frozen=True)
class Finding:
    """One cause as it stands on a host. `evidence`: a file with its line, or a command with what it said.

    `remedies`: what gpuprov itself can do about it instead of the next step; none where a person must.
    """

    what: str
    evidence: str
    next_step: str
    confidence: str = CERTAIN
    remedies: tuple[Remedy, ...] = ()


Look = Callable[[Examined], Optional[Finding]]


@dataclass(frozen=True)
class Rule:
    """One cause that is looked for. `sign`: what speaks for it, for the documentation.

    `follows`: rules of which this one is a mere consequence, where they find something; ANY_ROOT for a symptom, which
    follows from whatever else is found in its own area or in one before it.
    """

    name: str
    area: str
    sign: str
    look: Look
    follows: tuple[str, ...] = ()
