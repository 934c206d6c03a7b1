"""Container engines as verification uses them: run a command in a container with these GPUs, return what it said.

One class for each command line. An object is one way to a GPU: docker has three, podman and containerd one each. The
image that they run by default is made of the host's own C library and shell, so that verification needs no registry. It
holds /bin/sh and what nvidia-smi is linked against; its tag is the digest of its content, so an engine gets it once.
"""

import hashlib
import io
import json
import posixpath
import re
import tarfile
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Callable, Optional, Union

from gpuprov.checks.outcome import Failed, telling_line
from gpuprov.checks.smi import SmiReport, exits
from gpuprov.core.commands import Completed, Failure
from gpuprov.core.system import System
from gpuprov.engines.known import ENGINES
from gpuprov.engines.other_engines import socket_of
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError
from gpuprov.repos import DEBIAN_ARCHITECTURES
from gpuprov.runtime_hook.deploy import NVIDIA_HOOK_PATH

CONTAINER_SECONDS = 120
_PULL_SECONDS = 1800
_IMPORT_SECONDS = 120
_LIST_SECONDS = 20
_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
# Names without a value: docker takes what the image itself sets out of the environment. (CUDA_VERSION alone means all.)
_NOTHING_ASKED = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION")
OnLine = Optional[Callable[[str], None]]
ALL, NOTHING, VOID = "all", "", "void"
REPOSITORY = "gpuprov-verify"
_PROGRAMS = ("sh", "ls", "cat")
# What the driver's own libraries are linked against; the loader comes with nvidia-smi and the shell.
LIBRARIES = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
_NOT_STARTED = 125  # docker's and podman's own exit code
# crun and runc, whose failures podman ends with 126 or 127, as a shell does for a program.
_RUNTIME = re.compile(r"\b(crun|runc|OCI runtime|OCI permission denied)\b")
_ITS_PROGRAM = re.compile(r"executable file|exec format|exec[: ].*(permission denied|no such file)", re.IGNORECASE)


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
    """docker, or podman with docker's words, by one of its ways to a GPU.

    `way`: what gives the GPU; `flags` returns the words that ask for it. `not_started`: what to do if it starts no
    container (exit code 125). `nothing`: what may be asked for that brings no GPU. `repository`: of the host's image.
    """

    name: str
    way: str
    flags: Callable[[str], tuple[str, ...]]
    not_started: str
    nothing: tuple[str, ...] = (NOTHING,)
    repository: str = REPOSITORY

    def image(self, system: System, wanted: str = "") -> str:
        """Return the image to run, which the engine has then: the wanted one, pulled if need be, or the host's own.

        The host's own is never pulled. Raises Failed or GpuprovError.
        """
        if wanted:
            pull = (self.name, "pull", "--quiet", wanted)
            is_there = system.run((self.name, "inspect", "--type=image", wanted)).ok
            if not is_there and not (done := system.run(pull, timeout=_PULL_SECONDS)).ok:
                raise Failed(f"{self.name} can't pull {wanted}: {telling_line(done)}; {self.name} pull {wanted}")
            return wanted
        own = own_image(system)
        tag = f"{self.repository}:{own.tag}"
        listed = self.own_images(system)
        if tag in listed:
            return tag
        done = system.run((self.name, "import", "-", tag), stdin=own.root(), timeout=_IMPORT_SECONDS)
        if not done.ok:
            full = re.search("no space left on device|disk quota exceeded", done.stderr, re.IGNORECASE)
            room = f"make room where {self.name} keeps images: {self.name} system df"
            usable = system.run((self.name, "info"), timeout=_LIST_SECONDS).ok
            other = "set gpuprov_verify_image" if usable else f"{self.name} info; correct what it names"
            raise GpuprovError("the verification image can't be built", done.evidence(4), room if full else other)
        # Of an older C library.
        for old in listed:
            system.run((self.name, "rmi", old))
        return tag

    def own_images(self, system: System) -> tuple[str, ...]:
        """Return the tags of the images that verification has made, in order."""
        listing = (self.name, "images", "--format", "{{.Repository}}:{{.Tag}}", self.repository)
        listed = system.run(listing, timeout=_LIST_SECONDS)
        return tuple(sorted(listed.stdout.split())) if listed.ok else ()

    def run(
        self, system: System, image: str, command: tuple[str, ...], devices: str = NOTHING, *,
        seconds: float = CONTAINER_SECONDS, mounts: tuple[str, ...] = (), flags: tuple[str, ...] = (),
        on_line: OnLine = None,
    ) -> Completed:  # fmt: skip
        """Run a command in a container with these GPUs: ALL, an index or UUID, NOTHING, or VOID; remove it after.

        `mounts`: paths of the host that the container has too, read-only. `on_line` receives each line it prints.
        """
        container = f"{REPOSITORY}-{system.own_pid()}"
        # The image is there by now: nobody else's of the same name shall come from a registry. The image's own entry
        # point stays out: that of NVIDIA's images prints a banner.
        argv = (
            self.name, "run", "--rm", f"--name={container}", "--pull=never", "--network=none", *flags,
            *self.flags(devices), *_bind_mounts(mounts, "source", "target", "readonly"),
            "--entrypoint", command[0], image, *command[1:],
        )  # fmt: skip
        return _run(system, argv, seconds, on_line, lambda: self.remove(system, container))

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
    """containerd by its own client, ctr, as DockerLike: `runtime` in place of runc. Few hosts have what --gpus needs.

    It listens at `address`. In a namespace of containerd's of its own, beside docker's (moby) and Kubernetes' (k8s.io).
    """

    runtime: str
    address: str = ENGINES["containerd"].socket
    name: str = "containerd"
    way: str = "runtime"
    nothing: tuple[str, ...] = (VOID,)
    not_started: str = "containerd did not start it: journalctl -u containerd tells more"

    @property
    def ctr(self) -> tuple[str, ...]:
        """The client with the words that each command begins with."""
        place = () if self.address == ENGINES["containerd"].socket else ("--address", self.address)
        return ("ctr", *place, "--namespace", REPOSITORY)

    def image(self, system: System, wanted: str = "") -> str:
        listed = system.run((*self.ctr, "images", "list", "--quiet")).stdout.split()
        if wanted:
            reference = full_reference(wanted)
            pull = (*self.ctr, "images", "pull", reference)
            if reference not in listed and not (done := system.run(pull, timeout=_PULL_SECONDS)).ok:
                raise Failed(f"containerd can't pull {reference}: {telling_line(done)}; {' '.join(pull)}")
            return reference
        own = own_image(system)
        reference = full_reference(f"{REPOSITORY}:{own.tag}")
        if reference in listed:
            return reference
        archive = own.archive(reference, system.architecture())
        done = system.run((*self.ctr, "images", "import", "-"), stdin=archive, timeout=_IMPORT_SECONDS)
        done.require("containerd does not take the verification image", "systemctl status containerd", 4)
        for old in (one for one in listed if f"/{REPOSITORY}:" in one):
            system.run((*self.ctr, "images", "remove", old))
        return reference

    def run(
        self, system: System, image: str, command: tuple[str, ...], devices: str = NOTHING, *,
        seconds: float = CONTAINER_SECONDS, mounts: tuple[str, ...] = (), flags: tuple[str, ...] = (),
        on_line: OnLine = None,
    ) -> Completed:  # fmt: skip
        container = f"{REPOSITORY}-{system.own_pid()}"
        # ctr can't take a variable out of the image's environment: a GPU that is not asked for is refused.
        asked = (f"NVIDIA_VISIBLE_DEVICES={devices or VOID}", _CAPABILITIES)
        environment = [word for entry in asked for word in ("--env", entry)]
        # ctr asks for 1024 CPU shares by itself, which a host without the cpu controller can't give.
        argv = (
            *self.ctr, "run", "--rm", "--cpu-shares=0", "--runc-binary", self.runtime,
            *flags, *_bind_mounts(mounts, "src", "dst", "options=rbind:ro"), *environment, image, container, *command,
        )  # fmt: skip

        def remove() -> None:
            for words in ("tasks kill --signal SIGKILL", "tasks delete --force", "containers delete"):
                system.run((*self.ctr, *words.split(), container), timeout=CONTAINER_SECONDS)

        return _run(system, argv, seconds, on_line, remove)


