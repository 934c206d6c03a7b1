"""The program `nvidia-docker`: gives `run` and `create` the GPUs, and becomes docker; every other call is docker's.

Standard library only, with few imports, because it starts with each container. Its only effect on the host is that it
pulls an image whose labels it must read, as docker would do next.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, NoReturn

_DEVICES = "NVIDIA_VISIBLE_DEVICES"
_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
# The labels of nvidia-docker 1.
_VOLUMES_LABEL = "com.nvidia.volumes.needed"
_CUDA_LABEL = "com.nvidia.cuda.version"
# docker's exit code if it can't start a container, and a shell's if a program is missing.
_REFUSED, _NO_DOCKER = 125, 127
# docker stops reading options at the first word that is not one. What follows the image is the container's command, not
# parsed. Sources: docker(1), docker-run(1), and pflag's rules for words such as `-itv/a:/b`.
# docker's own options. An unknown one ends the parsing: the call goes to docker unchanged.
_GLOBAL_FLAGS = frozenset(("D", "debug", "tls", "tlsverify", "v", "version", "h", "help"))
_GLOBAL_VALUES = frozenset(("H", "host", "c", "context", "l", "log-level", "config", "tlscacert", "tlscert", "tlskey"))
# The options of `run` and `create` that take no value; all others take one, those of later versions too.
_RUN_FLAGS = frozenset(
    ("d", "detach", "disable-content-trust", "help", "i", "interactive", "init", "no-healthcheck", "oom-kill-disable",
     "privileged", "P", "publish-all", "q", "quiet", "read-only", "rm", "sig-proxy", "t", "tty", "use-api-socket")
)  # fmt: skip


class ContainerCall:
    """A call of `run` or `create`.

    `docker_options` are the words before the command, `start` the number of words up to and including `run` or
    `create`. `options` are the command's: pairs of name (without hyphens) and value. `image` is "" if there is none.
    """

    __slots__ = ("docker_options", "image", "options", "start")

    def __init__(self, words: Sequence[str], command: int, start: int) -> None:
        self.docker_options = tuple(words[:command])
        self.start = start
        self.options, place = _options(words[start:], _RUN_FLAGS, None)
        self.image = "".join(words[start + place : start + place + 1])

    def values(self, *names: str) -> tuple[str, ...]:
        """Return the values of the options of these names."""
        return tuple(value for name, value in self.options if name in names)


def container_call(words: Sequence[str]) -> ContainerCall | None:
    """Return the call of `run` or `create` in the words after `docker`, None for any other command."""
    _, command = _options(words, _GLOBAL_FLAGS, _GLOBAL_VALUES)
    start = command + (words[command : command + 1] == ["container"])
    return ContainerCall(words, command, start + 1) if words[start : start + 1] in (["run"], ["create"]) else None


def _options(
    words: Sequence[str], flags: frozenset[str], known: frozenset[str] | None
) -> tuple[list[tuple[str, str]], int]:
    """Return the options at the beginning, and the index of the first word after them.

    That index is behind the last word if an option is neither among `flags` nor among the `known` ones; None accepts
    all.
    """
    found: list[tuple[str, str]] = []
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] != "-":
        word = words[place]
        place += 1
        if word == "--":
            break
        for name, value in _in_word(word, flags):
            if known is not None and name not in flags and name not in known:
                return found, len(words)
            if value is None:
                value = words[place] if place < len(words) else ""
                place += 1
            found.append((name, value))
    return found, place


def _in_word(word: str, flags: frozenset[str]) -> list[tuple[str, str | None]]:
    """Return the options of one word; a value of None is the next word."""
    if word.startswith("--"):
        name, sign, value = word[2:].partition("=")
        return [(name, value if sign or name in flags else None)]
    found: list[tuple[str, str | None]] = []
    letters = word[1:]
    while letters:
        name, letters = letters[0], letters[1:]
        if letters.startswith("="):
            return [*found, (name, letters[1:])]
        if name not in flags:
            return [*found, (name, letters or None)]
        found.append((name, ""))
    return found


def gpu_words(call: ContainerCall, config: Mapping[str, Any], nv_gpu: str) -> list[str]:
    """Return the words to add to a call. `config`: the image's, as docker has it; `nv_gpu`: the caller's NV_GPU.

    A call that chooses its GPUs by docker's own flags is unchanged.
    """
    if call.values("gpus") or any(value.startswith("nvidia.com/gpu=") for value in call.values("device")):
        return []
    labels, image = config.get("Labels") or {}, _names(config.get("Env") or ())
    given = _given(call)
    words = [] if call.values("runtime") else ["--runtime=nvidia"]
    selected = ",".join(nv_gpu.replace(",", " ").split())
    if _DEVICES not in given and (selected or _DEVICES not in image):
        words.append(f"--env={_DEVICES}={selected or 'all'}")
    # nvidia-docker 1 gave such images the whole driver.
    if _VOLUMES_LABEL in labels and _CAPABILITIES not in given | image:
        words.append(f"--env={_CAPABILITIES}=all")
    cuda = str(labels.get(_CUDA_LABEL, "")).strip().lstrip("v").split(".")[:2]
    if all(one.isascii() and one.isdigit() for one in cuda):
        # The runtime compares it with the driver of its host, and heeds NVIDIA_DISABLE_REQUIRE.
        words.append(f"--env=NVIDIA_REQUIRE_CUDA_LABEL=cuda>={'.'.join(cuda)}")
    return words


def _given(call: ContainerCall) -> set[str]:
    """Return the names of the variables that a call sets. A pipe of --env-file is docker's: it can be read once."""
    lines = list(call.values("e", "env"))
    for path in call.values("env-file"):
        if not os.path.isfile(path):  # noqa: PTH113 (pathlib costs milliseconds)
            continue
        try:
            with open(path, encoding="utf-8-sig", errors="replace") as file:  # noqa: PTH123
                lines += file
        except OSError:
            continue  # docker says it next
    return _names(lines)


