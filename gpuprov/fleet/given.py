"""What the command line is given: texts that must not be empty, paths that shells complete, standard input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

_Command = TypeVar("_Command", bound=Callable[..., Any])


if TYPE_CHECKING:
    _Type = click.ParamType[str]
else:  # click 8.1 has no parameters for it
    _Type = click.ParamType


class Place(_Type):
    """A path, taken as it is typed; shells complete it. `name`, file or dir, is what it is called too."""

    def __init__(self, name: str) -> None:
        self.name = name

    def shell_complete(
        self, context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self.name)]


FILE, FOLDER = Place("file"), Place("dir")


def text(*names: str, **settings: Any) -> Callable[[_Command], _Command]:
    """Return a click option whose value is "" where it is not given.

    Given and empty is a mistake, mostly a variable of the shell that is not set: `--limit ""` would mean all hosts.
    """
    return click.option(*names, callback=_given, **settings)


def _given(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    if value is not None and not value.strip():
        raise click.BadParameter("it is empty: is a variable of the shell not set?", context, parameter)
    return value or ""


def standard_input(what: str) -> bytes:
    """Return all of standard input; at a terminal, say what is waited for."""
    if sys.stdin is None:  # closed
        return b""
    if sys.stdin.isatty():
        click.echo(f"reading {what} from standard input; Ctrl-D ends it", err=True)
    return sys.stdin.buffer.read()
