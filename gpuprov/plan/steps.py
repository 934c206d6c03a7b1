"""Facts and spec in, changes out: the steps in their order. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Callable

from gpuprov import driver_run, repos, toolkit
from gpuprov.boot import clean, nvidia_docker, prepare, reboot, watch
from gpuprov.core.changes import Change, MakeNode, RemoveFile, WriteFile
from gpuprov.core.proxy import NO_PROXY, Proxy
from gpuprov.core.repairs import RefreshLoaderCache, RestartUnit, SetMode
from gpuprov.driver import (
    cuda_repository,
    cuda_runfile,
    distribution_plan,
    dkms,
    driver_install,
    fabric_manager,
    fabric_plan,
    image_modules,
    kernel,
    mig,
    nouveau,
    packaged,
    running_driver,
    unload,
)
from gpuprov.engines import docker, docker_proxy, other_engines
from gpuprov.engines.docker_change import ReconfigureDocker
from gpuprov.engines.nvidia_docker import RemoveAccount, RemoveFolder, RemoveVolume, StopPlugin
from gpuprov.engines.other_engines import ConfigureEngine
from gpuprov.facts.host import HostFacts
from gpuprov.machine.distros import derivative_note
from gpuprov.packages import rpm_packages, rpm_remove, rpm_repos
from gpuprov.packages.apt_packages import HoldPackages, InstallPackages, RefreshPackageIndex
from gpuprov.packages.apt_remove import RemovePackages
from gpuprov.packages.keys import InstallKey
from gpuprov.packages.rpm_locks import HoldRpmPackages
from gpuprov.plan import images, migration, software
from gpuprov.plan.preflight import preflight, read_only_problems, security_warnings
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.spec import HostSpec


@dataclass(frozen=True)
class Step:
    """A part of the work: `plan` returns what this part must change, nothing if it is as it should be."""

    name: str
    plan: Callable[[HostFacts, HostSpec], tuple[Change, ...]]


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


def repository_changes(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the changes of a host's repositories and keys; their packages can then be queried in advance."""
    if facts.bundle:
        # A host with a bundle reaches no repository: its sources stay as they are.
        return ()
    return repos.plan(facts, spec, software.extra_repositories(facts, spec))


