"""Writes docs/cli.md: the help of each command, as click prints it.

python -m tools.cli_page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from gpuprov.cli.main import cli

PAGE = Path(__file__).resolve().parents[1] / "docs/cli.md"
_WIDTH = 110
_HEAD = """\
# Command line

The help of each command, written by `make docs`. Exit codes: [README](../README.md). The variables of `-e`:
[configuration.md](configuration.md).
"""


def page() -> str:
    """Return the page: one section for each command that is not hidden, in alphabetical order."""
    return "\n".join((_HEAD, *_sections(cli, click.Context(cli, info_name="gpuprov", max_content_width=_WIDTH))))


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    # A width of the terminal would make another page on each machine.
    context.terminal_width = _WIDTH
    yield f"## {context.command_path}\n\n```\n{command.get_help(context).strip()}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child and not child.hidden:
                yield from _sections(
                    child, click.Context(child, info_name=name, parent=context, max_content_width=_WIDTH)
                )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