def _names(entries: Sequence[str]) -> set[str]:
    return {entry.partition("=")[0].strip() for entry in entries}


def main(words: list[str], own_path: str) -> NoReturn:
    """Execute docker. `own_path`: this program's file, to which a `docker` on the PATH may link."""
    # Python ignores SIGPIPE and turns SIGINT into an exception; restore their defaults for docker and its children.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    docker = _docker(own_path)
    call = container_call(words)
    if call is not None and call.image:
        added = gpu_words(call, _image_config(docker, call), os.environ.get("NV_GPU", ""))
        words = [*words[: call.start], *added, *words[call.start :]]
    try:
        os.execv(docker[0], (*docker, *words))
    except OSError as error:
        _end(f"{docker[0]} does not start", str(error), "docker --version")


def _docker(own_path: str) -> tuple[str, ...]:
    """Return docker's program and, where NV_DOCKER names it, its first words; never this program itself."""
    first, *more = os.environ.get("NV_DOCKER", "").split() or ["docker"]
    own = os.path.realpath(own_path)
    for folder in os.environ.get("PATH", os.defpath).split(":") if "/" not in first else [""]:
        path = os.path.join(folder, first)  # noqa: PTH118
        if os.path.isfile(path) and os.access(path, os.X_OK) and os.path.realpath(path) != own:  # noqa: PTH113
            return path, *more
    return _end(f"there is no program {first}", f"PATH={os.environ.get('PATH', '')}", "install docker, or set PATH")


def _image_config(docker: tuple[str, ...], call: ContainerCall) -> Mapping[str, Any]:
    """Return the image's configuration; pull it first, as docker would, and exit as docker does if that fails."""
    import json
    import subprocess

    null = subprocess.DEVNULL
    docker = (*docker, *call.docker_options)
    inspect = (*docker, "inspect", "--type=image", "--format={{json .Config}}", call.image)
    done = subprocess.run(inspect, stdin=null, capture_output=True, check=False)
    if done.returncode and "never" not in call.values("pull"):
        options = [f"--platform={value}" for value in call.values("platform")]
        # Standard output belongs to the container.
        output = 2
        if call.values("q", "quiet"):
            options, output = [*options, "--quiet"], null
        if subprocess.run((*docker, "pull", *options, call.image), stdin=null, stdout=output, check=False).returncode:
            sys.exit(_REFUSED)
        done = subprocess.run(inspect, stdin=null, capture_output=True, check=False)
    return json.loads(done.stdout) or {} if done.returncode == 0 else {}


def _end(what: str, seen: str, then: str) -> NoReturn:
    sys.stderr.write(f"nvidia-docker: {what}\n  seen: {seen}\n  next: {then}\n")
    sys.exit(_NO_DOCKER)
