"""The installation: resume what was interrupted, resolve the spec, plan, apply, look again; and its dry run."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import gpuprov
from gpuprov.agent.context import RunContext, devices_to_lose, keep_devices
from gpuprov.boot.prepare import content_of
from gpuprov.boot.reboot import Reboot, forget_asked
from gpuprov.core.apply import apply_changes, obstacles, resume_run, undo_disturbs
from gpuprov.core.changes import NextAction
from gpuprov.core.commands import COMMAND_ENVIRONMENT, command_environment
from gpuprov.core.download import unreachable
from gpuprov.core.journal import STATE_DIRECTORY, Journal, journal_for, read_runs
from gpuprov.core.system import System
from gpuprov.core.units import daemon_reload
from gpuprov.driver import recommended
from gpuprov.driver.recommended import UNCHOSEN
from gpuprov.facts.boot import UNITS, WANTS
from gpuprov.facts.gpus import mig_layout
from gpuprov.facts.host import HostFacts
from gpuprov.facts.watch import OFF, gather_watch
from gpuprov.packages.interface import wait_until_free
from gpuprov.packages.keys import InstallKey, InstallRpmKey
from gpuprov.packages.sources import dns_problem
from gpuprov.plan import with_bundle
from gpuprov.plan.context import PlanContext
from gpuprov.plan.inputs import gather_for, resolve
from gpuprov.plan.steps import CHANGE_KINDS, Plan, StepChange, make_plan
from gpuprov.protocol.advisories import TOOLKIT_PACKAGE
from gpuprov.protocol.codec import dump
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, Stopped
from gpuprov.protocol.events import ChosenDriver, Finished, Planned, PlannedChange
from gpuprov.protocol.request import Request
from gpuprov.protocol.versions import version_numbers
from gpuprov.protocol.words import counted
from gpuprov.toolkit import InstallRuntime, WriteCdiSpecification, runtime_path, settings_problems

# A diff of at most this many lines is shown itself.
_SHORT_DIFF = 12
_OTHER_WAYS = {"distribution": "the distribution's own driver", "packages": "the driver in NVIDIA's repository"}
# The first plan, the plan after a reboot that was not needed, and one for what that brings.
_MOST_ROUNDS = 3
# They bring what a CDI specification describes.
_DRIVER_STEPS = ("driver", "boot", "device nodes")
# What resumes a run after a reboot.
UNIT = "gpuprov-resume.service"
_REQUEST, _VARIABLES = f"{STATE_DIRECTORY}/resume.json", f"{STATE_DIRECTORY}/resume.env"
# Time for the last event to reach the controller before the host goes down.
_REBOOT_DELAY_SECONDS = 3
# Puts the folder that holds this package, or the agent's archive, on the path.
_START = "import sys; sys.path.insert(0, sys.argv[1]); from gpuprov.agent.agent import main; main()"


@dataclass(frozen=True)
class _Progress:
    """State of an installation: the changes made so far, the latest facts, and the remaining plan."""

    made: int
    facts: HostFacts
    plan: Plan
    must_reboot: bool = False


def check(run: RunContext) -> Finished:
    """Report what an installation would change."""
    run = _resolved(run)
    facts = _gather(run)
    plan = _announced_plan(run, facts, _lost_gpus(run, facts))
    busy = facts.package_manager.lock_holder(run.system) if _needs_package_manager(plan) else ""
    if busy:
        run.note(f"{busy} holds the package manager's lock; a run waits up to {run.spec.lock_timeout} s for it")
    count = len(plan.changes)
    summary = f"{counted(count, 'change')} would be made" if count else "nothing to change"
    return Finished(int(ExitCode.DONE), changed=count, summary=summary, versions=versions_of(facts))


def install(run: RunContext) -> Finished:
    """Bring the host to the spec. Raises GpuprovError or Stopped; the journal then says what was done."""
    forget_resume(run.system)
    if run.request.require_drained and undo_disturbs(run.system, CHANGE_KINDS):
        what = "the host is not drained, and the undo of an earlier run's interrupted change disturbs containers"
        raise GpuprovError(what, "", "run the same command again: it drains the host first")
    interrupted = resume_run(run.system, CHANGE_KINDS, run.sink)
    with run.system.interruptible(run.stop_requested):
        run = _resolved(run)
        facts = _gather(run)
        lost = _lost_gpus(run, facts)
        plan = _announced_plan(run, facts, lost)
        _require_described_driver(plan)
        _require_runtime(run, plan)
        if _needs_package_manager(plan):
            # Before the first change: a run that fails here has changed nothing.
            wait_until_free(run.system, run.tell, facts.package_manager.lock_holder)
    end = _Progress(0, facts, plan)
    if plan.changes:
        keep_devices(run)
        journal = interrupted or journal_for(run.system, run.request.command, run.request.run_id)
        if interrupted is not None and run.request.run_id:
            journal.belongs_to(run.request.run_id)
        journal.chose(run.choice.driver, run.choice.version)
        with _end_when_failed(journal):
            end = _apply(run, journal, end)
        if end.must_reboot:
            return _reboot(run, end)
        _require_settled(end.plan)
        journal.end("done")
    elif interrupted is not None:
        interrupted.end("done")
    forget_asked(run.system)
    healthy = "the host is as it should be" if not lost else "no change brings a lost GPU back"
    summary = f"{counted(end.made, 'change')} made" if end.made else f"0 changes: {healthy}"
    if end.made and run.choice.why:
        summary += f"; {run.choice}"
    return Finished(int(ExitCode.DONE), changed=end.made, summary=summary, versions=versions_of(end.facts))


@contextlib.contextmanager
def _end_when_failed(journal: Journal) -> Iterator[None]:
    """Note in the journal that the run failed. A reboot is not a failure: what follows it belongs to the same run."""
    try:
        yield
    except (GpuprovError, Stopped) as error:
        if not isinstance(error, GpuprovError) or error.exit_code != ExitCode.REBOOT_NEEDED:
            # With a full disk the run stays open; the next run resumes it.
            with contextlib.suppress(GpuprovError):
                journal.end("failed")
        raise


def _resolved(run: RunContext) -> RunContext:
    """Return the run with its spec resolved and the driver's choice, which is reported if it is news."""
    manifest, spec, choice = run.bundle.manifest if run.bundle else None, run.spec, UNCHOSEN
    if recommended.is_open(spec) and not (manifest and manifest.driver_file):
        choice = recommended.choose(run.system, spec, run.request.fleet_drivers, upgrade=run.request.upgrade)
        spec = choice.of(spec)
        run.note(str(choice), "info" if choice.is_new else "debug")
        if choice.newer:
            kept = "is not the newest" if choice.is_new else "is kept"
            run.note(f"driver {choice.version} {kept}; `gpuprov install --upgrade` installs {choice.newer}")
    resolved = resolve(run.system, spec, manifest)
    # What `distribution` means on a host may be a kind of `packages`: recorded is what was asked for.
    version = resolved.driver_version if resolved.driver == recommended.RUNFILE else spec.driver_version
    return replace(run, spec=resolved, choice=replace(choice, driver=spec.driver, version=version))


