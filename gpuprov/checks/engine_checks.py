"""The checks of each engine that is configured: whether it knows the runtime, and its containers by all their ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Callable

from gpuprov import toolkit
from gpuprov.checks import cuda_checks, frameworks
from gpuprov.checks.engines import ALL, DOCKER, DOCKER_CDI, DOCKER_GPUS, PODMAN, Containerd, Engine, EngineTest, ended
from gpuprov.checks.outcome import Checks, Failed, Skipped, Values, all_gpus_check
from gpuprov.checks.smi import SmiReport, difference, parse_smi
from gpuprov.core import units
from gpuprov.core.system import System
from gpuprov.engines import docker, other_engines
from gpuprov.engines.docker import DockerFacts
from gpuprov.engines.docker_config import knows_cdi
from gpuprov.engines.docker_unit import gather_unit
from gpuprov.engines.known import ENGINES, EngineFacts, RuntimeEntry, kubernetes_programs
from gpuprov.engines.other_engines import Registration
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.words import counted

_SECONDS = 20
_BY_CDI = "docker run --device"
# Kubernetes alone makes their containers.
_NO_CONTAINERS = ("crio", *(name for name, engine in ENGINES.items() if engine.cluster))
_LISTING = "for path in /dev/nvidia* /usr/bin/nvidia-smi; do [ -e $path ] && echo $path; done; :"
# What docker says where no hook was on its PATH when it started.
_NO_HOOK = "could not select device driver"
_TITLES = {"crio": "CRI-O", "rke2": "RKE2"}
# Name → image and check.
_Frameworks = Mapping[str, tuple[str, Callable[[EngineTest], Values]]]


@dataclass
class Subject:
    """What is verified: the host, the specification, what nvidia-smi says (None without a driver).

    `tests` gathers the engines whose containers can be tried, in the order of the checks.
    """

    checks: Checks
    system: System
    spec: HostSpec
    host: SmiReport | None
    tests: list[EngineTest] = field(default_factory=list)


def check_engines(subject: Subject) -> None:
    """Check each engine that is configured; name those that are installed and left alone."""
    checks, system, spec = subject.checks, subject.system, subject.spec
    with checks.about("docker"):
        if spec.docker != "none":
            _check_docker(subject)
        elif system.which("dockerd"):
            checks.skip(("docker",), "installed, left alone: gpuprov_docker is none")
    found = other_engines.gather(system, ENGINES)
    registered = other_engines.registrations(found, toolkit.engine_runtime(spec))
    named = other_engines.names(system, spec)
    for name, facts in found.items():
        with checks.about(name):
            # An earlier run may have registered the runtime with an engine that this specification does not name.
            if name in named or (name in registered and registered[name] == Registration()):
                _check_other(subject, name, facts, registered)
            # Beside docker, containerd is docker's.
            elif facts.program and not (name == "containerd" and system.which("dockerd")):
                checks.skip((name,), f"installed, not configured by gpuprov: gpuprov_engines: [{name}]")


def _check_docker(subject: Subject) -> None:
    checks, system, spec = subject.checks, subject.system, subject.spec
    facts = docker.gather(system)
    docker_ok = checks.check("docker", lambda: _docker(facts))
    runtime_ok = docker_ok and checks.check("runtime nvidia", lambda: _runtime(system, facts, spec))
    if not docker_ok:
        checks.skip(("runtime nvidia",), "requires docker")
    # An older docker can't, and nobody says that it could.
    by_cdi = (_BY_CDI,) if knows_cdi(facts.version) else ()
    names = (*_names("docker"), "docker run --gpus", *by_cdi, *cuda_checks.names("docker"), *_frameworks(spec))
    missing = "" if runtime_ok else "the runtime" if docker_ok else "docker"
    if subject.host is None:
        missing = "the driver"
    test = _engine_test(subject, DOCKER, names, "image", missing=missing)
    if test is None:
        return
    _check_containers(checks, test)
    checks.check("docker run --gpus", lambda: same_gpus(replace(test, engine=DOCKER_GPUS)))
    if by_cdi:
        checks.check(_BY_CDI, lambda: _docker_cdi(facts, test))
    _check_computing(subject, test, _frameworks(spec))


def _docker_cdi(facts: DockerFacts, test: EngineTest) -> Values:
    """Check that docker takes devices by CDI, unless somebody has switched that off, or it waits for containers."""
    cdi = docker.cdi_of(facts)
    off = cdi.why_off
    if off and cdi.waits_for_containers:
        raise Skipped(f"{off}: {', '.join(facts.running_containers)} would stop")
    if off and cdi.switched_off:
        raise Skipped(off)
    if off:
        waits = cdi.waits and not cdi.is_to_be_set
        raise Failed(f"{off}; {f'systemctl restart {facts.unit.word}' if waits else 'run gpuprov install'}")
    return same_gpus(replace(test, engine=DOCKER_CDI))


def _check_other(subject: Subject, name: str, facts: EngineFacts, registered: Mapping[str, Registration]) -> None:
    """Check containerd, CRI-O or podman."""
    checks, spec = subject.checks, subject.spec
    address = other_engines.socket_of(facts, name)
    engine: Engine = PODMAN if name == "podman" else Containerd(toolkit.runtime_path(spec), address)
    is_ready = checks.check(name, lambda: _engine(subject, name, facts, registered))
    if is_ready and ENGINES[name].socket:
        checks.check(f"{name}, handler {RuntimeEntry().name}", lambda: _handler(subject, name, facts))
    if name in _NO_CONTAINERS:
        return
    asked = _frameworks(spec) if spec.docker == "none" and not subject.tests else {}
    names = (*_names(name), *cuda_checks.names(name), *asked)
    test = _engine_test(subject, engine, names, f"{name}, image", missing="" if is_ready else name)
    if test is not None:
        _check_containers(checks, test)
        _check_computing(subject, test, asked)


def _handler(subject: Subject, name: str, facts: EngineFacts) -> Values:
    """Check that the running engine offers the handler that a RuntimeClass names: it reads its files when it starts."""
    command = other_engines.restart_command(name, facts)
    running = facts.running
    if running is None:
        raise Skipped(f"{name} tells no handlers through CRI ({other_engines.socket_of(facts, name)})")
    kept = other_engines.kept_running({name: facts}, kubernetes_programs(subject.system), subject.spec)
    if facts.has_not_read_its_files and name in kept:
        raise Skipped(f"{name} has not read its files yet, and a restart is yours to choose: {command}")
    if facts.has_not_read_its_files:
        seen = ", ".join(running.handlers)
        raise Failed(f"{name} runs and has not read its files (it knows {seen}); {command}")
    return f"known to {name}", {True: "CDI devices too", False: "CDI devices off", None: ""}[running.cdi]


def _names(engine: str) -> tuple[str, ...]:
    return (all_gpus_check(engine), f"{engine}, one GPU", f"{engine}, no GPU")


def _engine_test(
    subject: Subject, engine: Engine, names: tuple[str, ...], check: str, *, missing: str
) -> EngineTest | None:
    """Have the engine get the image, as a check of its own; skip the others where it can't, or if one is `missing`."""
    if missing or subject.host is None:
        subject.checks.skip(names, f"requires {missing or 'the driver'}")
        return None
    got = subject.checks.check(check, lambda: ("", engine.image(subject.system, subject.spec.verify_image)))
    if got is None:
        subject.checks.skip(names, "requires an image")
        return None
    test = EngineTest(subject.system, got[1], subject.host, engine)
    subject.tests.append(test)
    return test


