"""Writes docs/cli.md: the help of each command, as click prints it; options that many commands have once.

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
# Options that are written once → commands of which each has all of them.
_SHARED = {
    "Options of runs over hosts": ("facts", "cuda"),
    "Options of runs that change hosts": ("install", "rollback", "uninstall", "doctor"),
}


def page() -> str:
    """Return the page: one section for each command that is not hidden, in alphabetical order."""
    shared = _shared()
    sections = [
        f"## {context.command_path}\n\n```\n{_help(command, context, shared)}\n```\n"
        for command, context in visible_commands()
    ]
    for title, options in shared.items():
        text = click.Command(title, params=options, add_help_option=False).get_help(_context(cli, "gpuprov"))
        sections.append(f"## {title}\n\n```\n{text.partition('Options:')[2].strip(chr(10))}\n```\n")
    return "\n".join((_HEAD, *sections))


def _shared() -> dict[str, list[click.Parameter]]:
    """Return the options that are written once, by their title; each of them under one title only."""
    found: dict[str, list[click.Parameter]] = {}
    for title, names in _SHARED.items():
        first, *others = [cli.commands[name].params for name in names]
        above = [_key(one) for options in found.values() for one in options]
        found[title] = [
            one for one in first if _key(one) not in above and all(_key(one) in map(_key, other) for other in others)
        ]
    return found


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


def _help(command: click.Command, context: click.Context, shared: dict[str, list[click.Parameter]]) -> str:
    """Return a command's help without --help; a line stands for the options that are written once."""
    shown = copy.copy(command)
    shown.add_help_option = False
    lines = ""
    for title, options in shared.items():
        keys = {_key(one) for one in options}
        if keys <= {_key(one) for one in shown.params}:
            shown.params = [one for one in shown.params if _key(one) not in keys]
            lines += f"\n\n  Also all {title[0].lower()}{title[1:]} (below)."
    return shown.get_help(context).strip() + lines


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
