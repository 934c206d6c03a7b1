"""Each client of a container engine, on provisioned hosts of two releases: how it asks for GPUs, and what it gets.

docs/engines.md has the same as a page for users. The clients are Debian's own, unpacked: installing them with all that
they recommend would take a minute for each host.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.lab import Host
from tests.lab.fixtures import GPUPROV, Site
from tests.lab.shell import LabError
from tests.simgpu import BuildError, cache
from tests.simgpu.debian import fetch

pytestmark = [pytest.mark.lab, pytest.mark.root]

# host: (Debian release, packages with clients, and what these need that the host lacks)
_PACKAGES = {
    "main": ("bookworm", (
        "docker-compose", "python3-docker", "python3-dockerpty", "python3-docopt", "python3-dotenv", "python3-attr",
        "python3-pyrsistent", "python3-jsonschema", "python3-texttable", "python3-yaml", "python3-distro",
        "python3-certifi", "python3-charset-normalizer", "python3-idna", "python3-six", "python3-urllib3",
        "python3-pkg-resources", "python3-chardet", "python3-requests", "python3-websocket", "python3-distutils",
        "libyaml-0-2", "podman", "conmon", "buildah", "golang-github-containers-common",
        "golang-github-containers-image", "uidmap", "libsubid4", "libgpgme11", "libassuan0", "libglib2.0-0",
    )),
    "trixie": ("trixie", (
        "docker-compose", "docker-buildx", "podman", "conmon", "buildah", "golang-github-containers-common",
        "golang-github-containers-image", "uidmap", "libsubid5", "libgpgme11t64", "libassuan9", "libglib2.0-0t64",
        "libatomic1", "netavark",
    )),
}  # fmt: skip
# A C library and a shell; of the driver's nothing. The lab's machine lacks some controllers of control groups.
_PREPARE = r"""
set -e
cd / && tar -ch lib64/ld-linux-x86-64.so.2 bin/sh $(printf 'lib/x86_64-linux-gnu/%s ' \
  libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1) >/root/small.tar
