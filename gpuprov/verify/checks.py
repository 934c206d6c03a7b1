"""The checks of a verification, in their order; each later one is skipped where an earlier one leaves it no ground."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from gpuprov import toolkit
from gpuprov.cdi.discover import discover
from gpuprov.cdi.generate import specification
from gpuprov.cdi.nodes import missing_nodes
from gpuprov.cdi.specification import render_json
from gpuprov.engines import docker
from gpuprov.errors import GpuprovError
from gpuprov.events import CheckDone, Sink
from gpuprov.spec import HostSpec
from gpuprov.system import Completed, System
from gpuprov.verify.image import verification_image
from gpuprov.verify.smi import SmiReport, compare, parse_smi

_CONTAINER_SECONDS = 120
_TORCH_SECONDS = 600
_LONGEST_LINE = 400
_TORCH = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count(), torch.version.cuda)"
# nvidia-smi's exit codes and what to do; its message comes on stdout.
_SMI_HINTS = {
    9: "the driver is not loaded: modprobe nvidia; dmesg | grep -i nvrm",
    12: "libnvidia-ml.so.1 is missing: run gpuprov install",
    15: "a GPU has fallen off the bus: reboot; if it comes back, look at power and seating",
    18: "libraries and kernel modules are of different versions: reboot, or run gpuprov install",
    127: "nvidia-smi is not installed: run gpuprov install",
}


@dataclass(frozen=True)
class _Failed(Exception):  # noqa: N818 (carries a check's outcome)
    reason: str
    host: str = ""
    container: str = ""


class _Run:
    """One verification: emits a CheckDone for each check, and knows whether all went well."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.good = True

    def check(self, name: str, do: Callable[[], tuple[str, str]]) -> bool:
        """Run a check; `do` returns what to show for host and container, or raises."""
        try:
            host, container = do()
        except (_Failed, GpuprovError) as error:
            failed = error if isinstance(error, _Failed) else _Failed(" ".join(str(error).split()))
            self.good = False
            self._sink(CheckDone(name, "failed", failed.host, failed.container, failed.reason))
            return False
        self._sink(CheckDone(name, "ok", host, container))
        return True

    def skip(self, names: tuple[str, ...], reason: str) -> None:
        for name in names:
            self._sink(CheckDone(name, "skipped", reason=reason))


def verify(system: System, spec: HostSpec, sink: Sink) -> bool:
    """Verify driver, docker, and containers with all GPUs, with one, and with none. Say whether all is well.

    Emits one CheckDone a line, in a fixed order.
    """
    run = _Run(sink)
    host_report: list[SmiReport] = []
    driver_ok = run.check("driver", lambda: _host_smi(system, host_report))
    run.check("device nodes", lambda: _device_nodes(system))
    run.check("CDI specification", lambda: _cdi(system))
    docker_ok = run.check("docker", lambda: _docker(system))
    runtime_ok = docker_ok and run.check("runtime nvidia", lambda: _runtime(system, spec))
    if not docker_ok:
        run.skip(("runtime nvidia",), "not without docker")
    names = (
        "container, all GPUs",
        "container, one GPU",
        "container, no GPU",
        *(("torch",) if spec.torch_image else ()),
    )
    if not (driver_ok and runtime_ok):
        missing = "the driver" if not driver_ok else "docker" if not docker_ok else "the runtime"
        run.skip(names, f"not without {missing}")
        return False
    _containers(run, system, spec, host_report[0], names)
    return run.good


def _containers(run: _Run, system: System, spec: HostSpec, host: SmiReport, names: tuple[str, ...]) -> None:
    image: list[str] = []

    def build() -> tuple[str, str]:
        image.append(spec.verify_image or verification_image(system))
        return "", image[0]

    if not run.check("image", build):
        run.skip(names, "not without an image")
        return
    run.check(names[0], lambda: _all_gpus(system, image[0], host))
    run.check(names[1], lambda: _one_gpu(system, image[0], host))
    run.check(names[2], lambda: _no_gpu(system, image[0]))
    if spec.torch_image:
        run.check(names[3], lambda: _torch(system, spec.torch_image, host))


def _host_smi(system: System, reports: list[SmiReport]) -> tuple[str, str]:
    done = system.run(("nvidia-smi", "-q", "-x"), timeout=_CONTAINER_SECONDS)
    if not done.ok:
        said = (done.stdout.strip() or done.stderr.strip()).splitlines()
        hint = _SMI_HINTS.get(done.returncode, "run nvidia-smi on the host")
        raise _Failed(f"nvidia-smi exited {done.returncode}: {said[0] if said else '(silent)'}; {hint}")
    report = parse_smi(done.stdout)
    if not report.gpus:
        raise _Failed("nvidia-smi sees no GPU; dmesg | grep -i nvrm")
    reports.append(report)
    return f"{report.driver}, CUDA {report.cuda}, {_count(len(report.gpus))}", ""