def _gather(run: RunContext) -> HostFacts:
    request = run.request
    facts = gather_for(run.system, run.spec, run.bundle, request.steps, run.sink, upgrade=request.upgrade)
    if run.request.arguments.get("watch"):
        # The service of the watch sees /usr and /etc read-only (ProtectSystem=): do not test there whether the host is
        # writable.
        facts = replace(facts, read_only={})
    metrics = run.spec.watch_metrics if run.spec.watch != OFF else ""
    # The watch cannot reach a bundle; the stored request says whether one was used.
    bundled = bool(run.request.bundle) or bool(run.request.arguments.get("bundle"))
    extra = {"bundle": bundled, "tables": dict(run.request.tables)}
    return replace(facts, watch=gather_watch(run.system, metrics, run.request.agent, extra))


def _apply(run: RunContext, journal: Journal, now: _Progress) -> _Progress:
    """Make the changes of the plan, and of the plans that follow from a change that makes the rest stale."""
    for _ in range(_MOST_ROUNDS):
        changes = [item.change for item in now.plan.changes]
        # Each round unpacks what its own changes need.
        keeps = run.spec.keep_driver and now.facts.image is None
        with with_bundle.unpacked(run.system, run.bundle, changes, keep_driver=keeps):
            applied = apply_changes(changes, run.system, journal, run.sink, run.stop_requested)
        made = now.made + applied.made
        if applied.next_action is NextAction.REBOOT:
            return replace(now, made=made, must_reboot=True)
        facts = _gather(run)
        now = _Progress(made, facts, make_plan(facts, run.spec, run.request.steps))
        require_drained(run, now.plan.changes)
        # A new driver may itself require a reboot.
        reboots = any(isinstance(item.change, Reboot) for item in now.plan.changes)
        if applied.next_action is NextAction.CONTINUE and not reboots:
            break
    return now


