"""What the checks ask docker for, and what they make of its answers."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Callable

import pytest

from gpuprov.checks import engine_checks, engines, frameworks
from gpuprov.checks.engines import (
    ALL,
    DOCKER,
    DOCKER_CDI,
    DOCKER_GPUS,
    PODMAN,
    Containerd,
    DockerLike,
    Engine,
    EngineTest,
    full_reference,
)
from gpuprov.checks.outcome import Failed
from gpuprov.checks.smi import parse_smi
from gpuprov.core.commands import TIMED_OUT
from gpuprov.core.system import System
from tests.unit.refused import refused
from tests.unit.scripted import Answer, Scripted

REPORT = (Path(__file__).parents[2] / "data/nvidia-smi-q-x-2-gpus.xml").read_text()
TWO = parse_smi(REPORT)
ONE = replace(TWO, gpus=TWO.gpus[:1])
IMAGE = "example.org/cuda:12.4"


class Docker(Scripted):
    """A docker that answers by its verb; `run` gives its answers one after the other."""

    which = System.which

    def __init__(self, *runs: tuple[int, str, str]) -> None:
        super().__init__()
        self.runs = list(runs)
        self.answers = {"inspect": (0, "[]", ""), "pull": (0, "", ""), "rm": (0, "", "")}

    def answer(self, argv: tuple[str, ...]) -> Answer:
        return self.runs.pop(0) if argv[1] == "run" else self.answers[argv[1]]

    def verbs(self) -> list[str]:
        return [argv[1] for argv in self.asked]


def environment(argv: tuple[str, ...]) -> list[str]:
    return [value for flag, value in zip(argv, argv[1:]) if flag == "--env"]


def test_an_only_gpu_is_asked_for_by_its_index() -> None:
    start, end = REPORT.index("\t<gpu id="), REPORT.index("\t</gpu>\n") + len("\t</gpu>\n")
    first_alone = f"{REPORT[:end]}</nvidia_smi_log>\n"
    assert start < end and parse_smi(first_alone).gpus == ONE.gpus
    docker = Docker((0, first_alone, ""))
    assert engine_checks.one_gpu(EngineTest(docker, IMAGE, ONE)) == ("0", "only the requested GPU")
    assert "NVIDIA_VISIBLE_DEVICES=0" in environment(docker.asked[0])


def test_what_the_image_sets_is_taken_out_where_nothing_shall_be_asked_for() -> None:
    """NVIDIA's images set NVIDIA_VISIBLE_DEVICES=all themselves."""
    docker = Docker((0, "", ""), (0, "", ""))
    assert engine_checks.no_gpu(EngineTest(docker, IMAGE, TWO)) == ("", "no GPU visible")
    assert [environment(argv) for argv in docker.asked] == [
        ["NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION"],
        ["NVIDIA_VISIBLE_DEVICES=void"],
    ]


@pytest.mark.parametrize("check", [engine_checks.all_gpus, engine_checks.no_gpu, frameworks.torch])
def test_no_container_pulls(check: Callable[[EngineTest], object]) -> None:
    docker = Docker((1, "", "x"))
    with pytest.raises(Failed):
        check(EngineTest(docker, IMAGE, TWO))
    assert "--pull=never" in docker.asked[-1] and "--network=none" in docker.asked[-1]


def test_the_users_image_is_pulled_once_if_it_is_missing() -> None:
    docker = Docker()
    assert DOCKER.image(docker, IMAGE) == IMAGE
    assert docker.verbs() == ["inspect"]
    docker.answers["inspect"] = (1, "[]", "Error: No such image")
    assert DOCKER.image(docker, IMAGE) == IMAGE
    assert docker.asked[-1] == ("docker", "pull", "--quiet", IMAGE)
    docker.answers["pull"] = (1, "", "Error response from daemon: manifest unknown")
    with pytest.raises(
        Failed, match=f"docker can't pull {IMAGE}: Error response from daemon: manifest unknown; docker"
    ):
        DOCKER.image(docker, IMAGE)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((9, "NVIDIA-SMI has failed\n", ""), "exited 9: NVIDIA-SMI has failed; the container can't reach the driver"),
        ((12, "NVIDIA-SMI couldn't find libnvidia-ml.so\n", ""), "is not where the image's loader looks"),
        ((18, "Failed to initialize NVML: Driver/library version mismatch\n", ""), "of another version"),
        ((125, "", "docker: Error response from daemon: unknown runtime.\n"), "docker did not start it: journalctl"),
        ((127, "", 'exec: "nvidia-smi": executable file not found in $PATH'), "the container did not get it"),
        ((255, "Failed to initialize NVML: Unknown Error\n", ""), "the device cgroup may forbid the nodes"),
        ((3, "odd\n", ""), "the container exited 3: odd"),
        (
            (TIMED_OUT, "", "stopped after 120 s, its time limit"),
            "exited 124: stopped after 120 s, its time limit; dmesg",
        ),
    ],
)
def test_how_a_container_ended_comes_with_what_to_do(answer: tuple[int, str, str], says: str) -> None:
    with pytest.raises(Failed) as caught:
        engine_checks.all_gpus(EngineTest(Docker(answer), IMAGE, TWO))
    assert says in caught.value.reason and "\n" not in caught.value.reason


def test_our_own_runtimes_word_needs_no_hint() -> None:
    said = "docker: Error response from daemon: OCI runtime create failed\ngpuprov: there is no GPU '7' on this host\n"
    with pytest.raises(Failed) as caught:
        engine_checks.all_gpus(EngineTest(Docker((125, "", said)), IMAGE, TWO))
    assert caught.value.reason == "the container exited 125: gpuprov: there is no GPU '7' on this host"


