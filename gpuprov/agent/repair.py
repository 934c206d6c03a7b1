"""Repair GPUs for `doctor --fix --allow`: what health's findings need, who is in the way, reset or reboot, the proof.

What must end for a reset, and which GPUs are reset together, is as nvidia-smi(1) has it. A record of each repair stays
on the host, with the findings before and after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence

from gpuprov.agent.context import RunContext
from gpuprov.agent.install import begin_reboot, leave_resume
from gpuprov.checks import health
from gpuprov.checks.accept import accept
from gpuprov.checks.engines import EngineTest
from gpuprov.core.places import REPAIRS
from gpuprov.core.system import System
from gpuprov.driver import running_driver
from gpuprov.driver.mig import DivideGpus
from gpuprov.driver.running_driver import Unloading, gather_running, start_again, start_all_again, still_held
from gpuprov.engines.containers import stop_command
from gpuprov.facts.boot import gather_reboot
from gpuprov.facts.driver import GpuHolder, RunningDriver, gather_holders, parse_cgroup
from gpuprov.facts.gpus import FABRIC_UNIT as FABRIC_MANAGER
from gpuprov.facts.gpus import gather_mig
from gpuprov.facts.host import HostFacts
from gpuprov.protocol.codec import WrongDataError, dump, load, parse
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, Stopped, os_errors
from gpuprov.protocol.events import ChangeDone, ChangeStarted, Event, Finished, HealthFound, Kept, Note, PlannedChange
from gpuprov.protocol.models import generation_of
from gpuprov.protocol.spec import IMAGE
from gpuprov.protocol.words import counted, one_line
from gpuprov.verify import verify

RESET, REBOOT, STEP = "reset", "reboot", "repair"
_RESET_SECONDS = 600.0
# Of the load after a repair.
_LOAD_MINUTES = 1
# From this generation on, GPUs that NVLink joins are reset one by one; with NVSwitches, if the fabric manager runs.
_SINGLY = 0x2080
_KMSG = "/dev/kmsg"
# GPUs come into the NVLink fabric, and a host into its IMEX domain, a while after a reset, and after a boot.
_JOINING, _JOINING_SECONDS = {"fabric-state", "fabric-manager-missing", "imex-missing"}, 120.0


@dataclass(frozen=True)
class Record:
    """A repair. `outcome`: ok, degraded, unfit or failed; "" while it is under way. `gpus`: UUIDs; `at`: epoch."""

    action: str
    at: int
    boot_id: str
    gpus: tuple[str, ...]
    ended: tuple[str, ...]
    before: tuple[HealthFound, ...]
    after: tuple[HealthFound, ...] = ()
    outcome: str = ""
    problem: str = ""
    format: int = 1


@dataclass(frozen=True)
class Users:
    """Who has a GPU open: docker's containers, units in the order of stopping, and other processes."""

    containers: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    processes: tuple[GpuHolder, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, for people."""
        return (
            *(f"container {name}" for name in self.containers), *self.units,
            *(f"process {one.pid} ({one.command})" for one in self.processes),
        )  # fmt: skip


@dataclass(frozen=True)
class Repair:
    """What a host needs: an `action`, or "" for nothing; `found`: all of health's findings, `because`: which need it.

    `gpus`: readings of the GPUs to reset; `whole`: all GPUs at once. `refused`: why it is not done now.
    """

    action: str = ""
    found: tuple[HealthFound, ...] = ()
    because: tuple[HealthFound, ...] = ()
    gpus: tuple[Mapping[str, str], ...] = ()
    whole: bool = False
    users: Users = field(default_factory=Users)
    refused: str = ""

    @property
    def minors(self) -> tuple[int, ...]:
        """The GPUs' device nodes; empty, for all, if one is not known."""
        told = [gpu.get("minor_number", "") for gpu in self.gpus]
        return tuple(map(int, told)) if all(one.isdecimal() for one in told) else ()

    @property
    def summary(self) -> str:
        """The action in one sentence, with its reasons and everything that it ends."""
        gpus = ", ".join(sorted({f"GPU {x.gpu}" for x in self.because}))
        which = "all GPUs, which NVLink joins" if self.whole else gpus
        what = f"reset {which}" if self.action == RESET else "reboot"
        reasons = "; ".join(dict.fromkeys(f"GPU {x.gpu}: {x.what}" if x.gpu else x.what for x in self.because))
        ends = f"; ends {', '.join(self.users.names)}" if self.users.names else ""
        return f"{what} ({reasons}){ends}"

    @property
    def changes(self) -> tuple[PlannedChange, ...]:
        """The change to announce; none for a repair that is not done."""
        return (PlannedChange(STEP, STEP, self.summary, disturbs=True),) if self.action and not self.refused else ()


def repair_of(one: HealthFound) -> str:
    """Return what a finding needs: reset, reboot or "" for nothing that gpuprov can do."""
    table = health.rules()
    if one.rule.startswith("xid-"):
        # The driver may ask for nothing any more: then the finding is a warning.
        action = health.xid_rows()[int(one.rule[4:])]["action"] if one.verdict == "unfit" else ""
        wanted = table["repair"].get(action, "")
    else:
        wanted = next((row.get("repair", "") for row in table["rules"] if row["rule"] == one.rule), "")
    # A GPU that nvidia-smi does not show can't be named to it.
    return REBOOT if wanted and not one.gpu else str(wanted)


def decide(x: health.Readings, allow: Collection[str], rebooted_for: Iterable[HealthFound] = ()) -> Repair:
    """Return the repair that the readings need, without its users. Pure.

    `rebooted_for`: why this run has rebooted the host, which it does not do twice, whatever it finds then.
    """
    found = health.judge(x)
    because = tuple(one for one in found if repair_of(one))
    if not because:
        return Repair(found=found)
    needed = {repair_of(one) for one in because}
    action = REBOOT if REBOOT in needed or (RESET not in allow and REBOOT in allow) else RESET
    refused = "" if action in allow else f"needs --allow {action}"
    before = {(one.rule, one.uuid) for one in rebooted_for}
    if before and (action == REBOOT or before & {(one.rule, one.uuid) for one in because}):
        refused = "a reboot has not changed that"
    if action == REBOOT:
        return Repair(action, found, because, refused=refused)
    wanted = tuple(gpu for number, gpu in enumerate(x.gpus) if str(number) in {one.gpu for one in because})
    whole = len(x.gpus) > 1 and any(_needs_others(gpu, x) for gpu in wanted)
    return Repair(action, found, because, x.gpus if whole else wanted, whole, refused=refused)


def _needs_others(gpu: Mapping[str, str], x: health.Readings) -> bool:
    joined = any(gpu.get(name, "0") not in ("0", "") for name in ("nvlink/active", "nvlink/expected"))
    device = gpu.get("pci/pci_device_id", "")[:4]
    known = generation_of(device, x.tables)
    old = known is not None and (int(device, 16) < _SINGLY or known.name == "Turing")
    return joined and (old or (bool(x.fabric.switches) and not x.fabric.active))


def plan(run: RunContext, facts: HostFacts, earlier: Record | None = None) -> Repair:
    """Return the repair that this host needs now, with everything that it ends; `earlier`: one that a reboot ended."""
    if run.spec.target == IMAGE:
        return Repair()
    rebooted_for = earlier.before if earlier is not None and earlier.action == REBOOT else ()
    wanted = decide(health.read(run.system, run.sink), run.request.allow, rebooted_for)
    if not wanted.action:
        return wanted
    if facts.kernel.container:
        return replace(wanted, refused=f"GPUs and kernel belong to the host of this {facts.kernel.container} container")
    running = gather_running(run.system, facts)
    users = _users(run.system, running, wanted)
    if wanted.action == REBOOT:
        return replace(wanted, users=replace(users, containers=facts.docker.running_containers, units=()))
    own, _ = parse_cgroup(run.system.read_text(f"/proc/{run.system.own_pid()}/cgroup") or "")
    refused = f"gpuprov itself runs in {own}, which it would stop" if own in users.units else ""
    if once := [name for name in users.containers if name in running.single_use]:
        refused = f"docker removes (--rm), or swarm replaces, what is stopped; end it before: {stop_command(once)}"
    if running.display_manager in users.units and not run.spec.stop_display_manager:
        refused = "gpuprov_stop_display_manager is not true"
    return replace(wanted, users=users, refused=wanted.refused or refused)


def _users(system: System, running: RunningDriver, wanted: Repair) -> Users:
    # To stop a user's manager would end all that this user runs.
    found = gather_holders(system, minors=wanted.minors)
    holders = [replace(one, unit="") if one.unit.startswith("user@") else one for one in found]
    containers = {key: name for key, name in running.containers.items() if key in {one.container for one in holders}}
    # Without it, GPUs behind NVSwitches can't be reset one by one.
    units = {one.unit for one in holders} - {"", *((FABRIC_MANAGER,) if not wanted.whole else ())}
    ordered = sorted(units, key=lambda unit: running.units.index(unit) if unit in running.units else -1)
    others = (one for one in holders if not one.unit and one.container not in containers)
    return Users(tuple(sorted(containers.values())), tuple(ordered), tuple(others))


def carry_out(run: RunContext, wanted: Repair) -> Finished | tuple[tuple[HealthFound, ...], tuple[Problem, ...]]:
    """Do the repair, judge the host again, and return the findings and what went wrong. Raises Stopped.

    Returns a Finished event if the host reboots now: the caller repeats the request then.
    """
    if run.stop_requested():
        raise Stopped([wanted.summary])
    system, begun = run.system, run.system.now()
    run.sink(ChangeStarted(STEP, wanted.summary, 1, 1))
    boot = gather_reboot(system).boot_id
    uuids = tuple(gpu.get("uuid", "") for gpu in wanted.gpus)
    record = Record(wanted.action, system.clock(), boot, uuids, wanted.users.names, wanted.found)
    path = _keep(system, record)
    run.note(f"the record of this repair: {path}")
    if wanted.action == REBOOT:
        if not run.request.caller_returns:
            leave_resume(system, run.request)
        begin_reboot(system)
        run.sink(ChangeDone(STEP, round(system.now() - begun, 3)))
        return Finished(int(ExitCode.REBOOT_NEEDED), 1, summary="rebooting; GPUs are judged after it", left_boot=boot)
    problems: tuple[Problem, ...] = ()
    try:
        _reset(run, wanted)
    except GpuprovError as error:
        problems = error.problems
        start_all_again(system, run.tell)
    else:
        run.sink(ChangeDone(STEP, round(system.now() - begun, 3)))
    found = _prove(run)
    if others := [unit for unit in wanted.users.units if unit not in running_driver.UNITS]:
        run.note(f"the GPUs were not loaded after the repair: {', '.join(others)} runs on them again", "warning")
    elif not problems and health.verdict_of(found) != "unfit":
        found = _load(run, found)
    verdict = health.verdict_of(found)
    if verdict != "unfit":
        start_all_again(system, run.tell)
    elif not problems and wanted.users.containers:
        names = " ".join(wanted.users.containers)
        problems = (Problem(f"stopped for the reset, and not started again: {names}", "", f"docker start {names}"),)
    outcome = "failed" if problems and verdict != "unfit" else verdict
    _keep(system, replace(record, after=found, outcome=outcome, problem="\n".join(map(str, problems))), path)
    return found, problems


def _reset(run: RunContext, wanted: Repair) -> None:
    """End the users that the plan has named, and reset the GPUs. Raises GpuprovError if that is not possible."""
    system, users = run.system, wanted.users
    running_driver.stop_users(system, Unloading(units=users.units, containers=users.containers), run.tell)
    named = {(one.pid, one.command) for one in users.processes}
    pids = [str(one.pid) for one in gather_holders(system, minors=wanted.minors) if (one.pid, one.command) in named]
    if pids:
        run.note(f"ending {', '.join(f'process {pid}' for pid in pids)}")
        system.run(("kill", *pids))
    left = [one for one in still_held(system, minors=wanted.minors) if wanted.whole or one.unit != FABRIC_MANAGER]
    if left:
        step = f"end them: {running_driver.end_command(left)}; then run the same command again"
        raise GpuprovError("a GPU is still in use, so it was not reset", "\n".join(map(str, left)), step)
    addresses = [gpu.get("pci/pci_bus_id", "") for gpu in wanted.gpus]
    gpus = [x for x in gather_mig(system) if wanted.whole or str(x.index) in {one.gpu for one in wanted.because}]
    layout = {str(one.index): ",".join(one.instances) for one in gpus if one.current == "Enabled"}
    which = () if wanted.whole else ("-i", ",".join(addresses))
    run.note(f"resetting {'all GPUs' if wanted.whole else ', '.join(addresses)}")
    system.require(("nvidia-smi", "--gpu-reset", *which), "nvidia-smi refuses the reset",
                   "--allow reboot, if it may reboot the host", timeout=_RESET_SECONDS)  # fmt: skip
    status = system.status(_KMSG)
    if status is not None and status.kind == "char":
        # Xids before it are settled. Not every driver tells of a reset in the log.
        for address in addresses:
            system.run(("tee", _KMSG), stdin=f"<5>gpuprov: gpu reset (PCI:{health.bus_of(address)})\n".encode())
    # A reset removes the MIG devices.
    DivideGpus.undo(system, {"before": layout}, None)
    start_again(system, run.tell)
    # A reset forgets it where no nvidia-persistenced keeps it.
    if lasting := [gpu["pci/pci_bus_id"] for gpu in wanted.gpus if gpu.get("persistence_mode") == "Enabled"]:
        system.run(("nvidia-smi", "-i", ",".join(lasting), "-pm", "1"))


def _wait_for_fabric(system: System) -> None:
    deadline = system.now() + _JOINING_SECONDS
    while _JOINING & {x.rule for x in health.judge(health.read(system, lambda _: None))} and system.now() < deadline:
        system.sleep(5.0)


def _prove(run: RunContext) -> tuple[HealthFound, ...]:
    """Judge the host after a repair, and report it; return the findings."""
    found = Kept(HealthFound, run.sink)
    _wait_for_fabric(run.system)
    health.examine(run.system, found)
    return tuple(found.events)


def _load(run: RunContext, found: tuple[HealthFound, ...]) -> tuple[HealthFound, ...]:
    """Load the GPUs for a minute as `gpuprov accept` does; return the findings with those of the load.

    Not while a program computes on a GPU of the host, nor without an engine: a note says so.
    """
    known = {(one.rule, one.gpu): one for one in found}

    def note(event: Event) -> None:
        # The checks and figures of a whole `accept` are no part of a repair's report.
        new = isinstance(event, HealthFound) and (event.rule, event.gpu) not in known
        if isinstance(event, HealthFound):
            known.setdefault((event.rule, event.gpu), event)
        if new or isinstance(event, Note):
            run.sink(event)

    spec = replace(run.spec, accept_commands=())

    def look(tests: list[EngineTest]) -> bool:
        # What else is wrong (headers for the next kernel, say) is no fault of a GPU, and the doctor's to tell.
        verify(run.system, spec, note, tests=tests)
        return True

    try:
        accept(run.system, spec, note, _LOAD_MINUTES, look)
    except GpuprovError as error:
        run.note(f"the GPUs were not loaded after the repair: {one_line(error)}", "warning")
    return tuple(known.values())


def load_after_reboot(
    run: RunContext, earlier: Record | None, found: tuple[HealthFound, ...]
) -> tuple[HealthFound, ...]:
    """Load the GPUs if a repair by reboot has just ended, as after a reset; return the findings, kept in its record.

    Containers start by themselves in a boot: those that compute keep their GPUs, and a note names them.
    """
    if earlier is None or not run.request.allow or health.verdict_of(found) == "unfit":
        return found
    path = f"{REPAIRS}/{_names(run.system)[-1]}"
    # A run that is cut off meanwhile leaves the load to the next one.
    _keep(run.system, replace(earlier, outcome=""), path)
    loaded = _load(run, found)
    _keep(run.system, replace(earlier, after=loaded, outcome=health.verdict_of(loaded)), path)
    return loaded


def judged(run: RunContext, finished: Finished, found: Sequence[HealthFound], problems: Sequence[Problem]) -> Finished:
    """Return the doctor's last event with health's verdict, which counts once a repair is allowed."""
    if not run.request.allow:
        return finished
    verdict = health.verdict_of(found)
    code = finished.exit_code
    if verdict == "unfit":
        code = int(ExitCode.UNFIT)
    elif problems:
        code = int(ExitCode.FAILED)
    elif verdict == "degraded" and code == ExitCode.DONE:
        code = int(ExitCode.DEGRADED)
    return replace(finished, exit_code=code, problems=(*problems, *health.problems_of(found), *finished.problems),
                   summary=f"{finished.summary}; GPUs: {verdict}")  # fmt: skip


# -- records -----------------------------------------------------------------------------------------------------------


def _keep(system: System, record: Record, path: str = "") -> str:
    """Write a record, a new one without `path`; return its path. Raises GpuprovError where the disk takes none."""
    with os_errors("the record of this repair can't be written", f"ls -ld {REPAIRS}"):
        if not path:
            system.make_directory(REPAIRS, 0o700)
            path = f"{REPAIRS}/{max([int(name[:-5]) for name in _names(system)], default=0) + 1:08d}.json"
        system.write(path, f"{dump(record)}\n".encode(), mode=0o600)
    return path


def _names(system: System) -> list[str]:
    return sorted(name for name in system.list_directory(REPAIRS) if name.endswith(".json") and name[:-5].isdecimal())


def settle(run: RunContext) -> Record | None:
    """End the record of a repair that a reboot or a kill has cut off, and start what it had stopped; return it."""
    system, names = run.system, _names(run.system)
    record = None
    if names:
        with contextlib.suppress(WrongDataError, ValueError):
            record = load(Record, parse(system.read_text(f"{REPAIRS}/{names[-1]}") or ""), trusted=True)
    if record is None or record.outcome:
        return None
    over = record.action == REBOOT and record.boot_id != gather_reboot(system).boot_id
    if not over:
        gpus = counted(len(record.gpus), "GPU")
        run.note(f"an earlier run was interrupted in a {record.action} of {gpus}", "warning")
    start_all_again(system, run.tell)
    _wait_for_fabric(system)
    found = health.judge(health.read(system, run.sink))
    record = replace(record, after=found, outcome=health.verdict_of(found))
    _keep(system, record, f"{REPAIRS}/{names[-1]}")
    return record if over else None
