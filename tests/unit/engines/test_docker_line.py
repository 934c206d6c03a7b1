"""How nvidia-docker reads docker's command line, and what it adds to it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuprov.engines import nvidia_docker_command
from gpuprov.engines.nvidia_docker_command import container_call, gpu_words

# words after `docker` → the words up to `run` or `create`, the image
CALLS = {
    "run IMAGE": ("run", "IMAGE"),
    "create IMAGE": ("create", "IMAGE"),
    "container run IMAGE": ("container run", "IMAGE"),
    "container create IMAGE cmd": ("container create", "IMAGE"),
    "-D run IMAGE": ("-D run", "IMAGE"),
    "-H tcp://h:1 run IMAGE": ("-H tcp://h:1 run", "IMAGE"),
    "-Htcp://h:1 run IMAGE": ("-Htcp://h:1 run", "IMAGE"),
    "-DH run run IMAGE": ("-DH run run", "IMAGE"),
    "--host=tcp://h:1 run IMAGE": ("--host=tcp://h:1 run", "IMAGE"),
    "--host run create IMAGE": ("--host run create", "IMAGE"),
    "--context run run IMAGE": ("--context run run", "IMAGE"),
    "-c run run IMAGE": ("-c run run", "IMAGE"),
    "--config /x -l debug --tlsverify --tlscacert a --tlscert b --tlskey c container run IMAGE": (
        "--config /x -l debug --tlsverify --tlscacert a --tlscert b --tlskey c container run", "IMAGE"),
    "--debug=false --tls run IMAGE": ("--debug=false --tls run", "IMAGE"),
    "-- run IMAGE": ("-- run", "IMAGE"),
    # What follows the image is the container's.
    "run IMAGE run --gpus all": ("run", "IMAGE"),
    "run -it --rm IMAGE run OTHER": ("run", "IMAGE"),
    "run -itv /a:/b IMAGE": ("run", "IMAGE"),
    "run -itv/a:/b IMAGE": ("run", "IMAGE"),
    "run -it=false IMAGE": ("run", "IMAGE"),
    "run -t=false -i IMAGE": ("run", "IMAGE"),
    "run --name run IMAGE": ("run", "IMAGE"),
    "run --name=run --init IMAGE": ("run", "IMAGE"),
    "run --an-option-of-later value IMAGE": ("run", "IMAGE"),
    "run -- IMAGE --rm": ("run", "IMAGE"),
    "run -e A -e B=1 --env C=2 IMAGE -e D": ("run", "IMAGE"),
    "run -h host IMAGE": ("run", "IMAGE"),
    "run": ("run", ""),
    "run --rm": ("run", ""),
    "run --name": ("run", ""),
}  # fmt: skip
OTHERS = (
    "", "ps", "ps run", "container ls run", "container", "exec run", "compose run IMAGE", "-D", "-H", "--help",
    "--version", "start run", "--unknown run IMAGE", "-X run IMAGE", "container -D run IMAGE", "- run", "image run",
    "container container run IMAGE",
)  # fmt: skip


@pytest.mark.parametrize("line", CALLS)
def test_the_command_and_the_image_are_found(line: str) -> None:
    words = shlex.split(line)
    call = container_call(words)
    assert call is not None
    assert (shlex.join(words[: call.start]), call.image) == CALLS[line]


@pytest.mark.parametrize("line", OTHERS)
def test_every_other_command_is_dockers(line: str) -> None:
    assert container_call(shlex.split(line)) is None


def test_options_that_matter_are_found_before_the_image_alone() -> None:
    call = container_call(shlex.split("-H h1 container run -it -eA=1 --env=B -e C=3 --gpus=all I --gpus none -e D=4"))
    assert call is not None
    assert call.values("e", "env") == ("A=1", "B", "C=3")
    assert call.values("gpus") == ("all",)
    assert call.docker_options == ("-H", "h1")


LEGACY = {"Labels": {"com.nvidia.volumes.needed": "nvidia_driver"}}
CUDA = {"Env": ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute"]}
RUNTIME = "--runtime=nvidia"
ALL = "--env=NVIDIA_VISIBLE_DEVICES=all"


@pytest.mark.parametrize(
    ("line", "config", "nv_gpu", "added"),
    [
        ("run I", {}, "", f"{RUNTIME} {ALL}"),
        ("run I", CUDA, "", RUNTIME),
        ("run I", {"Env": ["NVIDIA_VISIBLE_DEVICES=void"]}, "", RUNTIME),
        ("run I", CUDA, "0,1", f"{RUNTIME} --env=NVIDIA_VISIBLE_DEVICES=0,1"),
        ("run I", CUDA, " 0  1 ", f"{RUNTIME} --env=NVIDIA_VISIBLE_DEVICES=0,1"),
        ("run I", {}, "GPU-1", f"{RUNTIME} --env=NVIDIA_VISIBLE_DEVICES=GPU-1"),
        ("run -e NVIDIA_VISIBLE_DEVICES=1 I", {}, "0", RUNTIME),
        ("run -e NVIDIA_VISIBLE_DEVICES I", {}, "0", RUNTIME),
        ("run --runtime=x I", {}, "", ALL),
        ("run --gpus 1 I", LEGACY, "0", ""),
        ("run --device nvidia.com/gpu=0 I", {}, "0", ""),
        ("run --device /dev/fuse I", CUDA, "", RUNTIME),
        ("run I --gpus all", CUDA, "", RUNTIME),
        ("run I", LEGACY, "", f"{RUNTIME} {ALL} --env=NVIDIA_DRIVER_CAPABILITIES=all"),
        ("run I", {**LEGACY, **CUDA}, "", RUNTIME),
        ("run -e NVIDIA_DRIVER_CAPABILITIES=utility -e NVIDIA_VISIBLE_DEVICES=0 I", LEGACY, "", RUNTIME),
        ("run I", {"Labels": None, "Env": None}, "", f"{RUNTIME} {ALL}"),
    ],
)
def test_what_is_added(line: str, config: dict[str, Any], nv_gpu: str, added: str) -> None:
    call = container_call(line.split())
    assert call is not None
    assert gpu_words(call, config, nv_gpu) == added.split()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("# NVIDIA_VISIBLE_DEVICES=3\nOTHER=1\n  NVIDIA_VISIBLE_DEVICES=0\n", [RUNTIME]),
        ("\ufeffNVIDIA_VISIBLE_DEVICES=none\n", [RUNTIME]),
        ("# NVIDIA_VISIBLE_DEVICES=3\n", [RUNTIME, ALL]),
    ],
)
def test_a_file_of_variables_counts_as_the_call_itself(tmp_path: Path, content: str, words: list[str]) -> None:
    path = tmp_path / "env"
    path.write_text(content)
    call = container_call(["run", "--env-file", str(path), "--env-file=/missing", "I"])
    assert call is not None
    assert gpu_words(call, {}, "") == words


def test_a_file_that_can_not_be_read_is_left_to_docker() -> None:
    """Its first page is mapped nowhere: reading fails as for a file of another user."""
    call = container_call(["run", "--env-file=/proc/self/mem", "I"])
    assert call is not None
    assert gpu_words(call, {}, "") == [RUNTIME, ALL]


def test_a_pipe_of_variables_is_left_to_docker() -> None:
    """`--env-file <(…)`: a pipe can be read once."""
    reading, writing = os.pipe()
    os.write(writing, b"NVIDIA_VISIBLE_DEVICES=none\n")
    os.close(writing)
    call = container_call(["run", f"--env-file=/dev/fd/{reading}", "I"])
    assert call is not None
    assert gpu_words(call, {}, "") == [RUNTIME, ALL]
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"NVIDIA_VISIBLE_DEVICES=none\n"


def options_of(docker: str, *command: str) -> tuple[set[str], set[str]]:
    """Return the options of a command's help that take no value, and those that take one."""
    done = subprocess.run((docker, *command, "--help"), capture_output=True, text=True, timeout=60, check=False)
    rows = re.findall(r"^ +(?:-(\w), |    )?--([\w-]+)(?: (\S+))?(?: {2,}.*)?$", done.stdout, re.MULTILINE)
    found: tuple[set[str], set[str]] = (set(), set())
    for letter, name, value in rows:
        found[bool(value)].update(filter(None, (letter, name)))
    return found


