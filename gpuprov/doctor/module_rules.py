"""Kernel modules (not built, not allowed, not loaded, missing at the next boot) and the nodes in /dev. Pure."""

from __future__ import annotations

import re

from gpuprov.cdi.discover import missing_nodes
from gpuprov.checks.smi import OPEN_NODES
from gpuprov.doctor.finding import (
    ANY_ROOT,
    CERTAIN,
    LIKELY,
    LOAD_MODULES,
    MODULE,
    NODES,
    WARNING,
    Finding,
    Rules,
    finding_of,
    open_nodes,
    restart,
    steps,
)
from gpuprov.doctor.gpu_rules import enrol
from gpuprov.doctor.parse import lines_that_match
from gpuprov.doctor.snapshot import KEYS, HostSnapshot
from gpuprov.doctor.suggested_commands import (
    comment_out,
    gpuprov_install,
    install_packages,
    make_nodes,
    rebuild_initramfs,
    rebuild_module,
)
from gpuprov.driver.kernel import no_modules
from gpuprov.driver.precompiled import module_package
from gpuprov.driver.source import UNSIGNED
from gpuprov.facts.boot import NODES as NODES_UNIT
from gpuprov.facts.kernels import fault, newest
from gpuprov.machine.distros import kernel_headers, next_kernel_headers
from gpuprov.protocol.words import counted
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH

RULES = Rules()

_REFUSED = ("modules-disabled", "key-rejected", "lockdown", "secure-boot-unsigned", "module-of-another-kernel")
_ABSENT = ("headers-missing", "dkms-failed", "module-missing")
_BLACKLIST = (
    r"^\s*(blacklist\s+nvidia(-current)?\s*$|(install|alias)\s+nvidia(-current)?\s+(/usr)?(/bin/)?(false|true|off)\b)"
)


def _not_loaded(x: HostSnapshot) -> bool:
    """Say whether this machine's own kernel lacks the driver for its GPUs."""
    return bool(x.host.gpus) and not (x.driver.kernel_version or x.host.kernel.container or x.host.kernel.wsl)


@RULES.add("driver-outside", MODULE, "a system container (LXC, nspawn) without /proc/driver/nvidia", ("no-gpu",))
def _driver_outside(x: HostSnapshot) -> Finding | None:
    manager = x.host.kernel.container
    if not manager or x.driver.kernel_version:
        return None
    return Finding(
        f"the host's driver is not loaded, or is not shown inside {manager}",
        "cat /proc/driver/nvidia/version: No such file or directory",
        "modprobe -a nvidia nvidia-uvm; nvidia-smi  # on the host; then restart this container with its "
        "/proc/driver/nvidia and /dev/nvidia* bound into it",
    )


@RULES.add("modules-disabled", MODULE, "kernel.modules_disabled is 1, or there is no /proc/modules")
def _modules_disabled(x: HostSnapshot) -> Finding | None:
    return finding_of(no_modules(x.host)) if _not_loaded(x) and not x.host.kernel.takes_modules else None


@RULES.add("secure-boot-unsigned", MODULE, "Secure Boot, and modinfo shows no signer", ("key-rejected", "lockdown"))
def _secure_boot_unsigned(x: HostSnapshot) -> Finding | None:
    signed = x.module.signer or not x.module.path
    if not _not_loaded(x) or x.host.kernel.secure_boot != "enabled" or signed:
        return None
    key = next((path for path in KEYS if path in x.there), "")
    return Finding(
        UNSIGNED.what,
        f"{UNSIGNED.evidence}\nmodinfo {x.module.name}: {x.module.path} has no signer",
        f"{rebuild_module(x)}; {enrol(x)}" if key else enrol(x),
        LIKELY,
    )  # fmt: skip


def _here(x: HostSnapshot) -> tuple[bool, bool]:
    """Return whether the running kernel has headers, and whether it has the driver's module."""
    running = next((one for one in x.kernels if one.release == x.host.kernel.release), None)
    return (running.headers, running.module or bool(x.module.path)) if running else (False, bool(x.module.path))


