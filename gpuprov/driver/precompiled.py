"""Precompiled kernel modules, in packages for one kernel each: whether this host has any available. Pure.

Sources: github.com/NVIDIA/yum-packaging-precompiled-kmod (package names, streams, DISTROS.md) for Red Hat's family;
documentation.suse.com, "NVIDIA GPU driver on SLES", and the package nvidia-open-driver-G06-signed for SUSE's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpuprov.driver import generations
from gpuprov.facts.host import HostFacts
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.tables import LONG_TERM_BRANCH
from gpuprov.protocol.versions import version_numbers

# NVIDIA compiles for the kernels of Red Hat itself, on x86_64; those of 10 are Red Hat's own, in its extensions.
_WITH_KMODS = re.compile(r"rhel(8|9|10)")
_MADE_FOR = ("rhel", "sles", "sles_sap", "opensuse-leap")
_WITH_STREAMS = re.compile(r"rhel[89]")
_RED_HAT_KERNEL = re.compile(r"(?P<kernel>\d[^-]*-.+)\.el\d[^.]*\.x86_64")
_SUSE_KERNEL = re.compile(r"(?P<base>\d[\d.]*-\d+)(?:\.[\d.]+)?-(?P<flavour>[a-z0-9]+)")
# Others name theirs by the kernel first, and the driver's version is the package's.
_KMOD = re.compile(r"kmod-nvidia-(?P<open>open-)?(?P<driver>\d{3}(?:\.\d+)+)-(?P<kernel>\d+\.\d+\.\d+-[\d.]+)")
# SUSE's packages by the generation of the driver, which its names carry from 560 on as G06, from 590 on as G07.
_SUSE = {"G06": "nv-prefer-signed-open-driver", "G07": "nv-prefer-signed-open-driver-G07"}
_SIGNED_KMP = re.compile(r"nvidia-open-driver-G\d\d-signed-cuda-kmp-[a-z0-9]+")
# Ubuntu's, by the kernel; those with a flavour in its place only depend on them.
_UBUNTU = re.compile(r"(linux-modules-nvidia-\d+(?:-server)?(?:-open)?-)\d+\.\d+\.\d+-.+")
# The packages on which the driver's other packages depend.
_TOP = ("nvidia-open", "cuda-drivers", "nvidia-compute-utils-G06", "nvidia-compute-utils-G07")
# Packages of modules built on the host, or of NVIDIA's driver with any modules.
_BUILT = re.compile(r"kmod-nvidia-.*dkms|nvidia-(open-)?driver-G\d\d-kmp-.*|dkms-nvidia|nvidia-open|cuda-drivers")


@dataclass(frozen=True)
class Precompiled:
    """A driver for which there are modules for the running kernel.

    `module`: their package. `libraries`: packages that must have the driver's version, beside the package on which the
    others depend. `stream`: the stream of the module nvidia-driver in which dnf finds them, or ""; `latest`: the stream
    with the newest branch.
    """

    driver: str
    module: str
    libraries: tuple[str, ...] = ()
    stream: str = ""
    latest: str = ""


def kind_of(facts: HostFacts, spec: HostSpec) -> str:
    """Return the kind of modules that a driver from packages has on this host: open or proprietary.

    If both work it is open, as NVIDIA recommends. Without a version it is the newest, which only the repository knows.
    """
    version = generations.comparable_version(spec.driver_version or LONG_TERM_BRANCH)
    kind = generations.module_type(facts.gpu_device_ids, version, spec.kernel_module_type, facts.tables)
    return "open" if kind == "auto" else kind


def is_wanted(facts: HostFacts, spec: HostSpec) -> bool:
    """Say whether compiled modules are used if available.

    By default only if packages match the distribution's kernels; rebuilds of Red Hat's sources do not. With a
    user-supplied key for Secure Boot, modules are built and signed. A host keeps the kind that it has.
    """
    if facts.bundle is not None:
        return False
    if spec.kernel_modules != "auto":
        return spec.kernel_modules == "precompiled"
    by_default = facts.os.id in _MADE_FOR and not spec.module_signing_key
    return not facts.kernel.container and (by_default or bool(_in_use(facts)))


def chosen(facts: HostFacts, spec: HostSpec) -> Precompiled | None:
    """Return the installed, else the newest offered driver with compiled modules for the running kernel."""
    if not is_wanted(facts, spec) or _is_built(facts):
        return None
    kind = kind_of(facts, spec)
    here = _found(facts, spec, kind, {name: text.split(" ") for name, text in facts.packages.installed.items()})
    # The installed driver must match these modules, and not be a newer one beside old modules.
    tops = [_upstream(facts.packages.installed[name]) for name in _TOP if name in facts.packages.installed]
    fitting = [one for one in here if not tops or one.driver in tops]
    if not fitting and facts.offers is not None:
        fitting = _found(facts, spec, kind, facts.offers.found)
    ids, tables = facts.gpu_device_ids, facts.tables
    served = [one for one in fitting if not generations.problems(ids, one.driver, kind, tables)]
    return max(served, key=lambda one: version_numbers(one.driver), default=None)


def questions(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages, or patterns of them, to query the repositories for; none if all are installed."""
    if not is_wanted(facts, spec) or _is_built(facts):
        return ()
    kind = kind_of(facts, spec)
    if facts.distribution.package_manager == "zypper":
        kernel = _SUSE_KERNEL.fullmatch(facts.kernel.release)
        groups = _suse_groups(kernel["flavour"]) if kernel and kind == "open" else []
        return tuple(name for names in groups for name in names)
    running = _red_hat_kernel(facts)
    return (f"kmod-nvidia-{'open-' if kind == 'open' else ''}[0-9]*-{running}",) if running else ()


