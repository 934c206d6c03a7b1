"""What `gpuprov verify` does: the checks, in order; a check is skipped if an earlier failure makes it impossible."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuprov.boot.prepare import is_of_another_version
from gpuprov.cdi.discover import discover, missing_nodes
from gpuprov.cdi.generate import PATH, difference
from gpuprov.checks import memory
from gpuprov.checks.cuda.hiding import gather_hiding
from gpuprov.checks.engine_checks import Subject, check_engines
from gpuprov.checks.outcome import Checks, Failed, Values, Verdict
from gpuprov.checks.smi import EXITS, LOOK, Exit, SmiReport, exit_code, parse_smi
from gpuprov.checks.without_gpu import verify_copy
from gpuprov.core.changes import parent_of
from gpuprov.core.commands import NOT_FOUND
from gpuprov.core.system import System
from gpuprov.driver.precompiled import module_package
from gpuprov.facts import driver_change
from gpuprov.facts.gpus import UNIT, FabricFacts, gather_fabric
from gpuprov.facts.host import gather_software, manager_on
from gpuprov.facts.kernels import fault, gather_kernels, newest
from gpuprov.machine.distros import distribution_of, kernel_headers, next_kernel_headers
from gpuprov.machine.image_mark import is_copy
from gpuprov.machine.machine import gather_kernel, gather_os
from gpuprov.machine.pci import gather_gpus
from gpuprov.protocol.advisories import DRIVER, TOOLKIT, TOOLKIT_PACKAGE, Vulnerabilities, vulnerabilities
from gpuprov.protocol.events import Note, Sink
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.words import counted

_SMI_SECONDS = 120
# Tasks of the kernel, which a system container does not have.
_OF_KERNEL = re.compile(r"modprobe|dmesg|lspci|reboot|poweroff")


def verify(system: System, spec: HostSpec, sink: Sink, *, remember: bool = False) -> Verdict:
    """Verify the driver, and each engine with containers that have all GPUs, one, and none. Return whether all passed.

    Emits one CheckDone a line, in a fixed order. `remember`: the GPUs that are there now are all that should be.
    """
    recalled = memory.recall(system)
    if is_copy(system) and not gather_gpus(system) and recalled.memory is None:
        return verify_copy(system, spec, sink)
    if recalled.fault and not remember:
        sink(Note(f"{recalled.fault}: nothing is compared with it; {memory.FORGET}", "warning"))
    checks = Checks(sink)
    host_report: list[SmiReport] = []
    driver_ok = checks.check("driver", lambda: _host_smi(system, host_report))
    report = host_report[0] if driver_ok else None
    if recalled.memory is not None and not remember:
        memory.check_gpus(checks, system, recalled.memory, report)
    checks.check("device nodes", lambda: _device_nodes(system))
    fabric = gather_fabric(system)
    if fabric.switches:
        checks.check("fabric manager", lambda: _fabric_manager(system, fabric))
    checks.check("CDI specification", lambda: _cdi(system))
    checks.check("next kernel", lambda: _next_kernel(system))
    check_engines(Subject(checks, system, spec, report))
    if report is not None:
        memory.update(system, spec, checks, report, sink, remember=remember)
    return checks.verdict()


def installed_versions(system: System) -> dict[str, str]:
    """Return the versions of the installed driver and of NVIDIA's toolkit, as a run tells them; empty for none."""
    toolkit_version = gather_software(system, gather_os(system)).installed.get(TOOLKIT_PACKAGE, "")
    return {"driver": discover(system).library_version, "toolkit": toolkit_version}


def known_vulnerabilities(versions: Mapping[str, str]) -> tuple[Vulnerabilities, ...]:
    """Return the known security holes of these versions of the driver and of NVIDIA's toolkit."""
    found = (vulnerabilities(DRIVER, versions["driver"]), vulnerabilities(TOOLKIT, versions["toolkit"]))
    return tuple(one for one in found if one is not None)