@RULES.add("headers-missing", MODULE, "DKMS has the driver, and the running kernel has no headers")
def _headers_missing(x: HostSnapshot) -> Finding | None:
    headers, module = _here(x)
    if not _not_loaded(x) or headers or module or "nvidia" not in x.dkms:
        return None
    kernel = x.host.kernel.release
    return Finding(
        f"the running kernel {kernel} has no headers, so DKMS could not build the driver for it",
        f"ls /lib/modules/{kernel}/build/Makefile: No such file or directory\ndkms status: {_dkms_line(x)}",
        rebuild_module(x),
    )


@RULES.add("dkms-failed", MODULE, "DKMS has the driver and the headers, and no module for this kernel")
def _dkms_failed(x: HostSnapshot) -> Finding | None:
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


def _dkms_line(x: HostSnapshot) -> str:
    lines = [line for line in x.dkms.splitlines() if "nvidia" in line]
    return next((line for line in lines if x.host.kernel.release in line), lines[0] if lines else "")


@RULES.add(
    "module-missing", MODULE, "modinfo finds no nvidia for the running kernel", ("headers-missing", "dkms-failed")
)
def _module_missing(x: HostSnapshot) -> Finding | None:
    kernel = x.host.kernel.release
    if not _not_loaded(x) or _here(x)[1]:
        return None
    others = [one.release for one in x.kernels if one.module]
    elsewhere = f"\n/lib/modules: {', '.join(others)} has it" if others else ""
    what = f"the running kernel {kernel} has no NVIDIA module"
    return Finding(
        f"{what}: it came after the driver" if others else what,
        f"/lib/modules/{kernel}: no module of NVIDIA's{elsewhere}",
        rebuild_module(x),
    )


@RULES.add("module-vermagic", MODULE, "modinfo: vermagic names another kernel", ("module-of-another-kernel",))
def _module_vermagic(x: HostSnapshot) -> Finding | None:
    built = x.module.vermagic.partition(" ")[0]
    if not _not_loaded(x) or not built or built == x.host.kernel.release:
        return None
    return Finding(
        f"the driver's module was built for kernel {built}, and {x.host.kernel.release} runs",
        f"modinfo {x.module.name}: {x.module.path}: vermagic {x.module.vermagic}",
        rebuild_module(x),
    )


@RULES.add("module-blacklisted", MODULE, "/etc/modprobe.d: blacklist nvidia, install nvidia /bin/false")
def _module_blacklisted(x: HostSnapshot) -> Finding | None:
    if not _not_loaded(x):
        return None
    modprobe = {path: text for path, text in x.texts.items() if path.startswith("/etc/modprobe.d/")}
    places = lines_that_match(modprobe, _BLACKLIST)
    if not places:
        return None
    return Finding(
        "modprobe is told not to load NVIDIA's driver",
        "\n".join(f"{place}: {line}" for place, line in places),
        f"{comment_out(places[0][0])}; {rebuild_initramfs(x)}; modprobe nvidia",
    )


@RULES.add(
    "module-not-loaded",
    MODULE,
    "the module is there, and /proc/driver/nvidia is not",
    (
        *_REFUSED,
        *_ABSENT,
        "module-vermagic",
        "module-blacklisted",
        "gpu-nouveau",
        "gpu-vfio",
        "bound-to-another",
        "probe-not-called",
        "needs-open-modules",
        "needs-proprietary-modules",
        "branch-without-gpu",
        "gpu-too-old-or-new",
        "probe-failed",
        "fallen-off-bus",
        "power-cables",
        "bar-invalid",
        "gsp-firmware-missing",
        "init-failed",
    ),
)
def _module_not_loaded(x: HostSnapshot) -> Finding | None:
    if not _not_loaded(x) or not _here(x)[1]:
        return None
    return Finding(
        "the driver's module is there and not loaded",
        "/proc/driver/nvidia/version is not there\n" + _module_seen(x),
        "modprobe -a nvidia nvidia-uvm; dmesg | grep -i -e nvrm -e nvidia",
        remedies=(LOAD_MODULES,),
    )


