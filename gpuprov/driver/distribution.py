"""The distribution's own driver (`gpuprov_driver: distribution`): branch, packages, and what prevents it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property

from gpuprov.core.changes import Change
from gpuprov.driver import generations
from gpuprov.driver.packaged import SwitchBranch, driver_version, fits
from gpuprov.driver.packaged_source import PackagedDriver
from gpuprov.facts.host import PREFERENCES, HostFacts
from gpuprov.machine import distros
from gpuprov.packages import sources
from gpuprov.packages.apt import apt_options
from gpuprov.packages.apt_changes import RefreshPackageIndex
from gpuprov.packages.interface import Installation
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.tables import LONG_TERM_BRANCH, Tables
from gpuprov.protocol.versions import version_numbers

# Packages that only NVIDIA's repository has, and on which its other driver packages depend.
_NVIDIAS = re.compile(r"nvidia-open|cuda-drivers(-\d+)?")
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


@dataclass(frozen=True)
class Choice:
    """The branch for a host and the kind of its kernel modules.

    `compiled`: the packages of modules that the distribution compiled for the running kernel, if they are used;
    `lacking`: the wanted one that no repository has.
    """

    branch: distros.DriverBranch
    kind: str
    compiled: tuple[str, ...] = ()
    lacking: str = ""

    @property
    def built(self) -> tuple[str, ...]:
        """The packages from which DKMS builds the kernel modules; none if the distribution has none of this kind."""
        return self.branch.built.get(self.kind, ())

    @property
    def modules(self) -> tuple[str, ...]:
        """The packages that contain the kernel modules; none if the distribution has none of this kind."""
        return self.compiled or self.built


_NOTHING = Choice(distros.DriverBranch("", ()), "")


def as_packages(row: distros.Distribution, spec: HostSpec) -> HostSpec:
    """Return the spec for a distribution that has only kernel modules: its compiled modules with NVIDIA's packages."""
    own = distros.own_driver(row)
    if spec.driver != "distribution" or own is None or not own.like_packages:
        return spec
    return replace(spec, driver="packages", kernel_modules="precompiled")


def available(facts: HostFacts) -> distros.OwnDriver | None:
    """Return the distribution's own driver, None if it has none for this machine."""
    own = distros.own_driver(facts.distribution)
    return own if own is not None and facts.architecture in own.architectures else None


def asked_branch(own: distros.OwnDriver, version: str) -> distros.DriverBranch | None:
    """Return the branch of this number, None if the distribution has none."""
    listed = next((one for one in own.branches if one.branch == version), None)
    return own.numbered(version) if listed is None and own.template and version.isdecimal() else listed


def installed_branch(facts: HostFacts) -> distros.DriverBranch | None:
    """Return the branch of the distribution's driver that is installed, None if there is none."""
    own, installed = available(facts), facts.packages.installed
    if own is None or _of_nvidia(facts):
        return None
    if own.branch_pattern:
        found = sorted(match[1] for name in installed if (match := re.fullmatch(own.branch_pattern, name)))
        return own.numbered(found[-1]) if found else None
    # NVIDIA's repository has packages of the same names, of other branches.
    versions = ((one, installed.get(one.libraries[0], "")) for one in own.branches)
    return next((one for one, version in versions if version and (not one.branch or fits(version, one.branch))), None)


def _of_nvidia(facts: HostFacts) -> str:
    """Return an installed package of NVIDIA's own driver packages, "" if there is none."""
    return next((name for name in sorted(facts.packages.installed) if _NVIDIAS.fullmatch(name)), "")


def preferred_kind(branch: distros.DriverBranch, device_ids: Sequence[str], asked: str, tables: Tables) -> str:
    """Return open or proprietary; if these GPUs support both, NVIDIA's recommendation for the branch."""
    version = generations.comparable_version(branch.branch or LONG_TERM_BRANCH)
    return generations.settled_type(device_ids, version, asked, tables)


