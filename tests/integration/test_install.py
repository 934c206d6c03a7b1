"""The main job on real hosts: install, again, verify, break, fix, roll back; over SSH and on the machine itself."""

import json
import re
import shutil

import pytest

from tests import simgpu
from tests.lab import Host
from tests.lab.command_line import GPUPROV
from tests.lab.fixtures import DRIVER, Site, events, gpuprov, gpuprov_succeeds
from tests.lab.host import Snapshot, differences
from tests.lab.lab import REPOSITORY

pytestmark = [pytest.mark.lab, pytest.mark.root]
# What the host itself makes up: its own clock, its own random numbers.
VOLATILE = re.compile(r"^/etc/(machine-id|resolv\.conf|\.pwd\.lock|\.updated|docker/key\.json)$")


def etc(host: Host) -> Snapshot:
    """Return /etc, and where programs of ours would lie."""
    found = host.snapshot("/etc", "/usr/lib/gpuprov", "/usr/bin")
    return {path: value for path, value in found.items() if not VOLATILE.match(path)}


def packages(host: Host) -> str:
    return host.ssh("dpkg-query -W").stdout


def docker_start(host: Host) -> str:
    return host.ssh("systemctl show docker --property=ActiveEnterTimestampMonotonic,MainPID").stdout


@pytest.fixture(scope="module")
def installed(site: Site) -> Host:
    """A host with everything on it."""
    host = site.installed("main")
    other = "libnvidia-ml.so.535.261.03"
    shutil.copyfile(simgpu.build_libraries("535.261.03") / other, host.root / "root" / other)
    return host


def test_a_docker_of_another_unit_is_named_and_its_advice_helps(site: Site) -> None:
    """docker.service is masked: to start it would start a second dockerd."""
    host, inventory = site.fresh("main"), site.inventory("main")
    host.ssh(
        "systemctl disable --now docker.service docker.socket && sed 's/^Requires=.*//; s/-H fd:/-H unix:/' "
        "/lib/systemd/system/docker.service > /etc/systemd/system/my-docker.service && "
        "systemctl mask docker.service && systemctl enable --now my-docker.service"
    )
    refused = gpuprov("install", "--hosts", inventory)
    (step,) = re.findall(
        "next: gpuprov (runtime configure.* restart my-docker.service); gpuprov install", refused.stdout
    )
    host.ssh(f"{GPUPROV} {step}")
    gpuprov_succeeds("install", "--hosts", inventory)
    failed = gpuprov("verify", "--hosts", inventory).stdout
    assert "docker finds the --gpus hook at its start: systemctl restart my-docker.service" in failed
    host.ssh("systemctl restart my-docker.service")
    gpuprov_succeeds("verify", "--hosts", inventory)
    assert "0 changes" in gpuprov_succeeds("install", "--hosts", inventory).stdout
    told = gpuprov("doctor", "--hosts", inventory).stdout
    assert "start docker" not in told and "enable docker" not in told
    assert host.ssh("systemctl is-enabled docker.service", check=False).stdout == "masked\n"


@pytest.mark.sample
def test_verify_is_green_and_json_tells_the_same(site: Site, installed: Host) -> None:
    assert "1 host ready" in gpuprov_succeeds("verify", "--hosts", site.inventory("main")).stdout
    (image,) = installed.ssh("docker images -q gpuprov-verify").stdout.split()
    listed = installed.ssh("nvidia-smi -L").stdout
    assert listed.count("UUID: GPU-") == 2
    # The sentence of the README: docker run … nvidia-smi -L prints the host's GPUs.
    run = f"docker run --rm --runtime=nvidia -e NVIDIA_VISIBLE_DEVICES=all {image} nvidia-smi -L"
    assert installed.ssh(run).stdout == listed
    printed = gpuprov("verify", "--hosts", site.inventory("main"), "--json").stdout
    checks = [event for event in events(printed) if event.get("event") == "CheckDone"]
    assert len(checks) >= 8
    # The simulated GPUs compute nothing, and verify says so.
    others = {check["name"]: (check["status"], check["reason"]) for check in checks if check["status"] != "ok"}
    assert others == {"docker, CUDA kernel": ("skipped", "the GPUs are simulated and compute nothing")}