def _module_seen(x: HostSnapshot) -> str:
    """Return the module's place: from modinfo or, without modinfo, from the folder of the kernel's modules."""
    if x.module.path:
        return f"modinfo {x.module.name}: {x.module.path}"
    return f"/lib/modules/{x.host.kernel.release}: a module of NVIDIA's is there"


@RULES.add("uvm-not-loaded", MODULE, "/proc/devices has no nvidia-uvm")
def _uvm_not_loaded(x: HostSnapshot) -> Finding | None:
    if not x.driver.nodes or any(node.path == "/dev/nvidia-uvm" for node in x.driver.nodes):
        return None
    return Finding(
        "the module nvidia-uvm is not loaded: CUDA ends with error 999 or 3", "/proc/devices: no nvidia-uvm",
        "modprobe nvidia-uvm", remedies=(LOAD_MODULES,),
    )  # fmt: skip


@RULES.add("next-kernel", MODULE, "the newest installed kernel has no NVIDIA module, or no headers to come")
def _next_kernel(x: HostSnapshot) -> Finding | None:
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
    build = f"dkms autoinstall -k {kernel.release}" if dkms else f"{gpuprov_install(x)}  # once that kernel runs"
    if compiled:
        build, headers = install_packages(x, compiled), ()
    steps = (
        install_packages(x, *headers) if not (kernel.module or kernel.headers) and headers else "",
        build if not kernel.module else install_packages(x, *missing),
    )
    return Finding(
        f"at the next boot the driver would be gone: {reason.partition(': ')[0]}", f"/lib/modules/{kernel.release}",
        "; ".join(step for step in steps if step), LIKELY,
    )  # fmt: skip


_LOAD = "modprobe -a nvidia nvidia-uvm; dmesg | grep -i nvrm"
# Errors of open(2) on a node, in the C locale, and their meaning for a device.
_ERRORS = {
    "No such device or address": ("opening {path} fails: the driver does not respond", _LOAD),
    "No such device": ("opening {path} fails: the driver does not respond", _LOAD),
    "Input/output error": (
        "the driver can't start the GPU behind {path}",
        "dmesg | grep -i -e nvrm -e xid; systemctl reboot",
    ),
    "Operation not permitted": (
        "a device cgroup forbids {path}, on this machine itself",
        "ls -l /dev/nvidia*  # allow the device on the host: lxc.cgroup2.devices.allow = c 195:* rwm, or "
        "DeviceAllow=char-nvidia rw",
    ),
    "Permission denied": ("{path} may not be opened", f"ls -lZ /dev/nvidia*; {OPEN_NODES}"),
}


@RULES.add("nodes-missing", NODES, "the loaded driver's device nodes are not all in /dev")
def _nodes_missing(x: HostSnapshot) -> Finding | None:
    paths = [node.path for node in missing_nodes(x.driver) if not x.in_place.get(node.path)]
    if not paths:
        return None
    return Finding(
        f"{_listed(paths)} {'is' if len(paths) == 1 else 'are'} missing",
        "\n".join(f"ls {path}: No such file or directory" for path in paths[:4]),
        make_nodes(x),
        remedies=(steps("device nodes"),),
    )