def _check_containers(checks: Checks, test: EngineTest) -> None:
    for name, check in zip(_names(test.engine.name), (all_gpus, one_gpu, no_gpu)):
        checks.check(name, partial(check, test))


def _check_computing(subject: Subject, test: EngineTest, asked: _Frameworks) -> None:
    """Check that CUDA computes, and what the frameworks that are asked see."""
    cuda_checks.cuda_checks(subject.checks, test, own_image=not subject.spec.verify_image)
    for name, (image, look) in asked.items():
        subject.checks.check(name, partial(look, replace(test, image=image)))


def _frameworks(spec: HostSpec) -> _Frameworks:
    """Return the frameworks for which there is an image."""
    torch, tensorflow = (spec.torch_image, frameworks.torch), (spec.tensorflow_image, frameworks.tensorflow)
    known = {frameworks.TORCH: torch, frameworks.TENSORFLOW: tensorflow}
    return {name: one for name, one in known.items() if one[0]}


def _docker(facts: DockerFacts) -> Values:
    if not facts.installed:
        step = "run gpuprov install, or set gpuprov_docker: none where other engines have the GPUs"
        raise Failed(f"docker is not installed (there is no dockerd); {step}")
    if facts.is_unreachable:
        one = docker.unreachable(facts)
        raise Failed(f"{one.what}: {facts.error}; {one.next_step}")
    if not facts.active:
        raise Failed(f"docker does not answer: {facts.error}; systemctl status docker")
    return facts.version, ""


