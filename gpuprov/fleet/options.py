"""What the command line says about a run over hosts: each option once, with its flags, default, meaning and commands.

click alone is imported here, so that `--help` answers at once; gpuprov.cli makes its options from these fields.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from gpuprov import __version__
from gpuprov.protocol.dataclass import dataclass, field, fields
from gpuprov.protocol.errors import UsageError
from gpuprov.protocol.request import CHANGING, MOST_MINUTES

_Command = TypeVar("_Command", bound=Callable[..., Any])
_OPTION = "option"
FLAG = "flag"
_COMMANDS = "commands"
# True in the program `gpuprov-host.pyz`, set by its first lines (tools/host_program.py).
one_file = False
# The fields that choose hosts.
INVENTORY_FIELDS = ("hosts", "limit", "extra_vars", "vault_password_file")
DRIVERS = ("runfile", "packages", "distribution", "preinstalled")

# Taken as they are typed; shells complete them.
FILE, FOLDER = click.Path(readable=False), click.Path(file_okay=False, readable=False)
FILE.name, FOLDER.name = "file", "dir"
AS_JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")


def text_option(*names: str, **settings: Any) -> Callable[[_Command], _Command]:
    """Return a click option whose value is "" by default.

    An empty value is a mistake, mostly a variable of the shell that is not set: `--limit ""` would mean all hosts.
    """
    return click.option(*names, callback=_require_text, **settings)


def _require_text(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    if value is not None and not value.strip():
        raise click.BadParameter("it is empty: is a variable of the shell not set?", context, parameter)
    return value or ""


def pairs(option: str, texts: tuple[str, ...], form: re.Pattern[str], example: str) -> dict[str, str]:
    """Return name → value of an option that is given as NAME=VALUE; `form` has a group for each of the two."""
    found = {}
    for text in texts:
        pair = form.fullmatch(text)
        if pair is None:
            raise click.BadParameter(f"{text!r}: give {example}", param_hint=option)
        found[pair[1]] = pair[2]
    return found


def _option(flags: str, help: str, commands: tuple[str, ...] = (), *, default: Any = None, **settings: Any) -> Any:  # noqa: A002
    """Return a field with its click option: a flag, several values, a text or a number. `commands`: none means all."""
    make = text_option if default is None and not {"is_flag", "multiple"} & set(settings) else click.option
    if default is not None:
        settings |= {"default": default, "show_default": True}
    value = default or (False if "is_flag" in settings else () if "multiple" in settings else "")

    def made(name: str, other_help: str | None = None) -> Callable[[_Command], _Command]:
        return make(name, *flags.split(), **settings, help=other_help or help)

    return field(default=value, metadata={_OPTION: made, _COMMANDS: commands, FLAG: flags.split()[0]})


_flag = functools.partial(_option, is_flag=True)
_seconds = functools.partial(_option, metavar="SECONDS")
_PASSWORDS = (
    click.option("--ask-pass", "-k", is_flag=True, help="Ask for the SSH password."),
    click.option("--ask-become-pass", "-K", is_flag=True, help="Ask for the sudo password."),
)


@dataclass(frozen=True)
class SshSettings:
    """What all connections have in common."""

    accept_new_host_keys: bool = _flag(
        "--accept-new-host-keys", "Store host keys seen for the first time; changed keys are still refused."
    )
    connect_timeout: float = _seconds(
        "--connect-timeout", "How long to wait for a connection.", type=click.FloatRange(0.1, 600), default=10.0
    )


CONNECTION_FIELDS = tuple(SshSettings.__annotations__)


@dataclass(frozen=True)
class RunOptions:
    """What the command line asks for, but for connections."""

    command: str
    hosts: tuple[str, ...] = _option(
        "--hosts", "An Ansible inventory: file, directory or `a,b,`. Default: this machine.", type=FILE,
        metavar="INVENTORY", multiple=True,
    )  # fmt: skip
    limit: str = _option("--limit -l", "Only hosts that match, as Ansible's --limit.", metavar="PATTERN")
    extra_vars: tuple[str, ...] = _option(
        "--extra-vars -e", "key=value, JSON or @file.yml; wins over the inventory.",
        # `cuda` has another -e: docker run's.
        (*CHANGING, "verify", "doctor", "health", "accept", "facts"), metavar="VAR", multiple=True,
    )  # fmt: skip
    vault_password_file: str = _option("--vault-password-file", "The password of encrypted variables.", type=FILE)
    image: bool = _flag("--image", "Treat this machine's disk as an image; no GPU is needed.", CHANGING)
    root: str = _option(
        "--root", "Work in an image's root file system, mounted at DIR; implies --image.",
        (*CHANGING, "verify", "doctor"), type=FOLDER, metavar="DIR",
    )  # fmt: skip
    check: bool = _flag("--check -C --dry-run", "Show what would change; change nothing.", (*CHANGING, "doctor"))
    diff: bool = _flag("--diff -D", "Show the changes to files; with -v in full.", (*CHANGING, "doctor"))
    fix: bool = _flag("--fix", "Fix what gpuprov can fix, then check again.", ("doctor",))
    allow: str = _option(
        "--allow", "With --fix: what a GPU's repair may do to this host.", ("doctor",), metavar="reset,reboot"
    )
    remember: bool = _flag("--remember", "Record the present GPUs as the expected ones.", ("verify",))
    minutes: int = _option(
        "--minutes", "How long accept may take.", ("accept",),
        metavar="N", type=click.IntRange(1, MOST_MINUTES), default=10,
    )  # fmt: skip
    sign: str = _option("--sign", "Sign each result with this key of your gpg.", ("accept",), metavar="KEYID")
    upgrade: bool = _flag(
        "--upgrade", "Install the driver that is recommended now, of packages the branch's newest, not the kept one.",
        ("install",),
    )  # fmt: skip
    detailed_exitcode: bool = _flag(
        "--detailed-exitcode", "With --check: exit code 5 if something would change.", ("install",)
    )
    bundle: str = _option(
        "--bundle", "Install from this file of `gpuprov bundle create` alone, without a network.", ("install",),
        type=FILE,
    )  # fmt: skip
    bundle_key: str = _option(
        "--bundle-key", "The key that must have signed the bundle.", ("install",), metavar="FINGERPRINT"
    )
    forks: int = _option("--forks", "How many hosts at a time.", metavar="N", type=click.IntRange(1, 1000), default=20)
    serial: str = _option(
        "--serial", "Process hosts in batches of this size, as Ansible's serial.", metavar="N|N%|1,5,20%"
    )
    max_fail: str = _option("--max-fail", "Begin no further host once more hosts of a batch failed.", metavar="N|N%")
    canary: str = _option(
        "--canary", "Process these hosts, or the first N, before all others, and stop if one fails.", metavar="HOST|N"
    )
    window: str = _option(
        "--window", "Begin no host outside of it: 'Sat 02:00-06:00', 'Mon-Fri 22:00-04:00 Europe/Berlin'.",
        (*CHANGING, "doctor"),
        metavar="DAYS TIMES [ZONE]",
    )  # fmt: skip
    rollback_on_failure: bool = _flag(
        "--rollback-on-failure", "Verify each changed host; roll it back if its changes or verify fail.", ("install",)
    )
    before_host: str = _option(
        "--before-host", "Run this here, without a shell, before a change that stops containers: "
        "'kubectl drain {host}'.", (*CHANGING, "doctor"), metavar="COMMAND",
    )  # fmt: skip
    after_host: str = _option(
        "--after-host", "Run this once a drained host is verified: 'kubectl uncordon {host}'.",
        ("install", "rollback", "doctor"), metavar="COMMAND",
    )  # fmt: skip
    host_command_timeout: float = _seconds(
        "--host-command-timeout", "Time limit of each of these two commands.", (*CHANGING, "doctor"),
        type=click.FloatRange(0.1), default=1800.0,
    )  # fmt: skip
    # Longer than the longest command on a host may be quiet (packages/apt_changes.py: 3900).
    host_timeout: float = _seconds(
        "--host-timeout", "Give up on a host that sends nothing for this long.", type=click.FloatRange(0.1),
        default=4500.0,
    )  # fmt: skip
    bootstrap_python: bool = _flag("--bootstrap-python", "Install Python on hosts that have none.")
    report: str = _option("--report", "Also write the results as one HTML page.", type=FILE, metavar="FILE.html")
    metrics: str = _option(
        "--metrics", "Also write metrics for node_exporter's textfile collector.", type=FILE, metavar="FILE.prom"
    )
    json: bool = _flag("--json", "Print events as JSON lines, a summary last.")
    verbose: bool = _flag("--verbose -v", "Show more.")
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
    names = (one.name for one in ours if command in (one.metadata[_COMMANDS] or (command,)))
    return named_options(*names, passwords=True)


def named_options(*names: str, passwords: bool = False, **helps: str) -> Callable[[_Command], _Command]:
    """Return what gives a click command the options of these names; `helps` replaces the help of some."""
    chosen = [one for one in fields(Options) if one.name in names]
    return with_options(
        *(one.metadata[_OPTION](one.name, helps.get(one.name)) for one in chosen), *_PASSWORDS * passwords
    )


def with_options(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Return what gives a click command these options, in their order."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


def made_options(command: str, options: dict[str, Any], **others: Any) -> Options:
    """Return the Options that a click command's arguments make; with -k and -K, ask for the passwords."""
    password = asked("SSH password", wanted=options.pop("ask_pass"))
    sudo = asked("sudo password", wanted=options.pop("ask_become_pass"), otherwise=password)
    return Options(command, **others, password=password, become_password=sudo, **options)


