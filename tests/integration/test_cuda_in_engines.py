"""`gpuprov cuda IMAGE|CONTAINER` with the real docker and podman: how they are read, and what is left of that."""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuprov.checks.cuda import survey
from gpuprov.checks.cuda.files import add_driver, chain, unpacked
from gpuprov.checks.cuda.search import Program
from gpuprov.checks.cuda.survey import Subject, survey_of
from gpuprov.core.system import System
from gpuprov.doctor import gather
from gpuprov.doctor.gather import gather_containers
from gpuprov.runtime_hook.rootfs import Root
from gpuprov.runtime_hook.settings import Settings
from tests.integration.container_bench import LIBRARIES, Bench
from tests.integration.dockerd import DockerHost, docker_host
from tests.integration.test_libcuda_loader import make_root
from tests.lab.shell import wait_for

pytestmark = [pytest.mark.root, pytest.mark.slow]
OWN = "/opt/own/libcuda.so.535.261.03"
GPUPROV = (sys.executable, "-m", "gpuprov", "cuda")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `root`, an image's files with a libcuda of the image's own, and `library`, another libcuda."""
    folder = tmp_path_factory.mktemp("cuda-engines")
    content = make_root(folder)
    place = folder / f"root{OWN}"
    place.parent.mkdir(parents=True)
    place.write_bytes(content)
    (place.parent / "libcuda.so.1").symlink_to(place.name)
    return folder


@pytest.fixture(scope="module")
def docker(made: Path) -> Iterator[DockerHost]:
    with docker_host() as host:
        packed = subprocess.run(("tar", "-C", str(made / "root"), "-c", "."), capture_output=True, check=True).stdout
        host.docker("import", "--change", "ENV LD_LIBRARY_PATH=/opt/own", "--change", "ENV CUDA_VERSION=12.4.1", "-",
                    "app", stdin=packed)  # fmt: skip
        yield host


def asked(docker: DockerHost, *words: str) -> tuple[int, dict[str, Any], str]:
    environment = {**os.environ, "DOCKER_HOST": docker.socket}
    done = subprocess.run((*GPUPROV, "--json", *words), capture_output=True, text=True, check=False, env=environment)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def winner(found: dict[str, Any]) -> str:
    one = found["libraries"][0]["winner"]
    return str(one["chain"][-1]) if one else ""


def test_an_image_is_read_and_nothing_is_left(docker: DockerHost) -> None:
    _, found, errors = asked(docker, "app")
    assert errors == ""
    assert (found["kind"], winner(found)) == ("image", OWN)
    assert found["libraries"][0]["winner"]["reason"] == "LD_LIBRARY_PATH has /opt/own"
    assert found["read"].startswith("docker export of a container that was never started")
    assert {"version": "12.4", "source": "the variable CUDA_VERSION (12.4.1)"} in found["cuda"]
    assert docker.docker("ps", "--all", "--quiet") == ""
    _, found, _ = asked(docker, "app", "--env", "LD_LIBRARY_PATH=")
    assert winner(found) == ""
    _, found, _ = asked(docker, "app", "--env", "LD_LIBRARY_PATH=", "--env", "LD_PRELOAD=/opt/own/libcuda.so.1")
    assert winner(found) == OWN


def test_running_container_is_read_with_mounts_and_environment(docker: DockerHost, made: Path) -> None:
    volume = f"--volume={made}/library:/usr/lib/libcuda.so.550.163.01:ro"
    link = "ln -s libcuda.so.550.163.01 /usr/lib/libcuda.so.1"
    # The entry point unsets what the image sets.
    start = "unset LD_LIBRARY_PATH; exec sleep 1000"
    identifier = docker.docker("run", "--detach", "--network=none", volume, "--name=trainer", "app", "sh", "-c", start)
    subprocess.run((*_docker(docker), "exec", "trainer", "/bin/busybox", *link.split()), check=True)
    try:
        for name in ("trainer", identifier):
            _, found, errors = asked(docker, name)
            assert errors == ""
            assert (found["kind"], winner(found)) == ("container", "/usr/lib/libcuda.so.550.163.01")
            assert "/proc/" in found["read"]
            assert found["libraries"][0]["winner"]["version"] == "550.163.01"
        docker.docker("stop", "--time=0", "trainer")
        _, found, errors = asked(docker, "trainer")
        assert (found["kind"], errors) == ("container", "")
        assert found["read"].startswith("docker export, ")
    finally:
        docker.docker("rm", "--force", "trainer")


def test_doctor_examines_only_containers_with_driver_nodes(docker: DockerHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver on this machine no version is wrong, but a file that is no library is."""
    node = "busybox mknod /dev/nvidiactl c 195 255;"
    emptied = "busybox cp /dev/null /opt/own/libcuda.so.1;"
    starts = {"sound": node, "emptied": emptied + node, "without": emptied, "third": node}
    for name, start in starts.items():
        docker.docker("run", "--detach", "--network=none", f"--name={name}", "app", "sh", "-c", f"{start} sleep 1000")
    monkeypatch.setenv("DOCKER_HOST", docker.socket)
    monkeypatch.setattr(survey, "unpack", None)  # nothing is exported
    try:
        for name, start in starts.items():
            ready = "busybox test -e /dev/nvidiactl" if node in start else "busybox test ! -s /opt/own/libcuda.so.1"
            wait_for(name, functools.partial(_says, docker, name, ready))
        found = gather_containers(System("/"))
        assert (found.left, found.why) == (0, "")
        faults = {one.name: [fault.what for fault in one.findings] for one in found.examined}
        assert faults == {
            "sound": [], "third": [], "emptied": ["the loader stops at /opt/own/libcuda.so.1: file too short"]
        }  # fmt: skip
        monkeypatch.setattr(gather, "MOST_CONTAINERS", 2)
        limited = gather_containers(System("/"))
        assert (len(limited.examined), limited.left, limited.why) == (2, 1, "2 are looked at")
        monkeypatch.setattr(gather, "CONTAINERS_SECONDS", 0)
        assert "not done after" in gather_containers(System("/")).why
    finally:
        docker.docker("rm", "--force", *starts)


