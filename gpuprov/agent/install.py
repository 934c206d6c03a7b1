"""The installation: resume what was interrupted, resolve the spec, plan, apply, look again; and its dry run."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gpuprov
from gpuprov.agent.context import RunContext, devices_to_lose, keep_devices
from gpuprov.boot.reboot import Reboot, forget_asked
from gpuprov.core.apply import apply_changes, obstacles, resume_run, undo_disturbs
from gpuprov.core.changes import NextAction
from gpuprov.core.commands import COMMAND_ENVIRONMENT, command_environment
from gpuprov.core.download import unreachable
from gpuprov.core.journal import STATE_DIRECTORY, Journal, journal_for, read_runs
from gpuprov.core.system import System
from gpuprov.core.units import daemon_reload
from gpuprov.facts.boot import NODES, REFRESH, UNITS, WANTS
from gpuprov.facts.gpus import mig_layout
from gpuprov.facts.host import HostFacts
from gpuprov.facts.watch import OFF, gather_watch
from gpuprov.packages import dns
from gpuprov.packages.interface import wait_until_free
from gpuprov.packages.keys import InstallKey
from gpuprov.packages.rpm_changes import InstallRpmKey
from gpuprov.plan import with_bundle
from gpuprov.plan.context import PlanContext
from gpuprov.plan.inputs import gather_for, resolve
from gpuprov.plan.steps import CHANGE_KINDS, Plan, make_plan
from gpuprov.protocol.advisories import TOOLKIT_PACKAGE
from gpuprov.protocol.codec import dump
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, Stopped
from gpuprov.protocol.events import Finished, Planned, PlannedChange
from gpuprov.protocol.request import Request
from gpuprov.protocol.words import counted
from gpuprov.toolkit import InstallRuntime

# A diff of at most this many lines is shown itself.
_SHORT_DIFF = 12
# The first plan, the plan after a reboot that was not needed, and one for what that brings.
_MOST_ROUNDS = 3


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
    plan = _announced_plan(run, facts)
    busy = facts.package_manager.lock_holder(run.system) if _needs_package_manager(plan) else ""
    if busy:
        run.note(f"{busy} holds the package manager's lock; a run waits up to {run.spec.lock_timeout} s for it")
    count = len(plan.changes)
    summary = f"{counted(count, 'change')} would be made" if count else "nothing to change"
    return Finished(int(ExitCode.DONE), changed=count, summary=summary, versions=_versions(facts))


def install(run: RunContext) -> Finished:
    """Bring the host to the spec. Raises GpuprovError or Stopped; the journal then says what was done."""
    forget_resume(run.system)
    if run.request.require_drained and undo_disturbs(run.system, CHANGE_KINDS):
        raise GpuprovError(
            "the host is not drained, and to undo what an earlier run was cut off in disturbs containers",
            "",
            "run the same command again: it drains the host first",
        )
    interrupted = resume_run(run.system, CHANGE_KINDS, run.sink)
    with run.system.interruptible(run.stop_requested):
        run = _resolved(run)
        facts = _gather(run)
        plan = _announced_plan(run, facts)
        if _needs_package_manager(plan):
            # Before the first change: a run that fails here has changed nothing.
            holder = facts.package_manager.lock_holder
            wait_until_free(run.system, lambda message, *_: run.note(message), holder, run.spec.lock_timeout)
    end = _Progress(0, facts, plan)
    if plan.changes:
        keep_devices(run)
        journal = interrupted or journal_for(run.system, run.request.command, run.request.run_id)
        with _end_when_failed(journal):
            end = _apply(run, journal, end)
        if end.must_reboot:
            return _reboot(run, end)
        _require_settled(end.plan)
        journal.end("done")
    elif interrupted is not None:
        interrupted.end("done")
    forget_asked(run.system)
    summary = f"{counted(end.made, 'change')} made" if end.made else "0 changes: the host is as it should be"
    return Finished(int(ExitCode.DONE), changed=end.made, summary=summary, versions=_versions(end.facts))


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
    return replace(run, spec=resolve(run.system, run.spec, run.bundle.manifest if run.bundle else None))


def _gather(run: RunContext) -> HostFacts:
    facts = gather_for(run.system, run.spec, run.bundle, run.request.steps, run.sink)
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
        with with_bundle.unpacked(run.system, run.bundle, changes):
            applied = apply_changes(changes, run.system, journal, run.sink, run.stop_requested)
        made = now.made + applied.made
        if applied.next_action is NextAction.REBOOT:
            return replace(now, made=made, must_reboot=True)
        facts = _gather(run)
        now = _Progress(made, facts, make_plan(facts, run.spec, run.request.steps))
        _require_drained(run, now.plan)
        # A new driver may itself require a reboot.
        if applied.next_action is NextAction.CONTINUE and not any(
            isinstance(item.change, Reboot) for item in now.plan.changes
        ):
            break
    return now


def _needs_package_manager(plan: Plan) -> bool:
    """Return whether any change of the plan runs the package manager."""
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
        versions=_versions(end.facts),
    )  # fmt: skip


def _announced_plan(run: RunContext, facts: HostFacts) -> Plan:
    """Make the plan and report it. Raises GpuprovError with all problems at once."""
    plan = make_plan(facts, run.spec, run.request.steps)
    for note in plan.notes:
        run.note(note)
    newer = _newer_version(run.system) if any(isinstance(one.change, InstallRuntime) for one in plan.changes) else ""
    for warning in filter(None, (*plan.warnings, newer)):
        run.note(warning, "warning")
    for sentence in (one for item in plan.changes for one in item.change.way_back(run.system)):
        run.note(sentence)
    network = _network_problems(run, facts, plan)
    # Without a network, querying the sources would only report the same problem again.
    # The watch sees the host read-only.
    changes = () if run.request.arguments.get("watch") else [item.change for item in plan.changes]
    written = obstacles(run.system, changes)
    sources = () if network else _source_problems(run, facts)
    problems = tuple(dict.fromkeys((*plan.problems, *written, *network, *sources)))
    if problems:
        raise GpuprovError.several(problems)
    planned = []
    for step, change in ((item.step, item.change) for item in plan.changes):
        diff = change.diff(run.system) if run.request.diff else ""
        in_short = change.diff_in_short(run.system) if diff.count("\n") > _SHORT_DIFF else ""
        planned.append(PlannedChange(change.key, step, change.summary(), diff, in_short, change.disturbs))
    lost = devices_to_lose(run) if changes else ()
    disturbs = any(one.disturbs for one in planned) or bool(lost) or undo_disturbs(run.system, CHANGE_KINDS)
    run.sink(Planned(tuple(planned), disturbs))
    _require_drained(run, plan, lost)
    return plan


def _newer_version(system: System) -> str:
    """Return a warning if a newer gpuprov has set this host up, "" otherwise."""
    own = gpuprov.__version__
    version = max((run.version for run in read_runs(system)), key=_numbers, default="")
    if _numbers(version) <= _numbers(own):
        return ""
    return (
        f"gpuprov {version} set this host up, and this is the older gpuprov {own}: its container runtime replaces the "
        f"newer one; to keep that, run gpuprov {version} or newer"
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d{1,9}", version)]


def _require_drained(run: RunContext, plan: Plan, lost: tuple[str, ...] = ()) -> None:
    """Raise GpuprovError if the plan disturbs containers of a host that the caller has not drained for it."""
    disturbing = [*(item.change.summary() for item in plan.changes if item.change.disturbs), *lost]
    if run.request.require_drained and disturbing:
        raise GpuprovError(
            "the host is not drained, and what is left to do disturbs containers",
            "\n".join(disturbing),
            "run the same command again: it drains the host first",
        )


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
    return managers.ask(run.system, facts.package_manager, names, planned, run.spec.lock_timeout).problems


def _network_problems(run: RunContext, facts: HostFacts, plan: Plan) -> tuple[Problem, ...]:
    """Return what is unreachable: the proxy or all names, else each URL by itself."""
    asks = run.bundle is None and _needs_package_manager(plan)
    fetches = run.bundle is None and any(item.change.bundle_part == "packages" for item in plan.changes)
    dead = run.system.proxy_problem() if plan.urls or asks else None
    if dead is None and fetches:
        dead = dns.dns_problem(run.system, facts.package_manager.name, facts.files)
    return (dead,) if dead else unreachable(run.system, plan.urls)


def _require_settled(plan: Plan) -> None:
    """Raise GpuprovError if the host, looked at again after all changes, still differs from the spec."""
    if plan.problems:
        raise GpuprovError.several(plan.problems)
    if plan.changes:
        raise GpuprovError(
            "the host did not settle: after all changes were made, some are still wanted",
            "\n".join(item.change.summary() for item in plan.changes),
            "something on the host undoes them (another tool that manages it?); find it, then run this again",
        )


def _versions(facts: HostFacts) -> dict[str, str]:
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

UNIT = "gpuprov-resume.service"
_REQUEST = f"{STATE_DIRECTORY}/resume.json"
# Time for the last event to reach the controller before the host goes down.
_REBOOT_DELAY_SECONDS = 3
# Puts the folder that holds this package, or the agent's archive, on the path.
_START = "import sys; sys.path.insert(0, sys.argv[1]); from gpuprov.agent.agent import main; main()"
_TEXT = """\
# By gpuprov: resumes the run that needed this reboot; removed as soon as it does.
[Unit]
Description=The rest of a gpuprov run, after its reboot
Wants=network-online.target
After=network-online.target docker.service containerd.service {nodes} {refresh}
ConditionPathExists={request}

