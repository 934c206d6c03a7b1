"""The memory of a machine: the GPUs and versions that the last green verification saw, and what differs from it now.

Without it, a host that has lost a GPU looks like a healthy host with fewer GPUs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated

from gpuprov import __version__
from gpuprov.cdi.nvml import sysfs_bus_id
from gpuprov.checks.outcome import Checks, Failed, Skipped, Values
from gpuprov.checks.smi import SmiReport
from gpuprov.core.journal import RUNS_DIRECTORY, STATE_DIRECTORY
from gpuprov.core.lock import other_run
from gpuprov.core.places import REMEMBERED
from gpuprov.core.system import BOOTED, System
from gpuprov.facts.kernels import MACHINE_ID
from gpuprov.machine.machine import gather_kernel
from gpuprov.machine.pci import gather_gpus
from gpuprov.protocol.codec import Limit, Name, WrongDataError, dump, load, parse
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.events import Level, Note, Sink
from gpuprov.protocol.spec import IMAGE, HostSpec
from gpuprov.protocol.words import counted

SCHEMA = 1
CHECK = "remembered GPUs"
FORGET = "gpuprov verify --remember"
_LARGEST, _SECONDS, _LONGEST_LINE = 256 << 10, 20, 300
# Other lines about a GPU are of each healthy boot.
_TROUBLE = re.compile(r"NVRM|fallen|fail|error|not responding|removed|link (?:is )?down|inaccessible", re.IGNORECASE)
_WORST = re.compile(r"Xid|fallen off")


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine; `links` counts its active NVLinks, 0 if it has none or they are unknown."""

    uuid: Name
    model: Name
    bus_id: Name
    links: int = 0

    def __str__(self) -> str:
        return f"{self.uuid} ({self.model} at {self.bus_id})"


@dataclass(frozen=True)
class Memory:
    """What a green verification saw. `date`: of it, in UTC. `machine`: identifies the machine, since disks are copied.

    `engines`: engine → version, of those that passed their check.
    """

    schema: int
    date: Name
    machine: Name
    gpus: Annotated[tuple[Gpu, ...], Limit(1_000)]
    driver: Name
    kernel: Name
    gpuprov: Name
    engines: Annotated[Mapping[Name, Name], Limit(100)] = field(default_factory=dict)

    @property
    def day(self) -> str:
        return self.date.partition(" ")[0]


@dataclass(frozen=True)
class Recalled:
    """The memory; None if there is none for this machine. `fault`: why the file is not trusted, "" if it is."""

    memory: Memory | None = None
    fault: str = ""


def recall(system: System) -> Recalled:
    """Return what the file on this host says, if only root can have written it. Reads only."""
    status = system.status(REMEMBERED)
    if status is None:
        return Recalled()
    if status.kind != "file" or status.uid != 0 or status.mode & 0o022 or status.size > _LARGEST:
        return Recalled(fault=f"{REMEMBERED} is not a small file that only root can write")
    try:
        data = parse(system.read_bytes(REMEMBERED) or b"")
        if isinstance(data, dict) and data.get("schema", SCHEMA) != SCHEMA:
            return Recalled(fault=f"{REMEMBERED} is of another gpuprov: schema {data['schema']!r:.20}, not {SCHEMA}")
        memory = load(Memory, data)
    except WrongDataError as error:
        return Recalled(fault=f"{REMEMBERED} can't be read: {error}")
    return Recalled(memory if memory.machine == _machine(system) else None)


def gpus_in(report: SmiReport, links: Mapping[str, int]) -> tuple[Gpu, ...]:
    """Return the GPUs of a report of nvidia-smi."""
    return tuple(Gpu(one.uuid, one.name, sysfs_bus_id(one.bus_id), links.get(one.uuid, 0)) for one in report.gpus)


@dataclass(frozen=True)
class GpuChanges:
    """How the GPUs differ. `replaced`: pairs of another card, or of a virtual machine that moved: no GPU is missing."""

    lost: tuple[Gpu, ...] = ()
    added: tuple[Gpu, ...] = ()
    replaced: tuple[tuple[Gpu, Gpu], ...] = ()


