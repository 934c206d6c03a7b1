"""NVIDIA's CUDA repository: the driver from packages, and the CUDA toolkit. Pure.

Sources: NVIDIA's Driver Installation Guide and CUDA Installation Guide for Linux: repositories, keys, package names,
module streams, pinning packages.
"""

from __future__ import annotations

import re
from dataclasses import replace

from gpuprov.core.changes import Change, WriteFile
from gpuprov.driver import distribution, fabric_plan, generations, precompiled
from gpuprov.driver.kernel import brings_modules
from gpuprov.driver.packaged import ChangeDriverPackages, ChangeDriverRpms, EnableStream, LoadDriver, SwitchPin, fits
from gpuprov.facts.cuda import OTHER_PROFILE, PROFILE
from gpuprov.facts.host import HostFacts
from gpuprov.machine.distros import Distribution, ExtraRepository, nvidia_folder
from gpuprov.packages.apt import apt_options
from gpuprov.packages.apt_packages import InstallPackages, RefreshPackageIndex, missing
from gpuprov.packages.registry import manager_of
from gpuprov.packages.rpm import RpmManager
from gpuprov.packages.rpm_packages import RefreshRpmIndex
from gpuprov.protocol import driver_releases
from gpuprov.protocol.driver_releases import LONG_TERM_BRANCH
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec

_DEFAULT = "https://developer.download.nvidia.com/compute/cuda/repos"
_PROFILE_HEAD = b"# Written by gpuprov: programs of the CUDA toolkit.\n"
_PROFILE_TEXT = _PROFILE_HEAD + b'export PATH="/usr/local/cuda/bin${PATH:+:$PATH}"\n'
# The key that signs each folder: file, fingerprint; none if no source documents it. Debian 13 rejects the SHA-1
# signature of the older key. Since 2025 each new folder has a separate key, so a later release gets none of these.
_KEYS = (
    (r"debian13", "8793F200.pub", "02182E60104FCDC26EAE1B8597A5D4CB8793F200"),
    (r"ubuntu2604", "60DF8A40.pub", "14BAFBC7562AD710CA04E69905FBB6DA60DF8A40"),
    (r"debian1[12]|ubuntu2[024]04", "3bf863cc.pub", "EB693B3035CD5710E231E123A4B469963BF863CC"),
    (r"rhel10", "CDF6BA43.pub", ""),
    (r"fedora43", "1940C73E.pub", ""),
    (r"fedora44", "73CD9B30.pub", "129994480EC63D2789BC98E490DFED2F73CD9B30"),
    (r"suse16", "3A8B5622.pub", "CF65941A859D4B4E6870F188736A284B3A8B5622"),
    (
        r"rhel[789]|amzn2023|sles15|opensuse15|fedora(39|4[012])",
        "D42D0685.pub",
        "610C7B14E068A878070DA4E99CD0A493D42D0685",
    ),
)
# On these, dnf's module streams are the driver's branches; later releases have packages only.
_WITH_STREAMS = r"rhel[89]|amzn2023"
STREAM_FILE = "/etc/dnf/modules.d/nvidia-driver.module"
_TOP = ("nvidia-open", "cuda-drivers")
PINNING = "nvidia-driver-pinning-"


def _needs_repository(spec: HostSpec) -> bool:
    return spec.driver == "packages" or bool(toolkit_packages(spec))


def with_branch(facts: HostFacts, spec: HostSpec) -> HostSpec:
    """Return the spec with the last branch that serves this host's GPUs, if its packages would be of a later branch.

    A driver installed as packages of an earlier branch stays with its branch. If the repository lacks the branch, or
    can't hold a host to it, the spec is unchanged and `problems` reports it.
    """
    row, last = facts.distribution, generations.last_branch(facts.gpu_device_ids)
    if spec.driver != "packages" or spec.driver_version or not last or row is None or not _can_pin(row):
        return spec
    installed = facts.driver_installed_version.partition(".")[0] if facts.driver_packaged else ""
    branch = min(filter(None, (installed, last)), key=int)
    is_there = branch == installed or int(branch) >= int(LONG_TERM_BRANCH)
    return replace(spec, driver_version=branch) if is_there else spec


def repositories(facts: HostFacts, spec: HostSpec) -> tuple[ExtraRepository, ...]:
    """Return NVIDIA's CUDA repository if packages come from it, else nothing."""
    row = facts.distribution
    if row is None:
        return ()
    return repositories_of(row, facts.architecture, spec, fabric=fabric_plan.comes_from_repository(facts, spec))


def repositories_of(
    row: Distribution, architecture: str, spec: HostSpec, *, fabric: bool = False
) -> tuple[ExtraRepository, ...]:
    """Return the same for a row of the table and an architecture; `fabric`: the fabric manager is also needed."""
    folder = nvidia_folder(row, architecture)
    if not (fabric or _needs_repository(spec)) or not folder:
        return ()
    base = f"{spec.cuda_repository.rstrip('/')}/{folder}"
    file, fingerprint = _key(row, spec)
    return (ExtraRepository("cuda", f"{base}/", f"{base}/{file}", fingerprint),)


