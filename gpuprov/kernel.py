"""Who brings the kernel's half of the driver, and what building it needs; never installs anything itself."""

from __future__ import annotations

from gpuprov.distros import find_distribution
from gpuprov.errors import Problem
from gpuprov.facts import HostFacts
from gpuprov.next_kernel import header_packages
from gpuprov.spec import HostSpec


def builds_modules(facts: HostFacts, spec: HostSpec) -> bool:
    """Say whether kernel modules are to be built on this host.

    A system container's kernel belongs to the machine outside: there only the libraries are installed.
    """
    if spec.kernel_modules == "auto":
        return not facts.kernel.container
    return spec.kernel_modules == "build"


def problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return what stands in the way of a kernel driver here."""
    if spec.driver != "runfile":
        return ()
    return _build_problems(facts) if builds_modules(facts, spec) else _outside_problems(facts, spec)


def _build_problems(facts: HostFacts) -> tuple[Problem, ...]:
    if facts.kernel.takes_modules:
        return ()
    seen = "there is no /proc/modules" if not facts.kernel.modules_disabled else "kernel.modules_disabled is 1"
    return (
        Problem(
            "this kernel takes no modules, so no driver can be loaded into it",
            f"kernel {facts.kernel.release}: {seen}",
            "boot the distribution's own kernel; where the driver is loaded from outside, "
            "set gpuprov_kernel_modules: none",
        ),
    )


def _outside_problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Libraries and kernel must be of one version: NVML and CUDA refuse anything else (NVML error 18)."""
    where = "the machine outside" if facts.kernel.container else "this kernel"
    loaded = facts.driver_loaded_version
    if not loaded:
        return (
            Problem(
                f"the NVIDIA driver is not loaded in {where}",
                "there is no /proc/driver/nvidia/version",
                f"install driver {spec.driver_version} on {where} first, then run gpuprov again here",
            ),
        )
    if spec.driver_version and loaded != spec.driver_version:
        return (
            Problem(
                f"driver {spec.driver_version} is asked for, but {where} runs {loaded}: the two must match",
                "/proc/driver/nvidia/version",
                f"set gpuprov_driver_version: {loaded}, or update {where}",
            ),
        )
    return ()


def packages(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages that building modules needs: headers of this kernel and of later ones, a compiler, DKMS."""
    row = find_distribution(facts.os.id, facts.os.version)
    if row is None or spec.driver != "runfile" or not builds_modules(facts, spec):
        return ()
    headers = tuple(name.format(kernel=facts.kernel.release) for name in row.kernel_headers)
    for_the_next = header_packages(facts.packages.installed, facts.kernel.release)
    return (*headers, *for_the_next, *row.build_packages)


def note(facts: HostFacts, spec: HostSpec) -> str:
    """Return the sentence that tells what was decided, or nothing."""
    if spec.driver != "runfile" or builds_modules(facts, spec):
        return ""
    if facts.kernel.container:
        return f"inside {facts.kernel.container}: the kernel, and so its driver, is the outer machine's; libraries only"
    return "kernel modules are left alone, as asked; libraries only"
