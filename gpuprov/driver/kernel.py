"""Kernel modules of the driver: what prevents them, what building them needs (DKMS; for an image too), their proof."""

from __future__ import annotations

import configparser
import contextlib
import re
import shlex
from typing import ClassVar

from gpuprov.cdi.discover import discover
from gpuprov.core.changes import Change, RemoveFile, Tell
from gpuprov.core.commands import SYSTEM_PATH
from gpuprov.core.system import System
from gpuprov.driver.source import DriverSource
from gpuprov.facts.host import DKMS_SIGNING, HostFacts
from gpuprov.facts.kernels import module_of
from gpuprov.machine import distros
from gpuprov.machine.machine import gather_os
from gpuprov.packages import known_repositories
from gpuprov.packages.interface import require_answer
from gpuprov.packages.sources import repo_sections, text_of
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.tables import packaged

# Compiling takes two to three minutes on two cores; slow machines take longer.
_BUILD_SECONDS = 3600
# Sites that install kernels themselves exclude them. To disable that, dnf 4 takes `all`, dnf 5 `*`.
_DNF = ("/etc/dnf/dnf.conf", "/etc/yum.repos.d/")
_EXCLUDE = re.compile(r"^exclude(?:pkgs)?[ \t]*=.*kernel.*$", re.MULTILINE)


def problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return what prevents kernel modules on this host."""
    facts, spec = driver.facts, driver.spec
    if not driver.installs_modules:
        return ()
    if not facts.kernel.takes_modules:
        return (no_modules(facts),)
    signs = spec.module_signing_key and spec.module_signing_certificate
    return () if driver.is_installed or signs or facts.kernel.secure_boot != "enabled" else driver.signing_problems()


def no_modules(facts: HostFacts) -> Problem:
    """Return the problem of a kernel that takes no modules."""
    disabled = facts.kernel.modules_disabled
    return Problem(
        "this kernel takes no modules, so no driver can be loaded into it",
        f"kernel {facts.kernel.release}: "
        + ("/proc/sys/kernel/modules_disabled is 1" if disabled else "there is no /proc/modules"),
        "grep -rn modules_disabled /etc/sysctl.conf /etc/sysctl.d  # take it out, then systemctl reboot"
        if disabled else "uname -r; ls /boot  # boot the distribution's own kernel; where the driver is loaded from "
        "outside, set gpuprov_kernel_modules: none",
    )  # fmt: skip


def packages(driver: DriverSource) -> tuple[str, ...]:
    """Return the packages that building modules needs: headers of exactly the running kernel, a compiler, DKMS."""
    facts, row = driver.facts, driver.facts.distribution
    if not driver.compiles:
        return ()
    following = distros.next_kernel_headers(row, facts.kernel.release, facts.packages.installed)
    return (*headers(driver), *following, *row.build_packages)


def headers(driver: DriverSource) -> tuple[str, ...]:
    """Return the packages of the running kernel's headers, where modules are built; in an image, of all its kernels."""
    facts, row = driver.facts, driver.facts.distribution
    runs = driver.has_installer and not driver.installs and facts.driver_loaded_version == driver.version != ""
    if not driver.compiles or (runs and facts.image is None):
        return ()  # to keep a driver that runs, nothing is built
    releases = [one.release for one in facts.image.kernels] if facts.image is not None else [facts.kernel.release]
    return tuple(dict.fromkeys(name for release in releases for name in distros.kernel_headers(row, release)))


def plan_signing(driver: DriverSource) -> tuple[Change, ...]:
    """Return the change that makes DKMS sign with the user-supplied key, now and for later kernels (dkms(8))."""
    spec = driver.spec
    if not (spec.module_signing_key and spec.module_signing_certificate and driver.compiles):
        return (RemoveFile(DKMS_SIGNING, "no longer asked for"),) if DKMS_SIGNING in driver.facts.files else ()
    text = f"mok_signing_key={spec.module_signing_key}\nmok_certificate={spec.module_signing_certificate}\n".encode()
    return driver.facts.write(DKMS_SIGNING, text)


