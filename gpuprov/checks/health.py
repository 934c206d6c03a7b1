"""Judge whether each GPU, and the host, is fit for work. `judge` is pure; `examine` reads, and changes nothing.

The rules are rows of protocol/health.json and protocol/xids.json: a place in the report of nvidia-smi, what its value
says, the verdict, a sentence, and the next command.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpuprov.cdi.discover import is_excluded
from gpuprov.cdi.nvml import GpuAnswer, ask, sysfs_bus_id
from gpuprov.checks import memory
from gpuprov.checks.smi import exit_code, exits, parse_smi, per_gpu
from gpuprov.core.commands import NOT_FOUND, TIMED_OUT, Completed, unanswered_evidence
from gpuprov.core.system import System
from gpuprov.driver import fabric_manager
from gpuprov.facts.gpus import FabricFacts, gather_fabric
from gpuprov.machine.machine import Kernel, gather_kernel
from gpuprov.machine.pci import FOR_GUESTS, gather_gpus
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, Stopped
from gpuprov.protocol.events import CheckDone, Finished, HealthFound, Note, Sink, Verdict
from gpuprov.protocol.models import model_of
from gpuprov.protocol.tables import HEALTH, PACKAGED, XIDS, Tables, packaged
from gpuprov.protocol.words import counted, one_line

# Of each command; a GPU that hangs lets nvidia-smi wait for ever.
SECONDS = 20.0
# NVML's nvmlDeviceGpuRecoveryAction_t, as newer releases of nvidia-smi name it.
_ACTIONS = ("None", "Reset", "Reboot", "Drain P2P", "Drain and Reset", "Recover IMEX domain", "Bus Reset",
            "System Reboot")  # fmt: skip
_ACTION, _USED, _WITHOUT_PROCESS = "gpu_recovery_action", "fb_memory_usage/used", "memory without a process"
# At the line's begin: users name their processes and groups, which stand in other lines. A driver that is loaded again
# initialises the GPUs.
_XID = re.compile(
    r"(?:<\d+>)?(?:\[[^\]]*\] *)*(?:(?:\S+ \S+ kernel: )?NVRM: (?:loading NVIDIA UNIX|"
    r"Xid \(PCI:(?P<bus>[0-9a-f:]+)[^)]*\): (?P<number>\d{1,9}),? *(?P<text>.*))|"
    r"(?:\S+ \S+ )?gpuprov: gpu reset \(PCI:(?P<reset>[0-9a-f:]+)\))", re.IGNORECASE
)  # fmt: skip
# Xid 154 says each change of the recovery action.
_ACTION_XID, _NEW_ACTION = 154, re.compile(r"changed from .* to 0x\w+ \((?P<action>[^)]+)\)")
# NVLink 5: `145, RLW_REMAP Nonfatal XC0 i0 Link 02 (…)`.
_NONFATAL = re.compile(r"\): 1(?:4[4-9]|50), \w+ Nonfatal ")
# nvidia-smi has told everything, and warns of one GPU's infoROM.
_CORRUPT_INFOROM, _REPORT = 14, re.compile(r"<\?xml.*</nvidia_smi_log>", re.DOTALL)
_NUMBER, _LONGEST_BUS_ID, _LONGEST_STATE = re.compile(r"-?\d{1,18}"), 32, 100


@dataclass(frozen=True)
class Readings:
    """What was read. `gpus`: path → text of each GPU in `nvidia-smi -q -x`, with what NVML and sysfs add.

    `smi`: the command, if it gave no report. `on_bus`: GPUs on the PCI bus that the driver has. `lost`: remembered
    GPUs that are missing. `imex_down`: nvidia-imex is enabled, and does not run, or says that it is not ready.
    """

    gpus: tuple[Mapping[str, str], ...] = ()
    driver: str = ""
    smi: Completed | None = None
    on_bus: int = 0
    lost: Problem | None = None
    fabric: FabricFacts = field(default_factory=FabricFacts)
    imex_down: str = ""
    kernel_log: tuple[str, ...] = ()
    tables: Tables = PACKAGED


def rules() -> Mapping[str, Any]:
    """Return the table: `rules` of a GPU, those of the `host`, the verdicts of `xids` by their actions."""
    table: Mapping[str, Any] = packaged(HEALTH)
    return table


def words(rule: str) -> Mapping[str, str]:
    """Return the meaning and the next step of a rule for the doctor, with {places} for values; nothing if unknown."""
    for row in rules()["rules"]:
        if row["rule"] == rule:
            return {"meaning": f"GPU {{shown}}: {row['what']}", "next_step": row["next"]}
    row = rules()["host"].get(rule, {})
    return {"meaning": row["what"], "next_step": row["next"]} if "what" in row else {}


def next_step(name: str, gpu: object = "N") -> str:
    """Return the command of a row's `next`, which may be the name of an Xid's action."""
    return str(packaged(XIDS)["actions"].get(name, name)).replace("{gpu}", str(gpu))


def judge(x: Readings) -> tuple[HealthFound, ...]:
    """Return what is wrong, the worst first; nothing for a healthy host. Pure."""
    asked, xids = _xids(x)
    # What the kernel log says of the driver's verdict counts where neither NVML nor nvidia-smi has a word of the table.
    gpus = [gpu if gpu.get(_ACTION) in _ACTIONS or _bus(gpu) not in asked else {**gpu, _ACTION: asked[_bus(gpu)]}
            for gpu in x.gpus]  # fmt: skip
    found = [*_of_host(x), *(one for number, gpu in enumerate(gpus) for one in _of_gpu(number, gpu))]
    found += _of_xids(xids, gpus)
    return tuple(sorted(found, key=lambda one: one.verdict != "unfit"))


def _of_host(x: Readings) -> Iterator[HealthFound]:
    if x.smi is not None:
        known = exits().get(exit_code(x.smi.returncode))
        rule = {_CORRUPT_INFOROM: "inforom", TIMED_OUT: "nvidia-smi-hangs"}.get(x.smi.returncode, "no-report")
        yield _host(rule, x.smi.evidence(3), known.what if known else "", known.next_step if known else "")
    if x.lost is not None:
        yield _host("gpus-lost", x.lost.evidence, x.lost.what, x.lost.next_step)
    elif x.gpus and len(x.gpus) < x.on_bus:
        seen = f"on the PCI bus with the driver nvidia: {x.on_bus}"
        yield _host("gpus-fewer", seen, shown=len(x.gpus), gpus=counted(x.on_bus, "GPU"))
    # Where no switch is in sight, the state of the fabric tells.
    if not x.fabric.silent and (problem := fabric_manager.fault(replace(x.fabric, hidden=""), x.driver)):
        rule = "missing" if x.fabric.version in ("", x.driver) else "version"
        yield _host(f"fabric-manager-{rule}", problem.evidence, problem.what, problem.next_step)
    if x.imex_down:
        yield _host("imex-missing", x.imex_down)
    cliques = [f"{gpu.get('fabric/clusterUuid')}/{gpu.get('fabric/cliqueId')}" for gpu in x.gpus
               if gpu.get("fabric/state") == "Completed"]  # fmt: skip
    if len(set(cliques)) > 1:
        yield _host("cliques", "cluster/clique of each GPU: " + ", ".join(cliques))


def _host(rule: str, evidence: str, what: str = "", step: str = "", **values: object) -> HealthFound:
    row = rules()["host"][rule]
    sentence = what or row["what"].format(**values)
    return HealthFound(row["verdict"], rule, "", "", sentence, evidence, step or row["next"])


def _of_gpu(number: int, gpu: Mapping[str, str]) -> Iterator[HealthFound]:
    names: set[str] = set()
    for row in rules()["rules"]:
        if names & {row["rule"], *row.get("unless", ())}:
            continue
        if seen := _evidence(row, gpu):
            names.add(row["rule"])
            yield _found(row["verdict"], row["rule"], number, gpu, row["what"], seen, row["next"])


def _found(
    verdict: Verdict, rule: str, number: int, gpu: Mapping[str, str], what: str, seen: str, step: str
) -> HealthFound:
    evidence = f"{gpu.get('uuid', '')} at {_bus(gpu)}: {seen}"
    return HealthFound(verdict, rule, str(number), gpu.get("uuid", ""), what, evidence, next_step(step, number))


def _evidence(row: Mapping[str, Any], gpu: Mapping[str, str]) -> str:
    """Return the readings that the row is about, "" if it does not match."""
    wanted = [(places, wish) for wish in ("when", "not") for places in row.get(wish, {}).items()]
    if any(bool(re.search(text, gpu.get(place, ""))) != (wish == "when") for (place, text), wish in wanted):
        return ""
    if "below" not in row:
        fits, matches = re.compile(row["place"]).fullmatch, re.compile(row["is"]).search
        seen = [place for place, text in gpu.items() if fits(place) and matches(text)]
    else:
        seen = [row["place"], *row["below"]]
        value, *limits = (_number(gpu.get(place)) for place in seen)
        known = [limit for limit in limits if limit is not None]
        if value is None or len(known) < len(limits) or value >= min(known):
            return ""
    return ", ".join(f"{place}: {gpu[place]}" for place in seen)


def _number(text: str | None) -> int | None:
    return int(found[0]) if (found := _NUMBER.match(text or "")) else None


def _bus(gpu: Mapping[str, str]) -> str:
    return bus_of(gpu.get("pci/pci_bus_id", ""))


def bus_of(address: str) -> str:
    """Return an address of nvidia-smi as the kernel log has it: 0000:1b:00."""
    return sysfs_bus_id(address).partition(".")[0]


@functools.cache
def xid_rows() -> Mapping[int, Mapping[str, str]]:
    """Return number → row of the table of Xids."""
    found = {}
    for row in (*packaged(XIDS)["xids"], *packaged(XIDS)["named"]):
        found.update(dict.fromkeys(_numbers(row["xid"]), row))
    return found


def _numbers(xids: str) -> range:
    first, _, last = xids.partition("-")
    return range(int(first), int(last or first) + 1)


def last_xid(lines: Iterable[str], xids: str) -> tuple[Mapping[str, str], tuple[str]] | None:
    """Return the last line of the kernel log with one of these Xids (`79`, `119-120`), and its `bus` id."""
    found = None
    for line in lines:
        match = _XID.match(line)
        if match and match["bus"] and int(match["number"]) in _numbers(xids):
            found = {"bus": match["bus"]}, (line,)
    return found


def _xids(x: Readings) -> tuple[Mapping[str, str], Mapping[tuple[str, int], str]]:
    """Return the recovery action of each bus id, and the last line of each Xid since the GPU was last well."""
    asked: dict[str, str] = {}
    lines: dict[tuple[str, int], str] = {}
    for line in x.kernel_log:
        match = _XID.match(line)
        if match is None:
            continue
        if match["reset"]:
            asked.pop(gone := sysfs_bus_id(match["reset"]), None)
            lines = {key: one for key, one in lines.items() if key[0] != gone}
            continue
        if match["bus"] is None:
            asked, lines = {there: action for there, action in asked.items() if "Reboot" in action}, {}
            continue
        bus, number, new = sysfs_bus_id(match["bus"]), int(match["number"]), _NEW_ACTION.search(match["text"])
        if number != _ACTION_XID or new is None:
            lines[bus, number] = line.strip()
            continue
        asked[bus] = new["action"]
        if new["action"] == "None":
            lines = {key: one for key, one in lines.items() if key[0] != bus}
    return asked, lines


def _of_xids(xids: Mapping[tuple[str, int], str], gpus: Iterable[Mapping[str, str]]) -> Iterator[HealthFound]:
    """Yield the findings of Xids. What is not fatal, or has the driver ask for nothing, is a warning."""
    there = {_bus(gpu): (number, gpu) for number, gpu in enumerate(gpus)}
    for (bus, xid), line in xids.items():
        row = xid_rows().get(xid)
        if row is None or rules()["xids"][row["action"]] == "ok":
            continue
        verdict: Verdict = rules()["xids"][row["action"]]
        number, gpu = there.get(bus, (-1, {}))
        if gpu.get(_ACTION) == "None" or _NONFATAL.search(line):
            verdict = "degraded"
        what = f"{row['what']} (Xid {xid})"
        if gpu:
            yield _found(verdict, f"xid-{xid}", number, gpu, what, f"the kernel log: {line}", row["action"])
        else:
            yield HealthFound(verdict, f"xid-{xid}", "", "", f"{what}, {bus}", line, next_step(row["action"]))


# -- reading ---------------------------------------------------------------------------------------------------------


def examine(system: System, sink: Sink, seconds: float = SECONDS) -> Finished:
    """Read the host, judge it, report each GPU and each finding, and return the final event."""
    x = read(system, sink, seconds)
    found = judge(x)
    for number, gpu in enumerate(x.gpus):
        ours = [one for one in found if one.gpu == str(number)]
        name, said = f"GPU {number}", ", ".join(f"{one.verdict}: {one.rule}" for one in ours)
        shown = f"{gpu.get('product_name', '')} at {_bus(gpu)}"
        unfit = any(one.verdict == "unfit" for one in ours)
        sink(CheckDone(name, "failed", reason=said) if unfit else CheckDone(name, "ok", said or shown))
    for one in found:
        sink(one)
    return concluded(found, str(len(x.gpus)))


def verdict_of(found: Iterable[HealthFound]) -> str:
    """Return the worst verdict, ok for none."""
    return min((one.verdict for one in found), key=("unfit", "degraded").index, default="ok")


def concluded(found: Sequence[HealthFound], gpus: str) -> Finished:
    """Return the final event for these findings on a host with so many GPUs."""
    worst = verdict_of(found)
    code = {"ok": ExitCode.DONE, "degraded": ExitCode.DEGRADED, "unfit": ExitCode.UNFIT}[worst]
    seen = counted(len(found), "finding") if found else counted(int(gpus or 0), "GPU")
    return Finished(int(code), problems=tuple(problems_of(found)), summary=f"{worst}: {seen}", versions={"gpus": gpus})


def problems_of(found: Iterable[HealthFound]) -> Iterator[Problem]:
    """Yield each trouble once, with all GPUs that have it."""
    alike: dict[tuple[str, str], list[HealthFound]] = {}
    for one in found:
        alike.setdefault((one.verdict, one.what), []).append(one)
    for (verdict, what), ours in alike.items():
        gpus = ", ".join(one.gpu for one in ours if one.gpu)
        evidence = "\n".join(one.evidence for one in ours)
        step = ours[0].next_step.replace(f"-i {ours[0].gpu} ", f"-i {gpus.replace(' ', '')} ")
        yield Problem(f"{verdict}: {f'GPU {gpus}: ' if gpus else ''}{what}", evidence, step)


def read(system: System, sink: Sink, seconds: float = SECONDS) -> Readings:
    """Return the readings of this host. Notes tell what a user without root's rights can't read."""
    bus, kernel = [gpu for gpu in gather_gpus(system) if gpu.driver not in FOR_GUESTS], gather_kernel(system)
    remembered = memory.recall(system).memory if system.user_id() == 0 else None
    if not bus and remembered is None and not system.which("nvidia-smi"):
        return Readings()
    answers: dict[str, GpuAnswer] = {}
    # A System notices once that it is to stop; here two are to notice it.
    second = copy.copy(system)

    def ask_nvml() -> None:
        with contextlib.suppress(Stopped):
            answers.update(ask(second, "libnvidia-ml.so.1", seconds)[0])

    child = threading.Thread(target=ask_nvml, daemon=True)
    child.start()
    smi = system.run(("nvidia-smi", "-q", "-x"), timeout=seconds)
    child.join(seconds)
    report = None
    if smi.ok or smi.returncode == _CORRUPT_INFOROM:
        try:
            # The warning may stand before the report or behind it.
            text = _REPORT.search(smi.stdout)
            report = parse_smi(text[0] if text else smi.stdout)
        except GpuprovError:
            smi = Completed(smi.argv, 255, smi.stdout)
    gpus = tuple(_completed(system, kernel, gpu, answers) for gpu in per_gpu(smi.stdout)) if report else ()
    # In a container the switches are the host's, and /sys shows GPUs that are not passed to it.
    fabric = FabricFacts() if kernel.container else gather_fabric(system)
    if fabric.silent:
        sink(_unknown("the fabric manager serves the GPUs", fabric.silent))
    # A machine without GPUs may have the programs of its fleet.
    is_expected = bool(bus) or remembered is not None or kernel.wsl
    return Readings(
        with_expected_links(gpus, remembered.gpus if remembered else (), system.tables, switches=bool(fabric.switches)),
        report.driver if report else "",
        smi if is_expected and not smi.ok else None,
        0 if kernel.container else sum(gpu.driver == "nvidia" and not is_excluded(system, gpu.bus_id) for gpu in bus),
        memory.lost_gpus(system, remembered, report) if remembered else None,
        fabric,
        _imex_down(system, sink),
        _kernel_log(system, sink),
        system.tables,
    )


def _completed(
    system: System, kernel: Kernel, gpu: Mapping[str, str], answers: Mapping[str, GpuAnswer]
) -> Mapping[str, str]:
    """Return a GPU's readings with what nvidia-smi does not tell, or this release of it."""
    bus_id = sysfs_bus_id(gpu.get("pci/pci_bus_id", "")[:_LONGEST_BUS_ID])
    extra = {f"sysfs/{name}": (system.read_text(f"/sys/bus/pci/devices/{bus_id}/{name}") or "").strip()
             for name in ("max_link_width", "../max_link_width")}  # fmt: skip
    answer = answers.get(bus_id, GpuAnswer())
    if answer.recovery_action is not None and answer.recovery_action < len(_ACTIONS):
        extra[_ACTION] = _ACTIONS[answer.recovery_action]
    if answer.links is not None:
        extra["nvlink/active"] = str(answer.links)
    # In a container, and in WSL, the processes of others do not show.
    if not any(place.startswith("processes/process_info") for place in gpu) and not (kernel.container or kernel.wsl):
        extra[_WITHOUT_PROCESS] = gpu.get(_USED, "")
    return {**gpu, **extra}


