"""Whether a host needs the fabric manager, of which version and from where. Pure."""

from __future__ import annotations

from gpuprov.core.changes import Change
from gpuprov.driver import distribution
from gpuprov.driver.fabric_manager import RunFabricManager, packages, problems
from gpuprov.facts.host import HostFacts
from gpuprov.packages.interface import Installation
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec

# NVIDIA's repositories for RHEL 8 and 9 have it in the module stream of its driver's branch. A driver from a .run does
# not enable that stream, so dnf would not find it.
_REPOSITORY = "gpuprov-cuda"


def wanted_version(facts: HostFacts, spec: HostSpec) -> str:
    """Return the version that the fabric manager must have, "" if none is needed.

    In a system container the switches are the container host's.
    """
    if not facts.fabric.switches or facts.kernel.container:
        return ""
    version = spec.driver_version if spec.driver == "runfile" else facts.driver_installed_version
    # NVIDIA's packages are requested by branch; the version is the installed one.
    return version if "." in version else facts.driver_installed_version


def installs_package(facts: HostFacts, spec: HostSpec) -> bool:
    """Say whether the package comes from NVIDIA's repository."""
    version = wanted_version(facts, spec)
    return bool(version) and spec.fabric_manager == "auto" and facts.fabric.version != version


def comes_from_repository(facts: HostFacts, spec: HostSpec) -> bool:
    """Say whether NVIDIA's repository is needed for it: to install it, and to update what came from there."""
    if _own_package(facts, spec):
        return False
    configured = any(path.rpartition("/")[2].startswith("gpuprov-cuda.") for path in facts.files)
    return installs_package(facts, spec) or (configured and bool(wanted_version(facts, spec)))


def plan(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return installation and start of the fabric manager, or nothing; to be done after its driver."""
    version = wanted_version(facts, spec)
    if not version or spec.fabric_manager != "auto":
        return ()
    fabric = facts.fabric
    starts = facts.image is None
    running = (fabric.active or not starts) and fabric.enabled and fabric.version == version
    changes: tuple[Change, ...] = () if running else (RunFabricManager(version, starts),)
    names = wanted_packages(facts, spec)
    if not names:
        return changes
    wanted = Installation(names, spec.lock_timeout, facts.bundle, unfiltered_repository=_REPOSITORY)
    return (*facts.package_manager.plan_installation(facts.packages, wanted), *changes)


def wanted_packages(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages of the fabric manager that are to be installed."""
    if not installs_package(facts, spec):
        return ()
    version, own = wanted_version(facts, spec), _own_package(facts, spec)
    if own:
        return (f"{own}={version}{facts.package_manager.any_release}",)
    return packages(version, facts.package_manager, facts.fabric)


def _own_package(facts: HostFacts, spec: HostSpec) -> str:
    """Return the package of the distribution's own fabric manager, "" if NVIDIA's is used."""
    choice = distribution.chosen(facts, spec)
    return choice.branch.fabric_manager if choice is not None else ""


def plan_problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return what prevents CUDA from working with this host's switches."""
    return problems(facts.fabric, wanted_version(facts, spec), ours=spec.fabric_manager == "auto")