def _run(
    system: System, argv: tuple[str, ...], seconds: float, on_line: OnLine, remove: Callable[[], None]
) -> Completed:
    """Run an engine's client; remove the container if the client was ended, by its time limit, Ctrl-C or a signal."""
    done = None
    try:
        done = system.run(argv, timeout=seconds, on_line=on_line)
        return done
    finally:
        if done is None or done.unanswered:
            remove()


Engine = Union[DockerLike, Containerd]


def images_left(system: System) -> dict[str, tuple[str, ...]]:
    """Return the verification images that engines have: their names with the engine's, and what removes each."""
    found: dict[str, tuple[str, ...]] = {}
    for engine in (DOCKER, PODMAN):
        if system.which(engine.name) is not None:
            removal = (engine.name, "rmi", "--force")
            found.update({f"{one} of {engine.name}": (*removal, one) for one in engine.own_images(system)})
    # Without a containerd that answers, ctr waits for one.
    if system.which("ctr") is not None and system.exists(place := socket_of(system, "containerd")):
        ctr = Containerd("", place).ctr
        listed = system.run((*ctr, "images", "list", "--quiet"), timeout=_LIST_SECONDS)
        names = [one for one in listed.stdout.split() if f"/{REPOSITORY}:" in one] if listed.ok else []
        found.update({f"{one} of containerd": (*ctr, "images", "remove", "--sync", one) for one in names})
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


