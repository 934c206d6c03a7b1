"""The distribution's own driver (`gpuprov_driver: distribution`): which branch, which packages. Pure; plans nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuprov.driver import generations
from gpuprov.driver.packaged import fits
from gpuprov.facts.host import HostFacts
from gpuprov.machine.distros import Distribution, packages_for_kernels
from gpuprov.machine.driver_rows import DriverBranch, OwnDriver, own_driver
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.versions import version_numbers

# The first branch for which NVIDIA recommends the open modules if both kinds work.
# Packages that only NVIDIA's repository has, and on which its other driver packages depend.
_NVIDIAS = re.compile(r"nvidia-open|cuda-drivers(-\d+)?")


@dataclass(frozen=True)
class Choice:
    """The branch for a host and the kind of its kernel modules.

    `compiled`: the packages of modules that the distribution compiled for the running kernel, if they are used;
    `lacking`: the wanted one that no repository has.
    """

    branch: DriverBranch
    kind: str
    compiled: tuple[str, ...] = ()
    lacking: str = ""

    @property
    def key_package(self) -> str:
        """The package whose version equals the driver's."""
        return self.branch.libraries[0]

    @property
    def modules(self) -> tuple[str, ...]:
        """The packages that contain the kernel modules; none if the distribution has none of this kind."""
        return self.compiled or self.branch.built.get(self.kind, ())


def as_packages(row: Distribution | None, spec: HostSpec) -> HostSpec:
    """Return the spec for a distribution that has only kernel modules: its compiled modules with NVIDIA's packages."""
    own = own_driver(row)
    if spec.driver != "distribution" or own is None or not own.like_packages:
        return spec
    return replace(spec, driver="packages", kernel_modules="precompiled")


def available(facts: HostFacts) -> OwnDriver | None:
    """Return the distribution's own driver, None if it has none for this machine."""
    own = own_driver(facts.distribution)
    return own if own is not None and facts.architecture in own.architectures else None


def chosen(facts: HostFacts, spec: HostSpec) -> Choice | None:
    """Return the choice to install, None if nothing of the distribution's is possible."""
    own = available(facts)
    if spec.driver != "distribution" or own is None:
        return None
    branch = asked_branch(own, spec.driver_version) if spec.driver_version else _default(own, facts, spec)
    if branch is None:
        return None
    kind = preferred_kind(branch, facts.gpu_device_ids, spec.kernel_module_type)
    return _with_compiled(Choice(branch, kind), facts, spec)


def asked_branch(own: OwnDriver, version: str) -> DriverBranch | None:
    """Return the branch of this number, None if the distribution has none."""
    listed = next((one for one in own.branches if one.branch == version), None)
    if listed is None and own.other_branch is not None and version.isdigit():
        return own.other_branch(version)
    return listed


def _default(own: OwnDriver, facts: HostFacts, spec: HostSpec) -> DriverBranch | None:
    """Return the branch that is installed, or the first that serves the host's GPUs; the first if none does."""
    installed = installed_branch(facts)
    if installed is not None:
        return installed
    served = (one for one in own.branches if not unserved(one, facts, spec))
    return next(served, own.branches[0] if own.branches else None)


def unserved(branch: DriverBranch, facts: HostFacts, spec: HostSpec) -> bool:
    """Say whether a branch does not serve the host's GPUs, or not with the modules that the distribution has of it."""
    version = generations.newest_of(branch.branch)
    kind = preferred_kind(branch, facts.gpu_device_ids, spec.kernel_module_type)
    return bool(generations.problems(facts.gpu_device_ids, version, kind)) or kind not in branch.built


def installed_branch(facts: HostFacts) -> DriverBranch | None:
    """Return the branch of the distribution's driver that is installed, None if there is none."""
    own, installed = available(facts), facts.packages.installed
    if own is None or of_nvidia(facts):
        return None
    if own.branch_pattern and own.other_branch is not None:
        found = sorted(match[1] for name in installed if (match := re.fullmatch(own.branch_pattern, name)))
        return own.other_branch(found[-1]) if found else None
    # NVIDIA's repository has packages of the same names, of other branches.
    versions = ((one, installed.get(one.libraries[0], "")) for one in own.branches)
    return next((one for one, version in versions if version and (not one.branch or fits(version, one.branch))), None)


def of_nvidia(facts: HostFacts) -> str:
    """Return an installed package of NVIDIA's own driver packages, "" if there is none."""
    return next((name for name in sorted(facts.packages.installed) if _NVIDIAS.fullmatch(name)), "")