def _needs_package_manager(plan: Plan) -> bool:
    return any(item.change.uses_package_manager for item in plan.changes)


def _reboot(run: RunContext, end: _Progress) -> Finished:
    """Reboot the host; the caller repeats the request afterwards, or the host itself continues the run."""
    if not run.request.caller_returns:
        leave_resume(run.system, run.request)
    if end.facts.docker.running_containers:
        run.note(f"the reboot stops these containers: {', '.join(end.facts.docker.running_containers)}", "warning")
    begin_reboot(run.system)
    summary = "rebooting; the rest is done after it"
    if not run.request.caller_returns:
        summary += f", by the host itself: journalctl -u {UNIT}"
    return Finished(
        int(ExitCode.REBOOT_NEEDED), end.made, summary=summary, left_boot=end.facts.reboot.boot_id,
        versions=versions_of(end.facts),
    )  # fmt: skip


def _lost_gpus(run: RunContext, facts: HostFacts) -> str:
    """Return a warning if GPUs are gone from the PCI bus since the last green verification, "" otherwise."""
    # Other requests do not need it.
    from gpuprov.checks import memory

    remembered = memory.recall(run.system).memory if facts.image is None else None
    problem = memory.lost_gpus(run.system, remembered, None) if remembered is not None else None
    return f"{problem.what}; gpuprov doctor; taken out on purpose: {memory.FORGET}" if problem is not None else ""


def _announced_plan(run: RunContext, facts: HostFacts, lost_gpus: str) -> Plan:
    """Make the plan and report it, with the warning of lost GPUs. Raises GpuprovError with all problems at once."""
    plan = make_plan(facts, run.spec, run.request.steps)
    for note in plan.notes:
        run.note(note)
    newer = _newer_version(run.system) if any(isinstance(one.change, InstallRuntime) for one in plan.changes) else ""
    for warning in filter(None, (lost_gpus, *plan.warnings, newer)):
        run.note(warning, "warning")
    back = tuple(dict.fromkeys(one for item in plan.changes for one in item.change.way_back(run.system)))
    of_driver = "; ".join(back).replace("way back: ", "") or "none that gpuprov knows"
    upgrades = tuple(replace(one, way_back=one.way_back or of_driver) for one in plan.upgrades)
    for sentence in [one.sentence for one in upgrades] or back:
        run.note(sentence)
    network = _network_problems(run, facts, plan)
    # Without a network, querying the sources would only report the same problem again.
    # The watch sees the host read-only.
    changes = () if run.request.arguments.get("watch") else [item.change for item in plan.changes]
    written = (*obstacles(run.system, changes), *settings_problems(run.system, changes))
    sources = () if network else _source_problems(run, facts)
    if problems := tuple(dict.fromkeys((*plan.problems, *written, *network, *sources))):
        refused = network or facts.kernel.secure_boot == "enabled" or facts.offers is not None
        other = _other_way(run, facts, unreachable=bool(network)) if run.choice.is_new and refused else ()
        raise GpuprovError.several((*other, *problems), exit_code=ExitCode.USAGE if other else ExitCode.FAILED)
    planned = []
    for step, change in ((item.step, item.change) for item in plan.changes):
        diff = change.diff(run.system) if run.request.diff else ""
        in_short = change.diff_in_short(run.system) if diff.count("\n") > _SHORT_DIFF else ""
        planned.append(PlannedChange(change.key, step, change.summary(), diff, in_short, change.disturbs))
    lost = devices_to_lose(run) if changes else ()
    disturbs = undo_disturbs(run.system, CHANGE_KINDS) or any(one.disturbs for one in planned) or bool(lost)
    one, version = run.choice, run.choice.version or facts.driver_installed_version
    chosen = ChosenDriver(one.gpus, one.driver, version, one.why, one.newer) if one.why else None
    run.sink(Planned(tuple(planned), disturbs, upgrades, chosen))
    require_drained(run, plan.changes, lost)
    return plan