def _plan_engines(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    kept = other_engines.kept_running(facts.engines, facts.kubernetes, spec)
    return other_engines.plan(facts.engines, toolkit.runtime_path(spec), kept, set_default=spec.default_runtime)


def _plan_docker(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    runtime = toolkit.runtime_path(spec)
    changes = (
        docker.plan(
            facts.docker,
            runtime_path=runtime,
            set_default=spec.docker_default_runtime,
            cdi=True,
            drop=migration.dead_runtimes(facts, spec),
            offline=facts.image is not None and facts.image.offline,
        )
        if spec.docker != "none"
        else ()
    )
    restarts = any(isinstance(one, ReconfigureDocker) and one.restart and not one.is_loaded for one in changes)
    proxy = docker_proxy.plan(
        facts.files, facts.docker, _docker_proxy(facts, spec), in_use=facts.docker_proxy_in_use, restarts=restarts
    )
    return (*proxy, *changes, *running_driver.plan_containers(facts, spec))


def _docker_proxy(facts: HostFacts, spec: HostSpec) -> Proxy:
    """Return the proxy of docker's daemon; an empty one without docker, present or planned."""
    has_docker = facts.docker.installed or spec.docker in ("distribution", "docker-ce")
    return Proxy(spec.proxy, spec.no_proxy) if has_docker else NO_PROXY


def _plan_download(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    return (*driver_run.plan_download(facts, spec), *cuda_runfile.plan_download(facts, spec))


def _plan_packages(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    return (
        *distribution_plan.plan_preferences(facts, spec),
        *distribution_plan.plan_repository_package(facts, spec),
        *cuda_repository.plan_pin(facts, spec),
        *kernel.plan_signing(facts, spec),
        *migration.plan_packages(facts, spec),
        *toolkit.plan_hook_handover(facts, spec),
        *software.plan(facts, spec),
        *cuda_repository.plan_other_version(facts, spec),
        *distribution_plan.plan_other_branch(facts, spec),
        *cuda_repository.plan_profile(facts, spec),
    )


def _plan_toolkit(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    left = migration.without_removed(facts, spec)
    # Behind what each boot brings: the command's modules come with it.
    return (*toolkit.plan_runtime(left, spec), *nvidia_docker.plan(left, spec))


def _plan_driver(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    return (
        *driver_install.plan(facts, spec),
        *cuda_repository.plan_driver(facts, spec),
        *distribution_plan.plan_driver(facts, spec),
        *image_modules.plan(facts, spec),
        *fabric_plan.plan(facts, spec),
        *mig.plan(facts, spec),
        # Here, for its file has been downloaded by now in every order in which the steps are asked for.
        *cuda_runfile.plan(facts, spec),
    )


def _plan_boot(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    return (*prepare.plan(facts, spec), *clean.plan_mark(facts, spec))


def _plan_device_nodes(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    # An image's devices are where it boots, and so is what describes them.
    return toolkit.plan_device_nodes(facts, spec) if facts.image is None else ()


def _plan_cdi(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    return toolkit.plan_cdi(facts, spec) if facts.image is None else ()


STEPS = (
    Step("download", _plan_download),
    Step("repositories", repository_changes),
    Step("packages", _plan_packages),
    Step("nouveau", nouveau.plan),
    Step("reboot", reboot.plan),
    Step("driver", _plan_driver),
    # Before what describes the devices: it loads the part of the driver that nothing has loaded yet.
    Step("boot", _plan_boot),
    Step("device nodes", _plan_device_nodes),
    # Just before what takes the place of the removed programs.
    Step("leftovers", migration.plan),
    Step("toolkit", _plan_toolkit),
    Step("cdi", _plan_cdi),
    Step("docker", _plan_docker),
    Step("engines", _plan_engines),
    Step("images", images.plan),
    # What is stored is the specification of a host that is as it says.
    Step("watch", watch.plan),
    # Last: sshd takes no new login after it.
    Step("clean image", clean.plan),
)

# Every kind of change that a journal may name.
CHANGE_KINDS: dict[str, type[Change]] = {
    kind.__name__: kind
    for kind in (
        WriteFile, RemoveFile, MakeNode, SetMode, InstallKey, RefreshPackageIndex, InstallPackages, HoldPackages,
        rpm_repos.InstallRpmKey, rpm_packages.RefreshRpmIndex, rpm_packages.InstallRpmPackages, HoldRpmPackages,
        packaged.EnableStream, packaged.SwitchPin, packaged.ChangeDriverPackages, packaged.ChangeDriverRpms,
        packaged.SwitchBranch,
        driver_run.FetchRunfile, driver_install.InstallDriver, packaged.LoadDriver,
        toolkit.InstallRuntime, toolkit.HandOverHook, nvidia_docker.InstallNvidiaDocker,
        toolkit.WriteCdiSpecification, ReconfigureDocker, docker_proxy.SetDockerProxy, ConfigureEngine,
        nouveau.KeepNouveauOut,
        prepare.PrepareBoot, clean.CleanImage, image_modules.BuildModules, reboot.Reboot,
        images.LoadImage, unload.ReloadDriver, unload.StartContainers,
        fabric_manager.RunFabricManager, mig.DivideGpus, cuda_runfile.InstallCudaToolkit,
        cuda_runfile.LinkCudaToolkit, SetMode, RestartUnit, RefreshLoaderCache, watch.SetWatch, watch.RemoveWatch,
        RemovePackages, rpm_remove.RemoveRpms, rpm_remove.RemoveRpmKey, RemoveVolume, StopPlugin, RemoveAccount,
        RemoveFolder,
    )
}  # fmt: skip


def make_plan(facts: HostFacts, spec: HostSpec, steps: tuple[str, ...] = ()) -> Plan:
    """Return the plan from `facts` to `spec`, which is resolved; if impossible, all problems at once.

    `steps` keeps the plan to the steps of these names; none means all. Raises GpuprovError (exit code 2) for a name
    that is no step's.
    """
    chosen = _named(steps)
    problems = preflight(facts, spec)
    if problems:
        return Plan((), problems, urls=_urls(facts, spec, chosen))
    changes = _once(StepChange(step.name, change) for step in chosen for change in step.plan(facts, spec))
    problems = read_only_problems(facts, (one.change for one in changes))
    if problems:
        return Plan((), problems)
    notes = (
        derivative_note(facts.os),
        kernel.note(facts, spec),
        dkms.note(facts, spec),
        software.engine_note(facts, spec),
        migration.note(facts, spec),
        *(str(one) for one in (migration.kept(facts, spec) if spec.migrate_nvidia_docker else ())),
    )
    unfinished = software.note(facts)
    late = docker_proxy.warning(facts.docker, _docker_proxy(facts, spec), in_use=facts.docker_proxy_in_use)
    kept = nvidia_docker.warning(migration.without_removed(facts, spec), spec)
    warnings = (*security_warnings(facts, spec), *filter(None, (late, unfinished, kept, clean.warning(facts, spec))))
    urls = tuple(url for one in changes for url in one.change.urls)
    return Plan(changes, notes=tuple(note for note in notes if note), warnings=warnings, urls=urls)


def _urls(facts: HostFacts, spec: HostSpec, chosen: tuple[Step, ...]) -> tuple[str, ...]:
    """Return what a plan with problems would fetch: unreachable URLs are reported together with the problems."""
    if facts.distribution is None or facts.bundle is not None:
        return ()
    fetching = (step for step in chosen if step.plan in (_plan_download, repository_changes))
    return tuple(url for step in fetching for change in step.plan(facts, spec) for url in change.urls)


def _once(changes: Iterable[StepChange]) -> tuple[StepChange, ...]:
    """Return the changes; a key that several steps need appears only with the first of them."""
    found: list[StepChange] = []
    for one in changes:
        is_key = isinstance(one.change, rpm_repos.InstallRpmKey)
        if not is_key or all(one.change != other.change for other in found):
            found.append(one)
    return tuple(found)


def _named(names: tuple[str, ...]) -> tuple[Step, ...]:
    known = tuple(step.name for step in STEPS)
    for name in names:
        if name not in known:
            raise GpuprovError(f"there is no step {name!r}", "", f"steps: {', '.join(known)}", exit_code=ExitCode.USAGE)
    return tuple(step for step in STEPS if step.name in names) if names else STEPS
