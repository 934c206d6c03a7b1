"""The driver's libraries on disk and what hides them, nvidia-smi's exit code and report, the fabric. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from functools import partial

from gpuprov.cdi.files import CACHE
from gpuprov.checks.smi import exits, per_gpu
from gpuprov.core.commands import Failure, first_match
from gpuprov.core.places import KEPT
from gpuprov.doctor import suggested_commands as commands
from gpuprov.doctor.finding import CERTAIN, FILES, INSTALL, LIKELY, LOADER_CACHE, WARNING, Remedy
from gpuprov.doctor.module_rules import next_kernel
from gpuprov.doctor.rules import Seen, conditions, quoted, reported, seen_of
from gpuprov.doctor.snapshot import VULKAN_AND_OPENCL, HostSnapshot, lines_that_match
from gpuprov.driver import fabric_manager, generations
from gpuprov.driver.run_files import INCOMPLETE_MARK, INSTALLER_STATE
from gpuprov.facts.driver import without_preload
from gpuprov.facts.gpus import FABRIC_UNIT
from gpuprov.facts.kernels import newest
from gpuprov.plan.preflight import combination
from gpuprov.protocol import advisories
from gpuprov.protocol.known_problems import matching
from gpuprov.protocol.words import counted
from gpuprov.runtime_hook.driver_files import disagreement

_NVML, _CUDA = "libnvidia-ml.so.1", "libcuda.so.1"


def _again(x: HostSnapshot) -> tuple[Remedy, ...]:
    """Return the remedy of driver_again: the package manager restores a package's files."""
    return () if x.host.driver_packaged else (INSTALL,)


conditions({
    "driver-incomplete": lambda x: INCOMPLETE_MARK in x.there and f"{INCOMPLETE_MARK} is there",
    "driver-missing": lambda x: not (x.driver.library_version or x.library_files or x.host.kernel.wsl)
        and Seen(f"{_NVML} and {_CUDA} are in none of the loader's folders", remedies=_again(x)),
    "drivers-mixed": lambda x: x.host.driver_packaged and "/var/lib/nvidia/dirs" in x.there and not x.host.kernel.wsl
        and ["/var/lib/nvidia/dirs is there (the installer's)", f"package {x.host.driver_packaged} is installed"],
    "nvml-missing": lambda x: not x.driver.library_version and (path := next(iter(x.library_files), "")) and Seen(
        f"ls -L {path.rpartition('/')[0]}/{_NVML}: No such file or directory", f"{path} is there",
        remedies=_again(x)),
    "nvidia-smi-missing": lambda x: x.smi.reason == "nvidia-smi is not installed" and bool(x.driver.library_version)
        and not x.host.kernel.wsl and Seen("command -v nvidia-smi: nothing", remedies=_again(x)),
    "driver-damaged": lambda x: (damage := x.host.driver_damage) and "nvidia-smi:" not in damage
        and not x.host.kernel.wsl and Seen(damage, remedies=_again(x)),
    "library-not-in-cache": lambda x: bool(x.driver.library_version) and not x.host.kernel.wsl
        and (lost := next((name for name in (_NVML, _CUDA) if name not in x.loader), ""))
        and (Seen(f"{CACHE}: no {lost}, or it leads to no file", confidence=LIKELY) if CACHE in x.there
             else f"ls {CACHE}: No such file or directory"),
    "fabric-hidden": lambda x: not x.host.kernel.container and x.spec.fabric_manager == "auto"
        and bool(x.host.fabric.hidden) and (problem := fabric_manager.fault(x.host.fabric, "")) is not None
        and seen_of(problem),
    "preload-broken": lambda x: (named := re.findall(r"object '([^']+)' from /etc/ld\.so\.preload", x.preload_message))
        and Seen(f"/bin/true: {x.preload_message.splitlines()[0]}", library=named[0],
                 next_step="; ".join(map(without_preload, dict.fromkeys(named)))),
    "mig-pending": lambda x: next((
            Seen("nvidia-smi -q -x: pending_mig is Enabled, current_mig is not", gpu=number)
            for number, gpu in enumerate(per_gpu(x.smi.text))
            if gpu.get("mig_mode/pending_mig") == "Enabled" != gpu.get("mig_mode/current_mig")), None),
    "nvidia-smi-fewer": lambda x: not (x.smi.reason or x.smi.returncode)
        and (shown := x.smi.text.count("<gpu id=")) < (known := len(x.driver.gpus))
        and Seen(f"nvidia-smi -q -x: {counted(shown, 'GPU')}; /proc/driver/nvidia/gpus: {known}", shown=shown,
                 gpus=counted(known, "GPU")),
})  # fmt: skip


