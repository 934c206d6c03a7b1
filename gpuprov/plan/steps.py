"""Facts and spec in, changes out: the steps in their order. Pure."""

from collections.abc import Iterable, Iterator
from typing import Callable

from gpuprov import toolkit
from gpuprov.boot import clean, nvidia_docker, prepare, reboot, watch
from gpuprov.core.changes import Change
from gpuprov.core.proxy import NO_PROXY, Proxy
from gpuprov.driver import cuda_toolkit, dcgm, fabric_manager, gpudirect, imex, kernel, mig, nouveau, vgpu
from gpuprov.driver.running_driver import plan_containers
from gpuprov.engines import docker, docker_proxy, other_engines
from gpuprov.engines.docker_change import ReconfigureDocker
from gpuprov.facts.host import HostFacts
from gpuprov.machine.distros import derivative_note
from gpuprov.packages.interface import DRIVER_PACKAGES
from gpuprov.packages.keys import InstallRpmKey
from gpuprov.plan import migration, software, with_bundle
from gpuprov.plan.context import PlanContext
from gpuprov.plan.preflight import NO_GPU, machine_notes, preflight, read_only_problems, security_warnings
from gpuprov.plan.upgrades import upgrades
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import Problem, UsageError
from gpuprov.protocol.events import Upgrade
from gpuprov.protocol.spec import HostSpec
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, NVIDIA_HOOK_PATH


@dataclass(frozen=True)
class Step:
    """A part of the work: `plan` returns what this part must change, nothing if it is as it should be."""

    name: str
    plan: Callable[[PlanContext], tuple[Change, ...]]


@dataclass(frozen=True)
class StepChange:
    """A change and the step that it belongs to."""

    step: str
    change: Change


@dataclass(frozen=True)
class Plan:
    """The changes to make. With problems, nothing is done; `urls` is what would be fetched, even with problems."""

    changes: tuple[StepChange, ...]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    upgrades: tuple[Upgrade, ...] = ()


def _plan_packages(c: PlanContext) -> tuple[Change, ...]:
    comes = any(map(DRIVER_PACKAGES.match, c.lacking_packages))
    return (
        *c.driver.plan_preparation(),
        *kernel.plan_signing(c.driver),
        # Makes room for NVIDIA's current toolkit, which does not install beside the oldest of these.
        *(migration.removed_packages(c.facts, c.spec) if c.spec.toolkit == "nvidia" else ()),
        *toolkit.plan_hook_handover(c.facts, c.spec),
        *c.package_changes,
        *c.driver.plan_other_version(),
        # Before a reboot, after which a timer may upgrade them.
        *software.plan_driver_hold(c.driver, coming=bool(c.driver.plan_other_version()) or comes),
        *cuda_toolkit.plan_profile(c.facts, c.spec),
    )


def _plan_driver(c: PlanContext) -> tuple[Change, ...]:
    return (
        *c.driver.plan(),
        *kernel.plan_image(c.driver),
        *fabric_manager.plan(c.driver),
        *imex.plan(c.driver),
        *(software.plan_driver_hold(c.driver, coming=True) if imex.fabric_packages(c.driver) else ()),
        *mig.plan(c.driver),
        *gpudirect.plan(c.driver),
        *vgpu.plan(c.driver),
        *dcgm.plan(c.driver),
        # Here, for its file has been downloaded by now in every order in which the steps are asked for.
        *cuda_toolkit.plan(c.facts, c.spec),
    )


def _plan_docker(c: PlanContext) -> tuple[Change, ...]:
    facts, spec = c.facts, c.spec
    changes: tuple[Change, ...] = ()
    if spec.docker != "none":
        drop = facts.leftovers.dead_runtimes if spec.migrate_nvidia_docker else ()
        offline = facts.image is not None and facts.image.offline
        # A run without the step "toolkit" registers no runtime that is missing, so this one has it.
        lacks = facts.files.keys().isdisjoint({LAUNCHER_PATH, NVIDIA_HOOK_PATH})
        comes = facts.docker_began_first or (lacks and bool(toolkit.plan_runtime(facts, spec)))
        changes = docker.plan(facts.docker, toolkit.docker_runtime(spec), drop=drop, offline=offline, new_hook=comes)
    restarts = any(isinstance(one, ReconfigureDocker) and one.restart and not one.is_loaded for one in changes)
    in_use = facts.docker_proxy_in_use
    proxy = docker_proxy.plan(facts.files, facts.docker, _docker_proxy(c), in_use=in_use, restarts=restarts)
    return (*proxy, *changes, *plan_containers(c.driver))


def _docker_proxy(c: PlanContext) -> Proxy:
    """Return the proxy of docker's daemon; an empty one without docker, present or planned."""
    has_docker = c.facts.docker.installed or c.spec.docker in ("distribution", "docker-ce")
    return Proxy(c.spec.proxy, c.spec.no_proxy) if has_docker else NO_PROXY