def prove_modules(system: System, version: str, *, dkms: bool) -> None:
    """Check that the modules of that version exist for the running kernel. Raises GpuprovError if they do not.

    `dkms`: DKMS must have built them. An installer's exit code proves neither.
    """
    kernel = system.kernel_release()
    what = "{} does not tell which modules there are"
    if dkms:
        status = require_answer(system.run(("dkms", "status")), what.format("dkms"))
        states = dkms_states(status.stdout, version)
        if not states:
            lack = "the driver is not registered with DKMS: the next kernel upgrade would lose it"
            raise GpuprovError(lack, status.evidence(), f"dkms install nvidia/{version}")
        if states.get(kernel) != "installed":
            lack = f"DKMS knows the driver, but has not installed its modules for kernel {kernel}"
            step = f"dkms install nvidia/{version} -k {kernel}; see /var/lib/dkms/nvidia/{version}/build/make.log"
            raise GpuprovError(lack, status.stdout.strip(), step)
    found = require_answer(system.run(("modinfo", "-k", kernel, "-F", "version", "nvidia")), what.format("modinfo"))
    if found.stdout.strip() != version:
        lack = f"the installer reported success, but kernel {kernel} has no module nvidia of version {version}"
        seen = f"modinfo -k {kernel} nvidia: version {found.stdout.strip()}" if found.ok else found.evidence()
        raise GpuprovError(lack, seen, f"which file is it? modinfo -k {kernel} -F filename nvidia; dkms status")


def require_sources(system: System) -> None:
    """Raise GpuprovError if DKMS stops at a module without its source, as before 3.0.11: it sees none behind that."""
    status = system.run(("dkms", "status"))
    if lost := re.search(r"File: (\S+)/source/dkms\.conf does not exist", status.stderr):
        what = "DKMS has a module whose source is gone: it neither lists nor builds those behind it"
        raise GpuprovError(what, status.evidence(3), f"rm -r {shlex.quote(lost[1])}; then run the same command again")


def dkms_states(status: str, version: str) -> dict[str, str]:
    """Return kernel → state (built, installed) of a driver in what `dkms status` says; "" → added without a kernel.

    DKMS 2 writes `nvidia, 550.163.01, 5.10.0-32-amd64, x86_64: installed`, DKMS 3 a slash for the first comma. Words
    after the state are warnings.
    """
    found = re.findall(rf"^nvidia(?:/|, ){re.escape(version)}(?:, ([^,\s]+), [^,\s]+)?: (\w+)", status, re.MULTILINE)
    return dict(found)


def questions(driver: DriverSource) -> tuple[str, ...]:
    """Return the packages to query the repositories for before a plan is made; none if all are installed."""
    return (*driver.questions(), *_lacking_headers(driver)) if driver.facts.bundle is None else ()


def offer_problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return what no repository has, or why the query failed; nothing if no repository was queried."""
    facts, row, release = driver.facts, driver.facts.distribution, driver.facts.kernel.release
    if facts.offers is None or facts.offers.problems:
        return facts.offers.problems if facts.offers is not None else ()
    lacking = facts.offers.lacking(_lacking_headers(driver))
    said = known_repositories.advice(row, release, facts.architecture, facts.tables)
    what = f"no repository of this host has the headers of the running kernel {release}"
    step = said.next_step if said else "boot the distribution's own kernel, or add the repository of this one"
    seen = f"{facts.packages.manager} was asked for {', '.join(lacking)}"
    if hidden := [f"{path}: {line}\n" for path, file in facts.files.items() if path.startswith(_DNF)
                  for line in _EXCLUDE.findall(text_of(file))]:  # fmt: skip
        what, seen = f"an exclude hides the headers of the running kernel {release}", "".join((*hidden, seen))
        step = f"dnf '--setopt=disable_excludes=all,*' install {' '.join(map(facts.package_manager.typed, lacking))}"
    return (Problem(what, seen, step),) if lacking else ()


def _lacking_headers(driver: DriverSource) -> tuple[str, ...]:
    return driver.facts.package_manager.missing(driver.facts.packages, headers(driver))


# -- DKMS on distributions that do not package it ---------------------------------------------------------------------

_REPOSITORY_FILES = re.compile(r"/etc/(yum\.repos\.d|zypp/repos\.d)/(?!gpuprov-)[^/]+\.repo")


def dkms_packages(driver: DriverSource) -> tuple[str, ...]:
    """Return DKMS if it is installed, or to be installed, from a repository besides the distribution's."""
    facts = driver.facts
    if not needs_dkms(driver):
        return ()
    if facts.bundle is not None:
        has_it = any(one.name == known_repositories.DKMS for one in facts.bundle.manifest.packages)
        return (known_repositories.DKMS,) if has_it else ()
    has_source = _has_dkms_source(facts) or dkms_source(driver) is not None
    return (known_repositories.DKMS,) if has_source or known_repositories.DKMS in facts.packages.installed else ()


