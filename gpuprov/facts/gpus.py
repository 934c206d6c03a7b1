"""GPUs: the list in a .run file, their division by MIG, NVSwitches with their fabric manager, IMEX. Reads only."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence

from gpuprov.cdi.discover import IMEX_OPTION
from gpuprov.core.commands import Completed, unanswered_evidence
from gpuprov.core.system import System
from gpuprov.core.units import is_active
from gpuprov.machine.pci import gather_gpus, of_nvidia, own_ids
from gpuprov.packages.interface import require_answer
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.models import Fabric, fabric_of
from gpuprov.protocol.words import counted


@dataclass(frozen=True)
class Chip:
    """A GPU in the list. `legacy_branch` is the last branch for it, such as 470, or nothing."""

    name: str
    legacy_branch: str
    open_modules: bool
    proprietary_modules: bool


Chips = Mapping[str, Chip]


SMI = "nvidia-smi"
SMI_SECONDS = 120
MIG_QUERY = ("--query-gpu=index,mig.mode.current,mig.mode.pending", "--format=csv,noheader")
# `|   0  MIG 3g.40gb           9        2          4:4     |`; a GPU instance's table has a placement at its end.
_INSTANCE = re.compile(r"^\|\s+(\d+)\s+MIG (\S+)\s+\d+\s+(\d+)\s+\d+:\d+\s*\|", re.MULTILINE)
# `|   0      2       MIG 3g.40gb          2         0          0:4     |`: GPU and GPU instance of a compute instance.
_COMPUTE = re.compile(r"^\|\s+(\d+)\s+(\d+)\s+MIG ", re.MULTILINE)
# nvidia-smi(1), return values; of a GPU with a corrupted infoROM it answers whole.
NOT_FOUND, CORRUPT_INFOROM = 6, 14
# `|   0  MIG 1g.10gb       19     7/7        9.50 …`: free and total.
_PROFILE = re.compile(r"^\|\s+(\d+)\s+MIG (\S+)\s+\d+\s+\d+/(\d+)\s", re.MULTILINE)


@dataclass(frozen=True)
class MigGpu:
    """The MIG state of a GPU: `current` and `pending` are Enabled, Disabled, or [N/A] where it has none.

    `instances`: the profiles of its GPU instances, sorted. `most`: profile → how many an empty GPU has room for.
    `incomplete`: whether one of them has no compute instance: to a container it is no device.
    """

    index: int
    current: str
    pending: str
    instances: tuple[str, ...] = ()
    most: Mapping[str, int] = field(default_factory=dict)
    incomplete: bool = False


def mig_layout(gpus: Iterable[tuple[object, Sequence[str]]]) -> str:
    """Return (index, profiles of the instances) pairs as `0: 3g.40gb, 3g.40gb; 1: 7g.80gb`, for people and pages."""
    return "; ".join(f"{index}: {', '.join(instances)}" for index, instances in gpus if instances)


def gather_mig(system: System) -> tuple[MigGpu, ...]:
    """Return the GPUs of the loaded driver; none if nvidia-smi knows none. Reads only.

    Raises GpuprovError if it gives no answer, or if there are MIG devices and it does not list them.
    """
    modes = system.run((SMI, *MIG_QUERY), timeout=SMI_SECONDS)
    rows = parse_modes(require_answer(modes, "nvidia-smi does not tell which GPUs there are").stdout)
    if not any(current == "Enabled" for _, current, _ in rows):
        return tuple(MigGpu(*row) for row in rows)
    listed = system.run((SMI, "mig", "-lgi"), timeout=SMI_SECONDS)
    if listed.returncode not in (0, NOT_FOUND, CORRUPT_INFOROM):
        # Taken for GPUs without instances, they would be divided again, and a rollback or a reset would lose them.
        raise GpuprovError("the MIG devices of this host can't be listed", listed.evidence(4), "gpuprov health")
    instances = parse_instances(listed.stdout)
    compute = system.run((SMI, "mig", "-lci"), timeout=SMI_SECONDS) if instances else listed
    bare = incomplete(listed.stdout, compute)
    most = parse_profiles(system.run((SMI, "mig", "-lgip"), timeout=SMI_SECONDS).stdout)
    return tuple(MigGpu(*row, instances.get(row[0], ()), most.get(row[0], {}), row[0] in bare) for row in rows)


def parse_modes(text: str) -> tuple[tuple[int, str, str], ...]:
    """Return (index, current mode, pending mode) of each GPU from `nvidia-smi --query-gpu=…`."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return tuple((int(row[0]), row[1], row[2]) for row in rows if len(row) == 3 and row[0].isdecimal())


