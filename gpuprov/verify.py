"""What `gpuprov verify` does: the checks, in order; a check is skipped if an earlier failure makes it impossible."""

from __future__ import annotations

import re

from gpuprov.boot.prepare import is_of_another_version
from gpuprov.cdi.discover import discover, missing_nodes
from gpuprov.cdi.generate import PATH, difference
from gpuprov.checks import features, memory
from gpuprov.checks.cuda.hiding import gather_hiding
from gpuprov.checks.engine_checks import Subject, check_engines
from gpuprov.checks.engines import EngineTest
from gpuprov.checks.outcome import Checks, Failed, Values, Verdict
from gpuprov.checks.smi import LOOK, SmiReport, exit_code, exits, parse_smi
from gpuprov.core.changes import parent_of
from gpuprov.core.commands import NOT_FOUND, Completed, Failure
from gpuprov.core.system import System
from gpuprov.core.units import is_active
from gpuprov.driver import fabric_manager, imex
from gpuprov.driver.precompiled import module_package
from gpuprov.engines.docker import gather as gather_docker
from gpuprov.facts.boot import NODES, REFRESH, UNITS, WANTS, lacking
from gpuprov.facts.driver import version_difference
from gpuprov.facts.gpus import DCGM_EXPORTER, DCGM_UNIT, FabricFacts, gather_fabric, gather_imex
from gpuprov.facts.host import manager_on
from gpuprov.facts.kernels import gather_kernels, newest, next_kernel_fault
from gpuprov.machine.distros import distribution_of, kernel_headers, next_kernel_headers
from gpuprov.machine.machine import gather_kernel, gather_os
from gpuprov.machine.pci import gather_gpus, is_copy
from gpuprov.protocol.advisories import TOOLKIT_PACKAGE
from gpuprov.protocol.events import Note, Sink
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.words import counted

_SMI_SECONDS = 120
_UNKNOWN = "there is no GPU in this machine: run gpuprov verify on a copy of the image that has some"
# Tasks of the kernel, which a system container does not have.
_OF_KERNEL = re.compile(r"modprobe|dmesg|lspci|reboot|poweroff")


def verify(
    system: System, spec: HostSpec, sink: Sink, *, remember: bool = False, tests: list[EngineTest] | None = None
) -> Verdict:
    """Verify the driver, and each engine with containers that have all GPUs, one, and none. Return whether all passed.

    Emits one CheckDone a line, in a fixed order. `remember`: the GPUs that are there now are all that should be.
    `tests` receives the engines whose containers can be tried.
    """
    recalled = memory.recall(system)
    if is_copy(system) and not gather_gpus(system) and recalled.memory is None:
        return _verify_copy(system, spec, sink)
    if recalled.fault and not remember:
        sink(Note(f"{recalled.fault}: nothing is compared with it; {memory.FORGET}", "warning"))
    checks = Checks(sink)
    smi = system.run(("nvidia-smi", "-q", "-x"), timeout=_SMI_SECONDS)
    driver_ok = checks.check("driver", lambda: _host_smi(system, smi))
    report = parse_smi(smi.stdout) if driver_ok else None
    known = recalled.memory
    if known is not None and not remember:
        checks.check(memory.CHECK, lambda: memory.check_gpus(system, known, report))
    checks.check("device nodes", lambda: _device_nodes(system))
    fabric = gather_fabric(system)
    hidden = fabric.hidden and spec.fabric_manager == "auto" and not gather_kernel(system).container
    if fabric.switches or hidden:
        checks.check("fabric manager", lambda: _fabric_manager(system, fabric))
    if spec.imex_nodes and ((unit := gather_imex(system)).enabled or unit.silent):
        checks.check("IMEX domain", lambda: imex.verify_domain(system, spec))
    if spec.dcgm and report is not None:
        checks.check("DCGM", lambda: _dcgm(system, spec, report))
    for name, look in features.checks(system, spec) if report is not None else ():
        checks.check(name, look)
    checks.check("CDI specification", lambda: _cdi(system))
    checks.check("next kernel", lambda: _next_kernel(system))
    check_engines(Subject(checks, system, spec, report, [] if tests is None else tests))
    if report is not None:
        memory.update(system, spec, checks, report, sink, remember=remember)
    return checks.verdict()


