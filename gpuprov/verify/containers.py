"""The checks that look from within a container: all GPUs, one of them, none."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprov.core.commands import TIMED_OUT, Completed
from gpuprov.core.system import System
from gpuprov.verify.image import verification_image
from gpuprov.verify.outcome import Failed, Shown, counted, telling_line
from gpuprov.verify.smi import SmiReport, compare, parse_smi
from gpuprov.wire.spec import HostSpec

_CONTAINER_SECONDS = 120
_PULL_SECONDS = 1800
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
ALL_GPUS = ("NVIDIA_VISIBLE_DEVICES=all", CAPABILITIES)
# Names without a value: docker takes what the image itself sets out of the environment. (CUDA_VERSION alone means all.)
_NOTHING_ASKED = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION")
_LISTING = "for path in /dev/nvidia* /usr/bin/nvidia-smi; do [ -e $path ] && echo $path; done; :"
# What docker says where no hook was on its PATH when it started.
_NO_HOOK = "could not select device driver"
# Exit codes: docker's own, a shell's, and nvidia-smi's where the host's own went well.
_HINTS = {
    9: "the container can't reach the driver: gpuprov install refreshes device nodes and CDI specification",
    12: "libnvidia-ml.so.1 is not where the image's loader looks: give another image with --image",
    18: "the container got libraries of another version: gpuprov install refreshes the CDI specification",
    125: "docker did not start it: journalctl -u docker tells more",
    126: "the image can't run it: give another image with --image",
    127: "the container did not get it: gpuprov install refreshes the CDI specification",
    255: "the device cgroup may forbid the nodes: gpuprov install, then restart the container",
    TIMED_OUT: "dmesg | grep -i -e nvrm -e xid tells of a GPU that hangs",
}


@dataclass(frozen=True)
class Bench:
    """A docker with its runtime, the image to try them with, and what the host's own nvidia-smi says."""

    system: System
    image: str
    host: SmiReport


def usable_image(system: System, spec: HostSpec) -> str:
    """Return the image to try, with docker having it: the user's, pulled if need be, or our own, which never is."""
    if not spec.verify_image:
        return verification_image(system)
    pull_if_missing(system, spec.verify_image)
    return spec.verify_image


def pull_if_missing(system: System, image: str) -> None:
    """Have docker fetch the image that the user named, unless it has it. Raises Failed."""
    if system.run(("docker", "inspect", "--type=image", image)).ok:
        return
    done = system.run(("docker", "pull", "--quiet", image), timeout=_PULL_SECONDS)
    if not done.ok:
        raise Failed(f"docker can't pull {image}: {telling_line(done)}; docker pull {image}")


def all_gpus(bench: Bench) -> Shown:
    """A container that asks for all GPUs must see what the host sees, field by field."""
    report = _smi(bench, "all")
    different = next((row for row in compare(bench.host, report) if not row.same), None)
    if different is not None:
        seen = f"{different.field}: host {different.host or '(none)'}, container {different.container or '(none)'}"
        reason = f"{seen}; gpuprov install refreshes the CDI specification"
        raise Failed(reason, different.host, different.container)
    return counted(len(bench.host.gpus)), f"{counted(len(report.gpus))}, every field the same"


def one_gpu(bench: Bench) -> Shown:
    """A container that asks for one GPU must see only that one: the last by its UUID, an only one by its index."""
    wanted = bench.host.gpus[-1].uuid
    asked = wanted if len(bench.host.gpus) > 1 else "0"
    seen = [gpu.uuid for gpu in _smi(bench, asked).gpus]
    if seen != [wanted]:
        reason = f"asked for {asked}, the container sees {', '.join(seen) or 'none'}"
        raise Failed(f"{reason}; gpuprov install refreshes the CDI specification", wanted, ", ".join(seen))
    return asked, "only the requested GPU"


def no_gpu(bench: Bench) -> Shown:
    """A container that asks for nothing must get nothing: neither nodes nor files."""
    for environment in (_NOTHING_ASKED, ("NVIDIA_VISIBLE_DEVICES=void",)):
        done = run(bench.system, bench.image, ("sh", "-c", _LISTING), environment)
        if not done.ok:
            raise Failed(ended(done))
        if done.stdout.strip():
            got = ", ".join(done.stdout.split())
            raise Failed(f"a container that asked for no GPU got {got}; look at what the image and docker bring it")
    return "", "no GPU visible"


def by_docker_gpus(bench: Bench) -> Shown:
    """`docker run --gpus all`, which takes another way (a hook, and plain runc), must show the same GPUs."""
    command = ("nvidia-smi", "-q", "-x")
    done = run(bench.system, bench.image, command, (CAPABILITIES,), flags=("--gpus=all",))
    if _NO_HOOK in done.stderr:
        raise Failed("docker learns of the hook for --gpus when it starts: systemctl restart docker")
    if not done.ok:
        raise Failed(ended(done))
    seen, wanted = ([gpu.uuid for gpu in one.gpus] for one in (parse_smi(done.stdout), bench.host))
    if seen != wanted:
        raise Failed(f"the container sees {', '.join(seen) or 'none'}", ", ".join(wanted), ", ".join(seen))
    return counted(len(wanted)), f"{counted(len(seen))} (hook)"


def _smi(bench: Bench, devices: str) -> SmiReport:
    environment = (f"NVIDIA_VISIBLE_DEVICES={devices}", CAPABILITIES)
    done = run(bench.system, bench.image, ("nvidia-smi", "-q", "-x"), environment)
    if not done.ok:
        raise Failed(ended(done))
    return parse_smi(done.stdout)


def ended(done: Completed) -> str:
    """Return how a container ended, with what to do about it if that is known."""
    line = telling_line(done)
    # Our own runtime says itself what to do.
    hint = "" if "gpuprov:" in line else _HINTS.get(done.returncode, "")
    return f"the container exited {done.returncode}: {line}" + (f"; {hint}" if hint else "")


def run(
    system: System,
    image: str,
    command: tuple[str, ...],
    environment: tuple[str, ...],
    *,
    seconds: float = _CONTAINER_SECONDS,
    flags: tuple[str, ...] = ("--runtime=nvidia",),
) -> Completed:
    """Run a command in a container with docker and return what it did."""
    asked = [word for entry in environment for word in ("--env", entry)]
    name = f"gpuprov-verify-{system.own_pid()}"
    # The image is there by now: nobody else's of the same name shall come from a registry. The image's own entry point
    # stays out: that of NVIDIA's images prints a banner.
    argv = (
        "docker", "run", "--rm", f"--name={name}", "--pull=never", "--network=none", *flags, *asked,
        "--entrypoint", command[0], image, *command[1:],
    )  # fmt: skip
    done = system.run(argv, timeout=seconds)
    if done.returncode == TIMED_OUT:
        # Its client was ended, not the container.
        system.run(("docker", "rm", "--force", name), timeout=_CONTAINER_SECONDS)
    return done
