"""Writes docs/cli.md: the help of each command, as click prints it; the options of runs over hosts once.

python -m tools.cli_page
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import click

from gpuprov.cli.main import cli

PAGE = Path(__file__).resolve().parents[1] / "docs/cli.md"
_WIDTH = 110
_HEAD = """\
# Command line

The help of each command (`--help`), written by `make docs`. [Exit codes](fleets.md#exit-codes). The variables of `-e`:
[configuration.md](configuration.md).
"""
_SHARED = "Options of runs over hosts"
# These two have all of them; a command with one of them has the same option.
_RUN, _OTHER_RUN = "facts", "cuda"


def page() -> str:
    """Return the page: one section for each command that is not hidden, in alphabetical order."""
    shared = [one for one in cli.commands[_RUN].params if _key(one) in map(_key, cli.commands[_OTHER_RUN].params)]
    keys = frozenset(map(_key, shared))
    options = click.Command(_SHARED, params=list(shared), add_help_option=False).get_help(_context(cli, "gpuprov"))
    sections = [
        f"## {context.command_path}\n\n```\n{_help(command, context, keys)}\n```\n"
        for command, context in visible_commands()
    ]
    return "\n".join(
        (_HEAD, *sections, f"## {_SHARED}\n\n```\n{options.partition('Options:')[2].strip(chr(10))}\n```\n")
    )


def _key(parameter: click.Parameter) -> tuple[str, str]:
    return "/".join(parameter.opts), getattr(parameter, "help", None) or ""


def visible_commands(
    command: click.Command = cli, context: click.Context | None = None
) -> Iterator[tuple[click.Command, click.Context]]:
    """Give all commands that are not hidden, with their contexts; a group that does nothing itself is left out."""
    context = context or _context(command, "gpuprov")
    # The first lists the groups.
    if context.parent is None or not isinstance(command, click.Group) or command.invoke_without_command:
        yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child and not child.hidden:
                yield from visible_commands(child, _context(child, name, context))


def _context(command: click.Command, name: str, parent: click.Context | None = None) -> click.Context:
    context = click.Context(command, info_name=name, parent=parent, max_content_width=_WIDTH)
    # A width of the terminal would make another page on each machine.
    context.terminal_width = _WIDTH
    return context


def _help(command: click.Command, context: click.Context, shared: frozenset[tuple[str, str]]) -> str:
    """Return a command's help without --help; a line stands for the options that all runs over hosts have."""
    shown = copy.copy(command)
    shown.add_help_option = False
    left = [one for one in command.params if _key(one) not in shared]
    if len(command.params) - len(left) < len(shared):
        return shown.get_help(context).strip()
    shown.params = left
    return f"{shown.get_help(context).strip()}\n\n  Also all {_SHARED[0].lower()}{_SHARED[1:]} (below)."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
