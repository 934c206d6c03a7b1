"""Rules about kernel modules: not built, not allowed, not loaded, missing for the next boot. Pure."""

from __future__ import annotations

import re

from gpuprov.doctor import words
from gpuprov.doctor.examined import KEYS, Examined
from gpuprov.doctor.finding import LIKELY, MODULE, Finding, Rule
from gpuprov.doctor.log_rules import enrol
from gpuprov.doctor.parse import lines_that_match
from gpuprov.doctor.remedy import LOAD_MODULES
from gpuprov.driver.precompiled import module_package
from gpuprov.facts.kernels import fault, newest
from gpuprov.machine.distros import kernel_headers, next_kernel_headers

_REFUSED = ("modules-disabled", "key-rejected", "lockdown", "secure-boot-unsigned", "module-of-another-kernel")
_ABSENT = ("headers-missing", "dkms-failed", "module-missing")
_BLACKLIST = (
    r"^\s*(blacklist\s+nvidia(-current)?\s*$|(install|alias)\s+nvidia(-current)?\s+(/usr)?(/bin/)?(false|true|off)\b)"
)


def _not_loaded(x: Examined) -> bool:
    """Say whether this machine's own kernel lacks the driver for its GPUs."""
    return bool(x.host.gpus) and not (x.driver.kernel_version or x.host.kernel.container or x.host.kernel.wsl)


def _outside(x: Examined) -> Finding | None:
    manager = x.host.kernel.container
    if not manager or x.driver.kernel_version:
        return None
    return Finding(
        f"the host's driver is not loaded, or is not shown inside {manager}",
        "cat /proc/driver/nvidia/version: No such file or directory",
        "modprobe -a nvidia nvidia-uvm; nvidia-smi  # on the host; then restart this container with its "
        "/proc/driver/nvidia and /dev/nvidia* bound into it",
    )


def _modules_disabled(x: Examined) -> Finding | None:
    if not _not_loaded(x) or x.host.kernel.takes_modules:
        return None
    seen = "/proc/sys/kernel/modules_disabled: 1" if x.host.kernel.modules_disabled else "there is no /proc/modules"
    return Finding(
        "this kernel takes no modules, so NVIDIA's driver can't be loaded", seen,
        "grep -rn modules_disabled /etc/sysctl.conf /etc/sysctl.d  # take it out, then systemctl reboot"
        if x.host.kernel.modules_disabled else "uname -r; ls /boot  # boot the distribution's own kernel",
    )  # fmt: skip


def _unsigned(x: Examined) -> Finding | None:
    signed = x.module.signer or not x.module.path
    if not _not_loaded(x) or x.host.kernel.secure_boot != "enabled" or signed:
        return None
    key = next((path for path in KEYS if path in x.there), "")
    return Finding(
        "Secure Boot is on, and nobody has signed the driver's module",
        f"the EFI variable SecureBoot is 1\nmodinfo {x.module.name}: {x.module.path} has no signer",
        f"{words.rebuild_module(x)}; {enrol(x)}" if key else enrol(x),
        LIKELY,
    )  # fmt: skip


def _here(x: Examined) -> tuple[bool, bool]:
    """Return whether the running kernel has headers, and whether it has the driver's module."""
    running = next((one for one in x.kernels if one.release == x.host.kernel.release), None)
    return (running.headers, running.module or bool(x.module.path)) if running else (False, bool(x.module.path))


def _headers_missing(x: Examined) -> Finding | None:
    headers, module = _here(x)
    if not _not_loaded(x) or headers or module or "nvidia" not in x.dkms:
        return None
    kernel = x.host.kernel.release
    return Finding(
        f"the running kernel {kernel} has no headers, so DKMS could not build the driver for it",
        f"ls /lib/modules/{kernel}/build/Makefile: No such file or directory\ndkms status: {_dkms_line(x)}",
        words.rebuild_module(x),
    )


def _dkms_failed(x: Examined) -> Finding | None:
    headers, module = _here(x)
    if not _not_loaded(x) or not headers or module or "nvidia" not in x.dkms:
        return None
    line, kernel = _dkms_line(x), x.host.kernel.release
    # nvidia/550.163.01, 6.1.0-13-amd64, x86_64: installed (DKMS 3); nvidia, 550.163.01, …: installed (DKMS 2)
    folder = "/".join(re.split(r"[/,:]\s*", line)[:2])
    return Finding(
        f"DKMS has not built the driver for the running kernel {kernel}",
        f"dkms status: {line}\n/lib/modules/{kernel}: no module of NVIDIA's",
        f"dkms install {folder} -k {kernel}; modprobe nvidia  # where it fails: "
        f"less /var/lib/dkms/{folder}/build/make.log",
    )


def _dkms_line(x: Examined) -> str:
    lines = [line for line in x.dkms.splitlines() if "nvidia" in line]
    return next((line for line in lines if x.host.kernel.release in line), lines[0] if lines else "")


def _module_missing(x: Examined) -> Finding | None:
    kernel = x.host.kernel.release
    if not _not_loaded(x) or _here(x)[1]:
        return None
    others = [one.release for one in x.kernels if one.module]
    elsewhere = f"\n/lib/modules: {', '.join(others)} has it" if others else ""
    what = f"the running kernel {kernel} has no NVIDIA module"
    return Finding(
        f"{what}: it came after the driver" if others else what,
        f"/lib/modules/{kernel}: no module of NVIDIA's{elsewhere}",
        words.rebuild_module(x),
    )