def _other_way(run: RunContext, facts: HostFacts, *, unreachable: bool) -> tuple[Problem, ...]:
    """Return the source of the driver that works on a host for which gpuprov chose the .run file, which does not."""
    for driver, name in _OTHER_WAYS.items():
        spec = replace(run.spec, driver=driver, driver_version="", driver_url="", driver_sha256="")
        with contextlib.suppress(GpuprovError):
            other = replace(run, spec=resolve(run.system, spec, None))
            found = _gather(other)
            plan = make_plan(found, other.spec, run.request.steps)
            if not (plan.problems or _network_problems(other, found, plan)):
                what = f"NVIDIA's .run file can't be installed here, {name} can"
                return (Problem(what, facts.os.name, f"gpuprov install -e gpuprov_driver={driver}"),)
    if not unreachable or run.bundle is not None:
        return ()
    seen = f"tried: NVIDIA's .run file, {', '.join(_OTHER_WAYS.values())}"
    wanted = f"--distro {facts.os.id}-{facts.os.version} --driver {run.choice.version} --kernel {facts.kernel.release}"
    step = f"elsewhere: gpuprov bundle create {wanted} -o bundle.tar; then here: gpuprov install --bundle bundle.tar"
    return (Problem("no source of the driver can be reached from here", seen, step),)


def _newer_version(system: System) -> str:
    """Return a warning if a newer gpuprov has set this host up, "" otherwise."""
    own = gpuprov.__version__
    version = max((run.version for run in read_runs(system)), key=version_numbers, default="")
    if version_numbers(version) <= version_numbers(own):
        return ""
    what = f"gpuprov {version} set this host up, and this is the older gpuprov {own}"
    return f"{what}: its container runtime replaces the newer one; to keep that, run gpuprov {version} or newer"


def require_drained(run: RunContext, changes: Sequence[StepChange], lost: Sequence[str] = ()) -> None:
    """Raise GpuprovError if the plan disturbs containers of a host that the caller has not drained for it."""
    disturbing = [*(item.change.summary() for item in changes if item.change.disturbs), *lost]
    if run.request.require_drained and disturbing:
        what = "the host is not drained, and what is left to do disturbs containers"
        raise GpuprovError(what, "\n".join(disturbing), "run the same command again: it drains the host first")


def _source_problems(run: RunContext, facts: HostFacts) -> tuple[Problem, ...]:
    """Return why a dry run's package sources cannot be read; an installation would find these problems by itself.

    They are read in a copy, as the plan leaves them. The host itself does not change. If no package is missing, nothing
    is queried.
    """
    steps = run.request.steps or ("packages",)
    if not run.request.check or run.bundle is not None or facts.offers is not None or "packages" not in steps:
        return ()
    context = PlanContext(facts, run.spec)
    names = context.lacking_packages
    planned = context.repository_changes if names else ()
    if not names or not all(one.fingerprint for one in planned if isinstance(one, (InstallKey, InstallRpmKey))):
        return ()
    # Most runs change nothing and query no repository.
    from gpuprov.packages import managers

    run.note("reading the package sources, in a copy")
    return managers.ask(run.system, facts.package_manager, names, planned).problems


def _network_problems(run: RunContext, facts: HostFacts, plan: Plan) -> tuple[Problem, ...]:
    """Return what is unreachable: the proxy or all names, else each URL by itself."""
    asks = run.bundle is None and _needs_package_manager(plan)
    fetches = run.bundle is None and any(item.change.bundle_part == "packages" for item in plan.changes)
    dead = run.system.proxy_problem() if plan.urls or asks else None
    if dead is None and fetches:
        dead = dns_problem(run.system, facts.package_manager.name, facts.files)
    return (dead,) if dead else unreachable(run.system, plan.urls)


def _require_described_driver(plan: Plan) -> None:
    """Raise GpuprovError if the plan describes a driver, but the steps that bring it were left out."""
    described = any(isinstance(item.change, WriteCdiSpecification) and not item.change.content for item in plan.changes)
    if described and {item.step for item in plan.changes}.isdisjoint(_DRIVER_STEPS):
        what = "the CDI specification describes the driver, and this run leaves out what the driver needs"
        seen = f"left out: {', '.join(_DRIVER_STEPS)}"
        raise GpuprovError(what, seen, "run these steps first, in playbooks the role driver: --tags driver,toolkit")