def run_file_problems(facts: HostFacts) -> tuple[Problem, ...]:
    """Return why packages of any source can't be installed over a driver from a .run."""
    if not facts.driver_installed_version or facts.driver_packaged:
        return ()
    return (
        Problem(
            f"driver {facts.driver_installed_version} on this host comes from a .run; packages would break both",
            "its libraries belong to no package",
            "remove it first: nvidia-uninstall; or keep it: gpuprov_driver: preinstalled",
        ),
    )


def preferred_kind(branch: DriverBranch, device_ids: Sequence[str], asked: str) -> str:
    """Return open or proprietary; if these GPUs support both, NVIDIA's recommendation for the branch."""
    version = generations.newest_of(branch.branch) or "580.999"
    return generations.settled_type(device_ids, version, asked)


def _with_compiled(choice: Choice, facts: HostFacts, spec: HostSpec) -> Choice:
    """Return the choice with precompiled modules, if they are wanted and available."""
    templates = choice.branch.compiled.get(choice.kind, ())
    installed = facts.packages.installed
    is_built = any(name in installed for name in choice.branch.built.get(choice.kind, ()))
    by_default = not is_built and not spec.module_signing_key
    if not templates or spec.kernel_modules == "build" or (spec.kernel_modules == "auto" and not by_default):
        return choice
    names = tuple(name.format(kernel=facts.kernel.release) for name in templates)
    in_use = any(name.startswith(templates[0].partition("{")[0]) for name in installed)
    if names[0] in installed or _is_offered(facts, names[0]):
        return replace(choice, compiled=names)
    return replace(choice, lacking=names[0] if in_use or spec.kernel_modules == "precompiled" else "")


def _is_offered(facts: HostFacts, name: str) -> bool:
    return bool(_offered(facts, name))


def _offered(facts: HostFacts, name: str) -> tuple[str, ...]:
    """Return the versions of a package in the bundle, or in the repositories if they were queried."""
    if facts.bundle is not None:
        return tuple(one.version for one in facts.bundle.manifest.packages if one.name == name)
    return facts.offers.found.get(name, ()) if facts.offers is not None else ()


def packages(facts: HostFacts, spec: HostSpec, *, modules: bool) -> tuple[str, ...]:
    """Return the packages that the host needs of its distribution's driver; `modules`: include kernel modules."""
    choice = chosen(facts, spec)
    if choice is None:
        return ()
    if not modules:
        return choice.branch.libraries
    return (*choice.branch.libraries, *choice.modules, *_following(choice, facts))


def _following(choice: Choice, facts: HostFacts) -> tuple[str, ...]:
    """Return the packages that bring compiled modules with later kernels; not every flavour has one."""
    if not choice.compiled:
        return ()
    names = _candidates(choice, facts)
    return tuple(name for name in names if name in facts.packages.installed or _is_offered(facts, name))


def _candidates(choice: Choice, facts: HostFacts) -> tuple[str, ...]:
    rules = choice.branch.next_compiled.get(choice.kind, ())
    return packages_for_kernels(rules, facts.kernel.release, facts.packages.installed)


def questions(facts: HostFacts, spec: HostSpec, *, modules: bool) -> tuple[str, ...]:
    """Return the packages to query the repositories for before a plan is made; none if all are installed."""
    choice, own = chosen(facts, spec), available(facts)
    if choice is None or own is None or own.repository_package or facts.bundle is not None:
        return ()
    if not facts.package_manager.missing(facts.packages, packages(facts, spec, modules=modules)):
        return ()
    names = [choice.key_package, *(choice.branch.built.get(choice.kind, ()) if modules else ())]
    if modules and spec.kernel_modules != "build":
        compiled = choice.branch.compiled.get(choice.kind, ())[:1]
        names += [name.format(kernel=facts.kernel.release) for name in compiled]
        names += _candidates(choice, facts)
    return tuple(dict.fromkeys(names))


def offered_version(facts: HostFacts, name: str) -> str:
    """Return the newest available driver version of a package, "" if no repository was queried."""
    return max(map(driver_version, _offered(facts, name)), key=version_numbers, default="")


def driver_version(version: str) -> str:
    """Return the driver version in a package version: 535.309.01 of 535.309.01-0+deb12u1."""
    found = re.match(r"(?:\d+:)?(\d+(?:\.\d+)+)", version)
    return found[1] if found else ""
