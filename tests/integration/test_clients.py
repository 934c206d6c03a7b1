"""Each client of a container engine, on provisioned hosts of three releases: how it asks for GPUs, and what it gets.

docs/engines.md has the same as a page for users. The clients are Debian's own. A stable release's are unpacked, since
installing them would take a minute for each host; what unstable's need changes too often for that.
"""

import functools
import re
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import simgpu
from tests.integration import docker29
from tests.integration.doctor_typing import SLEEPER
from tests.lab import Host
from tests.lab.base import build_base
from tests.lab.drivers import change_kernel_side
from tests.lab.fixtures import DRIVER, Site, gpuprov, gpuprov_succeeds
from tests.lab.lab import CACHE, REPOSITORY
from tests.lab.shell import LabError
from tests.simgpu import cache
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
_AS_DEBIAN_13 = "printf 'ID=debian\\nVERSION_ID=13\\nVERSION_CODENAME=trixie\\nPRETTY_NAME=sid\\n' > /etc/os-release"
_INSTALL_ON_SID = (
    "apt-get -q update; DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "
    "docker-compose docker-buildx podman crun buildah uidmap apptainer"
)
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
_CTR = f"ctr run --rm --cpu-shares=0 %s docker.io/library/small:1 gpus-$$ {_SMI}"
# The clone's own Python is Debian 12's: each host runs what it has installed with its own.
_GPUPROV = f"env PYTHONPATH={sysconfig.get_path('purelib')}:{REPOSITORY} python3 -m gpuprov"
_FLAGS = f"{_GPUPROV} docker-args --gpus 1"
_COMPOSE_FLAGS = f"""
printf 'services: {{one: {{image: "small:1", network_mode: none}}}}\n' >/root/compose/plain.yml
{_FLAGS} --format compose --service one >/root/compose/flags.yml
docker-compose -f /root/compose/plain.yml -f /root/compose/flags.yml run --rm -T one {_SMI}
"""
HOSTS = ("main", "trixie", "sid")
NEWER = ("trixie", "sid")


@dataclass(frozen=True)
class Row:
    """A client's call, on which hosts it is tried, and the GPUs (by their numbers) that a container then sees.

    `fails`: it gets none, and says this; the limit is the client's.
    """

    command: str
    gpus: tuple[int, ...] = ()
    hosts: tuple[str, ...] = HOSTS
    fails: str = ""