docker import /root/small.tar small:1
mkdir -p /etc/containers /root/compose /root/build
printf '[containers]\npids_limit = 0\n' >/etc/containers/containers.conf
podman import --quiet /root/small.tar small:1
printf 'FROM small:1\nENV NVIDIA_VISIBLE_DEVICES=1\nRUN nvidia-smi -L\n' >/root/build/Dockerfile
docker save small:1 | ctr image import -
useradd --create-home pod
install -m 644 /root/small.tar /home/pod/
cd /root/compose
service() { printf 'version: "%s"\nservices: {one: {image: "small:1", network_mode: none, %s}}\n' "$1" "$2"; }
devices() { service 3.8 "deploy: {resources: {reservations: {devices: [{capabilities: [gpu], $1}]}}}"; }
devices 'driver: nvidia, count: all' >all.yml
devices 'driver: nvidia, count: 1' >count.yml
devices 'driver: nvidia, device_ids: ["1"]' >ids.yml
devices 'driver: cdi, device_ids: ["nvidia.com/gpu=1"]' >cdi.yml
service 3.8 'gpus: all' >gpus.yml
service 2.4 'runtime: nvidia, environment: {NVIDIA_VISIBLE_DEVICES: "1"}' >runtime.yml
"""
_SMI = "nvidia-smi -L"
_COMPOSE = f"docker-compose -f /root/compose/%s.yml run --rm -T one {_SMI}"
_PODMAN = f"podman %s run --rm --network=none %s small:1 {_SMI}"
_ROOTLESS = f"""
cd /home/pod && export XDG_RUNTIME_DIR=/tmp/pod && mkdir -p -m 700 /tmp/pod
podman="podman --storage-driver=vfs --cgroup-manager=cgroupfs"
$podman import --quiet small.tar small:1 >/dev/null
$podman run --rm --network=none --device nvidia.com/gpu=1 small:1 {_SMI}
"""
_BUILDAH = f"""
name=$(buildah from --ulimit=nofile=1000:1000 --ulimit=nproc=1000:1000 localhost/small:1)
buildah run --network=none %s "$name" {_SMI}; code=$?; buildah rm "$name" >/dev/null; exit $code
"""
# Without --cpu-shares=0, ctr asks for a controller that the lab's machine lacks.
_CTR = f"ctr run --rm --cpu-shares=0 %s docker.io/library/small:1 gpus {_SMI}"
# The clone's own Python is Debian 12's.
_FLAGS = f"{GPUPROV} docker-args --gpus 1"
_COMPOSE_FLAGS = f"""
printf 'services: {{one: {{image: "small:1", network_mode: none}}}}\n' >/root/compose/plain.yml
{_FLAGS} --format compose --service one >/root/compose/flags.yml
docker-compose -f /root/compose/plain.yml -f /root/compose/flags.yml run --rm -T one {_SMI}
"""
BOTH = ("main", "trixie")


@dataclass(frozen=True)
class Row:
    """A client's call, on which hosts it is tried, and the GPUs (by their numbers) that a container then sees.

    `fails`: it gets none, and says this; the limit is the client's.
    """

    command: str
    gpus: tuple[int, ...] = ()
    hosts: tuple[str, ...] = BOTH
    fails: str = ""


ROWS = {
    "compose, count: all": Row(_COMPOSE % "all", (0, 1)),
    "compose, count: 1": Row(_COMPOSE % "count", (0,)),
    "compose, device_ids": Row(_COMPOSE % "ids", (1,)),
    "compose, runtime: nvidia": Row(_COMPOSE % "runtime", (1,)),
    "compose 1.29, gpus: all": Row(_COMPOSE % "gpus", hosts=("main",), fails="Unsupported config option .*'gpus'"),
    # It knows no such key and says nothing: the container has no GPU.
    "compose 2.26, gpus: all": Row(_COMPOSE % "gpus", hosts=("trixie",), fails='"nvidia-smi": executable file not fo'),
    "compose, driver: cdi": Row(_COMPOSE % "cdi", hosts=("main",), fails='could not select device driver "cdi"'),
    "podman, --device": Row(_PODMAN % ("", "--device nvidia.com/gpu=all"), (0, 1)),
    "podman, --device of one": Row(_PODMAN % ("", "--device nvidia.com/gpu=1"), (1,)),
    "podman, --runtime": Row(
        _PODMAN % ("--runtime /usr/bin/gpuprov-container-runtime", "-e NVIDIA_VISIBLE_DEVICES=1"), (1,)
    ),
    "podman 4.3, --gpus": Row(
        _PODMAN % ("", "--gpus all"), hosts=("main",), fails='"nvidia-smi": executable file not found'
    ),
    "podman 5.4, --gpus all": Row(_PODMAN % ("", "--gpus all"), (0, 1), ("trixie",)),
    # The number is that of a GPU, not how many.
    "podman 5.4, --gpus 1": Row(_PODMAN % ("", "--gpus 1"), (1,), ("trixie",)),
    "podman, plain flags": Row(_PODMAN % ("--runtime runc", f"$({_FLAGS})"), (1,), ("main",)),
    "compose, plain flags": Row(_COMPOSE_FLAGS, (1,), ("main",)),
    "podman without root": Row(f"su pod -s /bin/sh -c '{_ROOTLESS}'", (1,)),
    "buildah, --runtime": Row(
        _BUILDAH % "--runtime /usr/bin/gpuprov-container-runtime --env NVIDIA_VISIBLE_DEVICES=1", (1,)
    ),
    "buildah 1.28, --device": Row(
        _BUILDAH % "--device nvidia.com/gpu=1", hosts=("main",), fails="unknown flag: --device"
    ),
    "buildah 1.39, --device": Row(
        _BUILDAH % "--device nvidia.com/gpu=1", hosts=("trixie",), fails="device access at .* field cannot be empty"
    ),
    "ctr, --runc-binary": Row(
        _CTR % "--runc-binary /usr/bin/gpuprov-container-runtime --env NVIDIA_VISIBLE_DEVICES=1", (1,)
    ),
    "ctr, --gpus": Row(_CTR % "--gpus 0", fails='"nvidia-container-cli": executable file not found'),
    "ctr, --device": Row(_CTR % "--device nvidia.com/gpu=1", fails="stat nvidia.com/gpu=1: no such file"),
}
CASES = [(host, name) for host in BOTH for name, row in ROWS.items() if host in row.hosts]


@pytest.fixture(scope="module")
def prepared(site: Site) -> Callable[[str], Host]:
    """Return a function that gives a provisioned host with its clients and an image for them: once for all tests."""

    @functools.cache
    def prepare(name: str) -> Host:
        found = site.installed(name)
        unpack(found, *_PACKAGES[name])
        found.ssh("sh -s", stdin=_PREPARE)
        return found

    return prepare


def unpack(host: Host, release: str, packages: tuple[str, ...]) -> None:
    """Unpack packages over a host's files: their scripts do not run, and what they depend on is not looked for."""
    folder = cache.built(
        "clients", f"{host.name}-{cache.digest_of((release, *packages))}",
        lambda place: fetch(place, release, "main", packages),
    )  # fmt: skip
    copy = 'tar -C "$1" -c . | tar -C "$2" -x --keep-directory-symlink'
    subprocess.run(("sh", "-c", copy, "sh", f"{folder}/unpacked", str(host.root)), check=True)
    host.ssh("ldconfig")


