"""Kernel modules (not built, not allowed, not loaded, missing at the next boot) and the nodes in /dev. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from gpuprov.cdi.discover import missing_nodes
from gpuprov.core.commands import Failure, first_match
from gpuprov.doctor import suggested_commands as commands
from gpuprov.doctor.finding import CERTAIN, NODE_MODES, Remedy
from gpuprov.doctor.rules import Seen, conditions, failed_unit, quoted, seen_of
from gpuprov.doctor.snapshot import KEYS, HostSnapshot, lines_that_match
from gpuprov.driver.kernel import no_modules
from gpuprov.driver.precompiled import module_package
from gpuprov.driver.source import UNSIGNED
from gpuprov.facts.boot import NODES as NODES_UNIT
from gpuprov.facts.kernels import newest, next_kernel_fault
from gpuprov.machine.distros import kernel_headers, next_kernel_headers
from gpuprov.protocol.words import counted
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH

_BLACKLIST = (
    r"^\s*(blacklist\s+nvidia(-current)?\s*$|(install|alias)\s+nvidia(-current)?\s+(/usr)?(/bin/)?(false|true|off)\b)"
)


def _not_loaded(x: HostSnapshot) -> bool:
    """Say whether this machine's own kernel lacks the driver for its GPUs."""
    return bool(x.host.gpus) and not (x.driver.kernel_version or x.host.kernel.container or x.host.kernel.wsl)


def _here(x: HostSnapshot) -> tuple[bool, bool]:
    """Return whether the running kernel has headers, and whether it has the driver's module."""
    running = next((one for one in x.kernels if one.release == x.host.kernel.release), None)
    return (running.headers, running.module or bool(x.module.path)) if running else (False, bool(x.module.path))


def _is_unbuilt(x: HostSnapshot) -> bool:
    """Say whether DKMS has the driver, and the running kernel has no module of it."""
    return _not_loaded(x) and not _here(x)[1] and "nvidia" in x.dkms


conditions({
    "driver-outside": lambda x: bool(x.host.kernel.container) and not x.driver.kernel_version
        and "cat /proc/driver/nvidia/version: No such file or directory",
    "modules-disabled": lambda x: _not_loaded(x) and not x.host.kernel.takes_modules and seen_of(no_modules(x.host)),
    "module-not-loaded": lambda x: _not_loaded(x) and _here(x)[1]
        and ["/proc/driver/nvidia/version is not there",
             f"modinfo {x.module.name}: {x.module.path}" if x.module.path
             else f"/lib/modules/{x.host.kernel.release}: a module of NVIDIA's is there"],
    "uvm-not-loaded": lambda x: bool(x.driver.nodes)
        and all(node.path != "/dev/nvidia-uvm" for node in x.driver.nodes) and "/proc/devices: no nvidia-uvm",
    "headers-missing": lambda x: _is_unbuilt(x) and not _here(x)[0] and [
        f"ls /lib/modules/{x.host.kernel.release}/build/Makefile: No such file or directory",
        f"dkms status: {_dkms_line(x)}"],
    "dkms-failed": lambda x: _is_unbuilt(x) and _here(x)[0] and Seen(
        f"dkms status: {_dkms_line(x)}", f"/lib/modules/{x.host.kernel.release}: no module of NVIDIA's",
        folder=_dkms_folder(x)),
    "module-vermagic": lambda x: _not_loaded(x)
        and (kernel := x.module.vermagic.partition(" ")[0]) not in ("", x.host.kernel.release)
        and Seen(f"modinfo {x.module.name}: {x.module.path}: vermagic {x.module.vermagic}", kernel=kernel),
    "module-blacklisted": lambda x: _not_loaded(x) and (lines := lines_that_match(
            {path: text for path, text in x.texts.items() if path.startswith("/etc/modprobe.d/")}, _BLACKLIST))
        and Seen(*quoted(lines), comment_out=commands.comment_out(lines[0][0])),
    "nodes-missing": lambda x: (
            paths := [node.path for node in missing_nodes(x.driver) if not x.in_place.get(node.path)])
        and Seen(*_no_such(paths), nodes=_listed(paths), verb="is" if len(paths) == 1 else "are"),
    "nodes-unit-failed": lambda x: (seen := failed_unit(x, NODES_UNIT))
        and Seen(seen, confidence=CERTAIN if missing_nodes(x.driver) or not x.driver.nodes else ""),
})  # fmt: skip


def secure_boot_unsigned(x: HostSnapshot) -> Seen | None:
    if not _not_loaded(x) or x.host.kernel.secure_boot != "enabled" or not x.module.path or x.module.signer:
        return None
    # What is built already, `dkms autoinstall` does not build again.
    which = f"{_dkms_folder(x)} -k {x.host.kernel.release}"
    again = f"dkms remove {which}; dkms install {which}" if "nvidia" in x.dkms else commands.rebuild_module(x)
    step = f"{again}; {commands.enrol(x)}" if x.there.intersection(KEYS) else ""
    seen = f"modinfo {x.module.name}: {x.module.path} has no signer"
    return Seen(UNSIGNED.evidence, seen, meaning=UNSIGNED.what, next_step=step)


