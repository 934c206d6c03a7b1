"""NVIDIA's CUDA repository, and the driver from its packages (`gpuprov_driver: packages`). Pure.

Sources: NVIDIA's Driver Installation Guide and CUDA Installation Guide for Linux: repositories, keys, package names,
module streams, pinning packages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from gpuprov.core.changes import Change
from gpuprov.driver import distribution, fabric_manager, generations, imex, precompiled
from gpuprov.driver.cuda_toolkit import toolkit_packages
from gpuprov.driver.packaged import EnableStream, SwitchPin, fits
from gpuprov.driver.packaged_source import PackagedDriver
from gpuprov.driver.precompiled import Precompiled
from gpuprov.driver.source import DriverSource
from gpuprov.facts.host import HostFacts
from gpuprov.machine.distros import Distribution, ExtraRepository, nvidia_folder
from gpuprov.packages.apt import apt_options
from gpuprov.packages.apt_changes import InstallPackages, RefreshPackageIndex
from gpuprov.packages.dpkg import missing
from gpuprov.packages.known_repositories import signing_key
from gpuprov.packages.managers import manager_of
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.tables import LONG_TERM_BRANCH, Tables

# On these, dnf's module streams are the driver's branches; later releases have packages only.
_WITH_STREAMS = r"rhel[89]|amzn2023"
STREAM_FILE = "/etc/dnf/modules.d/nvidia-driver.module"
PINNING = "nvidia-driver-pinning-"


def _needs_repository(spec: HostSpec) -> bool:
    return spec.driver == "packages" or spec.dcgm or "storage" in spec.gpudirect or bool(toolkit_packages(spec))


def repositories(driver: DriverSource) -> tuple[ExtraRepository, ...]:
    """Return NVIDIA's CUDA repository if packages come from it, else nothing."""
    row = driver.facts.distribution
    own = bool(driver.fabric_package())
    fabric = fabric_manager.comes_from_repository(driver) or (bool(imex.wanted_version(driver)) and not own)
    return repositories_of(row, driver.facts.architecture, driver.spec, fabric=fabric)


def repositories_of(
    row: Distribution, architecture: str, spec: HostSpec, *, fabric: bool = False
) -> tuple[ExtraRepository, ...]:
    """Return the same for a row of the table and an architecture; `fabric`: fabric manager or IMEX are also needed."""
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
    found = signing_key("cuda_keys", row.nvidia_repository)
    file, fingerprint = (found.file, found.fingerprint) if found else ("", "")
    if not spec.cuda_key_fingerprint:
        return file, fingerprint
    return file or f"{spec.cuda_key_fingerprint[-8:]}.pub", spec.cuda_key_fingerprint


def problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return why nothing of the repository that is asked for can be had on this host."""
    return repository_problems(facts.distribution, facts.architecture, spec) if _needs_repository(spec) else ()


def repository_problems(row: Distribution, architecture: str, spec: HostSpec) -> tuple[Problem, ...]:
    """Return why nothing can come from NVIDIA's CUDA repository for a row of the table and an architecture."""
    folder, (file, fingerprint) = nvidia_folder(row, architecture), _key(row, spec)
    if not folder:
        what = f"NVIDIA has no CUDA repository for {row.name} {row.version} on {architecture}"
        step = "set gpuprov_driver: runfile, and leave gpuprov_cuda and gpuprov_dcgm out"
        return (Problem(what, "developer.download.nvidia.com/compute/cuda/repos", step),)
    if fingerprint:
        return ()
    # Only NVIDIA's own key proves that packages are NVIDIA's.
    what = f"this gpuprov does not know the fingerprint of the key of NVIDIA's repository for {row.name} {row.version}"
    base = f"https://developer.download.nvidia.com/compute/cuda/repos/{folder}"
    seen = f"{base}/{file or 'the .pub file that lies there'}: no public source that tells its fingerprint was found"
    step = (
        f"fetch it twice over different networks (curl -O {base}/{file or 'FILE.pub'}), compare the two, and set "
        "gpuprov_cuda_key_fingerprint to the 40 digits that gpg --show-keys FILE prints; or gpuprov_driver: runfile"
    )
    return (Problem(what, seen, step),)