def problems(facts: HostFacts, spec: HostSpec, found: Precompiled | None) -> Iterator[Problem]:
    """Yield why compiled modules are unavailable although they are requested or in use; `found`: the chosen ones."""
    built, in_use, asked = _is_built(facts), _in_use(facts), spec.kernel_modules
    # The two ways have packages that exclude each other, and dnf removes none by itself.
    if (built and asked == "precompiled") or (in_use and asked == "build"):
        wanted, there = ("compiled ones", built) if built else ("ones built here", in_use)
        what = f"this host's driver has other kernel modules than are asked for, which are {wanted}"
        seen = f"the package {there} is installed; gpuprov_kernel_modules: {asked}"
        yield Problem(what, seen, "gpuprov uninstall, then install again; or leave gpuprov_kernel_modules out")
    needed = (asked == "precompiled" or in_use) and is_wanted(facts, spec) and not built
    names = questions(facts, spec)
    # Else the repositories were not queried, or the failed query is reported instead.
    was_queried = not names or (facts.offers is not None and not facts.offers.problems)
    if not found and needed and was_queried:
        branch = f" of branch {spec.driver_version}" if spec.driver_version else ""
        kind, kernel = kind_of(facts, spec), facts.kernel.release
        yield Problem(
            f"no repository has {kind} kernel modules{branch} that are compiled for the running kernel {kernel}",
            f"in use is {in_use}" if in_use else f"looked for {', '.join(names) or 'none: nobody makes any'}",
            "boot a kernel that there are some for (dnf repoquery --disable-modular-filtering 'kmod-nvidia*'; zypper "
            "search -s 'nvidia-open-driver-G0*'); or gpuprov_kernel_modules: build, after a gpuprov uninstall where "
            "compiled ones are in use",
        )


def module_package(installed: Iterable[str], release: str) -> str:
    """Return the package with the installed driver's modules for a kernel; "" if they are built."""
    names = sorted(installed)
    kernel = _RED_HAT_KERNEL.fullmatch(release)
    for found in filter(None, map(_KMOD.fullmatch, names)):
        return f"kmod-nvidia-{found['open'] or ''}{found['driver']}-{kernel['kernel']}" if kernel else ""
    for found in filter(None, map(_UBUNTU.fullmatch, names)):
        return f"{found[1]}{release}"
    return next((name for name in names if _SIGNED_KMP.fullmatch(name)), "")


def signing_problems(facts: HostFacts) -> tuple[Problem, ...]:
    """Return the problems of Secure Boot: kernels know their distribution's key, but not NVIDIA's.

    Source: UEFI.md of yum-packaging-precompiled-kmod.
    """
    row = facts.distribution
    if not _WITH_STREAMS.fullmatch(row.nvidia_repository) or facts.kernel.trusts_nvidia:
        return ()
    url = f"https://developer.download.nvidia.com/compute/cuda/repos/{row.nvidia_repository}/x86_64"
    what = "Secure Boot is on, and this kernel does not trust the key that NVIDIA signs its compiled modules with"
    step = (
        f"enrol it: curl -O {url}/NVIDIA2019-public_key.der; mokutil --import NVIDIA2019-public_key.der; reboot, "
        "confirm at the console; or switch Secure Boot off in the firmware"
    )
    return (Problem(what, "the EFI variable SecureBoot is 1, and /proc/keys has no key of NVIDIA's", step),)


