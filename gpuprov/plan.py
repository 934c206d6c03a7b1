"""Facts and spec in, changes out: the steps in their order, and all that stands in their way. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from gpuprov import driver_run, kernel, repos, software, toolkit
from gpuprov.bundle import images, use
from gpuprov.changes import Change, MakeNode, RemoveFile, WriteFile
from gpuprov.distros import find_distribution, supported_names
from gpuprov.engines import docker
from gpuprov.engines.docker_change import ReconfigureDocker
from gpuprov.errors import Problem
from gpuprov.facts import HostFacts
from gpuprov.packages import InstallPackages, RefreshPackageIndex, missing
from gpuprov.spec import HostSpec

# Less than this and a run is not begun; what the driver needs besides is checked once its file is there.
_LEAST_FREE_BYTES = 100 << 20


@dataclass(frozen=True)
class Step:
    """A part of the work: `plan` returns what this part must change, nothing if it is as it should be."""

    name: str
    plan: Callable[[HostFacts, HostSpec], tuple[Change, ...]]


@dataclass(frozen=True)
class StepChange:
    """A change and the step that wants it."""

    step: str
    change: Change


@dataclass(frozen=True)
class Plan:
    """What to do. With problems, nothing is done."""

    changes: tuple[StepChange, ...]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


def _plan_repositories(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    # A host with a bundle reaches no repository: its sources stay as they are.
    return () if facts.bundle else repos.plan_repositories(facts.files, spec, facts.architecture)


def _plan_docker(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    return docker.plan(facts.docker, runtime_path=toolkit.runtime_path(spec), set_default=spec.docker_default_runtime)


STEPS = (
    Step("download", driver_run.plan_download),
    Step("repositories", _plan_repositories),
    Step("packages", software.plan),
    Step("driver", driver_run.plan),
    Step("device nodes", toolkit.plan_device_nodes),
    Step("toolkit", toolkit.plan_runtime),
    Step("cdi", toolkit.plan_cdi),
    Step("docker", _plan_docker),
    Step("images", images.plan),
)

# Every kind of change that a journal may name.
CHANGE_KINDS: dict[str, type[Change]] = {
    kind.__name__: kind
    for kind in (
        WriteFile, RemoveFile, MakeNode, repos.InstallKey, RefreshPackageIndex, InstallPackages,
        driver_run.FetchRunfile, driver_run.InstallDriver, toolkit.InstallRuntime, toolkit.WriteCdiSpecification,
        ReconfigureDocker, images.LoadImage,
    )
}  # fmt: skip


def make_plan(facts: HostFacts, spec: HostSpec) -> Plan:
    """Return what brings the host from `facts` to `spec`; all problems at once if it can't be done."""
    problems = preflight(facts, spec)
    if problems:
        return Plan((), problems)
    changes = tuple(StepChange(step.name, change) for step in STEPS for change in step.plan(facts, spec))
    note = kernel.note(facts, spec)
    return Plan(changes, notes=(note,) if note else ())


def preflight(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return everything that stands in the way, before anything is changed."""
    # On a machine of the wrong kind the rest would only be noise.
    return (
        _machine_problems(facts)
        or _bundle_problems(facts, spec)
        or (
            *_gpu_problems(facts),
            *_room_problems(facts),
            *kernel.problems(facts, spec),
            *driver_run.problems(facts, spec),
            *software.problems(facts, spec),
            *(() if facts.bundle else repos.problems(facts.files, spec, facts.architecture)),
            *docker.problems(facts.docker),
        )
    )


def _bundle_problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    names = missing(facts.packages, software.wanted(facts, spec))
    return use.problems(facts, spec, names, installs_driver=driver_run.installs(facts, spec))


def _machine_problems(facts: HostFacts) -> tuple[Problem, ...]:
    if facts.kernel.wsl:
        next_step = "install the NVIDIA driver in Windows; WSL brings it in by itself"
        return (
            Problem("in WSL the driver belongs to Windows and must not be installed", facts.kernel.release, next_step),
        )
    if find_distribution(facts.os.id, facts.os.version) is None:
        seen = f"/etc/os-release: ID={facts.os.id} VERSION_ID={facts.os.version or '(none)'}"
        return (Problem(f"{facts.os.name} is not supported", seen, f"supported are: {supported_names()}"),)
    return ()


def _room_problems(facts: HostFacts) -> tuple[Problem, ...]:
    """A disk that fills up in the middle leaves half of everything: better not begin."""
    return tuple(
        Problem(
            f"not enough room on the file system of {place}",
            f"{free // 2**20} MiB free, at least {_LEAST_FREE_BYTES // 2**20} MiB needed",
            f"make room: df -h {place}",
        )
        for place, free in facts.free_bytes.items()
        if free < _LEAST_FREE_BYTES
    )


def _gpu_problems(facts: HostFacts) -> tuple[Problem, ...]:
    if facts.gpus:
        return ()
    return (
        Problem(
            "there is no NVIDIA GPU in this machine",
            "no device of class 03 (display) and vendor 10de in /sys/bus/pci/devices",
            "`lspci -d 10de:` should list it; a virtual machine needs it passed through",
        ),
    )