_DOCKER = f"docker run --rm --network=none %s small:1 {_SMI}"
SID = ("sid",)
ROWS = {
    # What older releases do with these, test_docker.py and test_engines.py say.
    "docker, --gpus all": Row(_DOCKER % "--gpus all", (0, 1), SID),
    "docker, --gpus 1": Row(_DOCKER % "--gpus 1", (0,), SID),
    "docker, --gpus of one": Row(_DOCKER % "--gpus '\"device=1\"'", (1,), SID),
    "docker, --runtime": Row(_DOCKER % "--runtime=nvidia -e NVIDIA_VISIBLE_DEVICES=1", (1,), SID),
    "docker, --device": Row(_DOCKER % "--device nvidia.com/gpu=all", (0, 1), SID),
    "nvidia-docker": Row(f"NV_GPU=1 nvidia-docker run --rm --network=none small:1 {_SMI}", (1,), SID),
    "docker, plain flags": Row(_DOCKER % f"$({_FLAGS})", (1,), SID),
    "compose, count: all": Row(_COMPOSE % "all", (0, 1)),
    "compose, count: 1": Row(_COMPOSE % "count", (0,)),
    "compose, device_ids": Row(_COMPOSE % "ids", (1,)),
    "compose, runtime: nvidia": Row(_COMPOSE % "runtime", (1,)),
    "compose 1.29, gpus: all": Row(_COMPOSE % "gpus", hosts=("main",), fails="Unsupported config option .*'gpus'"),
    # It knows no such key and says nothing: the container has no GPU.
    "compose 2.26, gpus: all": Row(_COMPOSE % "gpus", hosts=("trixie",), fails='"nvidia-smi": executable file not fo'),
    "compose 2.40, gpus: all": Row(_COMPOSE % "gpus", (0, 1), ("sid",)),
    # docker 28.2 and later read specifications by default.
    "compose 2.40, driver: cdi": Row(_COMPOSE % "cdi", (1,), ("sid",)),
    "compose, driver: cdi": Row(_COMPOSE % "cdi", hosts=("main",), fails='could not select device driver "cdi"'),
    "podman, --device": Row(_PODMAN % ("", "--device nvidia.com/gpu=all"), (0, 1)),
    "podman, --device of one": Row(_PODMAN % ("", "--device nvidia.com/gpu=1"), (1,)),
    "podman, --runtime": Row(
        _PODMAN % ("--runtime /usr/bin/gpuprov-container-runtime", "-e NVIDIA_VISIBLE_DEVICES=1"), (1,)
    ),
    "podman 4.3, --gpus": Row(
        _PODMAN % ("", "--gpus all"), hosts=("main",), fails='"nvidia-smi": executable file not found'
    ),
    "podman 5, --gpus all": Row(_PODMAN % ("", "--gpus all"), (0, 1), NEWER),
    # The number is that of a GPU, not how many.
    "podman 5, --gpus 1": Row(_PODMAN % ("", "--gpus 1"), (1,), NEWER),
    "podman, plain flags": Row(_PODMAN % ("--runtime runc", f"$({_FLAGS})"), (1,), ("main", "sid")),
    "compose, plain flags": Row(_COMPOSE_FLAGS, (1,), ("main", "sid")),
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
    "buildah 1.43, --device": Row(_BUILDAH % "--device nvidia.com/gpu=1", (1,), ("sid",)),
    "ctr, --runc-binary": Row(
        _CTR % "--runc-binary /usr/bin/gpuprov-container-runtime --env NVIDIA_VISIBLE_DEVICES=1", (1,)
    ),
    "ctr, --gpus": Row(_CTR % "--gpus 0", fails='"nvidia-container-cli": executable file not found'),
    "ctr 1, --device": Row(
        _CTR % "--device nvidia.com/gpu=1", hosts=("main", "trixie"), fails="stat nvidia.com/gpu=1: no such file"
    ),
    "ctr 2, --device": Row(_CTR % "--device nvidia.com/gpu=1", (1,), SID),
}
CASES = [(host, name) for host in HOSTS for name, row in ROWS.items() if host in row.hosts]


@pytest.fixture(scope="module")
def prepared(site: Site) -> Callable[[str], Host]:
    """Return a function that gives a provisioned host with its clients and an image for them: once for all tests."""

    @functools.cache
    def prepare(name: str) -> Host:
        if name == "sid":
            found = _sid(site)
        else:
            found = site.installed(name)
            unpack(found, *_PACKAGES[name])
        found.ssh("sh -s", stdin=_PREPARE)
        return found

    return prepare


def fresh_sid(site: Site) -> Host:
    """Return a host of unstable; skip where that can't be installed today.

    It takes itself for Debian 13: gpuprov refuses releases that are not out.
    """
    try:
        build_base(CACHE / "bases", "sid", print)
    except LabError as error:
        pytest.skip(f"Debian sid can't be installed: {error}")
    host = site.fresh("sid")
    host.ssh(_AS_DEBIAN_13)
    return host


def _sid(site: Site) -> Host:
    host = fresh_sid(site)
    host.ssh(_INSTALL_ON_SID, timeout=300)
    gpuprov_succeeds("install", "--hosts", site.inventory("sid", gpuprov_nvidia_docker=True))
    return host


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


@pytest.fixture(params=HOSTS)
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
    if host.name != "main":
        assert gpus(host.ssh(_COMPOSE % "cdi").stdout) == known[1:]


def test_apptainer_without_root(prepared: Callable[[str], Host]) -> None:
    """apptainer finds the driver itself, by the host's ldconfig, and always gives all GPUs."""
    host = prepared("sid")
    host.ssh("docker save small:1 > /home/pod/image.tar && chmod 644 /home/pod/image.tar")
    run = "su pod -c 'cd && {} apptainer exec {} box nvidia-smi -L'"
    host.ssh("su pod -c 'cd && apptainer build --sandbox box docker-archive:image.tar'")
    known = gpus(host.ssh(_SMI).stdout)
    for variable in ("", "NVIDIA_VISIBLE_DEVICES=1"):
        assert gpus(host.ssh(run.format(variable, "--nv")).stdout) == known
    done = host.ssh(run.format("", "--nv --nvccli"), check=False)
    assert done.returncode != 0
    assert '"nvidia-container-cli": executable file not found' in done.stderr