def _plan_engines(c: PlanContext) -> tuple[Change, ...]:
    kept = other_engines.kept_running(c.facts.engines, c.facts.kubernetes, c.spec)
    return other_engines.plan(c.facts.engines, toolkit.engine_runtime(c.spec), kept)


STEPS = (
    Step("download", lambda c: (*c.driver.plan_download(), *cuda_toolkit.plan_download(c.facts, c.spec))),
    Step("repositories", lambda c: c.repository_changes),
    Step("packages", _plan_packages),
    Step("nouveau", lambda c: nouveau.plan(c.driver)),
    Step("reboot", lambda c: reboot.plan(c.driver)),
    Step("driver", _plan_driver),
    # Before what describes the devices: it loads the part of the driver that nothing has loaded yet.
    Step("boot", lambda c: (*prepare.plan(c.driver), *clean.plan_mark(c.facts, c.spec))),
    # An image's devices are where it boots, and so is what describes them.
    Step("device nodes", lambda c: toolkit.plan_device_nodes(c.facts) if c.facts.image is None else ()),
    # Just before what takes the place of the removed programs.
    Step("leftovers", lambda c: c.migration),
    # After what each boot brings: the modules of nvidia-docker's command come with it.
    Step("toolkit", lambda c: (*toolkit.plan_runtime(c.migrated, c.spec), *nvidia_docker.plan(c.migrated, c.spec))),
    Step("cdi", lambda c: toolkit.plan_cdi(c.driver) if c.facts.image is None else ()),
    Step("docker", _plan_docker),
    Step("engines", _plan_engines),
    Step("images", lambda c: with_bundle.plan_images(c.facts, c.spec)),
    # What is stored is the specification of a host that is as it says.
    Step("watch", lambda c: watch.plan(c.facts, c.spec)),
    # Last: sshd takes no new login after it.
    Step("clean image", lambda c: clean.plan(c.facts, c.spec)),
)


def _kinds(base: type[Change]) -> Iterator[type[Change]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


# Every kind of change that a journal may name: the steps' modules have defined all of them by now.
CHANGE_KINDS: dict[str, type[Change]] = {kind.__name__: kind for kind in _kinds(Change)}


def make_plan(facts: HostFacts, spec: HostSpec, steps: tuple[str, ...] = ()) -> Plan:
    """Return the plan from `facts` to `spec`, which is resolved; if impossible, all problems at once.

    `steps` keeps the plan to the steps of these names; none means all. Raises GpuprovError (exit code 2) for a name
    that is no step's.
    """
    chosen, context = _named(steps), PlanContext(facts, spec)
    if problems := preflight(context):
        return Plan((), problems, urls=() if NO_GPU in problems else _urls(context, chosen))
    changes = _once(StepChange(step.name, change) for step in chosen for change in step.plan(context))
    if problems := read_only_problems(facts, [one.change for one in changes]):
        return Plan((), problems)
    notes = (
        derivative_note(facts.os),
        *machine_notes(facts),
        context.driver.note(),
        kernel.dkms_note(context.driver),
        software.engine_note(facts, spec),
        software.unheld(context.driver),
        migration.note(facts, spec),
        *(migration.kept(facts, spec) if spec.migrate_nvidia_docker else ()),
    )
    unfinished = software.note(facts)
    late = docker_proxy.warning(facts.docker, _docker_proxy(context), in_use=facts.docker_proxy_in_use)
    kept = nvidia_docker.warning(context.migrated, spec)
    others = (late, unfinished, kept, clean.warning(facts, spec), imex.warning(context.driver))
    warnings = (*security_warnings(context.driver), *filter(None, others))
    urls = tuple(url for one in changes for url in one.change.urls)
    replaced = upgrades(context, tuple(one.change for one in changes))
    return Plan(changes, notes=tuple(filter(None, notes)), warnings=warnings, urls=urls, upgrades=replaced)


def _urls(context: PlanContext, chosen: tuple[Step, ...]) -> tuple[str, ...]:
    """Return what a plan with problems would fetch: unreachable URLs are reported together with the problems."""
    if not context.facts.distribution.id or context.facts.bundle is not None:
        return ()
    fetching = (step for step in chosen if step.name in ("download", "repositories"))
    return tuple(url for step in fetching for change in step.plan(context) for url in change.urls)


def _once(changes: Iterable[StepChange]) -> tuple[StepChange, ...]:
    """Return the changes; a key that several steps need appears only with the first of them."""
    found: list[StepChange] = []
    for one in changes:
        if not isinstance(one.change, InstallRpmKey) or all(one.change != other.change for other in found):
            found.append(one)
    return tuple(found)


def _named(names: tuple[str, ...]) -> tuple[Step, ...]:
    known = tuple(step.name for step in STEPS)
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"there is no step {unknown[0]!r}", "", f"steps: {', '.join(known)}")
    return tuple(step for step in STEPS if step.name in names) if names else STEPS
