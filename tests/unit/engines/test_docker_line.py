"""How nvidia-docker reads docker's command line, and what it adds to it."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from gpuprov.engines.nvidia_docker_command import container_call, gpu_words

# words after `docker`, and those up to `run` or `create`
CALLS = (
    ("run IMAGE", "run"),
    ("create IMAGE", "create"),
    ("container run IMAGE", "container run"),
    ("container create IMAGE cmd", "container create"),
    ("-D run IMAGE", "-D run"),
    ("-H tcp://h:1 run IMAGE", "-H tcp://h:1 run"),
    ("-Htcp://h:1 run IMAGE", "-Htcp://h:1 run"),
    ("-DH run run IMAGE", "-DH run run"),
    ("--host=tcp://h:1 run IMAGE", "--host=tcp://h:1 run"),
    ("--host run create IMAGE", "--host run create"),
    ("--context run run IMAGE", "--context run run"),
    ("-c run run IMAGE", "-c run run"),
    (
        "--config /x -l debug --tlsverify --tlscacert a --tlscert b --tlskey c container run IMAGE",
        "--config /x -l debug --tlsverify --tlscacert a --tlscert b --tlskey c container run",
    ),
    ("--debug=false --tls run IMAGE", "--debug=false --tls run"),
    ("-- run IMAGE", "-- run"),
    ("run IMAGE run --gpus all", "run"),
    ("run -it --rm IMAGE run OTHER", "run"),
    ("run -itv /a:/b IMAGE", "run"),
    ("run -itv/a:/b IMAGE", "run"),
    ("run -it=false IMAGE", "run"),
    ("run -t=false -i IMAGE", "run"),
    ("run --name run IMAGE", "run"),
    ("run --name=run --init IMAGE", "run"),
    ("run --an-option-of-later value IMAGE", "run"),
    ("run -- IMAGE --rm", "run"),
    ("run -e A -e B=1 --env C=2 IMAGE -e D", "run"),
    ("run -h host IMAGE", "run"),
    ("run", "run"),
    ("run --rm", "run"),
    ("run --name", "run"),
)
OTHERS = (
    "", "ps", "ps run", "container ls run", "container", "exec run", "compose run IMAGE", "-D", "-H", "--help",
    "--version", "start run", "--unknown run IMAGE", "-X run IMAGE", "container -D run IMAGE", "- run", "image run",
    "container container run IMAGE",
)  # fmt: skip


@pytest.mark.parametrize(("line", "until_run"), CALLS)
def test_run_and_create_are_found(line: str, until_run: str) -> None:
    words = shlex.split(line)
    call = container_call(words)
    assert call is not None
    assert shlex.join(words[: call[0]]) == until_run


@pytest.mark.parametrize("line", OTHERS)
def test_every_other_command_is_dockers(line: str) -> None:
    assert container_call(shlex.split(line)) is None


def test_options_that_matter_are_found_before_the_image_alone() -> None:
    call = container_call(shlex.split("-H h1 container run -it -eA=1 --env=B -e C=3 --gpus=all I --gpus none -e D=4"))
    assert call is not None
    assert [one for one in call[1] if one[1]] == [("e", "A=1"), ("env", "B"), ("e", "C=3"), ("gpus", "all")]


def added(words: list[str], nv_gpu: str = "") -> list[str]:
    call = container_call(words)
    assert call is not None
    return gpu_words(call[1], nv_gpu)


RUNTIME = "--runtime=nvidia"
ALL = "--env=NVIDIA_VISIBLE_DEVICES=all"


@pytest.mark.parametrize(
    ("line", "nv_gpu", "expected"),
    [
        ("run I", "", f"{RUNTIME} {ALL}"),
        ("run I", "0,1", f"{RUNTIME} --env=NVIDIA_VISIBLE_DEVICES=0,1"),
        ("run I", " 0  1 ", f"{RUNTIME} --env=NVIDIA_VISIBLE_DEVICES=0,1"),
        ("run I", "GPU-1", f"{RUNTIME} --env=NVIDIA_VISIBLE_DEVICES=GPU-1"),
        ("run -e NVIDIA_VISIBLE_DEVICES=1 I", "0", RUNTIME),
        ("run -e NVIDIA_VISIBLE_DEVICES I", "0", RUNTIME),
        ("run --runtime=x I", "", ALL),
        ("run --gpus 1 I", "0", ""),
        ("run --help", "0", ""),
        ("run --device nvidia.com/gpu=0 I", "0", ""),
        ("run --device /dev/fuse I", "", f"{RUNTIME} {ALL}"),
        ("run I --gpus all -e NVIDIA_VISIBLE_DEVICES=0", "", f"{RUNTIME} {ALL}"),
        ("run -itv /a:/b I --gpus all", "", f"{RUNTIME} {ALL}"),
        ("run -t=false -i I --gpus all", "", f"{RUNTIME} {ALL}"),
        ("run --an-option-of-later value I --gpus all", "", f"{RUNTIME} {ALL}"),
        ("run -- I --gpus all", "", f"{RUNTIME} {ALL}"),
    ],
)
def test_added_words(line: str, nv_gpu: str, expected: str) -> None:
    assert added(line.split(), nv_gpu) == expected.split()


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
    assert added(["run", "--env-file", str(path), "--env-file=/missing", "I"]) == words


def test_a_file_that_can_not_be_read_is_left_to_docker() -> None:
    """Its first page is mapped nowhere: reading fails as for a file of another user."""
    assert added(["run", "--env-file=/proc/self/mem", "I"]) == [RUNTIME, ALL]


def test_a_pipe_of_variables_is_left_to_docker() -> None:
    """`--env-file <(…)`: a pipe can be read once."""
    reading, writing = os.pipe()
    os.write(writing, b"NVIDIA_VISIBLE_DEVICES=none\n")
    os.close(writing)
    assert added(["run", f"--env-file=/dev/fd/{reading}", "I"]) == [RUNTIME, ALL]
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"NVIDIA_VISIBLE_DEVICES=none\n"


def dashed(name: str) -> str:
    return f"{'--' if name[1:] else '-'}{name}"


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
            for name in flags | values:
                value = "I" * (name in values)
                assert container_call([command, dashed(name), "I"]) == (1, [(name, value)]), docker
        flags, values = options_of(docker)
        assert {"D", "tls"} <= flags and {"H", "context"} <= values, docker
        for name in flags | values:
            words = [dashed(name), *["value"] * (name in values), "run"]
            assert container_call(words) == (len(words), []), docker