def _require_runtime(run: RunContext, plan: Plan) -> None:
    """Raise GpuprovError if an engine would get a runtime that does not exist: as the default, it starts nothing."""
    path, steps = runtime_path(run.spec), {item.step for item in plan.changes}
    if steps & {"docker", "engines"} and not steps & {"packages", "toolkit"} and not run.system.exists(path):
        what, step = "this run registers a container runtime that is missing", "--tags repos,driver,toolkit,engine"
        raise GpuprovError(what, f"ls {path}: No such file or directory", f"bring it too, in playbooks: {step}")


def _require_settled(plan: Plan) -> None:
    """Raise GpuprovError if the host, looked at again after all changes, still differs from the spec."""
    if plan.problems:
        raise GpuprovError.several(plan.problems)
    if plan.changes:
        seen = "\n".join(item.change.summary() for item in plan.changes)
        step = "something on the host undoes them (another tool that manages it?); find it, then run this again"
        raise GpuprovError("the host did not settle: after all changes were made, some are still wanted", seen, step)


def versions_of(facts: HostFacts) -> dict[str, str]:
    """Return the versions that reports, the history and the metrics show."""
    return {
        "os": facts.os.name,
        "kernel": facts.kernel.release,
        "driver": facts.driver_installed_version,
        "docker": facts.docker.version,
        "toolkit": facts.packages.installed.get(TOOLKIT_PACKAGE, ""),
        "gpus": str(len(facts.gpus)),
        **({"mig": mig} if (mig := mig_layout((gpu.index, gpu.instances) for gpu in facts.mig)) else {}),
    }


# -- after a reboot the host resumes the run by itself, by a unit for one boot -----------------------------------------


def leave_resume(system: System, request: Request) -> None:
    """Make the next boot resume this request."""
    passed = {name: value for name, value in command_environment().items() if name not in COMMAND_ENVIRONMENT}
    words = (sys.executable, "-I", "-c", _START, str(Path(gpuprov.__file__).resolve().parent.parent))
    variables = "".join(f'{name}="{_escaped(value)}"\n' for name, value in sorted(passed.items()))
    # ExecStart= also expands variables and specifiers.
    command = " ".join('"{}"'.format(_escaped(word).replace("$", "$$").replace("%", "%%")) for word in words)
    unit = content_of(f"{UNITS}/{UNIT}", command=command)
    # Only root may read them: they may hold passwords of a proxy and a repository. `systemctl show` tells all users the
    # variables that a unit sets itself.
    system.make_directory(STATE_DIRECTORY, 0o700)
    system.make_directory(WANTS)
    system.write(_REQUEST, f"{dump(request)}\n".encode(), mode=0o600)
    system.write(_VARIABLES, variables.encode(), mode=0o600)
    system.write(f"{UNITS}/{UNIT}", unit, mode=0o600)
    system.make_link(f"{WANTS}/{UNIT}", f"{UNITS}/{UNIT}")
    daemon_reload(system)


def _escaped(value: str) -> str:
    """Return a value escaped for quotes in a unit and its EnvironmentFile= (systemd.syntax(7), systemd.exec(5))."""
    return value.replace("\\", "\\\\").replace('"', '\\"')


def forget_resume(system: System) -> None:
    """Remove the unit and its request, if they exist."""
    if system.status(f"{UNITS}/{UNIT}") is None and system.status(_REQUEST) is None:
        return
    for path in (f"{WANTS}/{UNIT}", f"{UNITS}/{UNIT}", _REQUEST, _VARIABLES):
        system.remove(path)
    daemon_reload(system)


def begin_reboot(system: System) -> None:
    """Reboot in a few seconds. Raises GpuprovError if the host refuses."""
    delay = (f"--on-active={_REBOOT_DELAY_SECONDS}", "--timer-property=AccuracySec=100ms")
    system.require(
        ("systemd-run", "--quiet", *delay, "systemctl", "reboot"), "the host can't be rebooted",
        "reboot it by hand, then run the same command again",
    )  # fmt: skip
