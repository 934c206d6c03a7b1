"""Where the kernel modules come from, and what building them needs; never installs anything itself."""

from __future__ import annotations

import re

from gpuprov.core.changes import Change, RemoveFile, WriteFile
from gpuprov.core.system import System
from gpuprov.driver import distribution, precompiled
from gpuprov.facts.host import DKMS_SIGNING, HostFacts
from gpuprov.machine.distros import kernel_headers, next_kernel_headers
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.spec import HostSpec


def brings_modules(facts: HostFacts, spec: HostSpec) -> bool:
    """Say whether this host needs kernel modules, built on it or not.

    The kernel of a system container belongs to the container host: only the libraries are installed.
    """
    if spec.kernel_modules == "auto":
        return not facts.kernel.container
    return spec.kernel_modules != "none"


def problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return what prevents kernel modules on this host."""
    if spec.driver == "preinstalled":
        return ()
    if not brings_modules(facts, spec):
        outside = spec.driver == "runfile" and facts.image is None
        return _outside_problems(facts, spec) if outside else ()
    if not facts.kernel.takes_modules:
        return _no_modules(facts)
    if _is_installed(facts, spec):
        return ()
    return (*_signing_problems(facts, spec), *_display_problems(facts, spec))


def _is_installed(facts: HostFacts, spec: HostSpec) -> bool:
    """Say whether the driver is installed; a driver from packages, which update it, counts in any version."""
    installed = facts.driver_installed_version
    return bool(installed) and (spec.driver in ("packages", "distribution") or installed == spec.driver_version)


def _signing_problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """With Secure Boot the kernel takes signed modules alone (Documentation/admin-guide/module-signing.rst)."""
    if facts.kernel.secure_boot != "enabled" or (spec.module_signing_key and spec.module_signing_certificate):
        return ()
    if precompiled.chosen(facts, spec):
        return precompiled.signing_problems(facts)
    if (choice := distribution.chosen(facts, spec)) is not None and choice.compiled:
        # Signed with the distribution's own key, which its kernels trust.
        return ()
    return (
        Problem(
            "Secure Boot is on: the kernel would refuse the driver's modules, which nobody has signed",
            "the EFI variable SecureBoot is 1",
            "make a key (openssl req -new -x509 -newkey rsa:2048 -nodes -subj /CN=modules -keyout /root/mok.key "
            "-outform DER -out /root/mok.der), enrol it (mokutil --import /root/mok.der; reboot, confirm at the "
            "console), set gpuprov_module_signing_key and gpuprov_module_signing_certificate to them; or switch Secure "
            "Boot off in the firmware",
        ),
    )


def _display_problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return the problems of running displays; one started by a display manager can be stopped with it."""
    managed = facts.running is not None and facts.running.display_manager
    if spec.driver != "runfile" or not facts.displays or (managed and spec.stop_display_manager):
        return ()
    return (
        Problem(
            "an X server is running, and the driver's installer refuses to work under it",
            "; ".join(facts.displays),
            "stop the display manager (systemctl isolate multi-user.target), then run the same command again; or set "
            "gpuprov_stop_display_manager: true",
        ),
    )


def _no_modules(facts: HostFacts) -> tuple[Problem, ...]:
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
    """Return the problems in a container: libraries and kernel must match, or NVML and CUDA fail (NVML error 18)."""
    where = "the container host" if facts.kernel.container else "this kernel"
    loaded = facts.driver_loaded_version
    if not loaded:
        return (
            Problem(
                f"the NVIDIA driver is not loaded {'on' if facts.kernel.container else 'in'} {where}",
                "there is no /proc/driver/nvidia/version",
                f"install {_driver(spec)} on {where} first, then run gpuprov again here",
            ),
        )
    if spec.driver_version and loaded != spec.driver_version:
        return (
            Problem(
                f"driver {spec.driver_version} is asked for, but {where} runs {loaded}: the two must match",
                "/proc/driver/nvidia/version",
                f'set gpuprov_driver_version: "{loaded}", or update {where}',
            ),
        )
    return ()


def _driver(spec: HostSpec) -> str:
    return f"driver {spec.driver_version}" if spec.driver_version else "the driver"