# -- docker 29, by a stand-in ---------------------------------------------------------------------------------------

_SMALL = ("small:1", *_SMI.split())
_OUTDATED = "/var/run/cdi/nvidia.yaml"


def test_docker_29_gives_by_cdi_the_gpus_that_the_hook_gives(prepared: Callable[[str], Host]) -> None:
    host = prepared("sid")
    known = gpus(host.ssh(_SMI).stdout)
    asked = {"all": known, "1": known[:1], "2": known, "device=1": known[1:], f"device={known[0]}": known[:1]}
    for value, expected in asked.items():
        for run in (docker29.run, docker29.by_hook):
            done = run(host, value, *_SMALL)
            assert (done.returncode, gpus(done.stdout)) == (0, expected), f"{value}: {done.stderr}"
    # Which of the two it was: nvidia-container-toolkit's own mark.
    image = ("-e", "NVIDIA_VISIBLE_DEVICES=all", "small:1", "sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES")
    assert docker29.run(host, "device=1", *image).stdout == "void\n"
    # What neither has is the hook's to refuse.
    done = docker29.run(host, "device=7", *_SMALL)
    assert done.returncode != 0 and "gpuprov: " in done.stderr, done.stderr


def test_docker_29_cdi_ignores_requirements_capabilities_settings(prepared: Callable[[str], Host]) -> None:
    host = prepared("sid")
    # `utility` is what has nvidia-smi.
    refused = {
        "requirement": ("-e", "NVIDIA_REQUIRE_CUDA=cuda>=99"),
        "capability": ("-e", "NVIDIA_DRIVER_CAPABILITIES=compute"),
        "setting": (),
    }
    for name, words in refused.items():
        if name == "setting":
            host.ssh(f"mkdir -p /etc/gpuprov && cat > {_SETTINGS}", stdin='supported-driver-capabilities = "compute"\n')
        by_cdi, by_hook = (run(host, "all", *words, *_SMALL) for run in (docker29.run, docker29.by_hook))
        host.ssh(f"rm -f {_SETTINGS}")
        assert (by_cdi.returncode, len(gpus(by_cdi.stdout))) == (0, 2), f"{name}: {by_cdi.stderr}"
        assert by_hook.returncode != 0 and not gpus(by_hook.stdout), f"{name}: {by_hook.stdout}"


def test_docker_29_gives_mig_devices_and_doctor_names_faults(prepared: Callable[[str], Host], site: Site) -> None:
    host = prepared("sid")
    before = host.ssh("cat /etc/cdi/nvidia.json").stdout
    host.ssh(SLEEPER)
    host.ssh(
        "docker run --detach --restart=always --network=none --device nvidia.com/gpu=all --name kept sleeper:1 "
        "/bin/sleep 9999"
    )
    change_kernel_side(host, DRIVER, divided=(1,))
    host.power_cycle()
    # What had its GPUs by CDI has them again, as the boot found them (docker before 28.2: moby, 49989).
    caps = host.ssh("ls /proc/$(docker inspect --format '{{.State.Pid}}' kept)/root/dev/nvidia-caps").stdout.split()
    assert sorted(caps) == sorted(Path(node.path).name for node in simgpu.mig_nodes(1))
    parts = [simgpu.mig_uuid(1, instance) for instance in (1, 2)]
    for value, expected in {"device=1:0": parts[:1], f"device={parts[1]}": parts[1:], "all": parts}.items():
        for run in (docker29.run, docker29.by_hook):
            done = run(host, value, *_SMALL)
            assert re.findall(r"MIG-[0-9a-f-]+", done.stdout) == expected, f"{run.__name__} {value}: {done}"
    host.ssh(f"mkdir -p /var/run/cdi && cat > {_OUTDATED}", stdin=before)
    assert "MIG-" not in docker29.run(host, "all", *_SMALL).stdout
    assert parts[0] in docker29.by_hook(host, "all", *_SMALL).stdout
    found = gpuprov("doctor", "--hosts", site.inventory("sid", gpuprov_nvidia_docker=True)).stdout
    assert f"{_OUTDATED} overrides /etc/cdi/nvidia.json and lacks the GPUs 1:0, 1:1" in found, found
    host.ssh(f"rm {_OUTDATED}")
    assert parts[0] in docker29.run(host, "all", *_SMALL).stdout