def parse_instances(text: str) -> Mapping[int, tuple[str, ...]]:
    """Return GPU → profiles of its GPU instances, sorted, from the table of `nvidia-smi mig -lgi`."""
    found: dict[int, list[str]] = {}
    for gpu, profile, _ in _INSTANCE.findall(text):
        found.setdefault(int(gpu), []).append(profile)
    return {gpu: tuple(sorted(profiles)) for gpu, profiles in found.items()}


def incomplete(instances: str, compute: Completed) -> frozenset[int]:
    """Return the GPUs with a GPU instance that has no compute instance, from `nvidia-smi mig -lgi` and `-lci`."""
    found = set(_COMPUTE.findall(compute.stdout))
    if not found and compute.returncode != NOT_FOUND:  # that is no answer
        return frozenset()
    return frozenset(int(gpu) for gpu, _, instance in _INSTANCE.findall(instances) if (gpu, instance) not in found)


def parse_profiles(text: str) -> Mapping[int, Mapping[str, int]]:
    """Return GPU → profile → how many there is room for, from the table of `nvidia-smi mig -lgip`."""
    found: dict[int, dict[str, int]] = {}
    for gpu, profile, total in _PROFILE.findall(text):
        found.setdefault(int(gpu), {})[profile] = int(total)
    return found


DCGM_UNIT, DCGM_EXPORTER = "nvidia-dcgm.service", "nvidia-dcgm-exporter.service"
_DCGM_PROGRAM = "/usr/bin/nv-hostengine"


# NVIDIA's GRID driver for virtual GPUs: the daemon that takes their licence (vGPU Client Licensing User Guide), its
# settings, and the token's file.
GRIDD_CONFIG, GRIDD_TEMPLATE = "/etc/nvidia/gridd.conf", "/etc/nvidia/gridd.conf.template"
TOKEN = "/etc/nvidia/ClientConfigToken/gpuprov.tok"
GRIDD = "nvidia-gridd.service"
_PROGRAMS = {_DCGM_PROGRAM: (DCGM_UNIT, DCGM_EXPORTER), "/usr/bin/nvidia-gridd": (GRIDD,)}


@dataclass(frozen=True)
class ServiceFacts:
    """Which units of DCGM, and of the GRID driver, are enabled, and which are active."""

    enabled: tuple[str, ...] = ()
    active: tuple[str, ...] = ()


def gather_services(system: System) -> ServiceFacts:
    """Return the facts; two commands for each unit whose program is installed. Raises GpuprovError."""
    names = [name for program, units in _PROGRAMS.items() if system.exists(program) for name in units]
    verbs = ("is-enabled", "is-active")
    return ServiceFacts(*(tuple(one for one in names if is_active(system, one, verb)) for verb in verbs))


# PCI Code and ID Assignment Specification: 0680 is a bridge of another kind; NVIDIA's are its NVSwitches.
_BRIDGE_CLASS = "0x0680"
# From B200 on the switches hide behind network adapters, whose vital product data says so (NVIDIA's driver container).
_ADAPTERS, _SWITCH_MANAGEMENT = "/sys/class/infiniband", b"SW_MNG"
FABRIC_UNIT = "nvidia-fabricmanager.service"
FABRIC_PROGRAM = "nv-fabricmanager"
# Kernel modules that it needs before it starts.
FABRIC_MODULES = "/etc/modules-load.d/gpuprov-fabric.conf"