def packages(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages that building modules needs: headers of exactly the running kernel, a compiler, DKMS."""
    row = facts.distribution
    if row is None or not compiles(facts, spec):
        return ()
    following = next_kernel_headers(row, facts.kernel.release, facts.packages.installed)
    return (*headers(facts, spec), *following, *row.build_packages)


def headers(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages of the running kernel's headers, where modules are built; in an image, of all its kernels."""
    row = facts.distribution
    if row is None or not compiles(facts, spec):
        return ()
    releases = [one.release for one in facts.image.kernels] if facts.image is not None else [facts.kernel.release]
    return tuple(dict.fromkeys(name for release in releases for name in kernel_headers(row, release)))


def compiles(facts: HostFacts, spec: HostSpec) -> bool:
    """Say whether kernel modules are built on this host."""
    if spec.driver == "preinstalled" or not brings_modules(facts, spec):
        return False
    choice = distribution.chosen(facts, spec)
    return precompiled.chosen(facts, spec) is None and not (choice is not None and choice.compiled)


def plan_signing(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the change that makes DKMS sign with the user-supplied key, now and for later kernels (dkms(8))."""
    there = facts.files.get(DKMS_SIGNING)
    if not (spec.module_signing_key and spec.module_signing_certificate and compiles(facts, spec)):
        return (RemoveFile(DKMS_SIGNING, "no longer asked for"),) if there else ()
    text = f"mok_signing_key={spec.module_signing_key}\nmok_certificate={spec.module_signing_certificate}\n".encode()
    return () if there and (there.content, there.mode) == (text, 0o644) else (WriteFile(DKMS_SIGNING, text),)


def note(facts: HostFacts, spec: HostSpec) -> str:
    """Return a sentence about the decision, or ""."""
    if spec.driver not in ("runfile", "distribution") or brings_modules(facts, spec):
        return ""
    if facts.kernel.container:
        return f"inside {facts.kernel.container}: the kernel and its driver are the container host's; libraries only"
    return "kernel modules are left alone, as asked; libraries only"


def prove_modules(system: System, version: str, *, dkms: bool) -> None:
    """Check that the modules of that version exist for the running kernel. Raises GpuprovError if they do not.

    `dkms`: DKMS must have built them. An installer's exit code proves neither.
    """
    kernel = system.kernel_release()
    if dkms:
        _prove_dkms(system, version, kernel)
    found = system.run(("modinfo", "-k", kernel, "-F", "version", "nvidia"))
    if found.stdout.strip() != version:
        raise GpuprovError(
            f"the installer reported success, but kernel {kernel} has no module nvidia of version {version}",
            found.evidence() if not found.ok else f"modinfo -k {kernel} nvidia: version {found.stdout.strip()}",
            f"which file is it? modinfo -k {kernel} -F filename nvidia; dkms status",
        )


def _prove_dkms(system: System, version: str, kernel: str) -> None:
    status = system.run(("dkms", "status"))
    states = dkms_states(status.stdout, version)
    if states.get(kernel) == "installed":
        return
    if not states:
        raise GpuprovError(
            "the driver is not registered with DKMS: the next kernel upgrade would lose it",
            status.evidence(),
            f"dkms install nvidia/{version}",
        )
    raise GpuprovError(
        f"DKMS knows the driver, but has not installed its modules for kernel {kernel}",
        status.stdout.strip(),
        f"dkms install nvidia/{version} -k {kernel}; see /var/lib/dkms/nvidia/{version}/build/make.log",
    )


def dkms_states(status: str, version: str) -> dict[str, str]:
    """Return kernel → state (built, installed) of a driver in what `dkms status` says; "" → added without a kernel.

    DKMS 2 writes `nvidia, 550.163.01, 5.10.0-32-amd64, x86_64: installed`, DKMS 3 a slash for the first comma. Words
    after the state are warnings.
    """
    found = re.findall(rf"^nvidia(?:/|, ){re.escape(version)}(?:, ([^,\s]+), [^,\s]+)?: (\w+)", status, re.MULTILINE)
    return dict(found)
