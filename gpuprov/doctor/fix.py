"""Convert causes to the changes by which gpuprov can fix them, in the order of an installation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

from gpuprov import toolkit
from gpuprov.boot.reboot import Reboot
from gpuprov.core.changes import Change, RefreshLoaderCache, RemoveFile, SetMode
from gpuprov.core.units import RestartUnit
from gpuprov.doctor.docker_rules import in_daemon, in_file
from gpuprov.doctor.examine import Cause
from gpuprov.doctor.finding import CACHE, FILES, INSTALL, MODULES, NODE_MODES, STEPS, UNITS, Remedy
from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.driver.packaged import LoadDriver
from gpuprov.engines import docker, other_engines
from gpuprov.engines.docker_change import ReconfigureDocker
from gpuprov.engines.docker_unit import UNIT as DOCKER_UNIT
from gpuprov.engines.known import NVIDIA_RUNTIME
from gpuprov.facts.boot import PROGRAM
from gpuprov.plan.context import PlanContext
from gpuprov.plan.steps import STEPS as PLAN_STEPS
from gpuprov.plan.steps import Plan, StepChange
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH

# Step names of changes that belong to no installation step; these come before those steps.
STEP = "fix"
_ORDER = (STEP, *(step.name for step in PLAN_STEPS))
_NOT_OURS = "gpuprov has not set up this host"
# Steps that are allowed on a host that gpuprov did not set up.
_ANY_HOSTS = frozenset(("device nodes", "nouveau"))


@dataclass(frozen=True)
class Fix:
    """The changes, and `left`: a sentence for each cause whose remedy gpuprov does not apply now.

    `whole`: the changes include an installation's whole plan, in which a change builds on those before it. It resumes
    an interrupted run, and may be empty.
    """

    changes: tuple[StepChange, ...] = ()
    left: tuple[str, ...] = ()
    whole: bool = False


def spec_as_found(x: HostSnapshot) -> HostSpec:
    """Return the specification that keeps the host's driver release and toolkit, unless they are specified."""
    spec, version = x.spec, x.driver.kernel_version or x.driver.library_version
    if spec.driver == "runfile" and not spec.driver_version and not x.host.driver_packaged:
        spec = replace(spec, driver_version=version)
    ours = LAUNCHER_PATH in (in_file(x), in_daemon(x)) or LAUNCHER_PATH in x.there
    return spec if ours or NVIDIA_RUNTIME not in x.there else replace(spec, toolkit="nvidia")


def needs_install(causes: Sequence[Cause]) -> bool:
    """Say whether a cause has the whole installation as its remedy."""
    return any(INSTALL in cause.finding.remedies for cause in causes)


def plan_fix(x: HostSnapshot, causes: Sequence[Cause], install: Plan | None = None) -> Fix:
    """Return the fix. `install`: the plan of the whole installation, if a cause needs it.

    A consequence is left if the cause that explains it is left: it would return.
    """
    x = replace(x, spec=spec_as_found(x))
    refused = _install_refused(x, install) if needs_install(causes) else ""
    if x.open_run and refused:
        return Fix((), (f"a run of gpuprov was interrupted and must be resumed first: {refused}",))
    whole = install.changes if install is not None and needs_install(causes) and not refused else ()
    found: dict[str, tuple[StepChange, ...]] = {}
    reasons: dict[str, str] = {}
    # Consequences after the causes that explain them.
    for cause in sorted(causes, key=lambda one: one.follows != ""):
        name, remedies = cause.rule.name, cause.finding.remedies
        if not remedies:
            continue
        if INSTALL in remedies:
            found[name], reasons[name] = whole, refused
            continue
        reason = next(filter(None, (_refused(x, remedy) for remedy in remedies)), "")
        if cause.follows and not found.get(cause.follows):
            reason = reason or f"it is a consequence of {cause.follows}"
        made = () if reason else tuple(change for remedy in remedies for change in _changes(x, remedy))
        found[name], reasons[name] = made, reason
    left = tuple(f"{cause.finding.what}: {reasons[name]}" for cause in causes if reasons.get(name := cause.rule.name))
    changes = _in_order(whole, [one for name in found for one in found[name]])
    return Fix(changes, left, needs_install(causes) and not refused)


def _in_order(whole: Sequence[StepChange], changes: Sequence[StepChange]) -> tuple[StepChange, ...]:
    """Return each change once: a whole installation's as planned, then the others in their usual order."""
    found = {one.change.key: one for one in whole}
    for one in sorted(changes, key=lambda one: (isinstance(one.change, RestartUnit), _ORDER.index(one.step))):
        found.setdefault(one.change.key, one)
    if any(isinstance(one.change, ReconfigureDocker) and one.change.restart for one in found.values()):
        found.pop(RestartUnit(DOCKER_UNIT).key, None)
    return tuple(found.values())


def _install_refused(x: HostSnapshot, install: Plan | None) -> str:
    """Return why a person must run the whole installation, "" if gpuprov may."""
    if not _is_set_up(x):
        return _NOT_OURS
    if install is None:
        return "its plan can't be made now"
    if install.problems:
        return install.problems[0].what
    if any(isinstance(one.change, Reboot) for one in install.changes):
        return "it needs a reboot"
    return ""


def _is_set_up(x: HostSnapshot) -> bool:
    """Say whether gpuprov has set this host up before: its runtime or its units exist."""
    return LAUNCHER_PATH in x.there or PROGRAM in x.host.files


def _refused(x: HostSnapshot, remedy: Remedy) -> str:
    """Return why this remedy is not applied now, "" if it is."""
    facts = x.host
    if remedy.kind == STEPS:
        if not (_ANY_HOSTS.issuperset(remedy.names) or _is_set_up(x)):
            return _NOT_OURS
        # Of these steps only: the host's other problems prevent nothing.
        found: tuple[Problem, ...] = ()
        if "docker" in remedy.names:
            found = docker.problems(facts.docker, toolkit.docker_runtime(x.spec))
        if "engines" in remedy.names:
            found += other_engines.problems(facts.engines, toolkit.engine_runtime(x.spec))
        return found[0].what if found else ""
    if remedy.kind == UNITS and DOCKER_UNIT in remedy.names:
        if refused := docker.restart_problem(facts.docker.unit):
            return refused.what
        running = ", ".join(facts.docker.running_containers)
        return f"a restart of docker stops {running}" if facts.docker.restart_stops else ""
    if remedy.kind == MODULES and facts.kernel.container:
        return f"the kernel's modules are not those of this {facts.kernel.container} container"
    return ""


def _changes(x: HostSnapshot, remedy: Remedy) -> tuple[StepChange, ...]:
    if remedy.kind == STEPS:
        context = PlanContext(x.host, x.spec)
        planned = (step for step in PLAN_STEPS if step.name in remedy.names)
        return tuple(StepChange(step.name, change) for step in planned for change in step.plan(context))
    modes = {node.path: node.mode for node in x.driver.nodes}
    make: dict[str, Callable[[str], Change]] = {
        UNITS: RestartUnit,
        FILES: lambda path: RemoveFile(path, "it stands in the way of gpuprov's own"),
        NODE_MODES: lambda path: SetMode(path, modes[path]),
        CACHE: lambda _: RefreshLoaderCache(),
        MODULES: lambda _: LoadDriver(),
    }
    return tuple(StepChange(STEP, make[remedy.kind](name)) for name in remedy.names or ("",))
