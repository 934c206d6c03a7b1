"""The options -k and -K, and the password prompts: the same for every command that contacts hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from gpuprov.protocol.errors import UsageError

_Command = TypeVar("_Command", bound=Callable[..., Any])


def password_options(function: _Command) -> _Command:
    """Add -k and -K to a command."""
    function = click.option("--ask-become-pass", "-K", is_flag=True, help="Ask for the sudo password.")(function)
    return click.option("--ask-pass", "-k", is_flag=True, help="Ask for the SSH password.")(function)


def take_passwords(options: dict[str, Any]) -> dict[str, Any]:
    """Remove -k and -K from the options and return the entered passwords, by the names in fleet.options.Options."""
    return {
        "password": _asked("SSH password", wanted=options.pop("ask_pass")),
        "become_password": _asked("sudo password", wanted=options.pop("ask_become_pass")),
    }


def _asked(what: str, *, wanted: bool) -> str:
    """Return a password typed at the terminal or, without one, the next line of standard input.

    Raises GpuprovError (exit code 2) if there is neither.
    """
    if not wanted:
        return ""
    if _has_terminal():
        return str(click.prompt(what, hide_input=True, err=True))
    line = sys.stdin.readline() if sys.stdin else ""
    if not line:
        raise UsageError(
            f"there is nobody to ask for the {what}",
            "no terminal, and nothing more on standard input",
            "pipe it in, a line each; or set ansible_password, ansible_become_password in a vault",
        )
    return line.rstrip("\n")


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