class DistributionDriver(PackagedDriver):
    """The distribution's own driver on one host."""

    @cached_property
    def own(self) -> distros.OwnDriver | None:
        """The distribution's row, None if it has no driver for this machine."""
        return available(self.facts)

    # -- the choice --------------------------------------------------------------------------------------------------

    @cached_property
    def choice(self) -> Choice:
        """What to install: of the asked branch, else the installed one, else the first that serves the host's GPUs.

        It has no packages if nothing of the distribution's is possible.
        """
        own, version = self.own, self.spec.driver_version
        if own is None:
            return _NOTHING
        served = (one for one in own.branches if self._serves(one))
        default = None if version else installed_branch(self.facts) or next(served, next(iter(own.branches), None))
        branch = asked_branch(own, version) if version else default
        return self._with_compiled(Choice(branch, self._kind_of(branch))) if branch is not None else _NOTHING

    def _kind_of(self, branch: distros.DriverBranch) -> str:
        return preferred_kind(branch, self.facts.gpu_device_ids, self.spec.kernel_module_type, self.facts.tables)

    def _serves(self, branch: distros.DriverBranch) -> bool:
        """Say whether a branch serves the host's GPUs with modules that the distribution has of it."""
        version, kind = generations.comparable_version(branch.branch), self._kind_of(branch)
        ids, tables = self.facts.gpu_device_ids, self.facts.tables
        return kind in branch.built and not generations.problems(ids, version, kind, tables)

    def _with_compiled(self, choice: Choice) -> Choice:
        """Return the choice with precompiled modules, if they are wanted and available."""
        templates, installed = choice.branch.compiled.get(choice.kind, ()), self.facts.packages.installed
        asked = self.spec.kernel_modules
        by_default = not any(name in installed for name in choice.built) and not self.spec.module_signing_key
        if not templates or asked == "build" or (asked == "auto" and not by_default):
            return choice
        names = tuple(name.format(kernel=self.facts.kernel.release) for name in templates)
        in_use = any(name.startswith(templates[0].partition("{")[0]) for name in installed)
        if names[0] in installed or self.offered(names[0]):
            return replace(choice, compiled=names)
        return replace(choice, lacking=names[0] if in_use or asked == "precompiled" else "")

    def _offered_version(self, name: str) -> str:
        """Return the newest available driver version of a package, "" if no repository was queried."""
        return max(map(driver_version, self.offered(name)), key=version_numbers, default="")

    # -- what a plan asks --------------------------------------------------------------------------------------------

    @property
    def key_package(self) -> str:
        return next(iter(self.choice.branch.libraries), "")

    @property
    def branch(self) -> str:
        return self.choice.branch.branch

    @property
    def has_compiled_modules(self) -> bool:
        return bool(self.choice.compiled)

    def signing_problems(self) -> tuple[Problem, ...]:
        # Compiled ones are signed with the distribution's own key, which its kernels trust.
        return () if self.has_compiled_modules else super().signing_problems()

    @property
    def coming_version(self) -> str:
        return "" if self.facts.driver_installed_version else self._offered_version(self.key_package)

    def fabric_package(self) -> str:
        return self.choice.branch.fabric_manager

    def packages(self) -> tuple[str, ...]:
        return () if self._other_branch is not None else self._wanted

    @cached_property
    def _wanted(self) -> tuple[str, ...]:
        """The packages that the host needs, also if a change of the branch installs them."""
        choice = self.choice
        if not self.brings_modules:
            return choice.branch.libraries
        installed = self.facts.packages.installed
        # Not every flavour has a package that brings compiled modules with later kernels.
        following = tuple(name for name in self._next_compiled if name in installed or self.offered(name))
        return (*choice.branch.libraries, *choice.modules, *(following if choice.compiled else ()))

    @property
    def _next_compiled(self) -> tuple[str, ...]:
        """The packages that may bring compiled modules with later kernels."""
        rules = self.choice.branch.next_compiled.get(self.choice.kind, ())
        return distros.packages_for_kernels(rules, self.facts.kernel.release, self.facts.packages.installed)

    def questions(self) -> tuple[str, ...]:
        return (*self._questions(), *self.upgrade_questions())

    def _questions(self) -> tuple[str, ...]:
        """Return what to query for if packages are missing."""
        choice, own = self.choice, self.own
        if own is None or not self.key_package or own.repository_package or self.facts.bundle is not None:
            return ()
        if not self.facts.package_manager.missing(self.facts.packages, self._wanted):
            return ()
        names = [self.key_package]
        if self.brings_modules:
            names += choice.built
            if self.spec.kernel_modules != "build":
                compiled = choice.branch.compiled.get(choice.kind, ())[:1]
                names += [name.format(kernel=self.facts.kernel.release) for name in compiled]
                names += self._next_compiled
        return tuple(dict.fromkeys(names))

    # -- problems ----------------------------------------------------------------------------------------------------

    def problems(self) -> tuple[Problem, ...]:
        return (*super().problems(), *self._own_problems())

    def _own_problems(self) -> Iterator[Problem]:
        row, own, choice = self.facts.distribution, self.own, self.choice
        if own is None:
            where = f" on {self.facts.architecture}" if distros.own_driver(row) is not None else ""
            others = distros.names_of(one for one in distros.ROWS if distros.own_driver(one) is not None)
            what = f"{row.name} {row.version}{where} has no NVIDIA driver of its own that gpuprov knows"
            seen = f"gpuprov_driver: distribution; these have one: {others}"
            yield Problem(what, seen, "set gpuprov_driver: runfile or packages")
        elif not self.key_package:
            branches = ", ".join(one.branch for one in own.branches if one.branch)
            has = f"it has the branches {branches}" if branches else "it has one driver, of whatever branch"
            yield Problem(
                f"the driver {self.spec.driver_version} can't be asked for of {row.name} {row.version}",
                f"gpuprov_driver: distribution; {has}; the version within a branch is the distribution's",
                "set gpuprov_driver_version to one of these, in quotes; or gpuprov_driver: runfile"
                if branches else "leave gpuprov_driver_version out, or set gpuprov_driver: runfile",
            )  # fmt: skip
        else:
            yield from self._other_driver_problems()
            yield from self._module_problems(row, choice) if self.brings_modules else self._container_problems(choice)
            if own.components and self.facts.bundle is None:
                name = f"{row.name} {row.version}"
                yield from sources.component_problems(self.facts.files, name, row.codename, own.components)
            yield from self._offer_problems(choice)

    def _other_driver_problems(self) -> Iterator[Problem]:
        """A .run's files, or NVIDIA's packages of the same names, would lie below the distribution's."""
        if nvidias := _of_nvidia(self.facts):
            what = "the driver on this host comes from NVIDIA's packages; the distribution's would break both"
            step = f"keep it: gpuprov_driver: packages; or remove it first: {self.facts.driver_removal}"
            yield Problem(what, f"package {nvidias} is installed", step)
        else:
            yield from self.run_file_problems()

    def _module_problems(self, row: distros.Distribution, choice: Choice) -> Iterator[Problem]:
        version, name = generations.comparable_version(choice.branch.branch), f"{row.name} {row.version}"
        ids, asked = self.facts.gpu_device_ids, self.spec.kernel_module_type
        if unserved := generations.problems(ids, version, asked, self.facts.tables):
            # Of the branches that serve the GPUs a distribution has few.
            for one in unserved:
                wanted = re.search(r'gpuprov_driver_version: "\d+"', one.next_step)
                step = f"set gpuprov_driver: runfile and {wanted[0]}" if wanted else one.next_step
                yield Problem(f"the distribution's {one.what.removeprefix('this ')}", one.evidence, step)
        elif choice.lacking:
            yield Problem(
                f"no repository has {choice.kind} kernel modules of branch {choice.branch.branch} that are "
                f"compiled for the running kernel {self.facts.kernel.release}",
                f"looked for {choice.lacking}",
                "boot the flavour's newest kernel (apt-get upgrade, then systemctl reboot); or set "
                "gpuprov_kernel_modules: build, which DKMS does",
            )
        elif self.spec.kernel_modules == "precompiled" and not choice.compiled:
            what = f"{name} has no compiled kernel modules of its driver"
            seen = f"gpuprov_kernel_modules: precompiled, gpuprov_driver: distribution; {name} builds them by DKMS"
            yield Problem(what, seen, "leave gpuprov_kernel_modules out")
        elif not choice.modules:
            branch = f"branch {choice.branch.branch}" if choice.branch.branch else "driver"
            what = f"{name} has no {choice.kind} kernel modules of its {branch}"
            seen = f"it has {', '.join(sorted(choice.branch.built))} ones"
            yield Problem(what, seen, "set gpuprov_driver: runfile, or leave gpuprov_kernel_module_type out")

    def _container_problems(self, choice: Choice) -> Iterator[Problem]:
        """Yield the problems of versions: libraries and kernel must match, or NVML and CUDA fail (NVML error 18)."""
        loaded, installed = self.facts.driver_loaded_version, installed_branch(self.facts)
        if self.facts.image is not None:
            return
        if not loaded:
            yield self.not_loaded_problem("the driver")
            return
        stays = installed is not None and installed.branch == choice.branch.branch
        version = self.facts.driver_installed_version if stays else self._offered_version(self.key_package)
        if version not in ("", loaded):
            what = f"the distribution's driver is {version}, but {self.outside} runs {loaded}: the two must match"
            runfile = f'set gpuprov_driver: runfile and gpuprov_driver_version: "{loaded}"'
            yield Problem(what, "/proc/driver/nvidia/version", f"{runfile}, or install {version} on {self.outside}")

    def _offer_problems(self, choice: Choice) -> Iterator[Problem]:
        """Yield what the queried repositories lack: a branch, or modules of the libraries' version."""
        offers = self.facts.offers
        if offers is None or offers.problems or not self._questions():
            return
        key = self.key_package
        if offers.lacking((key,)):
            what = f"no repository of this host has branch {choice.branch.branch} of the distribution's driver"
            look = "apt-cache search --names-only 'nvidia-headless-[0-9]*-server' shows the branches"
            yield Problem(what, f"{self.facts.packages.manager} was asked for {key}", f"{look}: gpuprov_driver_version")
            return
        modules = "" if choice.compiled or not self.brings_modules else next(iter(choice.modules), "")
        versions = [self._offered_version(name) for name in (key, modules) if name]
        if len(set(versions)) > 1:
            yield Problem(
                f"the distribution's {choice.kind} kernel modules and its libraries are of different versions",
                f"newest in the repositories: {modules} {versions[1] or '(none)'}, {key} {versions[0]}",
                # The kind that GPUs need is no choice.
                "set gpuprov_driver: runfile"
                if self.spec.kernel_module_type == "auto"
                else "leave gpuprov_kernel_module_type out where the GPUs can have the others; or set gpuprov_driver: "
                "runfile",
            )

    # -- changes -----------------------------------------------------------------------------------------------------

    def plan_preparation(self) -> tuple[Change, ...]:
        """Return what keeps NVIDIA's repository from replacing the driver, and the package of its own repository."""
        facts, own = self.facts, self.own
        if own is None or not own.components:
            changes = super().plan_preparation()
        else:
            changes = facts.write(PREFERENCES, PREFERENCES_TEXT.encode())
        if own is None or not own.repository_package:
            return changes
        installation = Installation((own.repository_package,), facts.bundle)
        return (*changes, *facts.package_manager.plan_installation(facts.packages, installation))

    @cached_property
    def _other_branch(self) -> distros.DriverBranch | None:
        """The installed branch, if another one is requested."""
        installed = installed_branch(self.facts)
        return installed if installed is not None and self.branch not in ("", installed.branch) else None

    def plan_other_version(self) -> tuple[Change, ...]:
        """Return the change to the requested branch if another one is installed, or to a newer release."""
        old = self._other_branch
        if old is None:
            return self.plan_newer()
        installed = self.facts.packages.installed
        names = {old.base, *old.libraries, *(name for built in old.built.values() for name in built)}
        compiled = re.compile(rf"(linux-modules-nvidia|nvidia-headless|nvidia-headless-no-dkms)-{old.branch}-server\b")
        names |= {*filter(compiled.match, installed)}
        gone = tuple(sorted(name for name in names if name in installed and name not in self._wanted))
        options, held = apt_options(self.facts.bundle), self.facts.packages.driver_held
        change = SwitchBranch(self._wanted, held, options=options, wanted=self.branch, instead=gone)
        return (RefreshPackageIndex(options), change)
