"""The program `nvidia-docker`: gives `run` and `create` the GPUs, and becomes docker; every other call is docker's.

Standard library only, with few imports, because it starts with each container. It changes nothing on the host.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    # Pairs of name (without hyphens) and value.
    Options = list[tuple[str, str]]

_DEVICES = "NVIDIA_VISIBLE_DEVICES"
# A shell's exit code if a program is missing.
_NO_DOCKER = 127
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


def container_call(words: Sequence[str]) -> tuple[int, Options] | None:
    """Return a call of `run` or `create`, None for any other command. `words`: those after `docker`.

    The number of words up to and including `run` or `create`, and the options before the image.
    """
    _, command = _options(words, _GLOBAL_FLAGS, _GLOBAL_VALUES)
    start = command + (words[command : command + 1] == ["container"])
    if words[start : start + 1] not in (["run"], ["create"]):
        return None
    return start + 1, _options(words[start + 1 :], _RUN_FLAGS, None)[0]


def _options(words: Sequence[str], flags: frozenset[str], known: frozenset[str] | None) -> tuple[Options, int]:
    """Return the options at the beginning, and the index of the first word after them.

    That index is behind the last word if an option is neither among `flags` nor among the `known` ones; None accepts
    all.
    """
    found: Options = []
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


def _values(options: Options, *names: str) -> list[str]:
    return [value for name, value in options if name in names]


def gpu_words(options: Options, nv_gpu: str) -> list[str]:
    """Return the words to add to a call with these options. `nv_gpu`: the caller's NV_GPU.

    A call that chooses its GPUs by docker's own flags, or asks for help, is unchanged.
    """
    if _values(options, "gpus", "help") or any(one.startswith("nvidia.com/gpu=") for one in _values(options, "device")):
        return []
    words = [] if _values(options, "runtime") else ["--runtime=nvidia"]
    if not _sets_devices(options):
        words.append(f"--env={_DEVICES}={','.join(nv_gpu.replace(',', ' ').split()) or 'all'}")
    return words


def _sets_devices(options: Options) -> bool:
    """Say whether a call itself chooses devices. A pipe of --env-file is docker's: it can be read once."""
    lines = _values(options, "e", "env")
    for path in _values(options, "env-file"):
        if not os.path.isfile(path):  # noqa: PTH113 (pathlib costs milliseconds)
            continue
        try:
            with open(path, encoding="utf-8-sig", errors="replace") as file:  # noqa: PTH123
                lines += file
        except OSError:
            continue  # docker says it next
    return any(line.partition("=")[0].strip() == _DEVICES for line in lines)


def main(words: list[str], own_path: str) -> NoReturn:
    """Execute docker. `own_path`: this program's file, to which a `docker` on the PATH may link."""
    # Python ignores SIGPIPE and turns SIGINT into an exception; restore their defaults for docker and its children.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    docker = _docker(own_path)
    call = container_call(words)
    if call is not None:
        start, options = call
        words = [*words[:start], *gpu_words(options, os.environ.get("NV_GPU", "")), *words[start:]]
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


def _end(what: str, seen: str, then: str) -> NoReturn:
    sys.stderr.write(f"nvidia-docker: {what}\n  seen: {seen}\n  next: {then}\n")
    sys.exit(_NO_DOCKER)
