"""The packages that a host needs, in one transaction: engine, build tools, toolkit, the site's own."""

from __future__ import annotations

import re

from gpuprov import toolkit
from gpuprov.boot import prepare
from gpuprov.core.changes import Change
from gpuprov.driver import cuda_repository, cuda_toolkit, dkms, fabric_manager, kernel
from gpuprov.driver.source import DriverSource
from gpuprov.engines import kubernetes, other_engines
from gpuprov.facts.host import HostFacts
from gpuprov.machine.distros import Distribution, ExtraRepository, docker_repository
from gpuprov.packages import known_repositories
from gpuprov.packages.failures import Advice
from gpuprov.packages.interface import Installation, pinned
from gpuprov.packages.managers import manager_of
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec

# docs.docker.com/engine/install
_DOCKER_CE = ("docker-ce", "docker-ce-cli", "containerd.io", "docker-buildx-plugin", "docker-compose-plugin")


def note(facts: HostFacts) -> str:
    """Return a sentence about partly installed packages, or "": a run that installs packages finishes them."""
    found = ", ".join(f"{name} is {status}" for name, status in sorted(facts.packages.unfinished.items()))
    return (
        f"{found}: dpkg was interrupted; the next installation finishes this first (dpkg --configure -a)"
        if found
        else ""
    )


def extra_repositories(driver: DriverSource) -> tuple[ExtraRepository, ...]:
    """Return NVIDIA's CUDA repository, Docker's, an archive of past kernels and DKMS's, if the spec needs them."""
    facts, row = driver.facts, driver.facts.distribution
    with_docker = row is not None and driver.spec.docker == "docker-ce"
    docker = docker_repository(row, facts.architecture) if row is not None and with_docker else None
    found = (*cuda_repository.repositories(driver), docker, *past_releases(driver), dkms.repository(driver))
    return tuple(one for one in found if one is not None)


def problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return which packages are missing but may not be installed."""
    return (
        *_manager_problems(driver.facts),
        *_docker_problems(driver.facts, driver.spec),
        *_archive_problems(driver),
        *dkms.problems(driver),
    )


def _manager_problems(facts: HostFacts) -> tuple[Problem, ...]:
    row = facts.distribution
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
    if spec.docker == "none":
        return _no_engine_problems(facts)
    if facts.docker.installed:
        return ()
    if spec.docker == "preinstalled":
        next_step = "install it, or set gpuprov_docker: distribution"
        return (Problem("docker is not installed", "there is no dockerd", next_step),)
    row = facts.distribution
    if row is None or engine_packages(row, spec):
        return ()
    here = f"{row.name} {row.version}"
    if spec.docker == "distribution":
        return (
            Problem(
                f"{here} has no docker of its own",
                "there is no dockerd, and none in the distribution's packages",
                "set gpuprov_docker: docker-ce to take it from Docker's own repository, or none for podman instead",
            ),
        )
    return (
        Problem(
            f"Docker has no repository for {here}",
            "docs.docker.com/engine/install",
            "set gpuprov_docker: distribution",
        ),
    )


def _no_engine_problems(facts: HostFacts) -> tuple[Problem, ...]:
    if facts.engines or facts.kubernetes:
        return ()
    others = "no engine but docker's own" if facts.docker.installed else "neither podman, containerd nor crio"
    return (
        Problem(
            "there is no container engine on this host for gpuprov to configure",
            f"gpuprov_docker is none, and {others} is installed",
            f"install one: {facts.package_manager.commands.install} podman; or set gpuprov_docker: distribution",
        ),
    )


def engine_note(facts: HostFacts, spec: HostSpec) -> str:
    """Return a note on a Kubernetes node's engine that is not named, or that waits for a restart; or ""."""
    own = kubernetes.own_engines(facts.kubernetes) if spec.docker == "none" else ()
    unnamed = [name for name in own if name not in facts.engines]
    if unnamed:
        named = f"gpuprov_engines: [{', '.join((*spec.engines, *unnamed))}]"
        return f"{', '.join(unnamed)} has a containerd of its own, which this run leaves as it is without {named}"
    kept = other_engines.kept_running(facts.engines, facts.kubernetes, spec)
    waiting = [name for name in facts.engines if name in kept and facts.engines[name].has_not_read_its_files]
    commands = "; ".join(other_engines.restart_command(name, facts.engines[name]) for name in waiting)
    return f"{', '.join(waiting)} runs without the handler nvidia until it is restarted: {commands}" if waiting else ""


