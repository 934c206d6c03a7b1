"""Options that take a text, and are refused where they are given none; known to the command line alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


def text(*names: str, **settings: Any) -> Callable[[_Command], _Command]:
    """Return a click option whose value is "" where it is not given.

    Given and empty is a mistake, mostly a variable of the shell that is not set: `--limit ""` would mean all hosts.
    """
    return click.option(*names, callback=_given, **settings)


def _given(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    if value is not None and not value.strip():
        raise click.BadParameter("it is empty: is a variable of the shell not set?", context, parameter)
    return value or ""