@dataclass(frozen=True)
class FabricFacts:
    """`switches`: bus ids of NVSwitches, or names of the adapters before them, which `nvlsm` has to manage (`managed`).

    `version`: of the fabric manager's program, "" if there is none; `active`, `enabled`: its unit. `rack`: the switches
    are a rack's, which IMEX uses; no fabric manager runs here. `hidden`: the evidence that the GPUs are a whole board's
    with switches, of which none is in sight; "" if there may be none. `masked`: its unit is, which only IMEX's may be.
    `silent`: the evidence that a command gave no answer, so that the rest is not known.
    """

    switches: tuple[str, ...] = ()
    managed: bool = False
    version: str = ""
    active: bool = False
    enabled: bool = False
    rack: bool = False
    hidden: str = ""
    masked: bool = False
    silent: str = ""


def gather_fabric(system: System, *, managed: bool | None = None) -> FabricFacts:
    """Return the facts; three commands, and none on a machine without switches.

    `managed`: the system is an image for machines with switches; whether adapters stand before them.
    """
    switches: tuple[str, ...] = ("to come",)
    fabrics: list[Fabric] = []
    if managed is None:
        fabrics = [fabric for one in own_ids(gather_gpus(system)) if (fabric := fabric_of(one, system.tables))]
        if any(not one.manager for one in fabrics):
            return FabricFacts(rack=True)
        adapters = tuple(name for name in system.list_directory(_ADAPTERS) if _manages_switches(system, name))
        switches, managed = (*of_nvidia(system, _BRIDGE_CLASS), *adapters), bool(adapters)
    if not switches:
        return FabricFacts(hidden=_hidden(system, fabrics))
    told = system.run((FABRIC_PROGRAM, "--version"), timeout=20)
    active, enabled = (system.run(("systemctl", verb, "--quiet", FABRIC_UNIT)) for verb in ("is-active", "is-enabled"))
    version, silent = parse_version(told.stdout + told.stderr), unanswered_evidence(told, active, enabled)
    return FabricFacts(switches, managed, version, active.ok, enabled.ok, silent=silent)


def _hidden(system: System, fabrics: Sequence[Fabric]) -> str:
    whole = next((one for one in fabrics if one.board and fabrics.count(one) >= one.board), None)
    if whole is None:
        return ""
    missing = [name for name in whole.modules if not system.exists(f"/sys/module/{name}")]
    loaded = f"; not loaded: {', '.join(missing)}" if missing else ""
    joined = counted(len(fabrics), "GPU")
    return f"{joined} that NVSwitches join; no bridge of NVIDIA's, no adapter in {_ADAPTERS}{loaded}"


def _manages_switches(system: System, adapter: str) -> bool:
    # Reading a card's vital product data may fail on a card that is busy with its firmware.
    with contextlib.suppress(OSError):
        return _SWITCH_MANAGEMENT in (system.read_bytes(f"{_ADAPTERS}/{adapter}/device/vpd") or b"")
    return False


IMEX_UNIT, IMEX_PROGRAM = "nvidia-imex.service", "/usr/bin/nvidia-imex"
IMEX_CONFIG, IMEX_NODES = "/etc/nvidia-imex/config.cfg", "/etc/nvidia-imex/nodes_config.cfg"
IMEX_FILES = (IMEX_CONFIG, IMEX_NODES, IMEX_OPTION)


def gather_imex(system: System) -> FabricFacts:
    """Return version and unit of IMEX, which is active too while it waits for other nodes; three commands if any."""
    if not system.exists(IMEX_PROGRAM):
        return FabricFacts()
    told = system.run((IMEX_PROGRAM, "--version"), timeout=20)
    state, enabled = (system.run(("systemctl", verb, IMEX_UNIT)) for verb in ("is-active", "is-enabled"))
    active, masked = state.stdout.strip() in ("active", "activating"), enabled.stdout.strip() == "masked"
    return FabricFacts(version=parse_version(told.stdout), active=active, enabled=enabled.ok, masked=masked,
                       silent=unanswered_evidence(told, state, enabled))  # fmt: skip


def parse_version(text: str) -> str:
    """Return the version in what `nv-fabricmanager --version` or `nvidia-imex --version` says, or nothing."""
    found = re.search(r"(?:Fabric Manager|IMEX) version is\s*:\s*(\d+(?:\.\d+)+)", text)
    return found[1] if found else ""
