"""Which packages a host needs, in one transaction: engine, build tools, toolkit, the site's own."""

from __future__ import annotations

import re
from dataclasses import replace

from gpuprov.boot import prepare
from gpuprov.bundle import use_rpm
from gpuprov.bundle.source import apt_options
from gpuprov.core.changes import Change
from gpuprov.driver import cuda_repository, kernel
from gpuprov.facts.host import HostFacts
from gpuprov.machine.distros import Distribution, DockerRepository, distribution_of, docker_repository
from gpuprov.packaging import past_kernels, rpm_locks, rpm_packages
from gpuprov.packaging.apt_packages import (
    InstallPackages,
    RefreshPackageIndex,
    missing,
    own_name,
    pinned,
    plan_holds,
)
from gpuprov.wire.errors import Problem
from gpuprov.wire.spec import HostSpec

# All four of one version, or apt takes the newest of those that only one of them depends on.
_TOOLKIT_PACKAGES = (
    "nvidia-container-toolkit", "nvidia-container-toolkit-base", "libnvidia-container-tools", "libnvidia-container1",
)  # fmt: skip
# fedoraproject.org/wiki/Changes/SwitchToDnf5
_DNF5_FEDORA = 41
# docs.docker.com/engine/install
_DOCKER_CE = ("docker-ce", "docker-ce-cli", "containerd.io")


def dockers_own_repository(facts: HostFacts, spec: HostSpec) -> DockerRepository | None:
    """Return Docker's own repository where docker shall come from there, or None."""
    row = distribution_of(facts.os)
    return docker_repository(row, facts.architecture) if row is not None and spec.docker == "docker-ce" else None


def problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return what is missing and must not be installed."""
    return (*_manager_problems(facts), *_docker_problems(facts, spec), *_archive_problems(facts, spec))


def _manager_problems(facts: HostFacts) -> tuple[Problem, ...]:
    row = distribution_of(facts.os)
    if row is None or facts.packages.manager == row.package_manager:
        return ()
    return (
        Problem(
            f"{row.name}'s package manager, {row.package_manager}, is missing on this host",
            f"there is no {row.package_manager}, or no database of packages that it could read",
            "is this an image without one (ostree, distroless)? Take the distribution's ordinary one",
        ),
    )


def _docker_problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    if facts.docker.installed:
        return ()
    if spec.docker == "preinstalled":
        next_step = "install it, or set gpuprov_docker: distribution"
        return (Problem("docker is not installed", "there is no dockerd", next_step),)
    row = distribution_of(facts.os)
    if row is None or engine_packages(row, spec):
        return ()
    here = f"{row.name} {row.version}"
    if spec.docker == "distribution":
        return (
            Problem(
                f"{here} has no docker of its own",
                "there is no dockerd, and none in the distribution's packages",
                "set gpuprov_docker: docker-ce to take it from Docker's own repository",
            ),
        )
    return (
        Problem(
            f"Docker has no repository for {here}",
            "docs.docker.com/engine/install",
            "set gpuprov_docker: distribution",
        ),
    )


def engine_packages(row: Distribution, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages of docker from where it shall come."""
    if spec.docker == "docker-ce":
        return _DOCKER_CE if row.docker_repository else ()
    return row.docker_packages


def confinement_packages(manager: str) -> tuple[str, ...]:
    """Return what docker needs where AppArmor is on: it runs no container whose profile it can't load.

    Debian's and Ubuntu's docker only recommend it, and recommendations are not installed (docs.docker.com, AppArmor).
    """
    return ("apparmor",) if manager == "apt" else ()


def note(facts: HostFacts, spec: HostSpec) -> str:
    """Return a warning where the next kernel would be without a driver, or nothing."""
    row = distribution_of(facts.os)
    if row is None or not row.dkms_from or spec.driver != "runfile" or not kernel.brings_modules(facts, spec):
        return ""
    if "dkms" in (*facts.packages.installed, *spec.packages):
        return ""
    return (
        f"{row.name} has no dkms of its own ({row.dkms_from} has): after a kernel update run gpuprov again, "
        "or add that repository and gpuprov_packages: [dkms]"
    )