def installed_versions(system: System) -> dict[str, str]:
    """Return the versions of the installed driver and of NVIDIA's toolkit, as a run tells them; empty for none."""
    toolkit_version = manager_on(system).gather(system).installed.get(TOOLKIT_PACKAGE, "")
    return {"driver": discover(system).library_version, "toolkit": toolkit_version}


def _host_smi(system: System, done: Completed) -> Values:
    said = ((done.stdout.strip() or done.stderr.strip()).splitlines() or ["(silent)"])[0]
    path = system.which("nvidia-smi") or "nvidia-smi"
    if not done.ok:
        known = exits().get(exit_code(done.returncode), Failure("nvidia-smi fails", LOOK))
        if hidden := gather_hiding(system, discover(system).kernel_version):
            reason = f"{hidden[0].what}: {hidden[0].reason}; {hidden[0].way_out(manager_on(system).commands)}"
        elif different := version_difference(system, discover(system)):
            reason = different
        elif done.returncode == NOT_FOUND:
            reason = "nvidia-smi is not installed: run gpuprov install"
        else:
            reason = _where(system, f"{known.what}: {known.next_step or 'gpuprov doctor'}")
        raise Failed(f"{path} exited {done.returncode}: {said}; {reason}")
    if not done.stdout.lstrip().startswith("<"):
        raise Failed(f"{path} prints no report, but: {said}; is it the driver's own program? run gpuprov doctor")
    report = parse_smi(done.stdout)
    if not report.gpus:
        raise Failed(f"nvidia-smi sees no GPU; {_where(system, 'dmesg | grep -i nvrm')}")
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
    if missing := missing_nodes(driver):
        raise Failed(f"{', '.join(node.path for node in missing)} is missing; run gpuprov install, which makes it")
    if driver.closed:
        modes = ", ".join(f"{node.path} (it should be {node.mode:04o})" for node in driver.closed)
        raise Failed(f"other users than root may not open {modes}; run gpuprov install, which opens it")
    if absent := lacking(system):
        reason = f"{absent[0]} is missing, empty or masked: the next boot may make no nodes and no CDI specification"
        raise Failed(f"{reason}; run gpuprov install")
    return f"{len(driver.nodes)} present", ""


def _fabric_manager(system: System, fabric: FabricFacts) -> Values:
    """Check the fabric manager. Without it, or with another version's, CUDA returns error 802."""
    if problem := fabric_manager.fault(fabric, discover(system).library_version):
        raise Failed(f"{problem.what}; {problem.evidence}; {problem.next_step}")
    return fabric.version, ""


def _dcgm(system: System, spec: HostSpec, report: SmiReport) -> Values:
    """Check that DCGM has the GPUs that nvidia-smi has; those that it takes for lost are not in its list."""
    done = system.run(("dcgmi", "discovery", "-l"), timeout=_SMI_SECONDS)
    found = set(re.findall(r"Device UUID: *(GPU-[\w-]+)", done.stdout))
    if not done.ok:
        reason = f"dcgmi discovery -l: {done.evidence(2)}; systemctl restart {DCGM_UNIT}; journalctl -u {DCGM_UNIT}"
        raise Failed(reason)
    if missing := [gpu.uuid for gpu in report.gpus if gpu.uuid not in found]:
        raise Failed(f"dcgmi discovery -l lacks {', '.join(missing)}; gpuprov health; systemctl restart {DCGM_UNIT}")
    if spec.dcgm_exporter and not is_active(system, DCGM_EXPORTER):
        raise Failed(f"{DCGM_EXPORTER} does not run; systemctl restart {DCGM_EXPORTER}; journalctl -u {DCGM_EXPORTER}")
    return counted(len(found), "GPU"), ""


