"""What ssh(1) makes of its configuration files, by `ssh -G`, and of the arguments for it that an inventory holds."""

from __future__ import annotations

import functools
import os
import pwd
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpuprov.core.files import expanded
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import UsageError

if TYPE_CHECKING:
    from paramiko.config import SSHConfigDict

# In Ansible's order: ssh takes the first of several values.
_ARGUMENTS = ("ssh_args", "ssh_common_args", "ssh_extra_args")
_HOST_KEYS = {"ansible_host_key_checking", "ansible_ssh_host_key_checking"}
ARGUMENT_VARIABLES = {*_HOST_KEYS, *(f"ansible_{one}" for one in _ARGUMENTS)}
_USER_FILE = "~/.ssh/config"
_SECONDS = 60  # `Match exec` runs commands
# ssh answers with all its default keys where none is configured.
_DEFAULT_KEY = re.compile(r"identityfile ~/\.ssh/id_(rsa|dsa|ecdsa|ed25519|xmss|mldsa\w+)(_sk)?")
# Keywords that change the connection and that gpuprov does not follow: each run says so.
UNHEEDED = ("BindInterface", "KnownHostsCommand")
# ssh_config(5) keywords that are read, by their lower-case form.
HEEDED = {
    keyword.lower(): keyword
    for keyword in (
        "BindAddress", "CertificateFile", "GlobalKnownHostsFile", "HostKeyAlgorithms", "HostKeyAlias", "Hostname",
        "IdentitiesOnly", "IdentityAgent", "IdentityFile", "Port", "ProxyCommand", "ProxyJump", "PubkeyAuthentication",
        "RevokedHostKeys", "StrictHostKeyChecking", "User", "UserKnownHostsFile", *UNHEEDED,
    )
}  # fmt: skip
# Common in Ansible inventories and without a meaning here: one connection serves the whole run, and it says by itself
# when it breaks. Passing over these deserves no warning.
_NEEDLESS = frozenset(
    ("batchmode", "controlmaster", "controlpath", "controlpersist", "connecttimeout", "forwardagent", "loglevel",
     "passwordauthentication", "kbdinteractiveauthentication", "preferredauthentications", "serveralivecountmax",
     "serveraliveinterval", "compression")
)  # fmt: skip
_NO_KNOWN_HOSTS = {"userknownhostsfile none": "userknownhostsfile /dev/null"}
_FLAGS_WITH_KEYWORD = {"-J": "ProxyJump", "-i": "IdentityFile", "-p": "Port", "-l": "User"}
_NEEDLESS_FLAGS = frozenset("46AaCnqTtvx")


@dataclass(frozen=True)
class SshArguments:
    """What the arguments ask for, in ssh_config(5)'s words; `warnings` name those that have no effect."""

    options: tuple[tuple[str, str], ...] = ()
    config_file: str = ""
    warnings: tuple[str, ...] = ()


def parse_ssh_arguments(text: str) -> SshArguments:
    """Return what a line of arguments for ssh(1) asks for. Raises UsageError where quotes do not close."""
    options: list[tuple[str, str]] = []
    warnings: list[str] = []
    config_file = ""
    try:
        words = iter(shlex.split(text))
    except ValueError as error:
        what = "ansible_ssh_common_args, or another setting of arguments for ssh, is no list of arguments"
        raise UsageError(what, str(error), "close what is quoted, as in a shell") from None
    for word in words:
        # `-oX=y` and `-o X=y` are the same.
        takes_value = word[:2] in ("-o", "-F", *_FLAGS_WITH_KEYWORD)
        flag, value = (word[:2], word[2:] or next(words, "")) if takes_value else (word, "")
        if flag == "-F":
            config_file = value
        elif flag in _FLAGS_WITH_KEYWORD and value.isprintable():
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