def vulkan_files_missing(x: HostSnapshot) -> Seen | None:
    missing = [path for path in VULKAN_AND_OPENCL.findall(x.texts.get(INSTALLER_STATE, "")) if path in x.absent]
    file = f"{KEPT}/{x.driver.library_version}.run"
    copies = "; ".join(f"install -D -m 644 $d/{path.rpartition('/')[2]} {path}" for path in missing)
    seen = (f"ls {path}: No such file or directory" for path in missing)
    return Seen(*seen, file=file, copies=copies) if missing and x.driver.library_version else None


def version_mismatch(x: HostSnapshot) -> Seen | None:
    module, libraries = x.driver.kernel_version, x.driver.library_version
    if not module or not libraries or module == libraries:
        return None
    path = next((path for path, version in x.library_files.items() if version == libraries and "-ml." in path), _NVML)
    seen = (f"/proc/driver/nvidia/version: {module}", f"{path}: {libraries}", *x.package_change)
    # The kernel module belongs to the host of a system container: the libraries must follow it.
    remedies = (INSTALL,) if x.host.kernel.container else ()
    meaning = disagreement(libraries, module, x.driver_since)
    return Seen(*seen, meaning=meaning, next_step=_before_a_reboot(x), remedies=remedies)


def _before_a_reboot(x: HostSnapshot) -> str:
    """Return what the next boot needs to load the driver of the libraries, with the reboot; "" if it needs nothing."""
    running, kernel = x.host.kernel.release, newest(x.kernels, x.host.kernel.release)
    if kernel is None or x.host.kernel.container:
        return ""
    if kernel.release != running:
        lack = None if kernel.module else next_kernel(x)
        return f"{lack.next_step.partition('  # ')[0]}; systemctl reboot" if lack else ""
    fits = kernel.module and x.module.version in ("", x.driver.library_version)
    return "" if fits else commands.rebuild_module(x).replace("modprobe nvidia", "systemctl reboot")


def cuda_stub(x: HostSnapshot) -> Seen | None:
    cuda = _stub_in_cache(x)
    if not cuda:
        return None
    kind = "a stub without a driver behind it" if "/stubs/" in cuda else "a compatibility library for other drivers"
    places = _loader_lines(x, r"/(stubs|compat)\b")
    first = commands.comment_out(places[0][0]) if places else "unset LD_LIBRARY_PATH"
    return Seen(f"ldconfig -p: {_CUDA} => {cuda}", *quoted(places), kind=kind, first=first)


def _stub_in_cache(x: HostSnapshot) -> str:
    cuda = x.loader.get(_CUDA, "")
    return cuda if "/stubs/" in cuda or "/compat/" in cuda else ""


def _loader_lines(x: HostSnapshot, pattern: str) -> tuple[tuple[str, str], ...]:
    return lines_that_match({path: x.texts[path] for path in x.texts if path.startswith("/etc/ld.so.conf")}, pattern)


def drivers_several(x: HostSnapshot) -> Seen | None:
    versions = tuple(dict.fromkeys(x.library_files.values()))
    if len(versions) < 2 or x.host.hiding:
        return None
    wanted = x.driver.kernel_version or x.driver.library_version
    old = shlex.join(path for path, version in x.library_files.items() if version != wanted)
    sure = WARNING if x.driver.kernel_version == x.driver.library_version else LIKELY
    return Seen(*quoted(x.library_files.items()), versions=", ".join(versions), old=old, confidence=sure)