def _key(row: Distribution, spec: HostSpec) -> tuple[str, str]:
    """Return file and fingerprint of the key that signs a row's repository; "" if unknown.

    The user's fingerprint has priority. NVIDIA names a key's file by the last eight digits of its fingerprint.
    """
    found = ((file, key) for pattern, file, key in _KEYS if re.fullmatch(pattern, row.nvidia_repository))
    file, fingerprint = next(found, ("", ""))
    if not spec.cuda_key_fingerprint:
        return file, fingerprint
    return file or f"{spec.cuda_key_fingerprint[-8:]}.pub", spec.cuda_key_fingerprint


def problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return why this host can't get packages from NVIDIA."""
    row = facts.distribution
    if not _needs_repository(spec) or row is None:
        return ()
    found = repository_problems(row, facts.architecture, spec)
    if not nvidia_folder(row, facts.architecture):
        return found
    return (*found, *(_driver_problems(facts, spec, row) if spec.driver == "packages" else ()))


def repository_problems(row: Distribution, architecture: str, spec: HostSpec) -> tuple[Problem, ...]:
    """Return why nothing can come from NVIDIA's CUDA repository for a row of the table and an architecture."""
    folder = nvidia_folder(row, architecture)
    if not folder:
        return (
            Problem(
                f"NVIDIA has no CUDA repository for {row.name} {row.version} on {architecture}",
                "developer.download.nvidia.com/compute/cuda/repos",
                "set gpuprov_driver: runfile, and leave gpuprov_cuda out",
            ),
        )
    return () if _key(row, spec)[1] else (_unknown_key(row, f"{_DEFAULT}/{folder}", _key(row, spec)[0]),)


def _unknown_key(row: Distribution, base: str, file: str) -> Problem:
    """Return the problem of an unknown key: only NVIDIA's own proves that packages are NVIDIA's."""
    place = f"{base}/{file or 'the .pub file that lies there'}"
    return Problem(
        f"this gpuprov does not know the fingerprint of the key of NVIDIA's repository for {row.name} {row.version}",
        f"{place}: no public source that tells its fingerprint was found",
        f"fetch it twice over different networks (curl -O {base}/{file or 'FILE.pub'}), compare the two, and set "
        "gpuprov_cuda_key_fingerprint to the 40 digits that gpg --show-keys FILE prints; or gpuprov_driver: runfile",
    )


def _driver_problems(facts: HostFacts, spec: HostSpec, row: Distribution) -> tuple[Problem, ...]:
    if not brings_modules(facts, spec):
        return (
            Problem(
                "the driver's packages bring kernel modules, and this host's kernel is not its own",
                f"inside {facts.kernel.container or 'a host with gpuprov_kernel_modules: none'}",
                "set gpuprov_driver: runfile (libraries only), or preinstalled",
            ),
        )
    if over_run_file := distribution.run_file_problems(facts):
        return over_run_file
    if (own := distribution.installed_branch(facts)) is not None:
        return (
            Problem(
                "the driver on this host is the distribution's own; NVIDIA's packages over it would break both",
                f"package {own.libraries[0]} is installed, and {', '.join(_TOP)} are not",
                "keep it: gpuprov_driver: distribution; or remove it first: gpuprov uninstall, or "
                f"{manager_of(row).commands.remove} '*nvidia*'",
            ),
        )
    if spec.driver_version and not _can_pin(row):
        return (
            Problem(
                f"a driver version can't be asked for of NVIDIA's packages for {row.name} {row.version}",
                "this repository has neither pinning packages nor streams",
                f"leave gpuprov_driver_version out (and hold the driver: {manager_of(row).commands.hold}), "
                "or set gpuprov_driver: runfile",
            ),
        )
    last = generations.last_branch(facts.gpu_device_ids)
    if last and not spec.driver_version:
        return (_no_branch(facts, row, last),)
    version = generations.newest_of(spec.driver_version)
    return generations.problems(facts.gpu_device_ids, version, spec.kernel_module_type)


def _no_branch(facts: HostFacts, row: Distribution, branch: str) -> Problem:
    """Return the problem of a branch before 580, or of a repository that can't hold a host to one."""
    release = driver_releases.resolved(branch)
    return Problem(
        f"NVIDIA's packages for {row.name} {row.version} have no driver that serves this host's GPUs",
        f"PCI devices {', '.join(f'10de:{one}' for one in sorted(set(facts.gpu_device_ids)))}: {branch} is the last "
        "branch that serves them all; packages without a version are of a later one",
        f'set gpuprov_driver: runfile and gpuprov_driver_version: "{release}"',
    )