def _listed(paths: list[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {counted(len(paths) - 4, 'more node')}" if len(paths) > 4 else "")


@RULES.add("node-wrong", NODES, "a file, a folder or another device lies in a node's place")
def _node_wrong(x: HostSnapshot) -> Finding | None:
    wrong = [(node, x.in_place[node.path]) for node in missing_nodes(x.driver) if x.in_place.get(node.path)]
    if not wrong:
        return None
    paths = " ".join(node.path for node, _ in wrong)
    return Finding(
        f"{paths} is not the device that it should be",
        "\n".join(f"ls -ld {node.path}: {there}; it should be char {node.major}:{node.minor}" for node, there in wrong),
        f"rm -rf {paths}; {make_nodes(x)}",
        # A folder may not be empty.
        remedies=() if "directory" in dict(wrong).values() else (steps("device nodes"),),
    )


@RULES.add("nodes-closed", NODES, "the driver's DeviceFileMode is open to all, the node is not")
def _nodes_closed(x: HostSnapshot) -> Finding | None:
    closed = [node.path for node in x.driver.closed]
    if not closed:
        return None
    by_mode: dict[int, list[str]] = {}
    for node in x.driver.closed:
        by_mode.setdefault(node.mode, []).append(node.path)
    return Finding(
        f"other users than root may not open {_listed(closed)}, so their containers get nothing",
        "\n".join(f"stat -c %a {path}: {x.node_modes[path]:o}" for path in closed[:4]),
        "; ".join(f"chmod {mode:04o} {' '.join(paths)}" for mode, paths in by_mode.items()),
        LIKELY,
        (open_nodes(*closed),),
    )


@RULES.add(
    "node-does-not-open", NODES, "nvidia-smi fails, and a node does not open: ENXIO, EIO, EPERM or EACCES", ANY_ROOT
)
def _node_does_not_open(x: HostSnapshot) -> Finding | None:
    if not x.node_errors:
        return None
    path, error = next(iter(x.node_errors.items()))
    what, step = _ERRORS.get(error, ("{path} can't be opened", "dmesg | grep -i nvrm"))
    return Finding(what.format(path=path), f"head -c 0 {path}: {error}", step, LIKELY)


@RULES.add(
    "dev-char-links",
    NODES,
    "NVIDIA's runtime, docker with systemd's cgroups, no links to the nodes in /dev/char",
    ("nodes-missing", "driver-outside", "module-not-loaded"),
)
def _dev_char_links(x: HostSnapshot) -> Finding | None:
    # gpuprov's runtime makes them at each container start.
    ours = (x.host.docker.runtimes or {}).get("nvidia") == LAUNCHER_PATH
    if ours or not x.links_missing or x.host.docker.cgroup_driver != "systemd" or not x.driver.present:
        return None
    return Finding(
        "running containers lose their GPUs at the next `systemctl daemon-reload` (Failed to initialize NVML: Unknown "
        "Error): systemd finds the devices by links in /dev/char, and they are missing",
        "\n".join(f"ls {path}: No such file or directory" for path in x.links_missing[:4]),
        _make_links(x),
        LIKELY,
    )


def _make_links(x: HostSnapshot) -> str:
    if "/usr/bin/nvidia-ctk" in x.there:
        return "nvidia-ctk system create-dev-char-symlinks --create-all"
    numbers = {node.path: f"{node.major}:{node.minor}" for node in x.driver.nodes}
    wanted = [path.rpartition("/")[2] for path in x.links_missing]
    return "; ".join(f"ln -s {path} /dev/char/{number}" for path, number in numbers.items() if number in wanted)


@RULES.add(
    "nodes-unit-failed",
    NODES,
    "gpuprov-nodes.service has failed",
    ("driver-outside", "module-not-loaded", "module-missing", "nodes-missing"),
)
def _nodes_unit_failed(x: HostSnapshot) -> Finding | None:
    unit = x.units.get(NODES_UNIT)
    if unit is None or unit.active != "failed":
        return None
    return Finding(
        "the device nodes could not be made at boot", f"systemctl show {NODES_UNIT}: {unit.active}, {unit.result}",
        f"systemctl restart {NODES_UNIT}; journalctl -b -u {NODES_UNIT} -n 20",
        CERTAIN if missing_nodes(x.driver) or not x.driver.nodes else WARNING,
        (restart(NODES_UNIT),),
    )  # fmt: skip
