"""Plan the distribution's own driver on a host, and report what prevents it. Pure."""

from __future__ import annotations

import re

from gpuprov.core.changes import Change, RemoveFile, WriteFile
from gpuprov.driver import distribution, generations
from gpuprov.driver.distribution import Choice
from gpuprov.driver.kernel import brings_modules
from gpuprov.driver.packaged import LoadDriver, SwitchBranch
from gpuprov.facts.host import PREFERENCES, HostFacts
from gpuprov.machine.driver_rows import OwnDriver, names_with_own_driver, own_driver
from gpuprov.packages import apt_components
from gpuprov.packages.apt import apt_options
from gpuprov.packages.apt_packages import RefreshPackageIndex
from gpuprov.packages.interface import Installation
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec

# NVIDIA's repository has newer packages of the same names, and its own pin prefers them. Its Release file says Origin:
# NVIDIA (apt_preferences(5)). Other packages that go with any driver still come from it.
PREFERENCES_TEXT = """\
# By gpuprov: the driver is the distribution's own, so NVIDIA's repository must not replace its packages.
Package: nvidia-fabricmanager* nvlsm nvidia-container-toolkit* libnvidia-container*
Pin: release o=NVIDIA
Pin-Priority: 500

Package: *nvidia* cuda-drivers* libcuda1* libcudadebugger1* libnvcuvid1* libnvoptix1* libxnvctrl*
Pin: release o=NVIDIA
Pin-Priority: -1
"""


