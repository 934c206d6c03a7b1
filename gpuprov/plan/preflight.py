"""All problems that prevent a run, found before any change: the host, its repositories, known security holes. Pure."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpuprov import driver_run, repos, toolkit
from gpuprov.boot import nvidia_docker, reboot
from gpuprov.core.changes import Change
from gpuprov.driver import cuda_repository, cuda_toolkit, dcgm, fabric_manager, gpudirect, imex, kernel, mig
from gpuprov.driver.packaged import fits
from gpuprov.driver.source import DriverSource
from gpuprov.engines import docker, other_engines
from gpuprov.facts.host import HostFacts
from gpuprov.machine.distros import machine_problems
from gpuprov.machine.machine import MACHINES, MachineKind
from gpuprov.packages import sources
from gpuprov.plan import software, with_bundle
from gpuprov.plan.context import PlanContext
from gpuprov.plan.refusals import refusals
from gpuprov.protocol.advisories import PRODUCTS, THRESHOLDS, TOOLKIT_PACKAGE, Vulnerabilities, known_vulnerabilities
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.known_problems import NEWEST, matching
from gpuprov.protocol.mig_configs import DISABLED
from gpuprov.protocol.spec import HostSpec

# The minimum free space of a run; the driver's additional need is checked once its file is available.
_LEAST_FREE_BYTES = 100 << 20
# 2026-01-01: no host that this gpuprov runs on has an earlier clock.
_EARLIEST_CLOCK = 1767225600
# 2041-01-01: fifteen years later, as systemd bounds a clock (CLOCK_VALID_RANGE_USEC_MAX).
_LATEST_CLOCK = 2240611200
# Besides packages.
_WRITES_USR = (
    toolkit.InstallRuntime, nvidia_docker.InstallNvidiaDocker, driver_run.InstallDriver,
    cuda_toolkit.InstallCudaToolkit, cuda_toolkit.LinkCudaToolkit,
)  # fmt: skip
_VARIABLES = dict(zip(PRODUCTS, ("driver_version", "toolkit_version")))
_REFUSE, _ALLOW = "gpuprov_refuse_advisories", "gpuprov_allow_known_problems"
LIST_GPUS = "lspci -d 10de:"
NO_GPU = Problem(
    "there is no NVIDIA GPU in this machine",
    "/sys/bus/pci/devices: no device of vendor 10de and class 03",
    f"{LIST_GPUS}  # in a virtual machine pass the GPU through to it; in hardware look at seating and firmware; an "
    "image for machines that have some: gpuprov_target: image",
)


def preflight(context: PlanContext) -> tuple[Problem, ...]:
    """Return every problem that prevents the run, before anything is changed."""
    facts, spec, driver = context.facts, context.spec, context.driver
    # On a machine of the wrong kind the rest would only be noise.
    return (
        _machine_problems(facts, spec)
        or (() if facts.gpus or facts.image is not None else (NO_GPU,))
        or _bundle_problems(context)
        or (
            *host_problems(facts),
            # Behind another library, no installation makes programs load the driver's: each run would repeat it.
            *(Problem(f"the loader takes another library than the driver's: {one.what}", one.reason,
                      one.way_out(facts.package_manager.commands))
              for one in facts.hiding if not one.is_by_environment),
            *kernel.problems(driver),
            *kernel.offer_problems(driver),
            *reboot.problems(driver),
            *driver.problems(),
            *_security_problems(driver),
            *_known_problems(driver),
            *cuda_repository.problems(facts, spec),
            *fabric_manager.plan_problems(driver),
            *imex.problems(driver),
            *dcgm.problems(driver),
            *refusals(driver),
            *mig.problems(facts, spec),
            *software.problems(driver),
            *sources.pin_problems(facts.pinned_out),
            *(() if facts.bundle else repos.problems(facts, spec, context.extra_repositories)),
            *(docker.problems(facts.docker, toolkit.docker_runtime(spec)) if spec.docker != "none" else ()),
            *other_engines.problems(facts.engines, toolkit.engine_runtime(spec)),
        )
    )  # fmt: skip


def _bundle_problems(context: PlanContext) -> tuple[Problem, ...]:
    facts, spec, driver = context.facts, context.spec, context.driver
    wanted = (*driver.pin_packages(), *context.wanted_packages, *imex.fabric_packages(driver),
              *gpudirect.packages(driver))  # fmt: skip
    names = facts.package_manager.missing(facts.packages, wanted)
    cuda = cuda_toolkit.unpacks(facts, spec)
    return tuple(with_bundle.problems(facts, spec, names, installs_driver=driver.installs, installs_cuda=cuda))


def _machine_problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return why a machine of this kind is refused. What an image is built on does not count."""
    refused = ("no",) if spec.driver == "preinstalled" else ("no", "preinstalled")
    kinds = _kinds(facts, *refused) if facts.image is None else ()
    found = tuple(Problem(one.what, facts.kinds[one.name], one.next_step) for one in kinds)
    return found[:1] or machine_problems(facts.os, facts.architecture)