def with_expected_links(
    gpus: tuple[Mapping[str, str], ...], remembered: Iterable[memory.Gpu], tables: Tables, *, switches: bool
) -> tuple[Mapping[str, str], ...]:
    """Return the readings with the NVLinks that each GPU has had, or that its model has where GPUs are connected."""
    connected = len(gpus) > 1 and (switches or any((_number(gpu.get("nvlink/active")) or 0) for gpu in gpus))
    before = {one.uuid: one.links for one in remembered}

    def expected(gpu: Mapping[str, str]) -> int:
        # MIG turns off a GPU's links, and those of GPUs that are joined to it without a switch.
        if any(one.get("mig_mode/current_mig") == "Enabled" for one in ((gpu,) if switches else gpus)):
            return 0
        model = model_of(gpu.get("pci/pci_device_id", "")[:4].lower(), tables)
        return max(before.get(gpu.get("uuid", ""), 0), model.links if model and connected else 0)

    return tuple({**gpu, "nvlink/expected": str(expected(gpu))} for gpu in gpus)


def _imex_down(system: System, sink: Sink) -> str:
    unit = "nvidia-imex.service"
    enabled = system.run(("systemctl", "is-enabled", "--quiet", unit))
    state = system.run(("systemctl", "is-active", unit)) if enabled.ok else enabled
    # It may still wait for the other nodes of its domain.
    domain = system.run(("nvidia-imex-ctl", "-q"), timeout=SECONDS) if state.ok else state
    if silent := unanswered_evidence(domain):
        sink(_unknown("IMEX serves its domain", silent))
    elif enabled.ok and not state.ok:
        return f"systemctl is-active {unit}: {state.stdout.strip()}"
    elif domain.ok and domain.stdout.strip() != "READY":
        return f"nvidia-imex-ctl -q: {one_line(domain.stdout)[:_LONGEST_STATE] or '(silent)'}"
    return ""


def _unknown(what: str, seen: str) -> Note:
    return Note(f"whether {what} is not known: {seen}", "warning")


def _kernel_log(system: System, sink: Sink) -> tuple[str, ...]:
    """Return the lines since this boot that tell an Xid; a full buffer has lost the oldest, which the journal keeps."""
    done = system.run(("dmesg",), timeout=SECONDS) if system.which("dmesg") else Completed(("dmesg",), NOT_FOUND)
    lines = done.stdout.splitlines() if done.ok else []
    if not lines or not re.match(r"\[ *0\.", lines[0]):
        journal = ("journalctl", "--dmesg", "--boot", "--no-pager", "--output=short-iso",
                   "--grep=NVRM: (Xid|loading)|^gpu reset ")  # fmt: skip
        told = system.run(journal, timeout=SECONDS) if system.which("journalctl") else done
        # Without a match it exits 1; without the right to read it says so.
        if not done.ok and (told.returncode > 1 or told.stderr.strip()):
            sink(Note("the kernel log was not read, so Xids are unknown: run it as root", "warning"))
        lines = [*(told.stdout.splitlines() if told.ok else ()), *lines]
    return tuple(line for line in lines if _XID.match(line))