def packages(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages of the distribution's driver that the host needs, unless a change of branch installs them."""
    return () if plan_other_branch(facts, spec) else _packages(facts, spec)


def _packages(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    return distribution.packages(facts, spec, modules=brings_modules(facts, spec))


def questions(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages to query the repositories for before a plan is made."""
    return distribution.questions(facts, spec, modules=brings_modules(facts, spec))


# -- problems --------------------------------------------------------------------------------------------------------


def problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return what prevents this host from using its distribution's driver."""
    row = facts.distribution
    if spec.driver != "distribution" or row is None:
        return ()
    own = distribution.available(facts)
    if own is None:
        return (_no_driver(facts),)
    choice = distribution.chosen(facts, spec)
    if choice is None:
        return (_no_branch(facts, spec, own),)
    return (
        *_other_driver_problems(facts),
        *(_module_problems(facts, spec, choice) if brings_modules(facts, spec) else _container_problems(facts, choice)),
        *_source_problems(facts, own),
        *_offer_problems(facts, spec, choice),
    )


def _no_driver(facts: HostFacts) -> Problem:
    row = facts.distribution
    assert row is not None
    known = own_driver(row)
    where = f" on {facts.architecture}" if known is not None else ""
    return Problem(
        f"{row.name} {row.version}{where} has no NVIDIA driver of its own that gpuprov knows",
        f"gpuprov_driver: distribution; these have one: {names_with_own_driver()}",
        "set gpuprov_driver: runfile or packages",
    )


def _no_branch(facts: HostFacts, spec: HostSpec, own: OwnDriver) -> Problem:
    row = facts.distribution
    assert row is not None
    branches = ", ".join(one.branch for one in own.branches if one.branch)
    has = f"it has the branches {branches}" if branches else "it has one driver, of whatever branch"
    return Problem(
        f"the driver {spec.driver_version} can't be asked for of {row.name} {row.version}",
        f"gpuprov_driver: distribution; {has}; the version within a branch is the distribution's",
        "set gpuprov_driver_version to one of these, in quotes; or gpuprov_driver: runfile"
        if branches else "leave gpuprov_driver_version out, or set gpuprov_driver: runfile",
    )  # fmt: skip


def _other_driver_problems(facts: HostFacts) -> tuple[Problem, ...]:
    """A .run's files, or NVIDIA's packages of the same names, would lie below the distribution's."""
    nvidias = distribution.of_nvidia(facts)
    if nvidias:
        return (
            Problem(
                "the driver on this host comes from NVIDIA's packages; the distribution's would break both",
                f"package {nvidias} is installed",
                f"keep it: gpuprov_driver: packages; or remove it first: {facts.package_manager.commands.remove} "
                "'*nvidia*'",
            ),
        )
    return distribution.run_file_problems(facts)


def _module_problems(facts: HostFacts, spec: HostSpec, choice: Choice) -> tuple[Problem, ...]:
    version = generations.newest_of(choice.branch.branch)
    unserved = generations.problems(facts.gpu_device_ids, version, spec.kernel_module_type)
    if unserved:
        return tuple(_instead(one) for one in unserved)
    if choice.lacking:
        return (_no_modules(facts, choice),)
    row = facts.distribution
    assert row is not None
    name, branch = f"{row.name} {row.version}", f"branch {choice.branch.branch}" if choice.branch.branch else "driver"
    if spec.kernel_modules == "precompiled" and not choice.compiled:
        return (
            Problem(
                f"{name} has no compiled kernel modules of its driver",
                f"gpuprov_kernel_modules: precompiled, gpuprov_driver: distribution; {name} builds them by DKMS",
                "leave gpuprov_kernel_modules out",
            ),
        )
    if not choice.modules:
        return (
            Problem(
                f"{name} has no {choice.kind} kernel modules of its {branch}",
                f"it has {', '.join(sorted(choice.branch.built))} ones",
                "set gpuprov_driver: runfile, or leave gpuprov_kernel_module_type out",
            ),
        )
    return ()


def _instead(problem: Problem) -> Problem:
    """Return a problem of the GPUs with a driver of any branch: a distribution has few branches."""
    wanted = re.search(r'gpuprov_driver_version: "\d+"', problem.next_step)
    step = f"set gpuprov_driver: runfile and {wanted[0]}" if wanted else problem.next_step
    return Problem(f"the distribution's {problem.what}", problem.evidence, step)


def _no_modules(facts: HostFacts, choice: Choice) -> Problem:
    return Problem(
        f"no repository has {choice.kind} kernel modules of branch {choice.branch.branch} that are compiled for the "
        f"running kernel {facts.kernel.release}",
        f"looked for {choice.lacking}",
        "boot the flavour's newest kernel (apt-get upgrade, then systemctl reboot); or set gpuprov_kernel_modules: "
        "build, which DKMS does",
    )


def _container_problems(facts: HostFacts, choice: Choice) -> tuple[Problem, ...]:
    """Return the problems of versions: libraries and kernel must match, or NVML and CUDA fail (NVML error 18)."""
    if facts.image is not None:
        return ()
    loaded, where = facts.driver_loaded_version, "the container host" if facts.kernel.container else "this kernel"
    if not loaded:
        return (
            Problem(
                f"the NVIDIA driver is not loaded {'on' if facts.kernel.container else 'in'} {where}",
                "there is no /proc/driver/nvidia/version",
                f"install the driver on {where} first, then run gpuprov again here",
            ),
        )
    installed = distribution.installed_branch(facts)
    stays = installed is not None and installed.branch == choice.branch.branch
    version = facts.driver_installed_version if stays else distribution.offered_version(facts, choice.key_package)
    if version in ("", loaded):
        return ()
    return (
        Problem(
            f"the distribution's driver is {version}, but {where} runs {loaded}: the two must match",
            "/proc/driver/nvidia/version",
            f'set gpuprov_driver: runfile and gpuprov_driver_version: "{loaded}", or install {version} on {where}',
        ),
    )


def _source_problems(facts: HostFacts, own: OwnDriver) -> tuple[Problem, ...]:
    row = facts.distribution
    if row is None or not own.components or facts.bundle is not None:
        return ()
    return apt_components.problems(facts.files, f"{row.name} {row.version}", row.codename, own.components)


def _offer_problems(facts: HostFacts, spec: HostSpec, choice: Choice) -> tuple[Problem, ...]:
    """Return what the queried repositories lack: a branch, or modules of the libraries' version."""
    if facts.offers is None or facts.offers.problems or not questions(facts, spec):
        return ()
    key = choice.key_package
    if facts.offers.lacking((key,)):
        what = f"no repository of this host has branch {choice.branch.branch} of the distribution's driver"
        look = "apt-cache search --names-only 'nvidia-headless-[0-9]*-server' shows the branches"
        return (Problem(what, f"{facts.packages.manager} was asked for {key}", f"{look}: gpuprov_driver_version"),)
    modules = "" if choice.compiled or not brings_modules(facts, spec) else next(iter(choice.modules), "")
    versions = [distribution.offered_version(facts, name) for name in (key, modules) if name]
    if len(set(versions)) < 2:
        return ()
    return (
        Problem(
            f"the distribution's {choice.kind} kernel modules and its libraries are of different versions",
            f"newest in the repositories: {modules} {versions[1] or '(none)'}, {key} {versions[0]}",
            "leave gpuprov_kernel_module_type out where the GPUs can have the others; or set gpuprov_driver: runfile",
        ),
    )


# -- changes ---------------------------------------------------------------------------------------------------------


def plan_preferences(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the change that writes or removes the file that keeps NVIDIA's repository from replacing the driver."""
    there, own = facts.files.get(PREFERENCES), distribution.available(facts)
    if spec.driver != "distribution" or own is None or not own.components:
        return (RemoveFile(PREFERENCES, "no longer asked for"),) if there else ()
    text = PREFERENCES_TEXT.encode()
    return () if there and (there.content, there.mode) == (text, 0o644) else (WriteFile(PREFERENCES, text),)


def plan_repository_package(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the installation of the package that adds the driver's repository, if there is one."""
    own = distribution.available(facts)
    if spec.driver != "distribution" or own is None or not own.repository_package:
        return ()
    return facts.package_manager.plan_installation(
        facts.packages, Installation((own.repository_package,), spec.lock_timeout, facts.bundle)
    )


def plan_other_branch(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the change to the requested branch, if another one is installed."""
    choice, installed = distribution.chosen(facts, spec), distribution.installed_branch(facts)
    if choice is None or installed is None or not choice.branch.branch:
        return ()
    if installed.branch == choice.branch.branch:
        return ()
    names = _packages(facts, spec)
    old = {installed.base, *installed.libraries, *(name for names in installed.built.values() for name in names)}
    old |= {name for name in facts.packages.installed if _is_compiled_of(name, installed.branch)}
    gone = tuple(sorted(name for name in old if name in facts.packages.installed and name not in names))
    options = apt_options(facts.bundle)
    change = SwitchBranch(
        names, lock_timeout=spec.lock_timeout, options=options, wanted=choice.branch.branch, instead=gone
    )
    return (RefreshPackageIndex(spec.lock_timeout, options), change)


def _is_compiled_of(name: str, branch: str) -> bool:
    return (
        re.match(rf"(linux-modules-nvidia|nvidia-headless|nvidia-headless-no-dkms)-{branch}-server\b", name) is not None
    )


def plan_driver(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the change that loads a driver whose packages were just installed, or are installed and not loaded."""
    # An image's modules are loaded when it boots.
    if spec.driver != "distribution" or not brings_modules(facts, spec) or facts.image is not None:
        return ()
    there, loaded = facts.driver_installed_version, facts.driver_loaded_version
    return () if there and loaded else (LoadDriver(),)