def machine_notes(facts: HostFacts) -> tuple[str, ...]:
    """Return a sentence for a special kind of machine that is served, and the way there."""
    return tuple(f"{one.what}; {one.next_step}" for one in _kinds(facts, "yes"))


def _kinds(facts: HostFacts, *served: str) -> tuple[MachineKind, ...]:
    return tuple(one for one in MACHINES if one.name in facts.kinds and one.served in served)


def host_problems(facts: HostFacts) -> Iterator[Problem]:
    """Yield what prevents any run on a host, independently of what it installs."""
    # A disk that fills up during a run leaves everything incomplete.
    for place, free in facts.free_bytes.items():
        if free < _LEAST_FREE_BYTES:
            seen = f"{free // 2**20} MiB free, at least {_LEAST_FREE_BYTES // 2**20} MiB needed"
            yield Problem(f"not enough room on the file system of {place}", seen, f"make room: df -h {place}")
    # With a clock that was never set no certificate and no signature is valid yet, far in the future none still is.
    if not _EARLIEST_CLOCK <= facts.clock < _LATEST_CLOCK:
        effect, when = "have expired", "more than fifteen years after"
        if facts.clock < _EARLIEST_CLOCK:
            effect, when = "not be valid yet", "before"
        what = f"the clock is wrong: certificates and signatures would {effect}"
        seen = f"it says {time.strftime('%Y-%m-%d', time.gmtime(facts.clock))}, {when} this gpuprov was made"
        yield Problem(what, seen, "set it: timedatectl set-ntp true; or date --set 'YYYY-MM-DD HH:MM'")


def read_only_problems(facts: HostFacts, changes: Sequence[Change]) -> tuple[Problem, ...]:
    """Return the read-only file systems that the changes would write to."""
    writes_usr = any(one.uses_package_manager or isinstance(one, _WRITES_USR) for one in changes)
    # Every change is noted in /var/lib, and most write to /etc.
    return read_only(facts, {*facts.read_only} - (set() if writes_usr else {"/usr"}) if changes else ())


def read_only(facts: HostFacts, places: Iterable[str]) -> tuple[Problem, ...]:
    """Return a problem for each place that is on a read-only file system."""
    image = next((one.next_step for one in _kinds(facts, "preinstalled") if "ostree" in facts.kinds[one.name]), "")
    mounts = ((place, facts.read_only[place]) for place in sorted(places))
    return tuple(
        Problem(f"{place} is on a file system that is mounted read-only", f"/proc/self/mountinfo: {mount}",
                image or f"mount -o remount,rw {mount.partition(' ')[0]}")
        for place, mount in mounts
    )  # fmt: skip