def driver_old(x: HostSnapshot) -> Seen | None:
    version = x.driver.library_version
    found = advisories.vulnerabilities(advisories.DRIVER, version, advisories.advisories(x.host.tables))
    if found is None or x.host.kernel.wsl or x.host.hiding:
        return None
    unserved = generations.problems(x.host.gpu_device_ids, found.fixed_in, "auto", x.host.tables)
    replace_it = f"{commands.list_gpus(x)}  # replace the GPU: {unserved[0].what}" if unserved else ""
    seen = f"{_NVML}: {version}; the advisories are of {advisories.updated(x.host.tables)}"
    return Seen(seen, meaning=f"{found}", next_step=replace_it or commands.other_driver(x, found.fixed_in))


def known_problem(x: HostSnapshot) -> Seen | None:
    found = sorted(matching(combination(x.host), x.host.tables), key=lambda one: "builds" not in one.when)
    if not found or x.host.kernel.wsl:
        return None
    first, seen = found[0], (f"{one.name}: {one.combination}\n{one.sources[0]}" for one in found)
    options = " ".join(f"-e gpuprov_{name}={value}" for name, value in first.use.items())
    driver = first.use.get("driver_version", "")
    step = first.command or (commands.other_driver(x, driver) if driver else f"gpuprov install {options}".strip())
    sure = LIKELY if "builds" in first.when else WARNING
    return Seen(*seen, meaning="; ".join(one.what for one in found), next_step=step, confidence=sure)


def library_hidden(x: HostSnapshot) -> Seen | None:
    if not x.host.hiding or x.host.kernel.wsl:
        return None
    one, manager = x.host.hiding[0], x.host.package_manager.commands
    seen = (
        f"{other.reason}: {', '.join(other.paths)}" + (f"; {other.foreign}" if other.foreign else "")
        for other in x.host.hiding
    )
    sure = LIKELY if one.is_by_environment or not (one.version or one.fault) else CERTAIN
    step = _together(list(dict.fromkeys(other.way_out(manager) for other in x.host.hiding)))
    return Seen(*seen, library=one.what, next_step=step, confidence=sure, remedies=_removal(x))


def _removal(x: HostSnapshot) -> tuple[Remedy, ...]:
    """Return the removal of the files, if nothing else is to be done."""
    ours = (one for one in x.host.hiding if not (one.package or one.is_configured or one.foreign))
    files = [one.removable for one in ours if one.removable]
    whole = len(files) == len(x.host.hiding)
    return (Remedy(FILES, tuple(path for paths in files for path in paths)), LOADER_CACHE) if whole else ()


def _together(steps: list[str]) -> str:
    """Return the commands as one line: one rm for several files, and one ldconfig at the end."""
    files = [step[len("rm ") : -len("; ldconfig")] for step in steps if step.startswith("rm ")]
    others = [step for step in steps if not step.startswith("rm ")]
    removal = [f"rm {' '.join(files)}; ldconfig"] if files else []
    # A comment ends the line.
    return "; ".join(sorted((*others, *removal), key=lambda step: "  # " in step))


def nvidia_smi_hidden(x: HostSnapshot) -> Seen | None:
    other = x.other_smi
    if other is None:
        return None
    step = f"mv {shlex.join((other.path, f'{other.path}.old'))}"
    if other.is_report or not x.smi.is_report:
        return Seen(f"command -v nvidia-smi: {other.path}", broken="", next_step=step, confidence=WARNING)
    seen = f"{other.path} -q -x exited {other.returncode}: {other.first_line}"
    return Seen(seen, broken=", and does not do its work", next_step=step)


def nvidia_smi_replaced(x: HostSnapshot) -> Seen | None:
    if x.smi.reason or x.smi.is_report or (x.smi.returncode and not x.smi_is_script):
        return None
    kind = "is a script, not the driver's program, and" if x.smi_is_script else "is not the driver's program: it"
    return Seen(f"{x.smi_path} -q -x exited {x.smi.returncode}: {x.smi.first_line}", kind=kind)