def _count(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"


def _device_nodes(system: System) -> tuple[str, str]:
    driver = discover(system)
    missing = missing_nodes(driver)
    if missing:
        raise _Failed(f"{', '.join(path for path, *_ in missing)} is missing; run gpuprov install, which makes it")
    return f"{len(driver.nodes)} there", ""


def _cdi(system: System) -> tuple[str, str]:
    path = toolkit.CDI_SPECIFICATION
    found = system.read_bytes(path)
    if found is None:
        raise _Failed(f"{path} is missing; run gpuprov install")
    if found != render_json(specification(discover(system))):
        raise _Failed(f"{path} does not describe the driver and GPUs that are here now; run gpuprov install")
    return path, ""


def _docker(system: System) -> tuple[str, str]:
    facts = docker.gather(system)
    if not facts.active:
        raise _Failed(f"docker does not answer: {facts.error or 'not installed'}; systemctl status docker")
    return facts.version, ""


def _runtime(system: System, spec: HostSpec) -> tuple[str, str]:
    facts = docker.gather(system)
    wanted = toolkit.runtime_path(spec)
    wrong = docker.problems(facts)
    if wrong:
        raise _Failed(f"{wrong[0].what}: {wrong[0].evidence}")
    # The running daemon may still know what the file no longer says: it would be gone at docker's next start.
    if docker.plan(facts, runtime_path=wanted, set_default=spec.docker_default_runtime):
        loaded = (facts.runtimes or {}).get("nvidia", "no runtime nvidia")
        raise _Failed(
            f"daemon.json or the running docker does not have runtime nvidia as {wanted} (docker info: {loaded}); "
            "run gpuprov install"
        )
    if not system.exists(wanted):
        raise _Failed(f"{wanted} is missing; run gpuprov install")
    return wanted, ""


def _container(system: System, image: str, command: tuple[str, ...], *environment: str) -> Completed:
    flags = [word for entry in environment for word in ("--env", entry)]
    # The image's own entry point stays out: that of NVIDIA's images prints a banner.
    base = ("docker", "run", "--rm", "--runtime=nvidia", "--network=none", *flags, "--entrypoint", command[0])
    return system.run((*base, image, *command[1:]), timeout=_CONTAINER_SECONDS)


def _container_smi(system: System, image: str, devices: str) -> SmiReport:
    environment = (f"NVIDIA_VISIBLE_DEVICES={devices}", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    done = _container(system, image, ("nvidia-smi", "-q", "-x"), *environment)
    if not done.ok:
        raise _Failed(f"the container exited {done.returncode}: {_telling_line(done)}")
    return parse_smi(done.stdout)


def _telling_line(done: Completed) -> str:
    """Return what a container's end is due to: our own runtime's word, else the first error, else the first line."""
    said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["(silent)"]
    found = (line for mark in ("gpuprov:", "rror", "") for line in said if mark in line)
    return next(found).strip()[:_LONGEST_LINE]


def _all_gpus(system: System, image: str, host: SmiReport) -> tuple[str, str]:
    report = _container_smi(system, image, "all")
    different = next((row for row in compare(host, report) if not row.same), None)
    if different is not None:
        reason = f"{different.field}: host {different.host or '(none)'}, container {different.container or '(none)'}"
        raise _Failed(reason, different.host, different.container)
    return _count(len(host.gpus)), f"{_count(len(report.gpus))}, every field the same"


def _one_gpu(system: System, image: str, host: SmiReport) -> tuple[str, str]:
    wanted = host.gpus[-1].uuid
    seen = [gpu.uuid for gpu in _container_smi(system, image, wanted).gpus]
    if seen != [wanted]:
        raise _Failed(f"asked for {wanted}, the container sees {', '.join(seen) or 'none'}", wanted, ", ".join(seen))
    return wanted, "that one alone"


def _no_gpu(system: System, image: str) -> tuple[str, str]:
    """A container that asks for nothing must get nothing: neither nodes nor files."""
    listing = ("sh", "-c", "for path in /dev/nvidia* /usr/bin/nvidia-smi; do [ -e $path ] && echo $path; done; :")
    for environment in ((), ("NVIDIA_VISIBLE_DEVICES=void",)):
        done = _container(system, image, listing, *environment)
        if not done.ok:
            raise _Failed(f"the container exited {done.returncode}: {_telling_line(done)}")
        if done.stdout.strip():
            raise _Failed(f"a container that asked for no GPU got {', '.join(done.stdout.split())}")
    return "", "none, as asked"


def _torch(system: System, image: str, host: SmiReport) -> tuple[str, str]:
    environment = ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    flags = [word for entry in environment for word in ("--env", entry)]
    command = ("docker", "run", "--rm", "--runtime=nvidia", *flags, image, "python3", "-c", _TORCH)
    done = system.run(command, timeout=_TORCH_SECONDS)
    if not done.ok:
        raise _Failed(f"python3 in {image} exited {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}")
    # The last line: before it an entry point may have printed its banner.
    available, _, rest = (done.stdout.strip().splitlines() or ["(silent)"])[-1].partition(" ")
    if available != "True":
        raise _Failed(f"torch.cuda.is_available() is {available} in {image} (CUDA of torch: {rest or '?'})")
    return _count(len(host.gpus)), f"torch.cuda.is_available(): True ({rest})"