def engine_packages(row: Distribution, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages of docker from its chosen source, with its plugins; none without docker."""
    if spec.docker in ("preinstalled", "none"):
        return ()
    if spec.docker == "docker-ce":
        return _DOCKER_CE if row.docker_repository else ()
    return row.docker_packages


def _missing_engine(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    row = facts.distribution
    return engine_packages(row, spec) if row is not None and not facts.docker.installed else ()


def wanted(driver: DriverSource) -> tuple[str, ...]:
    """Return the packages that the host needs, installed or not."""
    facts, spec = driver.facts, driver.spec
    engine = _missing_engine(facts, spec)
    # A system container's profiles are the container host's.
    confined = facts.kernel.apparmor and not facts.kernel.container
    ours = (
        *(facts.package_manager.confinement_packages if confined else ()),
        *kernel.packages(driver),
        *dkms.packages(driver),
        *driver.packages(),
        *cuda_toolkit.toolkit_packages(spec),
        *prepare.packages(driver),
        *toolkit.packages(spec),
    )
    holds = held(driver) or fabric_manager.held(driver)
    return (*engine, *ours, *spec.packages, *(facts.packages.locks.missing_plugin if holds else ()))


def plan(driver: DriverSource, wanted_packages: tuple[str, ...]) -> tuple[Change, ...]:
    """Return one refresh and one installation of all that is missing, and the holds; nothing if all is there."""
    facts, spec, limited = driver.facts, driver.spec, dkms.repository(driver)
    installation = Installation(
        wanted_packages,
        spec.lock_timeout,
        facts.bundle,
        hold=held(driver),
        units=("docker.service",) if _missing_engine(facts, spec) else (),
        advice=_advice(facts),
        limited=f"gpuprov-{limited.name}" if limited else "",
        limited_names=dkms.packages(driver),
    )
    return facts.package_manager.plan_installation(facts.packages, installation)


def _advice(facts: HostFacts) -> Advice | None:
    """Return what to say if no repository has the headers of the running kernel."""
    row = facts.distribution
    if row is None or facts.bundle is not None:
        return None
    return known_repositories.advice(row, facts.kernel.release, facts.architecture)


def past_releases(driver: DriverSource) -> tuple[ExtraRepository, ...]:
    """Return the repositories with the headers of the running kernel, if requested."""
    facts, row = driver.facts, driver.facts.distribution
    if row is None or not driver.spec.kernel_archive or not kernel.packages(driver):
        return ()
    return known_repositories.past_releases(row, facts.kernel.release, facts.architecture)


def _archive_problems(driver: DriverSource) -> tuple[Problem, ...]:
    facts, row = driver.facts, driver.facts.distribution
    if row is None or not driver.spec.kernel_archive or facts.bundle or not kernel.packages(driver):
        return ()
    return known_repositories.archive_problems(row, facts.kernel.release, facts.architecture)


def held(driver: DriverSource) -> tuple[str, ...]:
    """Return the packages to hold that are installed or come with the others, not after the driver."""
    fabric = () if fabric_manager.installs_package(driver) else fabric_manager.held(driver)
    there = driver.facts.packages.installed
    return (*_asked(driver.spec), *(name for name in fabric if name in there))


def _asked(spec: HostSpec) -> tuple[str, ...]:
    """Return the packages whose version is asked for. Never the kernel's."""
    asked = pinned((*toolkit.packages(spec), *spec.packages)) if spec.hold_pinned else ()
    return tuple(name for name in asked if not re.match(r"kernel\b", name))


def hold_packages(row: Distribution, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages that holding needs on a distribution, if something is to be held."""
    return manager_of(row).hold_packages(row) if _asked(spec) else ()