def gpu_changes(before: Sequence[Gpu], now: Sequence[Gpu]) -> GpuChanges:
    """Return how the GPUs differ; a new one stands for a missing one of its model, if possible at the same address."""
    there, known = {gpu.uuid for gpu in now}, {gpu.uuid for gpu in before}
    added = [gpu for gpu in now if gpu.uuid not in known]
    lost, replaced = [], []
    for old in (gpu for gpu in before if gpu.uuid not in there):
        same = sorted((gpu for gpu in added if gpu.model == old.model), key=lambda gpu: gpu.bus_id != old.bus_id)
        if same:
            replaced.append((old, same[0]))
            added.remove(same[0])
        else:
            lost.append(old)
    return GpuChanges(tuple(lost), tuple(added), tuple(replaced))


def lost_gpus(
    system: System, memory: Memory, report: SmiReport | None, explained: Collection[str] = ()
) -> Problem | None:
    """Return the trouble that remembered GPUs are missing, None if none is. `report`: None if nvidia-smi gave none.

    `explained`: PCI addresses at which a missing GPU is another's trouble.
    """
    bus = {gpu.bus_id.lower(): gpu for gpu in gather_gpus(system)}
    if report is not None:
        lost, count = gpu_changes(memory.gpus, gpus_in(report, {})).lost, len(report.gpus)
    else:
        # Buses may get other numbers: which GPU is missing shows only if as many addresses are empty.
        gone = tuple(gpu for gpu in memory.gpus if gpu.bus_id not in bus)
        is_known = len(gone) == len(memory.gpus) - len(bus) and not gather_kernel(system).wsl
        lost, count = gone if is_known else (), len(bus)
    lost = tuple(gpu for gpu in lost if gpu.bus_id not in explained)
    if not lost:
        return None
    seen = [f"{REMEMBERED}: {memory.date}"]
    for gpu in lost:
        there = bus.get(gpu.bus_id)
        if there is not None:
            seen.append(f"/sys/bus/pci/devices/{gpu.bus_id} is there, its driver: {there.driver or 'none'}")
        elif not gather_kernel(system).wsl:
            seen.append(f"/sys/bus/pci/devices/{gpu.bus_id} is not there")
        if said := _kernel_says(system, gpu, memory.date):
            seen.append(f"the kernel log says: {said}")
    missing = f"{', '.join(map(str, lost))} {'is' if len(lost) == 1 else 'are'} gone"
    what = f"{counted(len(memory.gpus), 'GPU')} on {memory.day}, {count} today: {missing}"
    step = f"systemctl reboot  # if it stays away: power, seating, heat; taken out on purpose: {FORGET}"
    return Problem(what, "\n".join(seen), step)


def check_gpus(system: System, memory: Memory, report: SmiReport | None) -> Values:
    """Check that each remembered GPU is there."""
    problem = lost_gpus(system, memory, report)
    if problem is not None:
        seen = "; ".join((problem.what, *problem.evidence.splitlines()[1:]))
        raise Failed(f"{seen}; gpuprov doctor; taken out on purpose: {FORGET}")
    if report is None:
        raise Skipped("requires the driver")
    return f"all {len(memory.gpus)} of {memory.day}", ""


def update(
    system: System, spec: HostSpec, checks: Checks, report: SmiReport, sink: Sink, *, remember: bool = False
) -> None:
    """Tell what else differs from the memory, and write a new one after a green verification or if asked to.

    An image, and a host on which a run works, keep what they have. A file that is not trusted stays until asked to.
    """
    recalled = recall(system)
    now = _observed(system, checks, report, recalled.memory.gpus if recalled.memory is not None else ())
    if recalled.memory is not None:
        for message, level in _news(recalled.memory, now, is_ours=_run_since(system)):
            sink(Note(message, level))
    if spec.target == IMAGE or not system.exists(BOOTED):
        return
    if not remember and (not checks.good or recalled.fault or other_run(system) is not None):
        return
    try:
        system.make_directory(STATE_DIRECTORY)
        system.write(REMEMBERED, f"{dump(now)}\n".encode(), mode=0o600, owner=(0, 0))
    except OSError as error:
        sink(Note(f"what this verification saw is not remembered: {error}", "warning"))
    else:
        if remember:
            sink(Note(f"remembered: {counted(len(now.gpus), 'GPU')}, driver {now.driver}"))


