"""The program `nvidia-docker`: gives `run` and `create` the GPUs, and becomes docker; every other call is docker's.

Standard library only, with few imports, because it starts with each container. Its only effect on the host is that it
pulls an image whose labels it must read, as docker would do next.
"""

from __future__ import annotations

import os
import signal
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence
    from typing import Any, NoReturn

_DEVICES = "NVIDIA_VISIBLE_DEVICES"
_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
# The labels of nvidia-docker 1.
_VOLUMES_LABEL = "com.nvidia.volumes.needed"
_CUDA_LABEL = "com.nvidia.cuda.version"
# docker's exit code if it can't start a container, and a shell's if a program is missing.
_REFUSED, _NO_DOCKER = 125, 127
_LARGEST_ENV_FILE = 1 << 20
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
_STARTING = ("run", "create")


class ContainerCall:
    """A call of `run` or `create`: `before` is everything up to and including that word, `after` what follows it.

    `options` are those of the command: pairs of name (without hyphens) and value, in their order. `image` is "" where
    there is none, else the word of `after` at `place`.
    """

    __slots__ = ("after", "before", "image", "options", "place")

    def __init__(self, before: Sequence[str], after: Sequence[str]) -> None:
        self.before = tuple(before)
        self.after = tuple(after)
        self.options, self.place = _options(self.after, _RUN_FLAGS, None)
        self.image = self.after[self.place] if 0 <= self.place < len(self.after) else ""

    @property
    def docker_options(self) -> tuple[str, ...]:
        """docker's own options, for another command to the same daemon."""
        return self.before[: -2 if self.before[-2:-1] == ("container",) else -1]

    def with_values(self, option: str, others: Mapping[str, str]) -> ContainerCall:
        """Return the call with other values of a long option: `others` says which for which."""
        long = {f"--{option}={value}": f"--{option}={other}" for value, other in others.items()}
        words = list(self.after)
        for place, word in enumerate(words[: self.place]):
            words[place] = (
                others.get(word, word) if place and words[place - 1] == f"--{option}" else long.get(word, word)
            )
        return ContainerCall(self.before, words)

    def values(self, *names: str) -> tuple[str, ...]:
        """Return the values of the options of these names."""
        return tuple(value for name, value in self.options if name in names)


def container_call(words: Sequence[str]) -> ContainerCall | None:
    """Return the call of `run` or `create` in the words after `docker`, None for any other command."""
    _, place = _options(words, _GLOBAL_FLAGS, _GLOBAL_VALUES)
    if place < 0 or place >= len(words):
        return None
    if words[place] == "container":
        place += 1
    if place >= len(words) or words[place] not in _STARTING:
        return None
    return ContainerCall(words[: place + 1], words[place + 1 :])


def _options(
    words: Sequence[str], flags: frozenset[str], known: frozenset[str] | None
) -> tuple[list[tuple[str, str]], int]:
    """Return the options at the beginning, and the index of the first word after them.

    That index is -1 if an option is neither among `flags` nor among the `known` ones; None accepts all.
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
                return found, -1
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


class Image:
    """Properties of an image: labels, and environment by name."""

    __slots__ = ("environment", "labels")

    def __init__(self, config: Any) -> None:
        config = config if isinstance(config, dict) else {}
        labels, environment = config.get("Labels"), config.get("Env")
        self.labels: dict[str, str] = {
            str(key): str(value) for key, value in (labels.items() if isinstance(labels, dict) else ())
        }
        entries = [str(entry).partition("=") for entry in (environment if isinstance(environment, list) else ())]
        self.environment = {name: value for name, _, value in entries}


def gpu_words(
    call: ContainerCall, image: Image, caller: Mapping[str, str], given: Mapping[str, str | None]
) -> tuple[str, ...]:
    """Return the words to add to a call, by the first matching rule.

    `caller` is the caller's environment, `given` the container's variables set by the call. A call that chooses its
    GPUs by docker's own flags is unchanged.
    """
    chooses_by_cdi = any(value.startswith("nvidia.com/gpu=") for value in call.values("device"))
    if call.values("gpus") or chooses_by_cdi:
        return ()
    words = [] if call.values("runtime") else ["--runtime=nvidia"]
    selected = caller.get("NV_GPU", "").replace(",", " ").split() or caller.get(_DEVICES, "").split()
    if _DEVICES not in given:
        if selected:
            words.append(f"--env={_DEVICES}={','.join(selected)}")
        elif not image.environment.get(_DEVICES):
            words.append(f"--env={_DEVICES}=all")
    # nvidia-docker 1 gave such images the whole driver.
    if _VOLUMES_LABEL in image.labels and _CAPABILITIES not in {*given, *image.environment}:
        words.append(f"--env={_CAPABILITIES}=all")
    return tuple(words)


def required_cuda(image: Image) -> str:
    """Return the CUDA release that an image's label requires, as MAJOR.MINOR; "" if it has none."""
    numbers = image.labels.get(_CUDA_LABEL, "").strip().lstrip("v").split(".")
    return ".".join(numbers[:2]) if all(one.isascii() and one.isdigit() for one in numbers[:2]) else ""


