"""The arguments for ssh(1) that an inventory holds (ansible_ssh_common_args and its kin), as data; runs nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

# ssh_config(5) keywords that the connection heeds, by their lower-case form.
HEEDED = {
    keyword.lower(): keyword
    for keyword in (
        "HostKeyAlias", "Hostname", "IdentitiesOnly", "IdentityFile", "Port", "ProxyCommand", "ProxyJump",
        "StrictHostKeyChecking", "User", "UserKnownHostsFile",
    )
}  # fmt: skip
# Common in Ansible inventories and without a meaning here: one connection serves the whole run, and it says by itself
# when it breaks. Passing over these deserves no warning.
_NEEDLESS = frozenset(
    ("batchmode", "controlmaster", "controlpath", "controlpersist", "connecttimeout", "forwardagent", "loglevel",
     "passwordauthentication", "kbdinteractiveauthentication", "preferredauthentications", "serveralivecountmax",
     "serveraliveinterval", "compression")
)  # fmt: skip
_FLAGS_WITH_KEYWORD = {"-J": "ProxyJump", "-i": "IdentityFile", "-p": "Port", "-l": "User"}
_NEEDLESS_FLAGS = frozenset("46AaCnqTtvx")


@dataclass(frozen=True)
class SshArguments:
    """What the arguments ask for, in ssh_config(5)'s words; `warnings` name those that have no effect."""

    options: tuple[tuple[str, str], ...] = ()
    config_file: str = ""
    warnings: tuple[str, ...] = ()


def parse_ssh_arguments(text: str) -> SshArguments:
    """Return what a line of arguments for ssh(1) asks for. Raises ValueError where quotes do not close."""
    options: list[tuple[str, str]] = []
    warnings: list[str] = []
    config_file = ""
    for flag, value in _pairs(shlex.split(text)):
        if flag == "-F":
            config_file = value
        elif flag in _FLAGS_WITH_KEYWORD:
            options.append((_FLAGS_WITH_KEYWORD[flag], value))
        elif flag == "-o":
            keyword, _, setting = value.replace("=", " ", 1).strip().partition(" ")
            heeded = HEEDED.get(keyword.lower())
            if heeded is not None and "\n" not in setting:
                options.append((heeded, setting.strip()))
            elif keyword.lower() not in _NEEDLESS:
                warnings.append(f"the SSH option {keyword} has no effect here")
        elif flag.lstrip("-") == "" or not set(flag[1:]) <= _NEEDLESS_FLAGS:
            warnings.append(f"the SSH argument {flag} has no effect here")
    return SshArguments(tuple(options), config_file, tuple(warnings))


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (flag, value), with the value empty for flags that take none; `-oX=y` and `-o X=y` are the same."""
    waiting = iter(words)
    for word in waiting:
        if word[:2] in ("-o", "-F", *_FLAGS_WITH_KEYWORD):
            yield word[:2], word[2:] or next(waiting, "")
        else:
            yield word, ""