def _other_kernels_module(x: Examined) -> Finding | None:
    built = x.module.vermagic.partition(" ")[0]
    if not _not_loaded(x) or not built or built == x.host.kernel.release:
        return None
    return Finding(
        f"the driver's module was built for kernel {built}, and {x.host.kernel.release} runs",
        f"modinfo {x.module.name}: {x.module.path}: vermagic {x.module.vermagic}",
        words.rebuild_module(x),
    )


def _blacklisted(x: Examined) -> Finding | None:
    if not _not_loaded(x):
        return None
    modprobe = {path: text for path, text in x.texts.items() if path.startswith("/etc/modprobe.d/")}
    places = lines_that_match(modprobe, _BLACKLIST)
    if not places:
        return None
    return Finding(
        "modprobe is told not to load NVIDIA's driver",
        "\n".join(f"{place}: {line}" for place, line in places),
        f"{words.comment_out(places[0][0])}; {words.rebuild_initramfs(x)}; modprobe nvidia",
    )


def _module_idle(x: Examined) -> Finding | None:
    if not _not_loaded(x) or not _here(x)[1]:
        return None
    return Finding(
        "the driver's module is there and not loaded",
        "/proc/driver/nvidia/version is not there\n" + _module_seen(x),
        "modprobe -a nvidia nvidia-uvm; dmesg | grep -i -e nvrm -e nvidia",
        remedies=(LOAD_MODULES,),
    )


def _module_seen(x: Examined) -> str:
    """Return the module's place: from modinfo or, without modinfo, from the folder of the kernel's modules."""
    if x.module.path:
        return f"modinfo {x.module.name}: {x.module.path}"
    return f"/lib/modules/{x.host.kernel.release}: a module of NVIDIA's is there"


def _no_uvm(x: Examined) -> Finding | None:
    if not x.driver.nodes or any(node.path == "/dev/nvidia-uvm" for node in x.driver.nodes):
        return None
    return Finding(
        "the module nvidia-uvm is not loaded: CUDA ends with error 999 or 3", "/proc/devices: no nvidia-uvm",
        "modprobe nvidia-uvm", remedies=(LOAD_MODULES,),
    )  # fmt: skip


def _next_kernel(x: Examined) -> Finding | None:
    running = x.host.kernel.release
    kernel = None if x.host.kernel.container else newest(x.kernels, running)
    row = x.host.distribution
    if kernel is None or row is None or not x.driver.kernel_version:
        return None
    headers = kernel_headers(row, kernel.release)
    missing = next_kernel_headers(row, running, x.host.packages.installed)
    dkms = "nvidia" in x.dkms
    compiled = module_package(x.host.packages.installed, kernel.release)
    reason = fault(kernel, headers=headers, missing=missing, dkms=dkms, compiled=compiled)
    if not reason:
        return None
    build = f"dkms autoinstall -k {kernel.release}" if dkms else f"{words.gpuprov_install(x)}  # once that kernel runs"
    if compiled:
        build, headers = words.install_packages(x, compiled), ()
    steps = (
        words.install_packages(x, *headers) if not (kernel.module or kernel.headers) and headers else "",
        build if not kernel.module else words.install_packages(x, *missing),
    )
    return Finding(
        f"at the next boot the driver would be gone: {reason.partition(': ')[0]}", f"/lib/modules/{kernel.release}",
        "; ".join(step for step in steps if step), LIKELY,
    )  # fmt: skip


RULES = (
    Rule("driver-outside", MODULE, "a system container (LXC, nspawn) without /proc/driver/nvidia", _outside,
         ("no-gpu",)),
    Rule("modules-disabled", MODULE, "kernel.modules_disabled is 1, or there is no /proc/modules", _modules_disabled),
    Rule("secure-boot-unsigned", MODULE, "Secure Boot, and modinfo shows no signer", _unsigned,
         ("key-rejected", "lockdown")),
    Rule("headers-missing", MODULE, "DKMS has the driver, and the running kernel has no headers", _headers_missing),
    Rule("dkms-failed", MODULE, "DKMS has the driver and the headers, and no module for this kernel", _dkms_failed),
    Rule("module-missing", MODULE, "modinfo finds no nvidia for the running kernel", _module_missing,
         ("headers-missing", "dkms-failed")),
    Rule("module-vermagic", MODULE, "modinfo: vermagic names another kernel", _other_kernels_module,
         ("module-of-another-kernel",)),
    Rule("module-blacklisted", MODULE, "/etc/modprobe.d: blacklist nvidia, install nvidia /bin/false", _blacklisted),
    Rule("module-not-loaded", MODULE, "the module is there, and /proc/driver/nvidia is not", _module_idle,
         (*_REFUSED, *_ABSENT, "module-vermagic", "module-blacklisted", "gpu-nouveau", "gpu-vfio", "bound-to-another",
          "probe-not-called", "needs-open-modules", "needs-proprietary-modules", "branch-without-gpu",
          "gpu-too-old-or-new", "probe-failed", "fallen-off-bus", "power-cables", "bar-invalid", "gsp-firmware-missing",
          "init-failed")),
    Rule("uvm-not-loaded", MODULE, "/proc/devices has no nvidia-uvm", _no_uvm),
    Rule("next-kernel", MODULE, "the newest installed kernel has no NVIDIA module, or no headers to come",
         _next_kernel),
)  # fmt: skip