def is_stale(package: str, driver: str) -> bool:
    """Say whether a package contains compiled modules of another driver than this one."""
    found = _KMOD.fullmatch(package)
    return found is not None and found["driver"] != driver


def _in_use(facts: HostFacts) -> str:
    """Return an installed package of compiled modules, for any kernel."""
    names = sorted(facts.packages.installed)
    return next((name for name in names if _KMOD.fullmatch(name) or name in _SUSE.values()), "")


def _is_built(facts: HostFacts) -> str:
    """Return an installed package whose modules are built on the host."""
    if _in_use(facts):
        return ""
    return next((name for name in sorted(facts.packages.installed) if _BUILT.fullmatch(name)), "")


def _found(facts: HostFacts, spec: HostSpec, kind: str, packages: Mapping[str, Sequence[str]]) -> list[Precompiled]:
    """Return all drivers that have modules for the running kernel in these packages."""
    found = (_suse if facts.distribution.package_manager == "zypper" else _red_hat)(facts, kind, packages)
    wanted = spec.driver_version.partition(".")[0]
    return [one for one in found if not wanted or one.driver.partition(".")[0] == wanted]


def _red_hat_kernel(facts: HostFacts) -> str:
    """Return the running kernel as written in names of module packages: 5.14.0-611.24.1; "" on other distributions."""
    match = _RED_HAT_KERNEL.fullmatch(facts.kernel.release)
    return match["kernel"] if match and _WITH_KMODS.fullmatch(facts.distribution.nvidia_repository) else ""


def _red_hat(facts: HostFacts, kind: str, packages: Iterable[str]) -> list[Precompiled]:
    kernel, end = _red_hat_kernel(facts), "-open-gpu" if kind == "open" else ""
    matches = (match for match in map(_KMOD.fullmatch, packages) if match and match["kernel"] == kernel)
    found = [Precompiled(one["driver"], one[0]) for one in matches if (kind == "open") == bool(one["open"])]
    if not _WITH_STREAMS.fullmatch(facts.distribution.nvidia_repository):
        return found
    return [replace(one, stream=f"{one.driver.partition('.')[0]}{end}", latest=f"latest{end}") for one in found]


def _suse(facts: HostFacts, kind: str, packages: Mapping[str, Sequence[str]]) -> list[Precompiled]:
    """Return SUSE's choices: it signs open modules for all kernels of a service pack, which keep their interfaces."""
    kernel = _SUSE_KERNEL.fullmatch(facts.kernel.release)
    if kernel is None or kind != "open":
        return []
    base, found = kernel["base"].replace("-", "_"), []
    groups = _suse_groups(kernel["flavour"])
    versions = {name: [*map(_upstream, packages.get(name, ()))] for names in groups for name in names}
    for prefer, module, utils in groups:
        for version in versions[module]:
            built = re.fullmatch(r"(?P<driver>\d{3}(?:\.\d+)+)_k(?P<kernel>[\d._]+)", version)
            if built is None or not re.match(rf"{re.escape(base)}(\.|$)", built["kernel"]):
                continue
            driver = built["driver"]
            if driver in versions[prefer] and driver in versions[utils]:
                libraries = tuple(f"{name}={driver}" for name in (utils, "nvidia-persistenced", prefer))
                found.append(Precompiled(driver, f"{module}={version}", libraries))
    return found


def _suse_groups(flavour: str) -> list[tuple[str, str, str]]:
    """Return the packages of each group: what chooses open modules, the modules, the libraries."""
    return [
        (prefer, f"nvidia-open-driver-{group}-signed-cuda-kmp-{flavour}", f"nvidia-compute-utils-{group}")
        for group, prefer in _SUSE.items()
    ]


def _upstream(version: str) -> str:
    """Return VERSION of EPOCH:VERSION-RELEASE.ARCH."""
    return version.rpartition(":")[2].rpartition("-")[0]