def _observed(system: System, checks: Checks, report: SmiReport, before: Sequence[Gpu]) -> Memory:
    links: Mapping[str, int] = {}
    if len(report.gpus) > 1:  # a link has two ends
        told = system.run(("nvidia-smi", "nvlink", "--status"), timeout=_SECONDS)
        links = parse_links(told.stdout) if told.ok else {one.uuid: one.links for one in before}
    return Memory(
        schema=SCHEMA,
        date=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(system.clock())),
        machine=_machine(system),
        gpus=gpus_in(report, links),
        driver=report.driver,
        kernel=system.kernel_release(),
        gpuprov=__version__,
        engines=checks.engine_versions,
    )


def _machine(system: System) -> str:
    """Return what identifies this machine: the firmware's number, which a copied disk does not bring.

    All system containers of a host see the same number, and those without privileges may not read it.
    """
    places = (MACHINE_ID,) if gather_kernel(system).container else ("/sys/class/dmi/id/product_uuid", MACHINE_ID)
    return next((text for path in places if (text := (system.read_text(path) or "").strip())), "")


def _run_since(system: System) -> bool:
    """Say whether a run of gpuprov has worked on this host since: what it changed is no news."""
    status = system.status(REMEMBERED)
    runs = (system.status(f"{RUNS_DIRECTORY}/{name}") for name in system.list_directory(RUNS_DIRECTORY))
    return status is not None and any(run is not None and run.modified > status.modified for run in runs)


def _news(before: Memory, now: Memory, *, is_ours: bool) -> Iterator[tuple[str, Level]]:
    """Yield what differs apart from missing GPUs. `is_ours`: a run of gpuprov accounts for versions."""
    gpus, links = gpu_changes(before.gpus, now.gpus), {gpu.uuid: gpu.links for gpu in now.gpus}
    if gpus.added:
        yield f"new since {before.day}: {', '.join(map(str, gpus.added))}", "info"
    for gpu in before.gpus:
        if 0 < links.get(gpu.uuid, 0) < gpu.links:
            what = f"{gpu} has {counted(links[gpu.uuid], 'active NVLink')}, {gpu.links} on {before.day}"
            yield f"{what}: nvidia-smi nvlink --status", "warning"
    engines = {*before.engines, *now.engines}
    versions = [("driver", before.driver, now.driver), ("gpuprov", before.gpuprov, now.gpuprov)]
    versions += [(name, before.engines.get(name, "none"), now.engines.get(name, "none")) for name in sorted(engines)]
    rows = [("kernel", before.kernel, now.kernel), *([] if is_ours else versions)]
    rows += [(f"GPU at {new.bus_id}", old.uuid, new.uuid) for old, new in gpus.replaced]
    if found := [f"{name} {old} → {new}" for name, old, new in rows if old != new]:
        yield f"changed since {before.day}: {', '.join(found)}", "debug"


def parse_links(text: str) -> Mapping[str, int]:
    """Return the active links of each GPU, by UUID, in the output of `nvidia-smi nvlink --status`."""
    found: dict[str, int] = {}
    gpu = ""
    for match in re.finditer(r"UUID: (GPU-[^)\s]+)\)|Link \d+: [\d.]+ GB/s", text):
        gpu = match[1] or gpu
        found[gpu] = found.get(gpu, 0) + (match[1] is None)
    return found


def _kernel_says(system: System, gpu: Gpu, since: str) -> str:
    """Return the worst line about a GPU in the kernel's log since then, earlier boots included; "" for none."""
    place = gpu.bus_id.rpartition(".")[0]
    journal = ("journalctl", "_TRANSPORT=kernel", f"--since={since}", f"--grep={place}", "--quiet", "--no-pager",
               "--output=short-iso", "--lines=200", "--reverse")  # fmt: skip
    for argv in (journal, ("dmesg",)):
        said = system.run(argv, timeout=_SECONDS).stdout if system.which(argv[0]) else ""
        # journalctl(1): --grep with --lines implies --reverse.
        told = said.splitlines()[:: -1 if argv is journal else 1]
        if lines := [line.strip() for line in told if place in line.lower() and _TROUBLE.search(line)]:
            return next((line for line in reversed(lines) if _WORST.search(line)), lines[-1])[:_LONGEST_LINE]
    return ""