def _can_pin(row: Distribution) -> bool:
    return manager_of(row).has_pin_packages or bool(re.fullmatch(_WITH_STREAMS, row.nvidia_repository))


def with_branch(
    row: Distribution, device_ids: Sequence[str], installed: str, spec: HostSpec, tables: Tables
) -> HostSpec:
    """Return the spec with the last branch that serves a host's GPUs, if its packages would be of a later branch.

    A driver `installed` as packages of an earlier branch stays with its branch. If the repository lacks the branch, or
    can't hold a host to it, the spec is unchanged and `problems` reports it.
    """
    last = generations.last_branch(device_ids, tables)
    if spec.driver_version or not last or not _can_pin(row):
        return spec
    there = installed.partition(".")[0]
    branch = min(filter(None, (there, last)), key=int)
    is_there = branch == there or int(branch) >= int(LONG_TERM_BRANCH)
    return replace(spec, driver_version=branch) if is_there else spec


class NvidiaPackages(PackagedDriver):
    """NVIDIA's packages on one host."""

    depends_on_dkms = True

    @property
    def kind(self) -> str:
        """The kind of modules that the packages have on this host: open or proprietary."""
        return precompiled.kind_of(self.facts, self.spec)

    @cached_property
    def compiled(self) -> Precompiled | None:
        """The driver for which there are modules for the running kernel, if such are used."""
        return precompiled.chosen(self.facts, self.spec)

    @property
    def has_compiled_modules(self) -> bool:
        return self.compiled is not None

    def signing_problems(self) -> tuple[Problem, ...]:
        return precompiled.signing_problems(self.facts) if self.compiled else super().signing_problems()

    @property
    def coming_version(self) -> str:
        if self.facts.driver_installed_version:
            return ""
        version = self.spec.driver_version
        return self.compiled.driver if self.compiled else version if "." in version else ""

    @property
    def key_package(self) -> str:
        # Compiled modules are there for some releases alone; zypper can't be told a branch.
        return "" if self.compiled or self.facts.packages.manager == "zypper" else self.packages()[0]

    def note(self) -> str:
        if not (self.facts.upgrade and self.facts.packages.driver) or self.key_package:
            return super().note()
        why = "its precompiled modules fit one release" if self.compiled else "zypper can't be told a release"
        step = "gpuprov install -e gpuprov_driver_updates=follow, then update the host and run gpuprov install"
        return f"--upgrade leaves the driver's packages at their version: {why}; {step}"

    def questions(self) -> tuple[str, ...]:
        return () if self.compiled else (*precompiled.questions(self.facts, self.spec), *self.upgrade_questions())

    def packages(self) -> tuple[str, ...]:
        """Return the package on which the driver's other packages depend, and modules.

        Compiled modules fit one driver version, and a repository may have a newer driver without modules for this
        kernel. So the first installation requests exactly that version.
        """
        top, found = "nvidia-open" if self.kind == "open" else "cuda-drivers", self.compiled
        if found is None:
            return (top,)
        if found.libraries:
            return (*found.libraries, found.module)
        return (top if top in self.facts.packages.installed else f"{top}={found.driver}", found.module)

    def pin_packages(self) -> tuple[str, ...]:
        return (f"{PINNING}{self.spec.driver_version}",) if self.spec.driver_version else ()

    # -- problems ----------------------------------------------------------------------------------------------------

    def problems(self) -> tuple[Problem, ...]:
        has_repository = nvidia_folder(self.facts.distribution, self.facts.architecture)
        compiled = precompiled.problems(self.facts, self.spec, self.compiled)
        return (*compiled, *super().problems(), *(self._package_problems() if has_repository else ()))

    def _package_problems(self) -> Iterator[Problem]:
        facts, spec, row, commands = self.facts, self.spec, self.facts.distribution, self.facts.package_manager.commands
        last, own = generations.last_branch(facts.gpu_device_ids, facts.tables), distribution.installed_branch(facts)
        if not self.brings_modules:
            what = "the driver's packages bring kernel modules, and this host's kernel is not its own"
            seen = f"inside {facts.kernel.container or 'a host with gpuprov_kernel_modules: none'}"
            yield Problem(what, seen, "set gpuprov_driver: runfile (libraries only), or preinstalled")
        elif over_run_file := self.run_file_problems():
            yield from over_run_file
        elif own is not None:
            what = "the driver on this host is the distribution's own; NVIDIA's packages over it would break both"
            seen = f"package {own.libraries[0]} is installed, and nvidia-open, cuda-drivers are not"
            step = "keep it: gpuprov_driver: distribution; or remove it first:"
            yield Problem(what, seen, f"{step} {facts.driver_removal}")
        elif spec.driver_version and not _can_pin(row):
            what = f"a driver version can't be asked for of NVIDIA's packages for {row.name} {row.version}"
            step = f"leave gpuprov_driver_version out (and hold the driver: {commands.hold})"
            seen = "this repository has neither pinning packages nor streams"
            yield Problem(what, seen, f"{step}, or set gpuprov_driver: runfile")
        elif last and not spec.driver_version:
            # It is before 580, or the repository can't hold a host to a branch.
            yield Problem(
                f"NVIDIA's packages for {row.name} {row.version} have no driver that serves this host's GPUs",
                f"PCI devices {', '.join(f'10de:{one}' for one in sorted(set(facts.gpu_device_ids)))}: {last} is the "
                "last branch that serves them all; packages without a version are of a later one",
                f'set gpuprov_driver: runfile and gpuprov_driver_version: "{facts.tables.resolved(last)}"',
            )
        else:
            version = generations.comparable_version(spec.driver_version)
            yield from generations.problems(facts.gpu_device_ids, version, spec.kernel_module_type, facts.tables)

    # -- changes -----------------------------------------------------------------------------------------------------

    def plan_preparation(self) -> tuple[Change, ...]:
        """Return what pins the driver to the requested branch or version."""
        has_pins = self.facts.package_manager.has_pin_packages
        return (*super().plan_preparation(), *(self._plan_apt_pin() if has_pins else self._plan_stream()))

    def _plan_stream(self) -> tuple[Change, ...]:
        # dnf would read the streams from the host's own repositories; the bundle has none, and only one branch.
        if self.facts.bundle is not None or not re.fullmatch(_WITH_STREAMS, self.facts.distribution.nvidia_repository):
            return ()
        compiled, version = self.compiled, self.spec.driver_version
        branch, kinds = version.partition(".")[0], ("open", "open") if self.kind == "open" else ("dkms", "latest")
        stream = compiled.stream if compiled else f"{branch}-{kinds[0]}" if branch else f"{kinds[1]}-dkms"
        found = self.facts.files.get(STREAM_FILE)
        current = re.search(r"^stream=(\S+)$", found.content.decode("utf-8", "replace") if found else "", re.MULTILINE)
        fits_too = (compiled.latest,) if compiled and not version else ()
        if current and current[1] in (stream, *fits_too):
            return ()
        return (EnableStream(stream, current[1] if current else ""),)

    def _plan_apt_pin(self) -> tuple[Change, ...]:
        names = missing(self.facts.packages, self.pin_packages())
        if not names:
            return ()
        options = apt_options(self.facts.bundle)
        others = tuple(sorted(name for name in self.facts.packages.installed if name.startswith(PINNING)))
        pin = SwitchPin(names, options=options, instead=others) if others else InstallPackages(names, options=options)
        return (RefreshPackageIndex(options=options), pin)

    def plan_other_version(self) -> tuple[Change, ...]:
        names, manager, wanted = self.packages(), self.facts.package_manager, self.spec.driver_version
        if not manager.has_pin_packages:
            # A dnf module stream has the newest version of its branch alone.
            wanted = wanted.partition(".")[0]
        installed = self.facts.packages.installed
        versions = [installed[name] for name in names if name in installed]
        if not (versions and wanted) or fits(versions[0], wanted):
            return self.plan_newer()
        return self.change_to(wanted, names)
