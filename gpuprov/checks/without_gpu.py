"""The verification of an image where no GPU is: what can be known of it; the rest is said to be unknown."""

from __future__ import annotations

from gpuprov.cdi.discover import discover
from gpuprov.checks.outcome import Checks, Failed, Values, Verdict
from gpuprov.core.system import System
from gpuprov.engines.docker import gather as gather_docker
from gpuprov.facts.boot import NODES, REFRESH, UNITS, WANTS
from gpuprov.facts.kernels import gather_kernels
from gpuprov.protocol.events import Sink
from gpuprov.protocol.spec import HostSpec

_UNKNOWN = "there is no GPU in this machine: run gpuprov verify on a copy of the image that has some"


def verify_copy(system: System, spec: HostSpec, sink: Sink) -> Verdict:
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
        raise Failed(
            f"kernel {', '.join(lacking)} has no NVIDIA module: dkms autoinstall -k {lacking[-1]}; dkms status"
        )
    return ", ".join(kernel.release for kernel in kernels) or "no kernel is installed", ""


def _units(system: System) -> Values:
    lacking = []
    for name in (NODES, REFRESH):
        link = system.status(f"{WANTS}/{name}")
        if link is None or link.target != f"{UNITS}/{name}":
            lacking.append(name)
    if lacking:
        raise Failed(f"{', '.join(lacking)} will not start at boot; run gpuprov install again")
    return f"{NODES}, {REFRESH}", ""


def _docker(system: System) -> Values:
    facts = gather_docker(system)
    if not facts.installed:
        raise Failed("docker is not installed")
    if "nvidia" not in (facts.config.get("runtimes") or {}) and "nvidia" not in facts.unit.flag_runtimes:
        raise Failed(f"{facts.config_path} does not name the runtime nvidia; run gpuprov install again")
    return f"runtime nvidia in {facts.config_path}", ""