# Stand in for PyTorch and TensorFlow, too large for a test: they ask the same libcuda.so.1, found as any program does.
_TORCH = """
import ctypes

__version__ = "2.5.1"

class cuda:
    @staticmethod
    def device_count():
        library, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        return count.value if library.cuInit(0) == 0 and library.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0

    @staticmethod
    def is_available():
        return cuda.device_count() > 0

class version:
    cuda = "12.4"
"""
_TENSORFLOW = """
import torch

__version__ = "2.16.1"

class config:
    @staticmethod
    def list_physical_devices(kind):
        return [kind] * torch.cuda.device_count()

class sysconfig:
    @staticmethod
    def get_build_info():
        return {"cuda_version": "12.3"}

class test:
    @staticmethod
    def is_built_with_cuda():
        return True
"""


def test_images_of_the_users_own_serve_for_the_checks_torch_and_tensorflow(site: Site, installed: Host) -> None:
    """The frameworks' image is the host's own Python; the driver's libraries come from the runtime alone."""
    gpuprov_succeeds("verify", "--hosts", site.inventory("main"))
    tag = installed.ssh("docker images --format '{{.Repository}}:{{.Tag}}' gpuprov-verify").stdout.strip()
    installed.ssh(f"docker tag {tag} own-image:1")
    installed.ssh("cat > /root/torch.py", stdin=_TORCH)
    installed.ssh("cat > /root/tensorflow.py", stdin=_TENSORFLOW)
    parts = "bin lib lib64 usr/lib64 usr/bin/python3 usr/bin/python3.11 usr/lib/python3.11 usr/lib/x86_64-linux-gnu"
    installed.ssh(
        f"tar -C / --exclude='*nvidia*' --exclude='*libcuda*' -c {parts} -C /root --transform "
        "'s,^[a-z]*.py$,usr/lib/python3.11/&,' torch.py tensorflow.py | docker import - torch-like:1"
    )
    inventory = site.inventory("main", gpuprov_tensorflow_image="torch-like:1")
    words = ("verify", "--hosts", inventory, "--image", "own-image:1")
    done = gpuprov_succeeds(*words, "--torch-image", "torch-like:1")
    assert "own-image:1" in done.stdout
    assert "2 GPUs, torch 2.5.1 for CUDA 12.4" in done.stdout
    assert "2 GPUs, tensorflow 2.16.1 for CUDA 12.3" in done.stdout
    installed.ssh("tar -C /root -c torch.py | docker import - no-python:1")
    done = gpuprov(*words, "--torch-image", "no-python:1")
    assert done.returncode == 1
    assert "Python in no-python:1 exited" in done.stdout


@pytest.mark.sample
def test_a_second_run_changes_nothing_and_restarts_nothing(site: Site, installed: Host) -> None:
    before = (etc(installed), packages(installed), docker_start(installed))
    assert "0 changes" in gpuprov_succeeds("install", "--hosts", site.inventory("main")).stdout
    assert (etc(installed), packages(installed), docker_start(installed)) == before


BREAKAGES = {
    "docker stopped": ("systemctl stop docker.socket docker", "docker does not answer"),
    "runtime removed": ("echo '{}' > /etc/docker/daemon.json", "does not have runtime nvidia"),
    "device node deleted": ("rm /dev/nvidia1", "/dev/nvidia1 is missing"),
    "driver library swapped": (
        "cd /usr/lib/x86_64-linux-gnu && cp /root/libnvidia-ml.so.535.261.03 . "
        "&& ln -sf libnvidia-ml.so.535.261.03 libnvidia-ml.so.1",
        "version mismatch",
    ),
    "CDI specification spoiled": ("echo '{}' > /etc/cdi/nvidia.json", "does not describe the driver"),
    "runtime's program deleted": ("rm /usr/bin/gpuprov-container-runtime", "is missing"),
}

