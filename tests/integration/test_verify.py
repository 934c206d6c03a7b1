"""The verification's tiny image, really imported into docker and run."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuprov.checks import engine_checks
from gpuprov.checks.engines import DOCKER, REPOSITORY, EngineTest
from gpuprov.checks.outcome import Failed
from gpuprov.checks.smi import SmiReport
from gpuprov.core.commands import TIMED_OUT
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError
from tests.clock import clock_of
from tests.integration.dockerd import DockerHost, docker_host
from tests.lab.shell import wait_for
from tests.simgpu import build_libraries

pytestmark = [pytest.mark.root, pytest.mark.needs("dockerd")]


@pytest.fixture(scope="module")
def running() -> Iterator[DockerHost]:
    with docker_host(started=False) as host:
        # The checks ask for the runtime by its name; which devices it would bring is tried elsewhere.
        host.daemon_json.write_text('{"runtimes": {"nvidia": {"path": "runc"}}}')
        assert host.start()
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
    image = DOCKER.image(System())
    assert image.startswith(f"{REPOSITORY}:")
    assert run(host, image, "echo $((6 * 7))") == "42"
    # The check that no GPU is seen walks over /dev and /usr/bin like this.
    listing = "for path in /dev/nvidia* /usr/bin/nvidia-smi; do [ -e $path ] && echo $path; done; :"
    assert run(host, image, listing) == ""
    assert run(host, image, "ls -d /tmp /etc /usr/lib; cat /proc/1/comm").split() == ["/etc", "/tmp", "/usr/lib", "sh"]


def test_it_has_the_libraries_that_nvidia_smi_is_linked_against(host: DockerHost) -> None:
    image = DOCKER.image(System())
    folder = build_libraries()
    arguments = ("run", "--rm", "--network=none", "--volume", f"{folder}/nvidia-smi:/usr/bin/nvidia-smi:ro")
    done = host.run(("docker", *arguments, image, "nvidia-smi", "-L"))
    # 12: it started, and missed the driver's library alone.
    assert done.returncode == 12, done.evidence()
    assert "libnvidia-ml.so" in done.stdout


def test_it_is_made_once_and_older_ones_go(host: DockerHost) -> None:
    first = DOCKER.image(System())
    created = host.docker("inspect", "--format", "{{.Id}}", first)
    assert DOCKER.image(System()) == first
    assert host.docker("inspect", "--format", "{{.Id}}", first) == created
    host.docker("import", "-", f"{REPOSITORY}:of-an-older-c-library", stdin=b"\0" * 10240)
    host.docker("import", "-", "example.org/other:1", stdin=b"\0" * 10240)
    host.docker("rmi", first)
    assert DOCKER.image(System()) == first
    assert sorted(images(host)) == sorted([first, "example.org/other:1"])


def test_a_docker_that_refuses_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(GpuprovError, match="verification image can't be built"):
        DOCKER.image(System())


def derived(host: DockerHost, *changes: str) -> str:
    """An image like ours, with changes as `docker import --change` takes them."""
    container = host.docker("create", DOCKER.image(System()), "sh")
    exported = host.folder / "exported.tar"
    host.docker("export", "--output", str(exported), container)
    host.docker("rm", container)
    flags = [word for change in changes for word in ("--change", change)]
    host.docker("import", *flags, "-", "example.org/derived:1", stdin=exported.read_bytes())
    return "example.org/derived:1"


def test_what_an_image_asks_for_itself_is_taken_out(host: DockerHost) -> None:
    image = derived(host, "ENV NVIDIA_VISIBLE_DEVICES=all", "ENV CUDA_VERSION=12.4", 'ENTRYPOINT ["echo", "banner"]')
    script = 'echo "${NVIDIA_VISIBLE_DEVICES-unset} ${CUDA_VERSION-unset} ${PATH-unset}"'
    assert host.docker("run", "--rm", "--network=none", "--entrypoint=sh", image, "-c", script).startswith("all 12.4 ")
    done = DOCKER.run(System(), image, ("sh", "-c", script))
    assert done.stdout.startswith("unset unset /"), done.evidence()


def test_no_gpu_is_seen_where_none_is(host: DockerHost) -> None:
    test = EngineTest(System(), DOCKER.image(System()), SmiReport("", "", ()))
    assert engine_checks.no_gpu(test) == ("", "no GPU visible")
    with pytest.raises(Failed, match=r"exited 127: .*nvidia-smi.*; the container did not get it"):
        engine_checks.all_gpus(test)


def test_a_container_that_hangs_is_removed(host: DockerHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over once it runs."""
    image = DOCKER.image(System())
    clock = clock_of(monkeypatch, "gpuprov.core.commands")

    def pass_time() -> None:
        wait_for("the container runs", lambda: host.docker("ps", "--quiet"))
        clock.ahead = 7200

    with ThreadPoolExecutor(1) as pool:
        passing = pool.submit(pass_time)
        done = DOCKER.run(System(), image, ("sh", "-c", "read forever < /dev/zero"), seconds=600)
        passing.result()
    assert done.returncode == TIMED_OUT
    assert host.docker("ps", "--all", "--quiet") == ""


def test_an_image_that_is_missing_is_not_looked_for_elsewhere(host: DockerHost) -> None:
    done = DOCKER.run(System(), f"{REPOSITORY}:of-somebody-else", ("sh", "-c", ":"))
    assert done.returncode == 125
    assert "No such image" in done.stderr


def test_an_image_that_nobody_has_is_named(host: DockerHost) -> None:
    with pytest.raises(Failed, match=r"docker can't pull localhost:1/nothing:1: .*; docker pull localhost:1/nothing:1"):
        DOCKER.image(System(), "localhost:1/nothing:1")
