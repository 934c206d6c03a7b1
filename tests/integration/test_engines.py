"""Engines as they are: docker's --gpus on this machine's cgroups, podman's --device by the CDI specification."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.container_bench import LIBRARIES, REPORT, Bench, nodes, require_all_gpus
from tests.integration.dockerd import DockerHost, docker_host
from tests.integration.podman_store import CONFIGURATION, run_report
from tests.integration.test_hostile_roots import state

pytestmark = pytest.mark.root
# In a mount namespace of its own, with an /etc of its own, whose layers lie in $1; $2 stands for /etc/cdi.
_WITH_CDI = """
mkdir "$1/upper" "$1/work" && mount -t overlay -o "lowerdir=/etc,upperdir=$1/upper,workdir=$1/work" gpuprov-etc /etc
mkdir -p /etc/cdi && mount --bind "$2" /etc/cdi && shift 2 && exec "$@"
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(tmp_path_factory.mktemp("bench"), "runc")


@pytest.fixture(scope="module")
def docker(bench: Bench) -> Iterator[DockerHost]:
    """A dockerd that found our hook on its PATH, with an image of the bundle's root."""
    with docker_host(started=False) as host:
        programs = host.folder / "programs"
        programs.mkdir()
        (programs / "nvidia-container-runtime-hook").symlink_to(bench.deployed.hook)
        host.search_path = f"{programs}:{os.environ['PATH']}"
        assert host.start()
        root = subprocess.run(("tar", "-C", str(bench.root), "-c", "."), capture_output=True, check=True).stdout
        host.docker("import", "-", "busybox-gpu", stdin=root)
        yield host


def run(docker: DockerHost, *words: str, image: str = "busybox-gpu") -> tuple[int, list[str], str]:
    """Run the report in a container; return its exit code, lines, and what docker complained of."""
    done = docker.run(("docker", "run", "--rm", "--network=none", *words, image, "sh", "-c", f"{REPORT}\n:"))
    return done.returncode, done.stdout.splitlines(), done.stderr


def paths(report: list[str]) -> list[str]:
    return [line.split()[1] for line in nodes(report)]


def test_gpus_all(docker: DockerHost) -> None:
    code, report, errors = run(docker, "--gpus", "all")
    assert code == 0, errors
    require_all_gpus(report)


@pytest.mark.parametrize(
    ("flag", "devices"),
    [
        ("1", ["/dev/nvidia0"]),
        ("2", ["/dev/nvidia0", "/dev/nvidia1"]),
        ('"device=1"', ["/dev/nvidia1"]),
        ('"device=GPU-1,GPU-0"', ["/dev/nvidia0", "/dev/nvidia1"]),
    ],
)
def test_gpus_by_number_and_by_name(docker: DockerHost, flag: str, devices: list[str]) -> None:
    code, report, errors = run(docker, "--gpus", flag)
    assert (code, paths(report)) == (0, [*devices, "/dev/nvidiactl"]), errors


def test_gpus_with_driver_capabilities_bring_their_files_alone(docker: DockerHost) -> None:
    code, report, errors = run(docker, "--gpus", '"capabilities=utility"')
    assert code == 0, errors
    assert "file /usr/bin/nvidia-smi smi" in report
    assert not [line for line in report if "libcuda" in line]


@pytest.fixture
def hosts_files(tmp_path: Path) -> Path:
    """What stands for the host's root; the engine's own files of /etc are there too."""
    folder = tmp_path / "host"
    for place in ("etc", "usr/bin", LIBRARIES[1:]):
        (folder / place).mkdir(parents=True)
    for name in ("hosts", "hostname", "resolv.conf", "mtab", "ld.so.cache"):
        (folder / "etc" / name).write_text("the host's")
    return folder


def image_root(bench: Bench, folder: Path, place: str, target: str) -> Path:
    """Return a copy of the bundle's root in which a link stands at a place."""
    root = folder / "image"
    shutil.copytree(bench.root, root, symlinks=True)
    shutil.rmtree(root / place, ignore_errors=True)
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / place).symlink_to(target)
    return root


@pytest.mark.parametrize("place", ["usr/bin", LIBRARIES[1:]])
@pytest.mark.parametrize("access", ["ro", "rw"])
def test_an_images_link_into_a_volume_writes_nothing_on_the_host(
    bench: Bench, docker: DockerHost, hosts_files: Path, tmp_path: Path, place: str, access: str
) -> None:
    root = image_root(bench, tmp_path, place, f"/rootfs/{place}")
    content = subprocess.run(("tar", "-C", str(root), "-c", "."), capture_output=True, check=True).stdout
    docker.docker("import", "-", "hostile-gpu", stdin=content)
    before = state(hosts_files)
    code, _, errors = run(docker, "--gpus", "all", "-v", f"{hosts_files}:/rootfs:{access}", image="hostile-gpu")
    assert state(hosts_files) == before
    assert "in the volume at /rootfs, and nothing is written into volumes" in errors
    assert code == 125


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpus", '"device=7"'), "gpuprov: there is no GPU '7' on this host; its GPUs: 0, 1"),
        (("--gpus", '"device=1,capabilities=video"'), "there is no GPU 'capabilities=video'"),
    ],
)
def test_docker_error_names_request_and_devices(docker: DockerHost, words: tuple[str, ...], says: str) -> None:
    code, _, errors = run(docker, *words)
    assert code == 125
    assert says in errors
    assert "Traceback" not in errors


@pytest.mark.needs("podman")
def test_podman_takes_devices_by_the_specification(bench: Bench, tmp_path: Path) -> None:
    configuration = tmp_path / "containers.conf"
    configuration.write_text(CONFIGURATION)
    (tmp_path / "etc").mkdir()
    private = ("unshare", "-m", "sh", "-ec", _WITH_CDI, "sh", f"{tmp_path}/etc", str(bench.deployed.specifications))
    device = "--device=nvidia.com/gpu=1"
    done = run_report(bench.root, configuration, device, podman=("--runtime=runc",), before=private)
    assert done.returncode == 0, done.stderr
    report = done.stdout.splitlines()
    assert paths(report) == ["/dev/nvidia1", "/dev/nvidiactl"]
    # The links come from the specification's own hook.
    assert f"file {LIBRARIES}/libcuda.so.1 cuda" in report