def gpus(text: str) -> list[str]:
    """Return the UUIDs in what `nvidia-smi -L` printed, in their order."""
    return re.findall(r"UUID: (GPU-[0-9a-f-]+)", text)


@pytest.mark.parametrize(("name", "client"), CASES)
def test_what_a_client_gets(prepared: Callable[[str], Host], name: str, client: str) -> None:
    host, row = prepared(name), ROWS[client]
    done = host.ssh(row.command, check=False)
    said = done.stdout + done.stderr
    known = gpus(host.ssh(_SMI).stdout)
    assert gpus(said) == [known[number] for number in row.gpus], said
    if row.fails:
        assert done.returncode != 0
        assert re.search(row.fails, said), said
    else:
        assert done.returncode == 0, said


# -- docker's daemon, told more ----------------------------------------------------------------------------------

_DAEMON = "/etc/docker/daemon.json"
_RESTART = "systemctl reset-failed docker; systemctl restart docker"
_SETTINGS = "/etc/gpuprov/container-runtime.toml"
_SERVICE = f"""
set -e
docker swarm init --advertise-addr 127.0.0.1 >/dev/null
docker service create --quiet --name one --restart-condition none --detach --network host --generic-resource gpu=1 \
  small:1 {_SMI} >/dev/null 2>&1
state() {{ docker service ps one --format '{{{{.CurrentState}}}}'; }}
until state | grep -Eq '^(Complete|Failed|Rejected)'; do sleep 0.2; done
docker service ps one --no-trunc --format '{{{{.CurrentState}}}} {{{{.Error}}}}' >&2
docker service logs --raw one
"""


@pytest.fixture(params=BOTH)
def default_runtime(request: pytest.FixtureRequest, prepared: Callable[[str], Host]) -> Iterator[Host]:
    """A host whose docker starts everything with the runtime, and which offers GPUs to swarm."""
    host = prepared(request.param)
    daemon = host.ssh(f"cat {_DAEMON}").stdout
    offered = ", ".join(f'"gpu={uuid}"' for uuid in gpus(host.ssh(_SMI).stdout))
    more = f'{{"default-runtime": "nvidia", "node-generic-resources": [{offered}],'
    host.ssh(f"cat > {_DAEMON}", stdin=more + daemon.strip()[1:])
    host.ssh(f"mkdir -p /etc/gpuprov && cat > {_SETTINGS}", stdin='swarm-resource = "DOCKER_RESOURCE_GPU"\n')
    host.ssh(_RESTART)
    yield host
    host.ssh(f"cat > {_DAEMON}", stdin=daemon)
    host.ssh(f"rm {_SETTINGS}; docker swarm leave --force; {_RESTART}", check=False)


def test_builds_services_and_cdi_with_the_runtime_as_the_default(default_runtime: Host) -> None:
    host = default_runtime
    known = gpus(host.ssh(_SMI).stdout)
    build = "docker build --no-cache --network=none /root/build"
    assert gpus(host.ssh(f"DOCKER_BUILDKIT=0 {build}").stdout) == known[1:]
    # BuildKit runs runc itself, and not docker's runtimes.
    done = host.ssh(f"DOCKER_BUILDKIT=1 {build} --progress=plain", check=False)
    assert done.returncode != 0
    assert "nvidia-smi: not found" in done.stdout + done.stderr
    done = host.ssh("sh -s", stdin=_SERVICE)
    (given,) = gpus(done.stdout)
    assert given in known, done.stderr
    if host.name == "trixie":
        assert gpus(host.ssh(_COMPOSE % "cdi").stdout) == known[1:]


def test_apptainer_without_root(prepared: Callable[[str], Host]) -> None:
    """apptainer finds the driver itself, by the host's ldconfig, and always gives all GPUs."""
    host = prepared("trixie")
    try:
        unpack(host, "sid", ("apptainer",))
        host.ssh("apptainer --version")
    except (BuildError, LabError) as error:  # it moves, and may need a newer C library one day
        pytest.skip(f"Debian sid's apptainer does not run on Debian 13: {error}")
    host.ssh("docker save small:1 > /home/pod/image.tar && chmod 644 /home/pod/image.tar")
    run = "su pod -c 'cd && {} apptainer exec {} box nvidia-smi -L'"
    host.ssh("su pod -c 'cd && apptainer build --sandbox box docker-archive:image.tar'")
    known = gpus(host.ssh(_SMI).stdout)
    for variable in ("", "NVIDIA_VISIBLE_DEVICES=1"):
        assert gpus(host.ssh(run.format(variable, "--nv")).stdout) == known
    done = host.ssh(run.format("", "--nv --nvccli"), check=False)
    assert done.returncode != 0
    assert '"nvidia-container-cli": executable file not found' in done.stderr