# Two that do not hide each other are made together.
_TOGETHER = ("device node deleted", "CDI specification spoiled")
_CASES = [
    pytest.param(_TOGETHER, marks=pytest.mark.sample),
    *((name,) for name in BREAKAGES if name not in _TOGETHER),
]


@pytest.mark.parametrize("names", _CASES, ids=", ".join)
def test_verify_fails_plainly_and_install_fixes_it(site: Site, installed: Host, names: tuple[str, ...]) -> None:
    for name in names:
        installed.ssh(BREAKAGES[name][0])
    done = gpuprov("verify", "--hosts", site.inventory("main"))
    assert done.returncode == 1, done.stdout
    assert [name for name in names if BREAKAGES[name][1] not in done.stdout] == [], done.stdout
    assert "Traceback" not in done.stdout
    gpuprov_succeeds("install", "--hosts", site.inventory("main"))
    gpuprov_succeeds("verify", "--hosts", site.inventory("main"))


# The second is refused by docker alone, at its next start: the one that runs has not read it yet.
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{\n  "log-driver": "journald",\n  "runtimes": {,}\n}\n', "line 3, column 16"),
        ('{\n  "storage-driver": "no-such-driver"\n}\n', "no-such-driver"),
    ],
    ids=["invalid JSON", "refused by docker"],
)
def test_a_daemon_json_that_fails_is_named_and_left_alone(site: Site, installed: Host, bad: str, says: str) -> None:
    path = installed.root / "etc/docker/daemon.json"
    good = path.read_text()
    path.write_text(bad)
    try:
        done = gpuprov("install", "--hosts", site.inventory("main"))
        assert done.returncode == 1
        assert says in done.stdout
        assert path.read_text() == bad
    finally:
        path.write_text(good)
        installed.ssh("systemctl reset-failed docker; systemctl restart docker")
    gpuprov_succeeds("install", "--hosts", site.inventory("main"))


def test_on_the_machine_itself_the_result_is_the_same(site: Site, installed: Host) -> None:
    over_ssh = etc(installed)
    installed.reset()
    names = ("gpuprov_driver_version", "gpuprov_driver_url", "gpuprov_driver_sha256")
    options = [f"-e {key}={site.variables[key]}" for key in names]
    more = {key: site.variables[key] for key in ("gpuprov_repositories", "gpuprov_packages")}
    command = f"{GPUPROV} install {' '.join(options)} -e '{json.dumps(more)}'"
    assert str(GPUPROV).startswith(str(REPOSITORY))
    done = installed.ssh(command, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert etc(installed) == over_ssh
    again = installed.ssh(f"{GPUPROV} verify", check=False)
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.parametrize("release", [pytest.param("bullseye", marks=pytest.mark.sample), "trixie"])
def test_check_changes_nothing_and_roll_back_gives_back_every_byte(site: Site, release: str) -> None:
    """Debian 11 has Python 3.9 and docker 20.10; Debian 13 has docker 26 and apt with sqv."""
    host, inventory = site.fresh(release), site.inventory(release)
    before = (etc(host), packages(host), docker_start(host))
    foreseen = gpuprov_succeeds("install", "--hosts", inventory, "--check", "--diff").stdout
    assert f"install NVIDIA driver {DRIVER} (libraries only)" in foreseen
    assert re.search(r'^\s*\+.*"path": "/usr/bin/gpuprov-container-runtime"', foreseen, re.MULTILINE)
    assert (etc(host), packages(host), docker_start(host)) == before
    assert not (host.root / "var/lib/gpuprov").exists()
    gpuprov_succeeds("install", "--hosts", inventory)
    assert etc(host) != before[0]
    gpuprov_succeeds("verify", "--hosts", inventory)
    assert "0 changes" in gpuprov("install", "--hosts", inventory).stdout
    gpuprov_succeeds("rollback", "--hosts", inventory)
    assert differences(before[0], etc(host)) == set()
    assert packages(host) == before[1]
