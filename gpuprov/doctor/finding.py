"""What a rule of the doctor is, and what it finds: a cause, its evidence, how sure it is, and what to type."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable, Optional

from gpuprov.doctor.examined import Examined
from gpuprov.facts.boot_files import NODES as NODES_UNIT
from gpuprov.facts.boot_files import REFRESH as REFRESH_UNIT

# How sure a finding is. An aside prevents no container from using its GPUs now: it is told, and fails nothing.
CERTAIN, LIKELY, POSSIBLE, ASIDE = CONFIDENCES = ("certain", "likely", "possible", "aside")

# What is looked at, in the order in which things depend on each other.
AREAS = (
    "GPUs", "kernel module", "driver libraries", "device nodes", "container toolkit", "CDI specification", "docker",
    "other engines",
)  # fmt: skip
GPUS, MODULE, DRIVER, NODES, TOOLKIT, CDI, DOCKER, ENGINES = AREAS


ANY_ROOT = ("*",)
RESTART_DOCKER = "systemctl restart docker"
REFRESH_SPECIFICATION = f"systemctl start {REFRESH_UNIT}"
MAKE_NODES = f"systemctl restart {NODES_UNIT}"
# Commands whose work is a part of every installation's plan.
_PARTS_OF_INSTALL = (RESTART_DOCKER, REFRESH_SPECIFICATION, MAKE_NODES)


@dataclass(frozen=True)
class Finding:
    """One cause as it stands on a host. `evidence`: a file with its line, or a command with what it said.

    `part_of_install`: an installation does the same as the next step.
    """

    what: str
    evidence: str
    next_step: str
    confidence: str = CERTAIN
    part_of_install: bool = False

    @property
    def remedy(self) -> Mapping[str, str] | None:
        """Return the variables with which `gpuprov install` does the same as the next step.

        None: gpuprov has no plan for it, or a comment leaves something to decide. Then a person types it.
        """
        if self.part_of_install or self.next_step in _PARTS_OF_INSTALL:
            return {}
        words = shlex.split(self.next_step) if self.next_step.startswith("gpuprov install") else []
        options, values = words[2::2], words[3::2]
        if not words or len(options) != len(values) or set(options) - {"-e"} or not all("=" in one for one in values):
            return None
        return {name: value for name, _, value in (one.partition("=") for one in values)}


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