@dataclass(frozen=True)
class SshConfiguration:
    """The configuration for one host and the hosts it is reached through; Fabric calls `lookup` for each.

    The inventory's options bind the host alone, its configuration file all of them: just as with ssh(1).
    """

    address: str
    options: tuple[tuple[str, str], ...] = ()
    file: str = ""

    def __post_init__(self) -> None:
        if not _home():  # paramiko and Fabric need a name, and look for it in this variable last
            os.environ.setdefault("USERNAME", str(os.getuid()))

    def lookup(self, host: str) -> SSHConfigDict:
        """Return the options for a host. Raises GpuprovError (exit code 2) if ssh refuses its configuration."""
        from paramiko import SSHConfig

        lines = _answers(host, self.options if host == self.address else (), self.file)
        # paramiko replaces what ssh leaves to its later steps: ~, %h, %p and %r in keys and in ProxyCommand.
        found = SSHConfig.from_text("\n".join(("Host *", *lines))).lookup(host)
        # In a name it would take the network interface of fe80::1%hsi0 for such a placeholder.
        found |= (line.split(" ", 1) for line in lines if line.startswith("hostname "))
        return found


@functools.cache
def _answers(host: str, options: tuple[tuple[str, str], ...], file: str) -> tuple[str, ...]:
    """Return the lines of `ssh -G` that are heeded; without ssh, or a name for this user, the options themselves."""
    if shutil.which("ssh") is None or not _home():
        if file not in ("", "none") or os.path.isfile(os.path.expanduser(_USER_FILE)):  # noqa: PTH111, PTH113
            what = "the SSH configuration can't be read: ssh, which does that, is missing, or this user has no name"
            raise UsageError(what, file or _USER_FILE, "install the OpenSSH client (package openssh-client)")
        return tuple(f"{keyword} {value}" for keyword, value in options)
    path = file if file in ("", "none") else str(expanded(file).absolute())
    named = ("-F", path) if path else ()
    # A name or a path may have blanks.
    quoted = {(key, value) for key, value in options if key in ("User", "IdentityFile") and '"' not in value}
    given = (f'-o{one[0]}="{one[1]}"' if one in quoted else f"-o{one[0]}={one[1]}" for one in options)
    words = ("ssh", "-G", "-T", *named, *given, "--", host)
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False)
        failure = f"exit code {done.returncode}\n{done.stderr.decode('utf-8', 'replace')}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure:
        shown = shlex.join(one for one in words if not one.startswith("-oProxyCommand="))  # which may have a password
        step = f"fix it: {shown} says where"
        if "username contains invalid characters" in failure:  # OpenSSH 10.3 and later
            step = (
                "take out ansible_user, and name the user in ~/.ssh/config, by `User`: from there ssh takes this name"
            )
        raise UsageError("ssh refuses its configuration", failure, step)
    lines = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.split(" ")[0] in HEEDED]
    keys = [line for line in lines if line.startswith("identityfile ")]
    # `none` means no file to ssh, to paramiko and host_keys.py one of that name.
    unset = {"identityfile none", f"userknownhostsfile {_home()}/.ssh/known_hosts {_home()}/.ssh/known_hosts2"}
    if len(keys) > 2 and all(map(_DEFAULT_KEY.fullmatch, keys)):
        unset |= set(keys)
    # Its keys are in the home directory that ssh takes, whatever HOME says.
    begin, place = "identityfile ~/", f"identityfile {_home()}/"
    lines = [_NO_KNOWN_HOSTS.get(line, line) for line in lines]
    return tuple(line.replace(begin, place) if line.startswith(begin) else line for line in lines if line not in unset)


def _home() -> str:
    """Return the home directory that ssh takes, "" for a user without a name, whom ssh refuses."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def arguments_of(values: Mapping[str, Any]) -> SshArguments:
    """Return the arguments for ssh as Ansible takes them: from variables, then its environment, then ansible.cfg."""
    from ansible.constants import CONFIG_FILE

    of_ansible = CONFIG_FILE or any(one.startswith("ANSIBLE_") for one in os.environ)
    if ARGUMENT_VARIABLES.isdisjoint(values) and not of_ansible:
        return SshArguments()
    get = functools.partial(_ssh_settings().get_config_value, plugin_type="connection", plugin_name="ssh")
    words = [str(get(name, variables=values) or "") for name in _ARGUMENTS]
    if get("host_key_checking", variables=values) is False:
        words.insert(1, "-o StrictHostKeyChecking=no")
    return parse_ssh_arguments(" ".join(words))


@functools.cache
def _ssh_settings() -> Any:
    """Return Ansible's configuration with the settings of its ssh connection, which take 0.1 s to load."""
    from ansible.constants import config
    from ansible.plugins.loader import connection_loader

    connection_loader.get("ssh", class_only=True)
    return config