def asked(what: str, *, wanted: bool, otherwise: str = "") -> str:
    """Return a password typed at the terminal or, without one, the next line of standard input.

    `otherwise`: what an empty one stands for, the SSH password, as with Ansible.

    Raises GpuprovError (exit code 2) if there is neither, or if it is not UTF-8.
    """
    if not wanted:
        return ""
    try:
        shown = f"{what} (empty: the SSH password)" if otherwise else what
        prompt = functools.partial(click.prompt, shown, otherwise or None, hide_input=True, show_default=False)
        typed = has_terminal() and f"{prompt(err=True)}\n"
        line = typed or (sys.stdin.readline() if sys.stdin else "")
        line.encode()  # some locales let other bytes through
    except UnicodeError:
        step = "type it in a terminal of UTF-8, after export LC_ALL=C.UTF-8; of other bytes, change the password"
        raise UsageError(f"the {what} is not text in UTF-8", "", step) from None
    if not line:
        seen = "no terminal, and nothing more on standard input"
        step = "pipe it in, a line each; or set ansible_password, ansible_become_password in a vault"
        raise UsageError(f"there is nobody to ask for the {what}", seen, step)
    return line.rstrip("\n") or otherwise


def has_terminal() -> bool:
    """Say whether this process has a terminal, at which a person may be."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def require_whole_program(what: str) -> None:
    """Raise GpuprovError (exit code 2) in the one-file program: `what` needs Ansible, SSH or gpuprov's own packages."""
    if one_file:
        raise UsageError(
            f"{what} needs the whole gpuprov",
            "this is the one-file program, which serves the machine it runs on: it has no Ansible and no SSH",
            f"on a machine with Python 3.11 or later: pip install gpuprov-{__version__}-py3-none-any.whl (of the same "
            "release), or `make setup` in a clone; then run the same command there",
        )
