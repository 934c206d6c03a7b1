"""The verification's tiny image, really imported into docker and run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from gpuprov.errors import GpuprovError
from gpuprov.system import System
from gpuprov.verify.image import REPOSITORY, verification_image
from tests.integration.dockerd import DockerHost, docker_host
from tests.simgpu import build_libraries

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: dockerd"),
    pytest.mark.skipif(shutil.which("dockerd") is None, reason="needs docker: apt-get install docker.io"),
]


@pytest.fixture(scope="module")
def running() -> Iterator[DockerHost]:
    with docker_host() as host:
        yield host


@pytest.fixture
def host(running: DockerHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerHost]:
    """A docker without images, to which this machine's client talks."""
    monkeypatch.setenv("DOCKER_HOST", running.socket)
    yield running
    if images := running.docker("images", "--quiet").split():
        running.docker("rmi", "--force", *images)


def run(host: DockerHost, image: str, script: str) -> str:
    return host.docker("run", "--rm", "--network=none", image, "sh", "-c", script)


def images(host: DockerHost) -> list[str]:
    return host.docker("images", "--format", "{{.Repository}}:{{.Tag}}").split()


def test_its_shell_runs(host: DockerHost) -> None:
    image = verification_image(System())
    assert image.startswith(f"{REPOSITORY}:")
    assert run(host, image, "echo $((6 * 7))") == "42"
    # The check that no GPU is seen walks over /dev and /usr/bin like this.
    listing = "for path in /dev/nvidia* /usr/bin/nvidia-smi; do [ -e $path ] && echo $path; done; :"
    assert run(host, image, listing) == ""
    assert run(host, image, "ls -d /tmp /etc /usr/lib; cat /proc/1/comm").split() == ["/etc", "/tmp", "/usr/lib", "sh"]


def test_it_has_the_libraries_that_nvidia_smi_is_linked_against(host: DockerHost) -> None:
    image = verification_image(System())
    folder = build_libraries()
    arguments = ("run", "--rm", "--network=none", "--volume", f"{folder}/nvidia-smi:/usr/bin/nvidia-smi:ro")
    done = host.run(("docker", *arguments, image, "nvidia-smi", "-L"))
    # 12: it started, and missed the driver's library alone.
    assert done.returncode == 12, done.evidence()
    assert "libnvidia-ml.so" in done.stdout


def test_it_is_made_once_and_older_ones_go(host: DockerHost) -> None:
    first = verification_image(System())
    created = host.docker("inspect", "--format", "{{.Id}}", first)
    assert verification_image(System()) == first
    assert host.docker("inspect", "--format", "{{.Id}}", first) == created
    host.docker("import", "-", f"{REPOSITORY}:of-an-older-c-library", stdin=b"\0" * 10240)
    host.docker("import", "-", "example.org/other:1", stdin=b"\0" * 10240)
    host.docker("rmi", first)
    assert verification_image(System()) == first
    assert sorted(images(host)) == sorted([first, "example.org/other:1"])


def test_a_docker_that_refuses_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(GpuprovError, match="verification image can't be built"):
        verification_image(System())