def _cdi(system: System) -> Values:
    content = system.read_bytes(PATH)
    if content is None:
        raise Failed(f"{PATH} is missing; run gpuprov install")
    driver = discover(system)
    if replaced := version_difference(system, driver):
        raise Failed(replaced)
    if different := difference(content, driver, any_version=is_of_another_version(system)):
        reason = f"{PATH} does not describe the driver and GPUs that are here now: {different}"
        raise Failed(f"{reason}; run gpuprov install")
    for place, needed in ((parent_of(PATH), 0o555), (PATH, 0o444)):
        status = system.status(place)
        if status is not None and status.mode & needed != needed:
            reason = f"{place} has mode {status.mode:04o}: engines of other users than root can't read it"
            raise Failed(f"{reason}; run gpuprov install, which opens it")
    return PATH, ""


def _next_kernel(system: System) -> Values:
    if gather_kernel(system).container:
        return "the container host's", ""
    running = system.kernel_release()
    kernel = newest(gather_kernels(system), running)
    if kernel is None:
        return f"none but {running} is installed", ""
    manager, row = manager_on(system), distribution_of(gather_os(system))
    installed = manager.gather(system).installed
    missing = tuple(map(manager.typed, next_kernel_headers(row, running, installed)))
    headers = tuple(map(manager.typed, kernel_headers(row, kernel.release)))
    # Debian's packages call it nvidia-current; nvidia-fs is GPUDirect Storage's.
    dkms = any(name.startswith("nvidia") and name != "nvidia-fs" for name in system.list_directory("/var/lib/dkms"))
    compiled = module_package(installed, kernel.release)
    if reason := next_kernel_fault(kernel, headers=headers, missing=missing, dkms=dkms, compiled=compiled):
        raise Failed(reason)
    return f"{kernel.release}, with the driver's module", ""


def _verify_copy(system: System, spec: HostSpec, sink: Sink) -> Verdict:
    """Verify a copy of an image that has no GPU, or the machine that built it; same lines as with GPUs, and more."""
    checks = Checks(sink)
    checks.check("driver", lambda: _libraries(system))
    checks.skip(("device nodes", "CDI specification"), _UNKNOWN)
    checks.check("next kernel", lambda: _modules(system, spec))
    checks.check("boot units", lambda: _units(system))
    if spec.docker != "none":
        with checks.about("docker"):
            checks.check("docker configuration", lambda: _docker(system))
            checks.skip(("docker, all GPUs",), _UNKNOWN)
    known = "what can be known without a GPU is right; the rest shows on a machine that has some"
    return Verdict(checks.good, unknown=known) if checks.good else checks.verdict()


def _libraries(system: System) -> Values:
    version = discover(system).library_version
    if not version:
        raise Failed("no NVIDIA driver is installed; run gpuprov install -e gpuprov_target=image")
    return f"{version} installed; no GPU to ask", ""


def _modules(system: System, spec: HostSpec) -> Values:
    kernels = gather_kernels(system)
    lacking = [kernel.release for kernel in kernels if not kernel.module]
    if spec.kernel_modules != "none" and lacking:
        reason = f"kernel {', '.join(lacking)} has no NVIDIA module: dkms autoinstall -k {lacking[-1]}; dkms status"
        raise Failed(reason)
    return ", ".join(kernel.release for kernel in kernels) or "no kernel is installed", ""


def _units(system: System) -> Values:
    links = {f"{WANTS}/{name}": f"{UNITS}/{name}" for name in (NODES, REFRESH)}
    elsewhere = [path for path, unit in links.items() if (link := system.status(path)) and link.target != unit]
    if missing := (*lacking(system), *elsewhere):
        raise Failed(f"{', '.join(missing)} is missing or leads elsewhere; run gpuprov install again")
    return f"{NODES}, {REFRESH}", ""


def _docker(system: System) -> Values:
    facts = gather_docker(system)
    if not facts.installed:
        raise Failed("docker is not installed")
    if "nvidia" not in (facts.config.get("runtimes") or {}) and "nvidia" not in facts.unit.flag_runtimes:
        raise Failed(f"{facts.config_path} does not name the runtime nvidia; run gpuprov install again")
    return f"runtime nvidia in {facts.config_path}", ""
