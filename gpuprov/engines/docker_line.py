"""Parse a call of docker's client: its own options, the command, and for `run` and `create` the image.

Pure and without imports, because it is part of a program that starts with each container (nvidia_docker_command.py).
docker stops reading options at the first word that is not one. What follows the image is the container's command, and
is not parsed. Sources: docker(1), docker-run(1), and pflag's rules for words such as `-itv/a:/b`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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

    `hosts` are the daemons that docker's own options name. `options` are those of the command: pairs of name (without
    hyphens) and value, in their order. `image` is "" where there is none, else the word of `after` at `place`.
    """

    __slots__ = ("after", "before", "hosts", "image", "options", "place")

    def __init__(self, before: Sequence[str], after: Sequence[str], hosts: Sequence[str] = ()) -> None:
        self.before = tuple(before)
        self.hosts = tuple(hosts)
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
        return ContainerCall(self.before, words, self.hosts)

    def values(self, *names: str) -> tuple[str, ...]:
        """Return the values of the options of these names."""
        return tuple(value for name, value in self.options if name in names)


def container_call(words: Sequence[str]) -> ContainerCall | None:
    """Return the call of `run` or `create` in the words after `docker`, None for any other command."""
    options, place = _options(words, _GLOBAL_FLAGS, _GLOBAL_VALUES)
    if place < 0 or place >= len(words):
        return None
    if words[place] == "container":
        place += 1
    if place >= len(words) or words[place] not in _STARTING:
        return None
    hosts = [value for name, value in options if name in ("H", "host")]
    return ContainerCall(words[: place + 1], words[place + 1 :], hosts)


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
