"""The checks that look from within a container of any engine: all GPUs, one, none."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from gpuprov.checks.engines import ALL, DOCKER, DOCKER_GPUS, Engine
from gpuprov.checks.outcome import Failed, Values, telling_line
from gpuprov.checks.smi import SmiReport, compare, parse_smi
from gpuprov.core.commands import TIMED_OUT, Completed
from gpuprov.core.system import System
from gpuprov.protocol.words import counted

_LISTING = "for path in /dev/nvidia* /usr/bin/nvidia-smi; do [ -e $path ] && echo $path; done; :"
# What docker says where no hook was on its PATH when it started.
_NO_HOOK = "could not select device driver"
_NOT_STARTED = 125  # docker's and podman's own exit code
# crun and runc, whose failures podman ends with 126 or 127, as a shell does for a program.
_RUNTIME = re.compile(r"\b(crun|runc|OCI runtime|OCI permission denied)\b")
_ITS_PROGRAM = re.compile(r"executable file|exec format|exec[: ].*(permission denied|no such file)", re.IGNORECASE)
# Exit codes: a shell's, and nvidia-smi's where the host's own went well.
_HINTS = {
    9: "the container can't reach the driver: gpuprov install refreshes device nodes and CDI specification",
    12: "libnvidia-ml.so.1 is not where the image's loader looks: give another image with --image",
    18: "the container got libraries of another version: gpuprov install refreshes the CDI specification",
    126: "the image can't run it: give another image with --image",
    127: "the container did not get it: gpuprov install refreshes the CDI specification",
    255: "the device cgroup may forbid the nodes: gpuprov install, then restart the container",
    TIMED_OUT: "dmesg | grep -i -e nvrm -e xid tells of a GPU that hangs",
}


@dataclass(frozen=True)
class EngineTest:
    """An engine by one of its ways to a GPU, the image to try it with, and what the host's own nvidia-smi says."""

    system: System
    image: str
    host: SmiReport
    engine: Engine = DOCKER

    def by(self, engine: Engine) -> EngineTest:
        """Return the same with another way of the engine."""
        return replace(self, engine=engine)


def all_gpus(test: EngineTest) -> Values:
    """Check that a container that requests all GPUs sees the same as the host, field by field."""
    report = _smi(test, "all")
    different = next((row for row in compare(test.host, report) if not row.same), None)
    if different is not None:
        seen = f"{different.field}: host {different.host or '(none)'}, container {different.container or '(none)'}"
        reason = f"{seen}; gpuprov install refreshes the CDI specification"
        raise Failed(reason, different.host, different.container)
    return counted(len(test.host.gpus), "GPU"), f"{counted(len(report.gpus), 'GPU')}, every field the same"


def one_gpu(test: EngineTest) -> Values:
    """Check that a container that requests one GPU sees only that one: the last by UUID, a single one by index."""
    wanted = test.host.gpus[-1].uuid
    asked = wanted if len(test.host.gpus) > 1 else "0"
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
            got = ", ".join(done.stdout.split())
            raise Failed(
                f"a container that asked for no GPU got {got}; look at what the image and {test.engine.name} bring it"
            )
    return "", "no GPU visible"


def same_gpus(test: EngineTest) -> Values:
    """Check that another way of the engine to all GPUs shows the same ones."""
    done = test.engine.run(test.system, test.image, ("nvidia-smi", "-q", "-x"), ALL)
    if _NO_HOOK in done.stderr and test.engine == DOCKER_GPUS:
        raise Failed("docker learns of the hook for --gpus when it starts: systemctl restart docker")
    if not done.ok:
        raise Failed(ended(test, done))
    seen, wanted = ([gpu.uuid for gpu in one.gpus] for one in (parse_smi(done.stdout), test.host))
    if seen != wanted:
        raise Failed(f"the container sees {', '.join(seen) or 'none'}", ", ".join(wanted), ", ".join(seen))
    return counted(len(wanted), "GPU"), f"{counted(len(seen), 'GPU')} ({test.engine.way})"


def _smi(test: EngineTest, devices: str) -> SmiReport:
    done = test.engine.run(test.system, test.image, ("nvidia-smi", "-q", "-x"), devices)
    if not done.ok:
        raise Failed(ended(test, done))
    return parse_smi(done.stdout)


def ended(test: EngineTest, done: Completed) -> str:
    """Return how a container ended, and the next step if known."""
    line = telling_line(done)
    hint = test.engine.not_started if done.returncode == _NOT_STARTED else _HINTS.get(done.returncode, "")
    if done.returncode in (126, 127) and _RUNTIME.search(line) and not _ITS_PROGRAM.search(line):
        hint = f"the OCI runtime starts no container: {test.engine.name} info names it; correct what it says"
    # gpuprov's own runtime suggests the next step itself.
    if "gpuprov:" in line:
        hint = ""
    return f"the container exited {done.returncode}: {line}" + (f"; {hint}" if hint else "")