def _says(docker: DockerHost, name: str, question: str) -> bool:
    return subprocess.run((*_docker(docker), "exec", name, *question.split()), check=False).returncode == 0


def test_a_name_that_nobody_knows_is_a_wrong_call(docker: DockerHost) -> None:
    code, _, errors = asked(docker, "no-such-thing")
    assert code == 2
    assert errors.startswith("there is no container or image no-such-thing on this host\n  seen: ")


def _docker(docker: DockerHost) -> tuple[str, ...]:
    return ("docker", "--host", docker.socket)


@pytest.mark.needs("podman")
def test_podmans_images_are_read_too(made: Path) -> None:
    script = """
    mount --bind "$1" /var/lib/containers && mount -t tmpfs tmpfs /run/containers 2>/dev/null
    tar -C "$2" -c . | podman import --quiet --change 'ENV LD_LIBRARY_PATH=/opt/own' - app >&2 || exit
    shift 2 && "$@"; podman ps --all --quiet >&2; umount /var/lib/containers/storage/overlay 2>/dev/null
    """
    Path("/var/lib/containers").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpuprov-") as folder:
        argv = ("unshare", "--mount", "sh", "-c", script, "sh", folder, f"{made}/root", *GPUPROV, "--json", "app")
        environment = {**os.environ, "DOCKER_HOST": "unix:///nowhere"}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=environment)
    found = json.loads(done.stdout or "{}")
    assert found, done.stderr
    assert (found["kind"], winner(found)) == ("image", OWN)
    assert found["read"].startswith("podman export of a container that was never started")


def test_what_the_runtime_adds_is_what_a_container_then_has(tmp_path: Path) -> None:
    """The forecast for an image, against the same image's root after the real runtime and runc had it."""
    bench = Bench(tmp_path, "runc")
    (tmp_path / "made").mkdir()
    make_root(tmp_path / "made")
    shutil.copytree(tmp_path / "made/root/lib64", bench.root / "lib64", dirs_exist_ok=True)
    forecast_root = tmp_path / "forecast"
    shutil.copytree(bench.root, forecast_root, symlinks=True)
    settings = Settings({"nvidia-container-runtime.modes.cdi.spec-dirs": [str(bench.deployed.specifications)]})
    with contextlib.closing(unpacked(str(forecast_root))) as before:
        assert "driver 550.163.01" in add_driver(before, settings)
        forecast = survey_of(Subject("image", "app", before, Program(), "test"), "")
        linked = chain(before, f"{LIBRARIES}/libcuda.so")
    bench.report("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    with contextlib.closing(Root(str(bench.root))) as after:
        seen = survey_of(Subject("image", "app", after, Program(), "test"), "")
    cache = "etc/ld.so.cache"
    assert (forecast_root / cache).read_bytes() == (bench.root / cache).read_bytes()
    for one, other in zip(forecast.libraries, seen.libraries):
        # The mounts are gone with the container; links, and what the cache says, stay.
        assert one.winner is not None
        assert one.winner.path == f"{LIBRARIES}/{one.name}"
        assert one.winner.reason.startswith("the loader's cache")
        assert one.winner.version == "550.163.01"
        assert other.winner is None or other.winner.path == one.winner.path
    assert linked == tuple(f"{LIBRARIES}/{name}" for name in ("libcuda.so", "libcuda.so.1", "libcuda.so.550.163.01"))