def _can_pin(row: Distribution) -> bool:
    return manager_of(row).has_pin_packages or bool(re.fullmatch(_WITH_STREAMS, row.nvidia_repository))


def packages(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages to install from NVIDIA's repository."""
    return (*driver_packages(facts, spec), *toolkit_packages(spec))


def driver_packages(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the package on which the driver's other packages depend, if the driver comes as packages, and modules.

    Compiled modules fit one driver version, and a repository may have a newer driver without modules for this kernel.
    So the first installation requests exactly that version.
    """
    if spec.driver != "packages":
        return ()
    top = "nvidia-open" if precompiled.kind_of(facts, spec) == "open" else "cuda-drivers"
    found = precompiled.chosen(facts, spec)
    if found is None:
        return (top,)
    if found.libraries:
        return (*found.libraries, found.module)
    return (top if top in facts.packages.installed else f"{top}={found.driver}", found.module)


def toolkit_packages(spec: HostSpec) -> tuple[str, ...]:
    """Return the CUDA toolkit as a package, if requested from there."""
    return (f"cuda-toolkit-{spec.cuda.replace('.', '-')}",) if spec.cuda and not spec.cuda_url else ()


def pin_packages(spec: HostSpec) -> tuple[str, ...]:
    """Return the package that pins apt to the requested branch or version, if any."""
    wanted = spec.driver == "packages" and spec.driver_version
    return (f"{PINNING}{spec.driver_version}",) if wanted else ()


def plan_pin(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the change that pins the driver to the requested branch or version, before its installation."""
    row = facts.distribution
    if row is None or spec.driver != "packages":
        return ()
    if manager_of(row).has_pin_packages:
        return _plan_apt_pin(facts, spec)
    if not re.fullmatch(_WITH_STREAMS, row.nvidia_repository):
        return ()
    compiled = precompiled.chosen(facts, spec)
    stream = compiled.stream if compiled else _stream(spec.driver_version, precompiled.kind_of(facts, spec))
    found = facts.files.get(STREAM_FILE)
    current = re.search(r"^stream=(\S+)$", found.content.decode("utf-8", "replace") if found else "", re.MULTILINE)
    fits_too = (compiled.latest,) if compiled and not spec.driver_version else ()
    if current and current[1] in (stream, *fits_too):
        return ()
    return (EnableStream(stream, current[1] if current else ""),)


def _plan_apt_pin(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    names = missing(facts.packages, pin_packages(spec))
    if not names:
        return ()
    options = apt_options(facts.bundle)
    others = tuple(sorted(name for name in facts.packages.installed if name.startswith(PINNING)))
    pin = SwitchPin(names, options=options, instead=others) if others else InstallPackages(names, options=options)
    return (RefreshPackageIndex(options=options), pin)


def plan_other_version(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the change of the driver's packages to the requested branch or version, if another is installed."""
    names, wanted = driver_packages(facts, spec), _enforced_version(facts, spec)
    versions = [facts.packages.installed[name] for name in names if name in facts.packages.installed]
    if not (versions and wanted) or fits(versions[0], wanted):
        return ()
    manager = facts.package_manager
    if isinstance(manager, RpmManager):
        rpms = ChangeDriverRpms(manager, names, lock_timeout=spec.lock_timeout, wanted=wanted)
        return (RefreshRpmIndex(manager, spec.lock_timeout), rpms)
    change = ChangeDriverPackages(names, lock_timeout=spec.lock_timeout, wanted=wanted)
    return (RefreshPackageIndex(spec.lock_timeout), change)


def _enforced_version(facts: HostFacts, spec: HostSpec) -> str:
    """Return the version that the installed packages must have: for a dnf module stream, the newest of the branch."""
    return spec.driver_version if facts.package_manager.has_pin_packages else spec.driver_version.partition(".")[0]


def _stream(version: str, kind: str) -> str:
    branch = version.partition(".")[0]
    if kind == "open":
        return f"{branch}-open" if branch else "open-dkms"
    return f"{branch}-dkms" if branch else "latest-dkms"


def plan_profile(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the file that adds the CUDA toolkit's programs to users' PATH."""
    there = facts.files.get(PROFILE)
    path = PROFILE if there is None or there.content.startswith(_PROFILE_HEAD) else OTHER_PROFILE
    found = facts.files.get(path)
    if not spec.cuda or (found is not None and (found.content, found.mode) == (_PROFILE_TEXT, 0o644)):
        return ()
    return (WriteFile(path, _PROFILE_TEXT),)


def plan_driver(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the change that loads a driver whose packages were just installed, or are installed and not loaded."""
    # An image's modules are loaded when it boots.
    if spec.driver != "packages" or not brings_modules(facts, spec) or facts.image is not None:
        return ()
    there, loaded = facts.driver_installed_version, facts.driver_loaded_version
    return () if there and loaded else (LoadDriver(),)
