"""The options that ask for passwords, and the asking: the same for every command that goes to hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from gpuprov.wire.errors import ExitCode, GpuprovError

_Command = TypeVar("_Command", bound=Callable[..., Any])


def password_options(function: _Command) -> _Command:
    """Give a command -k and -K."""
    function = click.option("--ask-become-pass", "-K", is_flag=True, help="Ask for the sudo password.")(function)
    return click.option("--ask-pass", "-k", is_flag=True, help="Ask for the SSH password.")(function)


def take_passwords(options: dict[str, Any]) -> dict[str, Any]:
    """Take -k and -K out of the options and return what was typed, by the names that fleet.options.Options has."""
    return {
        "password": _asked("SSH password", wanted=options.pop("ask_pass")),
        "become_password": _asked("sudo password", wanted=options.pop("ask_become_pass")),
    }


def _asked(what: str, *, wanted: bool) -> str:
    """Return what is typed at the terminal or, where there is none, the next line of standard input.

    Raises GpuprovError (exit code 2) if there is neither.
    """
    if not wanted:
        return ""
    if _has_terminal():
        return str(click.prompt(what, hide_input=True, err=True))
    line = sys.stdin.readline() if sys.stdin else ""
    if not line:
        raise GpuprovError(
            f"there is nobody to ask for the {what}",
            "no terminal, and nothing more on standard input",
            "pipe it in, a line each; or set ansible_password, ansible_become_password in a vault",
            exit_code=ExitCode.USAGE,
        )
    return line.rstrip("\n")


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