def dkms_source(driver: DriverSource) -> distros.ExtraRepository | None:
    """Return the repository to add for DKMS, None if the host has DKMS or its own repository with it.

    A repository that gpuprov added stays, for DKMS's updates.
    """
    facts, spec, row = driver.facts, driver.spec, driver.facts.distribution
    if not spec.epel or not needs_dkms(driver) or _has_dkms_source(facts):
        return None
    found = known_repositories.dkms_repository(row, facts.os.version, facts.architecture, spec, facts.tables)
    ours = found is not None and any(path.endswith(f"/gpuprov-{found.name}.repo") for path in facts.files)
    return found if ours or known_repositories.DKMS not in facts.packages.installed else None


def dkms_note(driver: DriverSource) -> str:
    """Return a warning if the next kernel would have no driver, or ""."""
    row = driver.facts.distribution
    if not driver.has_installer or not needs_dkms(driver) or dkms_packages(driver):
        return ""
    other = f"enable {row.dkms_from}, or set gpuprov_epel_repository"
    how = other if driver.spec.epel else "leave gpuprov_epel at true"
    return f"{row.name} has no dkms of its own ({row.dkms_from} has): after a kernel update run gpuprov again, or {how}"


def needs_dkms(driver: DriverSource) -> bool:
    """Say whether modules are built here that DKMS must also build for later kernels.

    NVIDIA's packages for SUSE contain modules without DKMS. A site that names dkms among its packages has a source for
    it.
    """
    row = driver.facts.distribution
    if not row.dkms_from or known_repositories.DKMS in driver.spec.packages or not driver.compiles:
        return False
    return driver.has_installer or row.package_manager == "dnf"


def _has_dkms_source(facts: HostFacts) -> bool:
    pattern = re.compile(packaged(known_repositories.TABLE)["dkms_names"][facts.distribution.dkms_from], re.IGNORECASE)
    for path in filter(_REPOSITORY_FILES.fullmatch, facts.files):
        with contextlib.suppress(configparser.Error):
            # The names of the host's own enabled repositories, in brackets.
            if any(pattern.fullmatch(name) for name, _ in repo_sections(text_of(facts.files[path]))):
                return True
    return False


def plan_image(driver: DriverSource) -> tuple[Change, ...]:
    """Return the change that builds modules for each kernel of an image without any, once the driver is installed."""
    image = driver.facts.image
    if image is None or not driver.compiles:
        return ()
    coming = driver.installs or not driver.facts.driver_installed_version
    kernels = tuple(one.release for one in image.kernels if coming or not one.module)
    return (BuildModules(kernels),) if kernels else ()


@dataclass(frozen=True)
class BuildModules(Change):
    """Build the installed driver's modules for these kernels with DKMS."""

    kernels: tuple[str, ...]

    # DKMS repeats an interrupted build; the undo of the driver removes its modules.
    undo_when_interrupted: ClassVar[bool] = False
    key = "build the driver's modules for the image's kernels"

    def summary(self) -> str:
        return f"build the driver's modules for {', '.join(self.kernels)}; load none"

    def apply(self, system: System, tell: Tell) -> None:
        for number, release in enumerate(self.kernels):
            if module_of(system, release):
                continue
            tell(f"building modules for {release}", number, len(self.kernels))
            if system.which("dkms") is None:
                raise GpuprovError(
                    f"kernel {release} has no NVIDIA module, and there is no dkms to build it",
                    f"/lib/modules/{release}/modules.dep lists none",
                    "remove that kernel from the image, or make dkms available (gpuprov_epel: true), then run the same "
                    "command again",
                )
            done = system.run(("dkms", "autoinstall", "-k", release), timeout=_BUILD_SECONDS)
            if not module_of(system, release):
                version = discover(system).library_version
                what = f"DKMS could not build the driver's modules for kernel {release}"
                step = f"see /var/lib/dkms/nvidia/{version}/build/make.log; or remove that kernel from the image"
                raise GpuprovError(what, done.evidence(), step)


def build_environment(system: System) -> dict[str, str]:
    """Return the PATH with the compiler that built the running kernel first, if it is not the host's `gcc`."""
    folder = distros.kernel_compiler(distros.distribution_of(gather_os(system)), system.kernel_release())
    return {"PATH": f"{folder}:{SYSTEM_PATH}"} if folder and system.exists(folder) else {}