def _dkms_folder(x: HostSnapshot) -> str:
    # nvidia/550.163.01, 6.1.0-13-amd64, x86_64: installed (DKMS 3); nvidia, 550.163.01, …: installed (DKMS 2)
    return shlex.quote("/".join(re.split(r"[/,:]\s*", _dkms_line(x))[:2]))


def _dkms_line(x: HostSnapshot) -> str:
    lines = [line for line in x.dkms.splitlines() if "nvidia" in line]
    return next((line for line in lines if x.host.kernel.release in line), lines[0] if lines else "")


def module_missing(x: HostSnapshot) -> Seen | None:
    if not _not_loaded(x) or _here(x)[1]:
        return None
    others = [one.release for one in x.kernels if one.module]
    seen = [f"/lib/modules/{x.host.kernel.release}: no module of NVIDIA's"]
    elsewhere = [f"/lib/modules: {', '.join(others)} has it"] if others else []
    return Seen(*seen, *elsewhere, later=": it came after the driver" if others else "")


def next_kernel(x: HostSnapshot) -> Seen | None:
    running = x.host.kernel.release
    kernel = None if x.host.kernel.container else newest(x.kernels, running)
    row = x.host.distribution
    if kernel is None or not row.id or not x.driver.kernel_version:
        return None
    headers = kernel_headers(row, kernel.release)
    missing = next_kernel_headers(row, running, x.host.packages.installed)
    dkms = "nvidia" in x.dkms
    compiled = module_package(x.host.packages.installed, kernel.release)
    reason = next_kernel_fault(kernel, headers=headers, missing=missing, dkms=dkms, compiled=compiled)
    if not reason:
        return None
    build = f"{commands.gpuprov_install(x)}  # once that kernel runs"
    if dkms:
        build = f"dkms autoinstall -k {kernel.release}"
    if compiled:
        build, headers = commands.install_packages(x, compiled), ()
    steps = (
        commands.install_packages(x, *headers) if not (kernel.module or kernel.headers) and headers else "",
        build if not kernel.module else commands.install_packages(x, *missing),
    )
    what = reason.partition(": ")[0]
    return Seen(f"/lib/modules/{kernel.release}", reason=what, next_step="; ".join(filter(None, steps)))


def node_does_not_open(x: HostSnapshot) -> Seen | None:
    if not x.node_errors:
        return None
    path, error = next(iter(x.node_errors.items()))
    known, _ = first_match("device node", [error]) or (Failure("{path} can't be opened"), "")
    return Seen(f"head -c 0 {path}: {error}", meaning=known.what.format(path=path), next_step=known.next_step)


def _no_such(paths: Sequence[str]) -> list[str]:
    return [f"ls {path}: No such file or directory" for path in paths[:4]]


def _listed(paths: list[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {counted(len(paths) - 4, 'more node')}" if len(paths) > 4 else "")


def node_wrong(x: HostSnapshot) -> Seen | None:
    wrong = [(node, x.in_place[node.path]) for node in missing_nodes(x.driver) if x.in_place.get(node.path)]
    if not wrong:
        return None
    seen = [f"ls -ld {node.path}: {there}; it should be char {node.major}:{node.minor}" for node, there in wrong]
    # A folder may not be empty.
    remedies = () if "directory" in dict(wrong).values() else None
    return Seen(*seen, paths=" ".join(node.path for node, _ in wrong), remedies=remedies)


def nodes_closed(x: HostSnapshot) -> Seen | None:
    closed = [node.path for node in x.driver.closed]
    if not closed:
        return None
    by_mode: dict[int, list[str]] = {}
    for node in x.driver.closed:
        by_mode.setdefault(node.mode, []).append(node.path)
    step = "; ".join(f"chmod {mode:04o} {' '.join(paths)}" for mode, paths in by_mode.items())
    seen = (f"stat -c %a {path}: {x.node_modes[path]:o}" for path in closed[:4])
    return Seen(*seen, nodes=_listed(closed), next_step=step, remedies=(Remedy(NODE_MODES, tuple(closed)),))


def dev_char_links(x: HostSnapshot) -> Seen | None:
    # gpuprov's runtime makes them at each container start.
    ours = (x.host.docker.runtimes or {}).get("nvidia") == LAUNCHER_PATH
    if ours or x.host.docker.cgroup_driver != "systemd" or not x.driver.present or not x.links_missing:
        return None
    numbers = {node.path: f"{node.major}:{node.minor}" for node in x.driver.nodes}
    wanted = [path.rpartition("/")[2] for path in x.links_missing]
    step = "; ".join(f"ln -s {path} /dev/char/{number}" for path, number in numbers.items() if number in wanted)
    if "/usr/bin/nvidia-ctk" in x.there:
        step = "nvidia-ctk system create-dev-char-symlinks --create-all"
    return Seen(*_no_such(x.links_missing), next_step=step)