def test_a_full_disk_asks_for_room_and_not_for_another_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "own_image", lambda system: SimpleNamespace(tag="1", root=lambda: b""))
    full = Docker()
    full.answers |= {"images": (0, "", ""), "import": (1, "", "write /x/link: no space left on device")}
    full.answers["info"] = (0, "", "")
    assert refused(DOCKER.image, full).next_step.endswith("docker system df")


@pytest.mark.parametrize(
    ("info", "step"), [(0, "set gpuprov_verify_image"), (125, "podman info; correct what it names")]
)
def test_an_engine_that_takes_no_image_at_all_is_to_be_corrected(
    monkeypatch: pytest.MonkeyPatch, info: int, step: str
) -> None:
    """As a podman with an invalid file in containers.conf.d."""
    monkeypatch.setattr(engines, "own_image", lambda system: SimpleNamespace(tag="1", root=lambda: b""))
    podman = Docker()
    podman.answers |= {"images": (0, "", ""), "import": (125, "", "toml: line 1"), "info": (info, "", "toml: line 1")}
    assert refused(PODMAN.image, podman).next_step == step


def test_a_difference_shows_both_sides_and_what_to_do() -> None:
    other = REPORT.replace(TWO.gpus[1].uuid, "GPU-bbb")
    with pytest.raises(Failed) as caught:
        engine_checks.all_gpus(EngineTest(Docker((0, other, "")), IMAGE, TWO))
    failed = caught.value
    assert (failed.host, failed.container) == (TWO.gpus[1].uuid, "GPU-bbb")
    assert failed.reason.startswith(f"GPU 1 UUID: host {TWO.gpus[1].uuid}, container GPU-bbb; gpuprov install")


def test_a_failed_check_keeps_its_traceback() -> None:
    """An exception that can't be written to would lose it in a context manager."""
    with pytest.raises(Failed) as caught:
        raise Failed("why")
    caught.value.__traceback__ = None
    assert str(caught.value) == caught.value.reason == "why"


class Recording(Docker):
    """An engine's program that ends with this code, whatever it is asked for."""

    def __init__(self, code: int, said: str = "") -> None:
        super().__init__()
        self.code, self.said = code, said

    def answer(self, argv: tuple[str, ...]) -> Answer:
        return self.code, self.said, ""


@pytest.mark.parametrize(
    ("engine", "devices", "words"),
    [
        (DOCKER, ALL, "--runtime=nvidia --env NVIDIA_VISIBLE_DEVICES=all"),
        (DOCKER_GPUS, ALL, "--gpus=all --env NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        (DOCKER_GPUS, "GPU-1", "--gpus=device=GPU-1"),
        (DOCKER_CDI, "1", "--device=nvidia.com/gpu=1 --entrypoint"),
        (PODMAN, ALL, "--device=nvidia.com/gpu=all --entrypoint"),
        (PODMAN, "", "--network=none --entrypoint"),
        (Containerd("/opt/runtime"), ALL, "--runc-binary /opt/runtime --env NVIDIA_VISIBLE_DEVICES=all"),
        (Containerd("/opt/runtime"), "", "--env NVIDIA_VISIBLE_DEVICES=void"),
        (Containerd("/opt/runtime", "/run/my.sock"), ALL, "ctr --address /run/my.sock --namespace gpuprov-verify run"),
    ],
)
def test_each_engine_is_asked_for_gpus_in_its_own_words(engine: Engine, devices: str, words: str) -> None:
    host = Recording(0, "GPU 0")
    done = engine.run(host, IMAGE, ("nvidia-smi", "-L"), devices)
    (argv,) = host.asked
    assert done.stdout == "GPU 0" and argv[0] == {"containerd": "ctr"}.get(engine.name, engine.name)
    assert words in " ".join(argv) and argv[-1] == "-L"


@pytest.mark.parametrize("engine", [DOCKER, PODMAN])
@pytest.mark.parametrize(("code", "removed"), [(TIMED_OUT, True), (137, True), (143, True), (0, False), (9, False)])
def test_a_container_whose_client_was_ended_does_not_go_on(engine: DockerLike, code: int, removed: bool) -> None:
    """By a time limit, or by a signal, as where memory is short: the container is the daemon's, and has the GPUs."""
    host = Recording(code)
    engine.run(host, IMAGE, ("sh", "-c", "read line"), ALL)
    started, *others = host.asked
    (name,) = (word.partition("=")[2] for word in started if word.startswith("--name="))
    assert others == [(engine.name, "rm", "--force", "--volumes", name)] * removed


def test_a_container_of_containerd_that_hangs_is_removed() -> None:
    host = Recording(TIMED_OUT)
    Containerd("/opt/runtime").run(host, IMAGE, ("sleep", "1"), ALL)
    started, *others = host.asked
    container = started[started.index(IMAGE) + 1]
    assert [argv[3:5] for argv in others] == [("tasks", "kill"), ("tasks", "delete"), ("containers", "delete")]
    assert all(argv[-1] == container for argv in others)


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ("ubuntu", "docker.io/library/ubuntu:latest"),
        ("nvidia/cuda:13.0.1-base-ubuntu24.04", "docker.io/nvidia/cuda:13.0.1-base-ubuntu24.04"),
        ("nvcr.io/nvidia/cuda", "nvcr.io/nvidia/cuda:latest"),
        ("localhost:5000/cuda", "localhost:5000/cuda:latest"),
        ("localhost/cuda:1", "localhost/cuda:1"),
        ("ubuntu@sha256:00", "docker.io/library/ubuntu@sha256:00"),
    ],
)
def test_ctr_gets_whole_references(image: str, reference: str) -> None:
    assert full_reference(image) == reference