def security_warnings(driver: DriverSource) -> tuple[str, ...]:
    """Return a sentence for each product to be installed with known holes or problems, or past its support."""
    version = driver.coming_version
    problems = matching(_combination_to_come(driver), driver.facts.tables)
    known = (f"{one.name}: {one.what} ({one.sources[0]})" for one in problems)
    end, now = driver.facts.tables.support_end(version), time.strftime("%Y-%m", time.gmtime(driver.facts.clock))
    ended = (f"driver {version}: the support of branch {version.partition('.')[0]} ended in {end}",) if end else ()
    return (*map(str, _installed_with(driver)), *(ended if end < now else ()), *known)


def _security_problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return why the products are refused, if gpuprov_refuse_advisories says so."""
    return tuple(
        Problem(
            f"{one.product} {one.version} is refused for its known security holes",
            f"{_REFUSE} is {driver.spec.refuse_advisories}; {one}",
            f"set {_settings({_VARIABLES[one.product]: one.fixed_in}, driver.spec)}, or {_REFUSE}: none",
        )
        for one in _installed_with(driver)
        if one.score >= THRESHOLDS[driver.spec.refuse_advisories]
    )


def _settings(use: Mapping[str, str], spec: HostSpec) -> str:
    """Return these options as an inventory has them; a distribution has only its own driver releases."""
    other = ("gpuprov_driver: runfile",) if "driver_version" in use and spec.driver == "distribution" else ()
    return " and ".join((*other, *(f'gpuprov_{name}: "{value}"' for name, value in use.items())))


def _installed_with(driver: DriverSource) -> tuple[Vulnerabilities, ...]:
    """Return the known holes of the driver and the toolkit that the run installs."""
    spec, installed = driver.spec, driver.facts.packages.installed.get(TOOLKIT_PACKAGE, "")
    toolkit_version = spec.toolkit_version if spec.toolkit == "nvidia" and spec.toolkit_version != installed else ""
    return known_vulnerabilities({"driver": driver.coming_version, "toolkit": toolkit_version}, driver.facts.tables)


def combination(facts: HostFacts) -> Mapping[str, Any]:
    """Return what a host has, of all that known problems depend on."""
    packages = facts.packages.installed
    return {
        **facts.kernel.conditions(), "driver": facts.driver_installed_version, "gpus": facts.gpu_device_ids,
        "toolkit": packages.get(TOOLKIT_PACKAGE, ""), "docker": facts.docker.version,
        "podman": packages.get("podman", ""), "mig": any(gpu.mig for gpu in facts.driver.gpus),
        "builds": not (facts.driver_loaded_version or facts.kernel.container),
    }  # fmt: skip


def _combination_to_come(driver: DriverSource) -> Mapping[str, Any]:
    """Return what a host has after the run. Engines that the run does not configure do not count."""
    facts, spec, there = driver.facts, driver.spec, combination(driver.facts)
    asked = "" if spec.driver == "preinstalled" or fits(there["driver"], spec.driver_version) else spec.driver_version
    version = driver.coming_version or asked or there["driver"]
    docker = there["docker"] or (NEWEST if spec.docker == "docker-ce" else "")
    return {
        **there, "driver": version,
        "toolkit": spec.toolkit_version or there["toolkit"] or NEWEST if spec.toolkit == "nvidia" else "",
        "docker": docker if spec.docker != "none" else "",
        "podman": there["podman"] if "podman" in facts.engines else "",
        "mig": there["mig"] or any(text != DISABLED for _, text in mig.wanted(facts, spec)),
        "builds": driver.compiles and (version != there["driver"] or not facts.driver_loaded_version),
    }  # fmt: skip


def _known_problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return why a plan is refused: it would make a combination that is known to break."""
    there, allowed = combination(driver.facts), driver.spec.allow_known_problems
    return tuple(
        Problem(
            f"{one.name}: {one.what}", f"{one.combination}: {one.sources[0]}",
            f"set {', or '.join(filter(None, (_settings(one.use, driver.spec), f'{_ALLOW}: [{one.name}]')))}",
        )
        for one in matching(_combination_to_come(driver), driver.facts.tables)
        if one.name not in allowed and not one.matches(there)
    )  # fmt: skip