def wanted(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages that the host needs, installed or not."""
    row = distribution_of(facts.os)
    engine = engine_packages(row, spec) if row is not None and not facts.docker.installed else ()
    # A system container's profiles are the outer machine's.
    confined = facts.kernel.apparmor and not facts.kernel.container
    ours = (
        *(confinement_packages(facts.packages.manager) if confined else ()),
        *kernel.packages(facts, spec),
        *cuda_repository.packages(facts, spec),
        *prepare.packages(facts, spec),
        *toolkit_packages(spec),
    )
    return (*engine, *ours, *spec.packages, *_lock_plugin(facts, spec))


def _lock_plugin(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the package that holding packages needs here, if something is to be held and the host can't yet."""
    locks = facts.packages.locks
    return (rpm_locks.LOCK_TOOLS[locks.tool].plugin,) if locks.tool and not locks.path and _held(spec) else ()


def toolkit_packages(spec: HostSpec) -> tuple[str, ...]:
    """Return NVIDIA's toolkit as packages, if it is asked for."""
    if spec.toolkit != "nvidia":
        return ()
    pin = f"={spec.toolkit_version}" if spec.toolkit_version else ""
    return tuple(f"{name}{pin}" for name in _TOOLKIT_PACKAGES)


def plan(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return one refresh and one installation of all that is missing, and the holds; nothing where all is there."""
    names = wanted(facts, spec)
    if facts.packages.manager in rpm_packages.MANAGERS:
        return _plan_rpm(facts, spec, names)
    lacking = missing(facts.packages, names)
    held = tuple(name for name in pinned(lacking) if own_name(facts.packages, name) in facts.packages.held)
    options = apt_options(facts.bundle)
    installation: tuple[Change, ...] = (
        RefreshPackageIndex(spec.lock_timeout, options),
        InstallPackages(lacking, held, spec.lock_timeout, options, _advice(facts)),
    )
    # A hold that the installation takes off is to be made anew.
    packages = replace(facts.packages, held=facts.packages.held - {own_name(facts.packages, name) for name in held})
    holds = plan_holds(packages, pinned(names) if spec.hold_pinned else (), spec.lock_timeout)
    return (*(installation if lacking else ()), *holds)


def _plan_rpm(facts: HostFacts, spec: HostSpec, names: tuple[str, ...]) -> tuple[Change, ...]:
    """Return the same for dnf, yum and zypper."""
    enable = () if facts.docker.installed else ("docker.service",)
    options = use_rpm.options(facts.bundle)
    installation = rpm_packages.plan(facts.packages, names, enable, spec.lock_timeout, options, _advice(facts))
    keys = use_rpm.plan_keys(facts.bundle, facts.packages.trusted_keys) if installation else ()
    lacking = pinned(rpm_packages.missing(facts.packages, names))
    lift, hold = rpm_locks.plan(facts.packages.locks, _held(spec), lacking)
    return (*keys, *lift, *installation, *hold)


def _advice(facts: HostFacts) -> past_kernels.Advice | None:
    """Return what to say if no repository has the headers of the running kernel."""
    row = distribution_of(facts.os)
    if row is None or facts.bundle is not None:
        return None
    return past_kernels.advice(row, facts.kernel.release, facts.architecture)


def past_releases(facts: HostFacts, spec: HostSpec) -> tuple[past_kernels.PastRelease, ...]:
    """Return the repositories that have the headers of the running kernel, where they are asked for."""
    row = distribution_of(facts.os)
    if row is None or not spec.kernel_archive or not kernel.packages(facts, spec):
        return ()
    return past_kernels.past_releases(row, facts.kernel.release, facts.architecture)


def _archive_problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    row = distribution_of(facts.os)
    if row is None or not spec.kernel_archive or facts.bundle or not kernel.packages(facts, spec):
        return ()
    return past_kernels.problems(row, facts.kernel.release, facts.architecture)


def _held(spec: HostSpec) -> tuple[str, ...]:
    """Return the packages that shall stay at the version that is asked for. Never the kernel's."""
    asked = pinned((*toolkit_packages(spec), *spec.packages)) if spec.hold_pinned else ()
    return tuple(name for name in asked if not re.match(r"kernel\b", name))


def lock_packages(row: Distribution, spec: HostSpec) -> tuple[str, ...]:
    """Return the plugin that holds packages, where something is to be held and dnf 4 or yum does it."""
    tool = "dnf5" if row.id == "fedora" and int(row.version) >= _DNF5_FEDORA else row.package_manager
    plugin = rpm_locks.LOCK_TOOLS[tool].plugin if tool in rpm_locks.LOCK_TOOLS else ""
    return (plugin,) if plugin and _held(spec) else ()