def given_variables(call: ContainerCall, caller: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that a call sets; a name alone takes the caller's value, None if there is none."""
    lines: list[str] = []
    for path in call.values("env-file"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 (pathlib costs milliseconds)
                # As docker reads it: without a byte order mark, and lines end nowhere but at a line feed.
                text = file.read(_LARGEST_ENV_FILE).removeprefix("\ufeff")
                lines += [line.strip() for line in text.split("\n")]
        except OSError:
            continue  # docker says it next
    entries = (entry.partition("=") for entry in (*lines, *call.values("e", "env")) if entry and entry[0] != "#")
    return {name: value if sign else caller.get(name) for name, sign, value in entries}


def with_files(call: ContainerCall) -> ContainerCall:
    """Return the call with a copy in memory for each pipe of --env-file: what is read here is gone for docker."""
    copies: dict[str, str] = {}
    for path in call.values("env-file"):
        try:
            if path in copies or stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
                continue
            with open(path, "rb") as file:  # noqa: PTH123
                content = file.read()
        except OSError:
            continue  # docker says it next
        handle = os.memfd_create("env-file", 0)  # docker inherits it
        with open(handle, "wb", closefd=False) as copy:
            copy.write(content)
        copies[path] = f"/proc/self/fd/{handle}"
    return call.with_values("env-file", copies) if copies else call


def main(words: Sequence[str], own_path: str) -> NoReturn:
    """Execute docker. `own_path`: this program's file, to which a `docker` on the PATH may link."""
    # Python ignores SIGPIPE and turns SIGINT into an exception; restore their defaults for docker and its children.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    docker = _docker(own_path)
    call = container_call(words)
    if call is not None and call.image:
        call = with_files(call)
        words = (*call.before, *_added(docker, call), *call.after)
    try:
        os.execv(docker[0], (*docker, *words))
    except OSError as error:
        _end(_NO_DOCKER, f"{docker[0]} does not start", str(error), "docker --version")


def _docker(own_path: str) -> tuple[str, ...]:
    """Return docker's program and, where NV_DOCKER names it, its first words; never this program itself."""
    first, *more = os.environ.get("NV_DOCKER", "").split() or ["docker"]
    folders = os.environ.get("PATH", os.defpath).split(":") if "/" not in first else [""]
    own = os.path.realpath(own_path)
    for folder in folders:
        path = os.path.join(folder, first)  # noqa: PTH118
        if os.path.isfile(path) and os.access(path, os.X_OK) and os.path.realpath(path) != own:  # noqa: PTH113
            return path, *more
    seen = f"PATH={os.environ.get('PATH', '')}"
    return _end(_NO_DOCKER, f"there is no program {first}", seen, "install docker, or set PATH")


def _added(docker: tuple[str, ...], call: ContainerCall) -> tuple[str, ...]:
    image = _image(docker, call)
    words = gpu_words(call, image, os.environ, given_variables(call, os.environ))
    cuda = required_cuda(image)
    # The runtime compares it with the driver of its host, which may be another one, and heeds NVIDIA_DISABLE_REQUIRE.
    return (*words, f"--env=NVIDIA_REQUIRE_CUDA_LABEL=cuda>={cuda}") if cuda else words


def _image(docker: tuple[str, ...], call: ContainerCall) -> Image:
    """Return the image's properties, pulling it first if docker would; empty if docker does not have it."""
    import json

    pull = ("missing", *call.values("pull"))[-1]
    inspect = (*docker, *call.docker_options, "inspect", "--type=image", "--format={{json .Config}}", call.image)
    done = _asked(inspect)
    if pull == "always" or (done.returncode and pull != "never" and b"o such image" in done.stderr):
        _pull(docker, call)
        done = _asked(inspect)
    try:
        return Image(json.loads(done.stdout) if done.returncode == 0 else {})
    except (ValueError, RecursionError):
        return Image({})


def _asked(command: tuple[str, ...]) -> subprocess.CompletedProcess[bytes]:
    import subprocess

    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def _pull(docker: tuple[str, ...], call: ContainerCall) -> None:
    """Pull the image; on failure, exit as docker does. Standard output belongs to the container."""
    import subprocess

    platform = [f"--platform={value}" for value in call.values("platform")]
    quiet = ["--quiet"] if call.values("q", "quiet") else []
    command = (*docker, *call.docker_options, "pull", *quiet, *platform, call.image)
    output = 2 if not quiet else subprocess.DEVNULL
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, check=False).returncode:
        sys.exit(_REFUSED)


def _end(code: int, what: str, seen: str, then: str) -> NoReturn:
    sys.stderr.write(f"nvidia-docker: {what}\n  seen: {seen}\n  next: {then}\n")
    sys.exit(code)