def _runtime(system: System, facts: DockerFacts, spec: HostSpec) -> Values:
    entry = toolkit.docker_runtime(spec)
    wanted, loaded = entry.path, (facts.runtimes or {}).get(entry.name, "no runtime nvidia")
    wrong = docker.problems(facts, entry)
    # What docker reads is right for it, even if gpuprov could not edit it.
    if wrong and (facts.refused or loaded != wanted):
        raise Failed(f"{wrong[0].what}: {wrong[0].evidence}")
    # The running daemon may still know what the file no longer says: it would be gone at docker's next start.
    if docker.plan(facts, replace(entry, cdi=False)):
        reason = f"{facts.config_path} or the running docker does not have runtime nvidia as {wanted}"
        if loaded == wanted and facts.unit.is_disabled:
            raise Failed("docker.service is disabled, so docker does not start at the next boot; run gpuprov install")
        raise Failed(f"{reason} (docker info: {loaded}); run gpuprov install")
    _require_program(system, wanted)
    return wanted, ""


def _engine(subject: Subject, name: str, facts: EngineFacts, registered: Mapping[str, Registration]) -> Values:
    """Return the engine's version. Raises Failed if it is missing, does not run, or does not know the runtime."""
    system, wanted = subject.system, toolkit.runtime_path(subject.spec)
    if not facts.program:
        raise Failed(f"{name} is not installed (there is no {ENGINES[name].program}), and gpuprov_engines names it")
    found = registered[name]
    if found.problem is not None:
        raise Failed(f"{found.problem.what}: {found.problem.evidence}")
    if found.edits:
        raise Failed(f"{found.edits[0].path} does not have runtime nvidia as {wanted}; run gpuprov install")
    _require_program(system, wanted)
    unit = facts.unit or ENGINES[name].unit
    if unit and not units.is_active(system, unit):
        raise Failed(f"{name} does not run; systemctl status {unit.removesuffix('.service')}")
    said = "" if name == "microk8s" else system.run((facts.program, "--version"), timeout=_SECONDS).stdout.strip()
    version = re.search(r"\d+\.\d+[^\s,]*", said)
    alone = f"configuration only: gpuprov starts no container with {_TITLES.get(name, name)}"
    return version[0] if version else "version unknown", alone if name in _NO_CONTAINERS else ""


def _require_program(system: System, path: str) -> None:
    if not system.exists(path):
        raise Failed(f"{path} is missing; run gpuprov install")


def all_gpus(test: EngineTest) -> Values:
    """Check that a container that requests all GPUs sees the same as the host, field by field."""
    report = _smi(test, ALL)
    if different := difference(test.host, report):
        name, ours, theirs = different
        seen = f"{name}: host {ours or '(none)'}, container {theirs or '(none)'}"
        raise Failed(f"{seen}; gpuprov install refreshes the CDI specification", ours, theirs)
    return counted(len(test.host.gpus), "GPU"), f"{counted(len(report.gpus), 'GPU')}, every field the same"


def one_gpu(test: EngineTest) -> Values:
    """Check that a container that requests one GPU sees only that one: SmiReport.last_alone."""
    wanted, asked = test.host.gpus[-1].uuid, test.host.last_alone
    seen = [gpu.uuid for gpu in _smi(test, asked).gpus]
    if seen != [wanted]:
        reason = f"asked for {asked}, the container sees {', '.join(seen) or 'none'}"
        raise Failed(f"{reason}; gpuprov install refreshes the CDI specification", wanted, ", ".join(seen))
    return asked, "only the requested GPU"


def no_gpu(test: EngineTest) -> Values:
    """Check that a container that requests nothing gets neither nodes nor files."""
    for devices in test.engine.nothing:
        done = test.engine.run(test.system, test.image, ("sh", "-c", _LISTING), devices)
        if not done.ok:
            raise Failed(ended(test, done))
        if done.stdout.strip():
            reason = f"a container that asked for no GPU got {', '.join(done.stdout.split())}"
            raise Failed(f"{reason}; look at what the image and {test.engine.name} bring it")
    return "", "no GPU visible"


def same_gpus(test: EngineTest) -> Values:
    """Check that another way of the engine to all GPUs shows the same ones."""
    seen, wanted = ([gpu.uuid for gpu in one.gpus] for one in (_smi(test, ALL), test.host))
    if seen != wanted:
        raise Failed(f"the container sees {', '.join(seen) or 'none'}", ", ".join(wanted), ", ".join(seen))
    return counted(len(wanted), "GPU"), f"{counted(len(seen), 'GPU')} ({test.engine.way})"


def _smi(test: EngineTest, devices: str) -> SmiReport:
    done = test.engine.run(test.system, test.image, ("nvidia-smi", "-q", "-x"), devices)
    if _NO_HOOK in done.stderr and test.engine == DOCKER_GPUS:
        raise Failed(f"docker finds the --gpus hook at its start: systemctl restart {gather_unit(test.system).word}")
    if not done.ok:
        raise Failed(ended(test, done))
    return parse_smi(done.stdout)
