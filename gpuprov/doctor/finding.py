"""A finding of the doctor: a cause, its evidence, the next command, and what gpuprov can do about it."""

from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.protocol.dataclass import dataclass

# The confidence of a finding. A warning (`aside` in JSON) prevents no container from using its GPUs now.
CERTAIN, LIKELY, POSSIBLE, WARNING = CONFIDENCES = ("certain", "likely", "possible", "aside")

# The examined areas, in the order in which they depend on each other.
AREAS = (
    "GPUs", "kernel module", "driver libraries", "device nodes", "container toolkit", "CDI specification", "docker",
    "other engines", "containers",
)  # fmt: skip
GPUS, MODULE, DRIVER, NODES, TOOLKIT, CDI, DOCKER, ENGINES, CONTAINERS = AREAS


def unknown_areas(x: HostSnapshot) -> frozenset[str]:
    """Return the areas that need a GPU or a running engine: an image that is not booted has neither."""
    of_gpus = frozenset((GPUS, MODULE, DRIVER, NODES, CDI))
    return of_gpus if x.is_booted else of_gpus | {TOOLKIT, DOCKER, ENGINES, CONTAINERS}


# Kinds: steps of an installation's plan (`names`), the whole plan, restart of units, removal of files, modes of device
# nodes as the driver sets them, the loader's cache, the driver's kernel modules.
STEPS, WHOLE, UNITS, FILES, NODE_MODES, CACHE, MODULES = (
    "steps", "install", "restart", "remove", "node modes", "loader cache", "load modules",
)  # fmt: skip


@dataclass(frozen=True)
class Remedy:
    """One remedy: its kind, and its subjects (steps, units or paths)."""

    kind: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {', '.join(self.names)}" if self.names else self.kind


INSTALL = Remedy(WHOLE)
LOADER_CACHE = Remedy(CACHE)


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
