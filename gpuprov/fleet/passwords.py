"""Passwords that the command line asks for: typed at a terminal, or piped in; never stored."""

from __future__ import annotations

import os
import sys

import click

from gpuprov.wire.errors import ExitCode, GpuprovError


def ask(what: str, *, wanted: bool) -> str:
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
