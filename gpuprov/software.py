"""Which packages a host needs, in one transaction: engine, build tools, toolkit, the site's own."""

from __future__ import annotations

from gpuprov import kernel
from gpuprov.bundle import use
from gpuprov.changes import Change
from gpuprov.distros import find_distribution
from gpuprov.errors import Problem
from gpuprov.facts import HostFacts
from gpuprov.packages import InstallPackages, RefreshPackageIndex, missing
from gpuprov.spec import HostSpec

# All four of one version, or apt takes the newest of those that only one of them depends on.
_TOOLKIT_PACKAGES = (
    "nvidia-container-toolkit", "nvidia-container-toolkit-base", "libnvidia-container-tools", "libnvidia-container1",
)  # fmt: skip


def problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return what is missing and must not be installed."""
    if facts.docker.installed or spec.docker != "preinstalled":
        return ()
    return (
        Problem("docker is not installed", "there is no dockerd", "install it, or set gpuprov_docker: distribution"),
    )


def wanted(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages that the host needs, installed or not."""
    row = find_distribution(facts.os.id, facts.os.version)
    engine = row.docker_packages if row is not None and not facts.docker.installed else ()
    return (*engine, *kernel.packages(facts, spec), *toolkit_packages(spec), *spec.packages)


def toolkit_packages(spec: HostSpec) -> tuple[str, ...]:
    """Return NVIDIA's toolkit as packages, if it is asked for."""
    if spec.toolkit != "nvidia":
        return ()
    pin = f"={spec.toolkit_version}" if spec.toolkit_version else ""
    return tuple(f"{name}{pin}" for name in _TOOLKIT_PACKAGES)


def plan(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return one refresh and one installation of all that is missing, or nothing."""
    names = missing(facts.packages, wanted(facts, spec))
    options = use.apt_options() if facts.bundle is not None else ()
    return (RefreshPackageIndex(options), InstallPackages(names, options)) if names else ()