[Service]
Type=oneshot
TimeoutStartSec=infinity
StandardInput=file:{request}
ExecStart={command}
{environment}
"""


def leave_resume(system: System, request: Request) -> None:
    """Make the next boot resume this request."""
    passed = {name: value for name, value in command_environment().items() if name not in COMMAND_ENVIRONMENT}
    words = (sys.executable, "-I", "-c", _START, str(Path(gpuprov.__file__).resolve().parent.parent))
    text = _TEXT.format(
        nodes=NODES, refresh=REFRESH, request=_REQUEST, command=" ".join(f'"{_word(word)}"' for word in words),
        environment="".join(f'Environment="{name}={_escaped(value)}"\n' for name, value in sorted(passed.items())),
    )  # fmt: skip
    # Only root may read them: the unit may hold a proxy's password, the request a repository's.
    system.make_directory(STATE_DIRECTORY, 0o700)
    system.make_directory(WANTS)
    system.write(_REQUEST, f"{dump(request)}\n".encode(), mode=0o600)
    system.write(f"{UNITS}/{UNIT}", text.encode(), mode=0o600)
    system.make_link(f"{WANTS}/{UNIT}", f"{UNITS}/{UNIT}")
    daemon_reload(system)


def _word(value: str) -> str:
    """Return a word escaped for quotes in ExecStart=, which also expands variables."""
    return _escaped(value).replace("$", "$$")


def _escaped(value: str) -> str:
    """Return a value escaped for quotes in a unit (systemd.unit(5), systemd.syntax(7))."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def forget_resume(system: System) -> None:
    """Remove the unit and its request, if they exist."""
    if system.status(f"{UNITS}/{UNIT}") is None and system.status(_REQUEST) is None:
        return
    for path in (f"{WANTS}/{UNIT}", f"{UNITS}/{UNIT}", _REQUEST):
        system.remove(path)
    daemon_reload(system)


def begin_reboot(system: System) -> None:
    """Reboot in a few seconds. Raises GpuprovError if the host refuses."""
    delay = (f"--on-active={_REBOOT_DELAY_SECONDS}", "--timer-property=AccuracySec=100ms")
    system.require(
        ("systemd-run", "--quiet", *delay, "systemctl", "reboot"),
        "the host can't be rebooted",
        "reboot it by hand, then run the same command again",
    )
