"""Kernel modules for an image: built for each kernel installed in it, and not loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpuprov.cdi.discover import discover
from gpuprov.core.changes import Change, Json, Tell
from gpuprov.core.system import System
from gpuprov.driver import kernel
from gpuprov.driver_run import installs
from gpuprov.facts.host import HostFacts
from gpuprov.facts.kernels import has_module
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.spec import HostSpec

# Compiling takes two to three minutes on two cores; slow machines take longer.
_BUILD_SECONDS = 3600
# Generations used in machines with NVSwitches (HGX and DGX A100, H100, B200, …).
_WITH_SWITCHES = frozenset(("volta", "ampere", "hopper", "blackwell", "rubin"))


def problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return what an image lacks, or which facts about the machines of its copies are missing."""
    if facts.image is None:
        return ()
    found = []
    if spec.driver != "preinstalled" and kernel.brings_modules(facts, spec):
        found += _kernel_problems(facts, spec)
    if spec.fabric_manager == "auto" and spec.image_nvswitch is None and _WITH_SWITCHES & {*spec.image_gpus}:
        found.append(_switches_not_said(spec))
    if spec.mig_layout:
        found.append(
            Problem(
                "GPUs that are not here yet can't be divided by MIG",
                "gpuprov_target is image, and gpuprov_mig_layout is set",
                "leave gpuprov_mig_layout out; divide them on the machine: gpuprov install -e gpuprov_mig_layout=…",
            )
        )
    return tuple(found)


def _kernel_problems(facts: HostFacts, spec: HostSpec) -> list[Problem]:
    found = []
    if facts.image is not None and not facts.image.kernels:
        found.append(
            Problem(
                "there is no kernel in this image to build the driver's modules for",
                "/lib/modules has no release whose vmlinuz is in /boot or beside its modules",
                "install one first (Debian: apt-get install linux-image-amd64); or, where the kernel comes from "
                "elsewhere and has the driver, set gpuprov_kernel_modules: none",
            )
        )
    if spec.kernel_module_type == "auto" and not spec.image_gpus:
        found.append(
            Problem(
                "which kernel modules the image needs is not said: open or proprietary",
                "gpuprov_target is image; neither gpuprov_image_gpus nor gpuprov_kernel_module_type is set",
                "set gpuprov_image_gpus to the GPUs that it will meet (ampere, [turing, ada], …), or "
                "gpuprov_kernel_module_type: open or proprietary",
            )
        )
    return found


def _switches_not_said(spec: HostSpec) -> Problem:
    return Problem(
        "whether the image will meet NVSwitches, and so needs the fabric manager, is not said",
        f"gpuprov_target is image, gpuprov_image_gpus is {', '.join(spec.image_gpus)}, gpuprov_image_nvswitch is not "
        "set",
        "set gpuprov_image_nvswitch: true (HGX and DGX machines), or false",
    )


def plan(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the change that builds modules for each kernel without any, once the driver is installed."""
    image = facts.image
    if image is None or spec.driver == "preinstalled" or not kernel.compiles(facts, spec):
        return ()
    coming = installs(facts, spec) or not facts.driver_installed_version
    kernels = tuple(one.release for one in image.kernels) if coming else image.without_module
    return (BuildModules(kernels),) if kernels else ()


@dataclass(frozen=True)
class BuildModules(Change):
    """Build the installed driver's modules for these kernels with DKMS."""

    kernels: tuple[str, ...]

    # DKMS repeats an interrupted build; the undo of the driver removes its modules.
    undo_when_interrupted: ClassVar[bool] = False

    def summary(self) -> str:
        return f"build the driver's modules for {', '.join(self.kernels)}; load none"

    @property
    def key(self) -> str:
        return "build the driver's modules for the image's kernels"

    def apply(self, system: System, tell: Tell) -> Json:
        for number, release in enumerate(self.kernels):
            if not _has_module(system, release):
                tell(f"building modules for {release}", number, len(self.kernels))
                _build(system, release)
        return {}


def _build(system: System, release: str) -> None:
    if system.which("dkms") is None:
        raise GpuprovError(
            f"kernel {release} has no NVIDIA module, and there is no dkms to build it",
            f"/lib/modules/{release}/modules.dep lists none",
            "remove that kernel from the image, or make dkms available (gpuprov_epel: true), then run the same command "
            "again",
        )
    done = system.run(("dkms", "autoinstall", "-k", release), timeout=_BUILD_SECONDS)
    if not _has_module(system, release):
        version = discover(system).library_version
        raise GpuprovError(
            f"DKMS could not build the driver's modules for kernel {release}",
            done.evidence(),
            f"see /var/lib/dkms/nvidia/{version}/build/make.log; or remove that kernel from the image",
        )


def _has_module(system: System, release: str) -> bool:
    return has_module(system.read_text(f"/lib/modules/{release}/modules.dep") or "")