def _exited(x: HostSnapshot, is_it: bool) -> str:
    """Return the evidence of nvidia-smi's exit code, "" if it is not this one, or nvidia-smi was not run."""
    return f"nvidia-smi exited {x.smi.returncode}: {x.smi.first_line}" if is_it and not x.smi.reason else ""


def _known_exit(known: Failure, x: HostSnapshot) -> Seen | None:
    """Look for one of nvidia-smi's exit codes, with the words of `gpuprov verify`."""
    seen = _exited(x, x.smi.code == known.returncode)
    return Seen(seen, meaning=known.what, next_step=known.next_step) if seen else None


conditions({f"nvidia-smi-{code}": partial(_known_exit, known) for code, known in exits().items()})
conditions({
    "nvidia-smi-fails": lambda x: _exited(x, x.smi.code not in (0, *exits())),
    "cuda-stub-configured": lambda x: not _stub_in_cache(x) and (lines := _loader_lines(x, r"^[^#]*/(stubs|compat)\b"))
        and Seen(*quoted(lines), first=commands.comment_out(lines[0][0])),
})  # fmt: skip


def mig_without_instances(x: HostSnapshot) -> Seen | None:
    numbers = [
        number for number, gpu in enumerate(per_gpu(x.smi.text))
        if gpu.get("mig_mode/current_mig") == "Enabled" and gpu.get("mig_devices") == "None"
    ]  # fmt: skip
    seen = "nvidia-smi -q -x: current_mig is Enabled, mig_devices is None"
    return Seen(seen, shown=", ".join(map(str, numbers)), gpu=numbers[0]) if numbers else None


def fabric_state(x: HostSnapshot) -> Seen | None:
    found = reported(x, "fabric/state", "In Progress|Not Started")
    if found and x.host.fabric.rack:
        found.next_step = "systemctl status nvidia-imex; nvidia-imex-ctl -N; nvidia-smi -q | grep -A4 Fabric"
    elif found and not commands.has_unit(x, FABRIC_UNIT):
        outside = "the fabric manager runs outside: on the container host, or the VM's"
        found.next_step = f"nvidia-smi -q | grep -A4 Fabric  # {outside}"
    return found


def fabric_manager_missing(x: HostSnapshot) -> Seen | None:
    unit, version = x.units.get(FABRIC_UNIT), _fabric_wanted(x)
    if not version or x.host.fabric.silent or (unit is not None and unit.active == "active"):
        return None
    if unit is not None and unit.load == "loaded":
        known = first_match("fabric manager", x.fabric_log)
        seen = f"systemctl show {FABRIC_UNIT}: {unit.active}, {unit.result}"
        return Seen(seen, known[1], meaning=known[0].what, next_step=known[0].next_step) if known else Seen(seen)
    return Seen(
        f"NVSwitches: {', '.join(x.host.fabric.switches)}", f"systemctl show {FABRIC_UNIT}: not-found",
        meaning="this machine has NVSwitches, and no fabric manager: CUDA ends with error 802",
        next_step=f"{_install_fabric_manager(x, version)}; systemctl enable --now nvidia-fabricmanager",
    )  # fmt: skip


def _fabric_wanted(x: HostSnapshot) -> str:
    """Return the version that the fabric manager must have (the loaded driver's), "" if none has to run."""
    if not x.host.fabric.switches or x.host.kernel.container:
        return ""
    return x.driver.kernel_version or x.driver.library_version


def _install_fabric_manager(x: HostSnapshot, version: str) -> str:
    names = fabric_manager.packages(version, x.host.package_manager, x.host.fabric, x.host.tables)
    return commands.install_packages(x, *names)


def fabric_manager_version(x: HostSnapshot) -> Seen | None:
    wanted, fabric = _fabric_wanted(x), replace(x.host.fabric, active=True, silent="")
    problem = fabric_manager.fault(fabric, wanted) if wanted and fabric.version else None
    if problem is None:
        return None
    return Seen(problem.evidence, found=fabric.version, wanted=wanted, install=_install_fabric_manager(x, wanted))