def _host_smi(system: System, reports: list[SmiReport]) -> Values:
    done = system.run(("nvidia-smi", "-q", "-x"), timeout=_SMI_SECONDS)
    said = ((done.stdout.strip() or done.stderr.strip()).splitlines() or ["(silent)"])[0]
    path = system.which("nvidia-smi") or "nvidia-smi"
    if not done.ok:
        hidden = gather_hiding(system, discover(system).kernel_version)
        if hidden:
            commands = manager_on(system).commands
            raise Failed(f"{path} exited {done.returncode}: {said}; {hidden[0].what}: {hidden[0].reason}; "
                         f"{hidden[0].way_out(commands)}")  # fmt: skip
        if different := driver_change.difference(system, discover(system)):
            raise Failed(f"{path} exited {done.returncode}: {said}; {different}")
        known = EXITS.get(exit_code(done.returncode), Exit("nvidia-smi fails", LOOK))
        hint = f"{known.what}: {known.next_step or 'gpuprov doctor'}"
        if done.returncode == NOT_FOUND:
            hint = "nvidia-smi is not installed: run gpuprov install"
        raise Failed(f"{path} exited {done.returncode}: {said}; {_where(system, hint)}")
    if not done.stdout.lstrip().startswith("<"):
        raise Failed(f"{path} prints no report, but: {said}; is it the driver's own program? run gpuprov doctor")
    report = parse_smi(done.stdout)
    if not report.gpus:
        raise Failed(f"nvidia-smi sees no GPU; {_where(system, 'dmesg | grep -i nvrm')}")
    reports.append(report)
    return f"{report.driver}, CUDA {report.cuda}, {counted(len(report.gpus), 'GPU')}", ""


def _where(system: System, hint: str) -> str:
    """Return the hint with the place for its command: a system container's kernel belongs to the host."""
    manager = gather_kernel(system).container
    return f"{hint} (outside {manager}, on the container host)" if manager and _OF_KERNEL.search(hint) else hint


def _device_nodes(system: System) -> Values:
    driver = discover(system)
    if not driver.nodes:
        hint = "modprobe nvidia; dmesg | grep -i nvrm"
        raise Failed(f"no driver with a GPU is loaded, so there are no nodes: {_where(system, hint)}")
    missing = missing_nodes(driver)
    if missing:
        raise Failed(f"{', '.join(node.path for node in missing)} is missing; run gpuprov install, which makes it")
    if driver.closed:
        modes = ", ".join(f"{node.path} (it should be {node.mode:04o})" for node in driver.closed)
        raise Failed(f"other users than root may not open {modes}; run gpuprov install, which opens it")
    return f"{len(driver.nodes)} present", ""


def _fabric_manager(system: System, fabric: FabricFacts) -> Values:
    """Check the fabric manager. Without it, or with another version's, CUDA returns error 802."""
    driver = discover(system).library_version
    if fabric.version != driver:
        found = fabric.version or "not installed"
        raise Failed(f"fabric manager is {found}, the driver {driver}: they must agree; run gpuprov install")
    if not fabric.active:
        raise Failed(f"{UNIT} does not run, so CUDA answers 802; systemctl status {UNIT}")
    return fabric.version, ""


def _cdi(system: System) -> Values:
    path = PATH
    content = system.read_bytes(path)
    if content is None:
        raise Failed(f"{path} is missing; run gpuprov install")
    driver = discover(system)
    if replaced := driver_change.difference(system, driver):
        raise Failed(replaced)
    different = difference(content, driver, any_version=is_of_another_version(system))
    if different:
        reason = f"{path} does not describe the driver and GPUs that are here now: {different}"
        raise Failed(f"{reason}; run gpuprov install")
    for place, needed in ((parent_of(path), 0o555), (path, 0o444)):
        status = system.status(place)
        if status is not None and status.mode & needed != needed:
            raise Failed(
                f"{place} has mode {status.mode:04o}: engines of other users than root can't read it; "
                "run gpuprov install, which opens it"
            )
    return path, ""


def _next_kernel(system: System) -> Values:
    if gather_kernel(system).container:
        return "the container host's", ""
    running = system.kernel_release()
    kernel = newest(gather_kernels(system), running)
    if kernel is None:
        return f"none but {running} is installed", ""
    os = gather_os(system)
    installed, row = gather_software(system, os).installed, distribution_of(os)
    missing = next_kernel_headers(row, running, installed) if row is not None else ()
    headers = kernel_headers(row, kernel.release) if row is not None else ()
    # Debian's packages call it nvidia-current.
    dkms = any(name.startswith("nvidia") for name in system.list_directory("/var/lib/dkms"))
    compiled = module_package(installed, kernel.release)
    if reason := fault(kernel, headers=headers, missing=missing, dkms=dkms, compiled=compiled):
        raise Failed(reason)
    return f"{kernel.release}, with the driver's module", ""