@dataclass(frozen=True)
class OwnImage:
    """The image's tag and its files, path in the image → content."""

    tag: str
    files: Mapping[str, bytes]

    def root(self) -> bytes:
        """Return the root file system as a tar archive (`docker import`); same files, same bytes."""
        parents = {str(parent) for name in self.files for parent in PurePosixPath(name).parents} - {"."}
        return _tar(self.files, sorted(parents | {"tmp", "etc", "usr/bin", "usr/lib"}))

    def archive(self, reference: str, architecture: str) -> bytes:
        """Return the image with its name as `docker save` writes it, for engines that import no root file system."""
        root = self.root()
        config = {
            # Go's names (runtime.GOARCH) are Debian's.
            "architecture": DEBIAN_ARCHITECTURES.get(architecture, architecture),
            "os": "linux",
            "config": {"Env": ["PATH=/usr/bin:/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(root).hexdigest()}"]},
        }
        manifest = json.dumps([{"Config": "config.json", "RepoTags": [reference], "Layers": ["layer.tar"]}]).encode()
        return _tar({"config.json": json.dumps(config).encode(), "layer.tar": root, "manifest.json": manifest}, [])


def own_image(system: System) -> OwnImage:
    """Return the image as this host's files make it. Raises GpuprovError where that can't be done."""
    files = _files(system)
    digest = hashlib.sha256(repr([(name, hashlib.sha256(files[name]).digest()) for name in sorted(files)]).encode())
    return OwnImage(digest.hexdigest()[:16], files)


def _files(system: System) -> dict[str, bytes]:
    """Return path in the image → content: the programs, and all that their loader names."""
    files: dict[str, bytes] = {}
    programs = [path for name in _PROGRAMS if (path := system.which(name))]
    for path in programs:
        files[f"bin/{path.rpartition('/')[2]}"] = _content(system, path)
    smi = system.which("nvidia-smi")
    listed = system.run(("ldd", *programs, *((smi,) if smi else ()))).stdout
    # The driver's own come from the runtime.
    needed = {path for path in re.findall(r"=> (/\S+)", listed) if "nvidia" not in path}
    folder = next((path.rpartition("/")[0] for path in needed if path.endswith("/libc.so.6")), "")
    if not folder:
        raise GpuprovError("the host's C library was not found", f"ldd: {listed[:200]}", "set gpuprov_verify_image")
    needed |= {f"{folder}/{name}" for name in LIBRARIES if system.exists(f"{folder}/{name}")}
    # The loader's path stands in the programs themselves: without an arrow in ldd's list.
    for path in needed | set(re.findall(r"^\s+(/\S*ld-\S+) \(", listed, re.MULTILINE)):
        files[path.lstrip("/")] = _content(system, path)
    return files


def _content(system: System, path: str) -> bytes:
    content = system.read_bytes(system.real_path(path))
    if content is None:
        raise GpuprovError(f"{path} can't be read", "", "set gpuprov_verify_image")
    return content


def _tar(files: Mapping[str, bytes], folders: list[str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for folder in folders:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(files[name]), 0o755
            archive.addfile(entry, io.BytesIO(files[name]))
    return made.getvalue()


@dataclass(frozen=True)
class EngineTest:
    """An engine by one of its ways to a GPU, the image to try it with, and what the host's own nvidia-smi says."""

    system: System
    image: str
    host: SmiReport
    engine: Engine = DOCKER


def ended(test: EngineTest, done: Completed) -> str:
    """Return how a container ended, and the next step if known."""
    line = telling_line(done)
    unknown = Failure(test.engine.not_started if done.returncode == _NOT_STARTED else "")
    known = exits("container").get(done.returncode, unknown)
    hint = ": ".join(filter(None, (known.what, known.next_step)))
    if done.returncode in (126, 127) and _RUNTIME.search(line) and not _ITS_PROGRAM.search(line):
        hint = f"the OCI runtime starts no container: {test.engine.name} info names it; correct what it says"
    # docker looks for the hook of --gpus on the host.
    if f'"{posixpath.basename(NVIDIA_HOOK_PATH)}": executable file not found' in line:
        hint = "gpuprov install puts it back"
    # gpuprov's own runtime suggests the next step itself.
    if "gpuprov:" in line:
        hint = ""
    return f"the container exited {done.returncode}: {line}" + (f"; {hint}" if hint else "")