def test_the_table_of_options_is_that_of_each_docker_here() -> None:
    """Dockers of this machine: an option that is taken for a flag, or not, moves the image to another word."""
    dockers = {
        os.path.realpath(path) for folder in os.get_exec_path() if os.access(path := f"{folder}/docker", os.X_OK)
    }
    if not dockers:
        pytest.skip("docker is not installed")
    for docker in dockers:
        for command in ("run", "create"):
            flags, values = options_of(docker, command)
            assert {"i", "tty", "privileged"} <= flags, docker
            assert {"env", "e", "gpus", "v"} <= values, docker
            assert flags <= nvidia_docker_command._RUN_FLAGS, docker
            assert not values & nvidia_docker_command._RUN_FLAGS, docker
        flags, values = options_of(docker)
        assert {"D", "tls"} <= flags <= nvidia_docker_command._GLOBAL_FLAGS, docker
        assert {"H", "context"} <= values <= nvidia_docker_command._GLOBAL_VALUES, docker


@pytest.mark.parametrize(
    ("label", "cuda"),
    [("8.0", "8.0"), ("8.0.61", "8.0"), ("v9", "9"), ("", ""), ("x", ""), ("9.x", ""), ("12.4.\x1b]0;title", "12.4")],
)
def test_the_cuda_release_that_a_label_asks_for(label: str, cuda: str) -> None:
    call = container_call(["run", "I"])
    assert call is not None
    added = [f"--env=NVIDIA_REQUIRE_CUDA_LABEL=cuda>={cuda}"] if cuda else []
    assert gpu_words(call, {"Labels": {"com.nvidia.cuda.version": label}}, "") == [RUNTIME, ALL, *added]
