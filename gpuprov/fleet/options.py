"""What the command line says about a run over hosts: each option once, with its flags, default, meaning and commands.

click alone is imported here, so that `--help` answers at once; gpuprov.cli makes its options from these fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

_Command = TypeVar("_Command", bound=Callable[..., Any])
_OPTION = "option"
_COMMANDS = "commands"
# The fields that choose hosts.
INVENTORY_FIELDS = ("hosts", "limit", "extra_vars", "vault_password_file")

if TYPE_CHECKING:
    _Type = click.ParamType[str]
else:  # click 8.1 has no parameters for it
    _Type = click.ParamType


class PathText(_Type):
    """A path, taken as it is typed; shells complete it. `name`, file or dir, is what it is called too."""

    def __init__(self, name: str) -> None:
        self.name = name

    def shell_complete(
        self, context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self.name)]


FILE, FOLDER = PathText("file"), PathText("dir")


def text_option(*names: str, **settings: Any) -> Callable[[_Command], _Command]:
    """Return a click option whose value is "" by default.

    An empty value is a mistake, mostly a variable of the shell that is not set: `--limit ""` would mean all hosts.
    """
    return click.option(*names, callback=_require_text, **settings)


def _require_text(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    if value is not None and not value.strip():
        raise click.BadParameter("it is empty: is a variable of the shell not set?", context, parameter)
    return value or ""


def _option(*flags: str, default: Any = None, commands: tuple[str, ...] = (), **settings: Any) -> Any:
    """Return a field with its click option: a flag, several values, a text or a number. `commands`: none means all."""
    make = text_option if default is None and not {"is_flag", "multiple"} & set(settings) else click.option
    if default is not None:
        settings |= {"default": default, "show_default": True}
    value = default or (False if "is_flag" in settings else () if "multiple" in settings else "")

    def made(name: str, other_help: str | None = None) -> Callable[[_Command], _Command]:
        return make(name, *flags, **{**settings, "help": other_help or settings["help"]})

    return field(default=value, metadata={_OPTION: made, _COMMANDS: commands})


@dataclass(frozen=True)
class SshSettings:
    """What all connections have in common."""

    accept_new_host_keys: bool = _option(
        "--accept-new-host-keys", is_flag=True,
        help="Store host keys seen for the first time; changed keys are still refused.",
    )  # fmt: skip
    connect_timeout: float = _option(
        "--connect-timeout", metavar="SECONDS", type=click.FloatRange(0.1, 600), default=10.0,
        help="How long to wait for a connection.",
    )  # fmt: skip


@dataclass(frozen=True)
class RunOptions:
    """What the command line asks for, but for connections."""

    command: str
    hosts: tuple[str, ...] = _option(
        "--hosts", type=FILE, metavar="INVENTORY", multiple=True,
        help="An Ansible inventory: file, directory or `a,b,`. Default: this machine.",
    )  # fmt: skip
    limit: str = _option("--limit", "-l", metavar="PATTERN", help="Only hosts that match, as Ansible's --limit.")
    extra_vars: tuple[str, ...] = _option(
        "--extra-vars", "-e", metavar="VAR", multiple=True,
        # `cuda` has another -e: docker run's.
        commands=("install", "verify", "doctor", "facts", "rollback", "uninstall"),
        help="key=value, JSON or @file.yml; wins over the inventory.",
    )  # fmt: skip
    vault_password_file: str = _option("--vault-password-file", type=FILE, help="The password of encrypted variables.")
    image: bool = _option(
        "--image", is_flag=True, commands=("install", "rollback", "uninstall"),
        help="Treat this machine's disk as an image; no GPU is needed.",
    )  # fmt: skip
    root: str = _option(
        "--root", type=FOLDER, metavar="DIR", commands=("install", "verify", "doctor", "rollback", "uninstall"),
        help="Work in an image's root file system, mounted at DIR; implies --image.",
    )  # fmt: skip
    check: bool = _option(
        "--check", "-C", "--dry-run", is_flag=True, commands=("install", "rollback", "uninstall", "doctor"),
        help="Show what would change; change nothing.",
    )  # fmt: skip
    diff: bool = _option(
        "--diff", "-D", is_flag=True, commands=("install", "rollback", "uninstall", "doctor"),
        help="Show the changes to files; with -v in full.",
    )  # fmt: skip
    fix: bool = _option(
        "--fix", is_flag=True, commands=("doctor",),
        help="Fix what gpuprov can fix, then check again.",
    )  # fmt: skip
    remember: bool = _option(
        "--remember", is_flag=True, commands=("verify",),
        help="Take the GPUs that are there now as all that should be there.",
    )  # fmt: skip
    detailed_exitcode: bool = _option(
        "--detailed-exitcode", is_flag=True, commands=("install",),
        help="With --check: exit code 5 if something would change.",
    )  # fmt: skip
    bundle: str = _option(
        "--bundle", type=FILE, commands=("install",),
        help="Install from this file of `gpuprov bundle create` alone, without a network.",
    )  # fmt: skip
    bundle_key: str = _option(
        "--bundle-key", metavar="FINGERPRINT", commands=("install",), help="The key that must have signed the bundle."
    )
    forks: int = _option(
        "--forks", metavar="N", type=click.IntRange(1, 1000), default=20, help="How many hosts at a time."
    )
    serial: str = _option(
        "--serial", metavar="N|N%|1,5,20%",
        help="Process hosts in batches of this size, as Ansible's serial.",
    )  # fmt: skip
    max_fail: str = _option(
        "--max-fail", metavar="N|N%", help="Begin no further host once more hosts of a batch failed."
    )
    canary: str = _option(
        "--canary", metavar="HOST|N",
        help="Process these hosts, or the first N, before all others, and stop if one fails.",
    )  # fmt: skip
    before_host: str = _option(
        "--before-host", metavar="COMMAND", commands=("install", "rollback", "uninstall"),
        help="Run this here, without a shell, before a change that stops containers: 'kubectl drain {host}'.",
    )  # fmt: skip
    after_host: str = _option(
        "--after-host", metavar="COMMAND", commands=("install", "rollback"),
        help="Run this once a drained host is verified: 'kubectl uncordon {host}'.",
    )  # fmt: skip
    host_command_timeout: float = _option(
        "--host-command-timeout", metavar="SECONDS", type=click.FloatRange(0.1), default=1800.0,
        commands=("install", "rollback", "uninstall"), help="Time limit of each of these two commands.",
    )  # fmt: skip
    # Longer than the longest command on a host may be quiet (packages/apt_changes.py: 3900).
    host_timeout: float = _option(
        "--host-timeout", metavar="SECONDS", type=click.FloatRange(0.1), default=4500.0,
        help="Give up on a host that sends nothing for this long.",
    )  # fmt: skip
    bootstrap_python: bool = _option("--bootstrap-python", is_flag=True, help="Install Python on hosts that have none.")
    report: str = _option("--report", type=FILE, metavar="FILE.html", help="Also write the results as one HTML page.")
    metrics: str = _option(
        "--metrics", type=FILE, metavar="FILE.prom", help="Also write metrics for node_exporter's textfile collector."
    )
    json: bool = _option("--json", is_flag=True, help="Print events as JSON lines, a summary last.")
    verbose: bool = _option("--verbose", "-v", is_flag=True, help="Show more.")
    password: str = field(default="", repr=False)
    become_password: str = field(default="", repr=False)
    overrides: tuple[tuple[str, str], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Options(SshSettings, RunOptions):
    """What the command line asks for. `overrides` are options of the specification that win over the inventory.

    A dataclass has the fields of its last base first: those of all connections come last.
    """


def options_of(command: str) -> Callable[[_Command], _Command]:
    """Return what gives a click command its options; they arrive under the names of the fields."""
    ours = [one for one in fields(Options) if _OPTION in one.metadata]
    return _giving([one for one in ours if command in (one.metadata[_COMMANDS] or (command,))])


def options_of_hosts() -> Callable[[_Command], _Command]:
    """Return what gives a click command the options that choose hosts, and those of the connections to them."""
    known = {one.name: one for one in fields(Options)}
    return _giving([known[name] for name in (*INVENTORY_FIELDS, *SshSettings.__annotations__)])


def options_of_inventories(help_of_hosts: str) -> Callable[[_Command], _Command]:
    """Return what gives a click command those options that choose hosts and their variables."""
    return _giving([one for one in fields(Options) if one.name in INVENTORY_FIELDS], hosts=help_of_hosts)


def _giving(chosen: list[Any], **helps: str) -> Callable[[_Command], _Command]:
    def give(command: _Command) -> _Command:
        for one in reversed(chosen):
            command = one.metadata[_OPTION](one.name, helps.get(one.name))(command)
        return command

    return give
