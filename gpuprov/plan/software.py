"""The packages that a host needs, in one transaction: engine, build tools, toolkit, the site's own."""

import re

from gpuprov import toolkit
from gpuprov.boot import prepare
from gpuprov.core.changes import Change
from gpuprov.driver import cuda_repository, cuda_toolkit, dcgm, imex, kernel, packaged
from gpuprov.driver.source import DriverSource
from gpuprov.engines import known, other_engines
from gpuprov.facts.host import HostFacts
from gpuprov.machine.distros import Distribution, ExtraRepository, docker_repository
from gpuprov.packages import known_repositories
from gpuprov.packages.interface import Installation, driver_set, pinned
from gpuprov.packages.managers import manager_of
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec

# docs.docker.com/engine/install
_DOCKER_CE = ("docker-ce", "docker-ce-cli", "containerd.io", "docker-buildx-plugin", "docker-compose-plugin")


def note(facts: HostFacts) -> str:
    """Return a sentence about partly installed packages, or "": a run that installs packages finishes them."""
    found = ", ".join(f"{name} is {status}" for name, status in sorted(facts.packages.unfinished.items()))
    why = "dpkg was interrupted, or a script of the package failed"
    return f"{found}: {why}; the next installation finishes this first (dpkg --configure -a)" if found else ""


def extra_repositories(driver: DriverSource) -> tuple[ExtraRepository, ...]:
    """Return NVIDIA's CUDA repository, Docker's, an archive of past kernels and DKMS's, if the spec needs them."""
    facts, row = driver.facts, driver.facts.distribution
    docker = docker_repository(row, facts.architecture) if driver.spec.docker == "docker-ce" else None
    found = (*cuda_repository.repositories(driver), docker, *past_releases(driver), kernel.dkms_source(driver))
    return tuple(one for one in found if one is not None)


def problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return why the archive of past kernels is not possible, if it is requested and needed."""
    facts, row, kernel_release = driver.facts, driver.facts.distribution, driver.facts.kernel.release
    if facts.bundle or not _needs_archive(driver) or past_releases(driver):
        return ()
    said = known_repositories.advice(row, kernel_release, facts.architecture, facts.tables)
    what = f"{row.name} has no archive of past kernels that gpuprov could add"
    step = f"leave it out; {said.next_step}" if said else "leave gpuprov_kernel_archive out"
    return (Problem(what, f"gpuprov_kernel_archive is true, the kernel is {kernel_release}", step),)


def engine_note(facts: HostFacts, spec: HostSpec) -> str:
    """Return a note on a Kubernetes node's engine that is not named, or that waits for a restart; or ""."""
    own = known.own_engines(facts.kubernetes) if spec.docker == "none" else ()
    if unnamed := [name for name in own if name not in facts.engines]:
        named = f"gpuprov_engines: [{', '.join((*spec.engines, *unnamed))}]"
        return f"{', '.join(unnamed)} has a containerd of its own, which this run leaves as it is without {named}"
    kept = other_engines.kept_running(facts.engines, facts.kubernetes, spec)
    waiting = [name for name in facts.engines if name in kept and facts.engines[name].has_not_read_its_files]
    commands = "; ".join(other_engines.restart_command(name, facts.engines[name]) for name in waiting)
    return f"{', '.join(waiting)} runs without the handler nvidia until it is restarted: {commands}" if waiting else ""


def engine_packages(row: Distribution, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages of docker from its chosen source, with its plugins; none without docker."""
    sources = {"docker-ce": _DOCKER_CE if row.docker_repository else (), "distribution": row.docker_packages}
    return sources.get(spec.docker, ())


def wanted(driver: DriverSource) -> tuple[str, ...]:
    """Return the packages that the host needs, installed or not."""
    facts, spec = driver.facts, driver.spec
    engine = () if facts.docker.installed else engine_packages(facts.distribution, spec)
    # A system container's profiles are the container host's.
    confined = facts.kernel.apparmor and not facts.kernel.container
    ours = (
        *(facts.package_manager.confinement_packages if confined else ()),
        *kernel.packages(driver),
        *kernel.dkms_packages(driver),
        *driver.packages(),
        *cuda_toolkit.toolkit_packages(spec),
        *dcgm.wanted_packages(driver),
        *prepare.packages(driver),
        *toolkit.packages(spec),
    )
    holds = _asked(spec) or (_holds_driver(driver) and not unheld(driver))
    return (*engine, *ours, *spec.packages, *(facts.packages.locks.missing_plugin if holds else ()))


def plan(driver: DriverSource, wanted_packages: tuple[str, ...]) -> tuple[Change, ...]:
    """Return one refresh and one installation of all that is missing, and the holds; nothing if all is there."""
    facts, spec, limited = driver.facts, driver.spec, kernel.dkms_source(driver)
    engine = () if facts.docker.installed else engine_packages(facts.distribution, spec)
    place = (facts.kernel.release, facts.architecture, facts.tables)
    installation = Installation(
        wanted_packages,
        facts.bundle,
        hold=_asked(spec),
        units=("docker.service",) if engine else (),
        advice=None if facts.bundle else known_repositories.advice(facts.distribution, *place),
        limited=f"gpuprov-{limited.name}" if limited else "",
        limited_names=kernel.dkms_packages(driver),
    )
    changes = facts.package_manager.plan_installation(facts.packages, installation)
    return packaged.restoring(changes, facts.packages.installed)


def past_releases(driver: DriverSource) -> tuple[ExtraRepository, ...]:
    """Return the repositories with the headers of the running kernel, if requested."""
    facts = driver.facts
    if not _needs_archive(driver):
        return ()
    return known_repositories.past_releases(facts.distribution, facts.kernel.release, facts.architecture, facts.tables)


def _needs_archive(driver: DriverSource) -> bool:
    """Say whether the archive of past kernels is requested and needed."""
    return driver.spec.kernel_archive and bool(kernel.packages(driver))


def _asked(spec: HostSpec) -> tuple[str, ...]:
    """Return the packages whose version is asked for. Never the kernel's, nor the driver's, which move as one set."""
    asked = pinned((*toolkit.packages(spec), *spec.packages)) if spec.hold_pinned else ()
    return tuple(one for one in asked if not re.match(r"kernel\b|linux-(image|modules)", one) and not driver_set([one]))


def plan_driver_hold(driver: DriverSource, *, coming: bool) -> tuple[Change, ...]:
    """Return the change that holds the driver's packages, or no longer does; `coming`: some are installed before it."""
    facts, spec = driver.facts, driver.spec
    hold = spec.driver_updates == "hold" and not unheld(driver)
    return facts.package_manager.hold_driver(facts.packages, hold, coming)


def unheld(driver: DriverSource) -> str:
    """Return a note if this host can't hold the driver's packages: a bundle need not have dnf's plugin for it."""
    facts, plugin = driver.facts, driver.facts.packages.locks.missing_plugin
    if not plugin or facts.bundle is None or {*plugin} & {one.name for one in facts.bundle.manifest.packages}:
        return ""
    return f"the driver's packages are not held: the bundle lacks {plugin[0]}" if _holds_driver(driver) else ""


def _holds_driver(driver: DriverSource) -> bool:
    names = (*driver.facts.packages.driver, *driver.packages(), *imex.fabric_packages(driver))
    return driver.spec.driver_updates == "hold" and bool(driver_set(names))


def hold_packages(row: Distribution, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages that holding needs on a distribution, if something is to be held."""
    packaged = spec.driver in ("packages", "distribution") and spec.driver_updates == "hold"
    return manager_of(row).hold_packages(row) if packaged or _asked(spec) else ()
