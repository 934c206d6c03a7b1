"""Container engines as verification uses them: run a command in a container with these GPUs, return what it said.

One class for each command line. An object is one way to a GPU: docker has three, podman and containerd one each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Protocol

from gpuprov.checks.image import REPOSITORY, own_image
from gpuprov.checks.outcome import Failed, telling_line
from gpuprov.core.commands import TIMED_OUT, Completed
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError

CONTAINER_SECONDS = 120
_PULL_SECONDS = 1800
_IMPORT_SECONDS = 120
_LIST_SECONDS = 20
_CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
# Names without a value: docker takes what the image itself sets out of the environment. (CUDA_VERSION alone means all.)
_NOTHING_ASKED = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION")
ALL, NOTHING, VOID = "all", "", "void"


class Engine(Protocol):
    """An engine by one of its ways to a GPU.

    `name`: the engine's; `way`: what gives the GPU; `nothing`: what may be asked for that brings no GPU;
    `not_started`: what to do if it starts no container (exit code 125).
    """

    @property
    def name(self) -> str: ...
    @property
    def way(self) -> str: ...
    @property
    def nothing(self) -> tuple[str, ...]: ...
    @property
    def not_started(self) -> str: ...

    def image(self, system: System, wanted: str = "") -> str:
        """Return the image to run, which the engine has then: the wanted one, pulled if need be, or the host's own.

        The host's own is never pulled. Raises Failed or GpuprovError.
        """

    def run(
        self, system: System, image: str, command: tuple[str, ...], devices: str = NOTHING, *,
        seconds: float = CONTAINER_SECONDS, mounts: tuple[str, ...] = (),
    ) -> Completed:  # fmt: skip
        """Run a command in a container with these GPUs: ALL, an index or UUID, NOTHING, or VOID; remove it after.

        `mounts`: paths of the host that the container has too, read-only.
        """


def _by_runtime(devices: str) -> tuple[str, ...]:
    """Ask in the environment. What an image itself asks for is taken out where nothing shall be asked for."""
    if devices == NOTHING:
        asked = _NOTHING_ASKED
    else:
        asked = (f"NVIDIA_VISIBLE_DEVICES={devices}", *((_CAPABILITIES,) if devices != VOID else ()))
    return ("--runtime=nvidia", *(word for entry in asked for word in ("--env", entry)))


def _by_gpus(devices: str) -> tuple[str, ...]:
    if devices == NOTHING:
        return ()
    return (f"--gpus={devices if devices == ALL else f'device={devices}'}", "--env", _CAPABILITIES)


def _by_cdi(devices: str) -> tuple[str, ...]:
    return (f"--device=nvidia.com/gpu={devices}",) if devices != NOTHING else ()


@dataclass(frozen=True)
class DockerLike:
    """docker, or podman with docker's words. `flags` returns what asks for GPUs; `repository`: of the host's image."""

    name: str
    way: str
    flags: Callable[[str], tuple[str, ...]]
    not_started: str
    nothing: tuple[str, ...] = (NOTHING,)
    repository: str = REPOSITORY

    def image(self, system: System, wanted: str = "") -> str:
        if wanted:
            self._pull_if_missing(system, wanted)
            return wanted
        own = own_image(system)
        tag = f"{self.repository}:{own.tag}"
        listed = self.own_images(system)
        if tag in listed:
            return tag
        done = system.run((self.name, "import", "-", tag), stdin=own.root(), timeout=_IMPORT_SECONDS)
        if not done.ok:
            raise GpuprovError("the verification image can't be built", done.evidence(4), "give one with --image")
        # Of an older C library.
        for old in listed:
            system.run((self.name, "rmi", old))
        return tag

    def own_images(self, system: System) -> tuple[str, ...]:
        """Return the tags of the images that verification has made, in order."""
        listing = (self.name, "images", "--format", "{{.Repository}}:{{.Tag}}", self.repository)
        listed = system.run(listing, timeout=_LIST_SECONDS)
        return tuple(sorted(listed.stdout.split())) if listed.ok else ()

    def _pull_if_missing(self, system: System, image: str) -> None:
        if system.run((self.name, "inspect", "--type=image", image)).ok:
            return
        done = system.run((self.name, "pull", "--quiet", image), timeout=_PULL_SECONDS)
        if not done.ok:
            raise Failed(f"{self.name} can't pull {image}: {telling_line(done)}; {self.name} pull {image}")

    def run(
        self, system: System, image: str, command: tuple[str, ...], devices: str = NOTHING, *,
        seconds: float = CONTAINER_SECONDS, mounts: tuple[str, ...] = (), flags: tuple[str, ...] = (),
    ) -> Completed:  # fmt: skip
        container = _container_name(system)
        # The image is there by now: nobody else's of the same name shall come from a registry. The image's own entry
        # point stays out: that of NVIDIA's images prints a banner.
        argv = (
            self.name, "run", "--rm", f"--name={container}", "--pull=never", "--network=none", *flags,
            *self.flags(devices), *_bind_mounts(mounts, "source", "target", "readonly"),
            "--entrypoint", command[0], image, *command[1:],
        )  # fmt: skip
        done = system.run(argv, timeout=seconds)
        if done.returncode == TIMED_OUT:
            # Its client was ended, not the container.
            self.remove(system, container)
        return done

    def start(
        self, system: System, image: str, command: tuple[str, ...], devices: str, mounts: tuple[str, ...] = ()
    ) -> Completed:
        """Start a command that waits for the end of its input, which never comes; the output ends with the id."""
        return self.run(system, image, command, devices, mounts=mounts, flags=("--detach", "--interactive"))

    def execute(self, system: System, container: str, command: tuple[str, ...]) -> Completed:
        """Run a command in a container that runs."""
        return system.run((self.name, "exec", container, *command), timeout=CONTAINER_SECONDS)

    def remove(self, system: System, container: str) -> None:
        """Remove a container, whether it runs or not."""
        system.run((self.name, "rm", "--force", "--volumes", container), timeout=CONTAINER_SECONDS)


def _bind_mounts(paths: tuple[str, ...], source: str, target: str, options: str) -> tuple[str, ...]:
    mounts = (f"type=bind,{source}={path},{target}={path},{options}" for path in paths)
    return tuple(word for mount in mounts for word in ("--mount", mount))


DOCKER = DockerLike(
    "docker", "--runtime=nvidia", _by_runtime, "docker did not start it: journalctl -u docker tells more",
    nothing=(NOTHING, VOID),
)  # fmt: skip
DOCKER_GPUS = DockerLike("docker", "hook", _by_gpus, DOCKER.not_started)
DOCKER_CDI = DockerLike("docker", "CDI", _by_cdi, DOCKER.not_started)
PODMAN = DockerLike(
    "podman", "CDI", _by_cdi, "podman did not start it: podman info; gpuprov cdi validate",
    repository=f"localhost/{REPOSITORY}",
)  # fmt: skip


@dataclass(frozen=True)
class Containerd:
    """containerd by its own client, ctr: `runtime` in place of runc. ctr's --gpus needs a program that few hosts have.

    In a namespace of containerd's of its own, beside docker's (moby) and Kubernetes' (k8s.io).
    """

    runtime: str
    name: str = "containerd"
    way: str = "runtime"
    nothing: tuple[str, ...] = (VOID,)
    not_started: str = "containerd did not start it: journalctl -u containerd tells more"

    def image(self, system: System, wanted: str = "") -> str:
        listed = system.run((*_CTR, "images", "list", "--quiet")).stdout.split()
        if wanted:
            return self._pulled(system, full_reference(wanted), listed)
        own = own_image(system)
        reference = full_reference(f"{REPOSITORY}:{own.tag}")
        if reference in listed:
            return reference
        archive = own.archive(reference, system.architecture())
        done = system.run((*_CTR, "images", "import", "-"), stdin=archive, timeout=_IMPORT_SECONDS)
        if not done.ok:
            raise GpuprovError(
                "containerd does not take the verification image", done.evidence(4), "systemctl status containerd"
            )
        for old in (one for one in listed if f"/{REPOSITORY}:" in one):
            system.run((*_CTR, "images", "remove", old))
        return reference

    def _pulled(self, system: System, image: str, listed: list[str]) -> str:
        if image not in listed:
            done = system.run((*_CTR, "images", "pull", image), timeout=_PULL_SECONDS)
            if not done.ok:
                raise Failed(
                    f"containerd can't pull {image}: {telling_line(done)}; {' '.join(_CTR)} images pull {image}"
                )
        return image

    def run(
        self, system: System, image: str, command: tuple[str, ...], devices: str = NOTHING, *,
        seconds: float = CONTAINER_SECONDS, mounts: tuple[str, ...] = (),
    ) -> Completed:  # fmt: skip
        container = _container_name(system)
        # ctr can't take a variable out of the image's environment: a GPU that is not asked for is refused.
        asked = (f"NVIDIA_VISIBLE_DEVICES={devices or VOID}", _CAPABILITIES)
        environment = [word for entry in asked for word in ("--env", entry)]
        # ctr asks for 1024 CPU shares by itself, which a host without the cpu controller can't give.
        flags = (
            "--rm",
            "--cpu-shares=0",
            "--runc-binary",
            self.runtime,
            *_bind_mounts(mounts, "src", "dst", "options=rbind:ro"),
        )
        argv = (*_CTR, "run", *flags, *environment, image, container, *command)
        done = system.run(argv, timeout=seconds)
        if done.returncode == TIMED_OUT:
            system.run((*_CTR, "tasks", "kill", "--signal", "SIGKILL", container), timeout=CONTAINER_SECONDS)
            system.run((*_CTR, "tasks", "delete", "--force", container), timeout=CONTAINER_SECONDS)
            system.run((*_CTR, "containers", "delete", container), timeout=CONTAINER_SECONDS)
        return done


_CTR = ("ctr", "--namespace", REPOSITORY)


def images_left(system: System) -> dict[str, tuple[str, ...]]:
    """Return the verification images that engines have: their names with the engine's, and what removes each."""
    found: dict[str, tuple[str, ...]] = {}
    for engine in (DOCKER, PODMAN):
        if system.which(engine.name) is not None:
            removal = (engine.name, "rmi", "--force")
            found.update({f"{one} of {engine.name}": (*removal, one) for one in engine.own_images(system)})
    # Without a containerd that answers, ctr waits for one.
    if system.which("ctr") is not None and system.exists(_CONTAINERD_SOCKET):
        listed = system.run((*_CTR, "images", "list", "--quiet"), timeout=_LIST_SECONDS)
        names = [one for one in listed.stdout.split() if f"/{REPOSITORY}:" in one] if listed.ok else []
        found.update({f"{one} of containerd": (*_CTR, "images", "remove", "--sync", one) for one in names})
    return found


def full_reference(image: str) -> str:
    """Return a reference with registry and tag, as ctr wants it: `ubuntu` is docker.io/library/ubuntu:latest."""
    first, slash, _ = image.partition("/")
    if ":" not in image.rpartition("/")[2] and "@" not in image:
        image += ":latest"
    if not slash:
        image = f"docker.io/library/{image}"
    elif "." not in first and ":" not in first and first != "localhost":
        image = f"docker.io/{image}"
    return image


def _container_name(system: System) -> str:
    return f"{REPOSITORY}-{system.own_pid()}"
