"""Writes the man pages: gpuprov(1) and one for each command, from the help that docs/cli.md shows.

python -m tools.man_pages build/man
"""

from __future__ import annotations

import datetime
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from gpuprov import __version__
from gpuprov.fleet.options import require_whole_program
from tools.cli_page import visible_commands

_EXIT_STATUS = """\
The worst result of all hosts decides.
.TP
.B 0
done
.TP
.B 1
a host failed
.TP
.B 2
the call or the inventory is wrong
.TP
.B 3
a host needs a reboot
.TP
.B 4
a host is unreachable
.TP
.B 5
something would change
.RB ( install
.BR "\\-\\-check \\-\\-detailed\\-exitcode" )
.TP
.B 6
a host is degraded
.RB ( health )
.TP
.B 7
a host is unfit
.RB ( health )
.TP
.B 129, 130, 143
SIGHUP, Ctrl-C or SIGTERM ended the run
"""
_ESCAPES = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}
_HEADING = re.compile(r"^(Examples?|Exit codes)\b.*:$")


def pages(moment: int, *, one_file: bool = False) -> dict[str, str]:
    """Return file name → page of all commands that are not hidden; `moment`: seconds since 1970, the pages' date.

    `one_file`: without the commands that the one-file program refuses.
    """
    date = datetime.datetime.fromtimestamp(moment, datetime.timezone.utc).strftime("%Y-%m-%d")
    return {
        f"{_name(context)}.1": "".join(f"{line}\n" for line in _page(command, context, date, one_file=one_file))
        for command, context in visible_commands()
        if not (one_file and _is_refused(command))
    }


def _is_refused(command: click.Command) -> bool:
    function = inspect.unwrap(command.callback) if command.callback else None
    return function is not None and require_whole_program.__name__ in function.__code__.co_names


def _name(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _page(command: click.Command, context: click.Context, date: str, *, one_file: bool) -> Iterator[str]:
    name = _name(context)
    yield f'.TH {literal(name.upper())} 1 "{date}" "gpuprov {__version__}" "User Commands"'
    yield from (".nh", ".ad l", ".SH NAME", f"{literal(name)} \\- {_summary(command)}")
    yield ".SH SYNOPSIS"
    yield f".B {literal(context.command_path)}"
    yield from (literal(piece) for piece in command.collect_usage_pieces(context))
    description, examples = _help(command)
    yield ".SH DESCRIPTION"
    yield from description
    yield from _records("OPTIONS", _options(command, context))
    yield from _records("COMMANDS", _subcommands(command, context, one_file=one_file))
    if context.parent is None:
        yield from (".PP", "Each command has a page:", ".BR gpuprov\\-install (1).")
    if examples:
        yield from (".SH EXAMPLES", ".nf", *examples, ".fi")
    if context.parent is None or "hosts" in (one.name for one in command.params):
        yield from (".SH EXIT STATUS", _EXIT_STATUS.rstrip())
    yield from (".SH SEE ALSO", *_see_also(context))


def _summary(command: click.Command) -> str:
    """Return the line that apropos shows: no period at its end."""
    return literal(command.get_short_help_str(200).rstrip("."))


def _help(command: click.Command) -> tuple[list[str], list[str]]:
    """Return the lines of the description, and of the examples; exit codes have a section of their own."""
    description: list[str] = []
    examples: list[str] = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        kept = paragraph.startswith("\b\n")
        lines = paragraph.removeprefix("\b\n").splitlines()
        if kept and _HEADING.match(lines[0]):
            if lines[0].startswith("Example"):
                examples += (literal(line.removeprefix("  ")) for line in lines[1:])
        elif kept:
            description += (".PP", ".nf", *map(literal, lines), ".fi")
        else:
            description += (".PP", *map(literal, lines))
    return description[1:], examples


def _options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record:
            yield record


def _subcommands(command: click.Command, context: click.Context, *, one_file: bool) -> Iterator[tuple[str, str]]:
    if isinstance(command, click.Group):
        for child, below in visible_commands(command, context):
            if child is not command and not (one_file and _is_refused(child)):
                yield below.command_path.removeprefix(f"{context.command_path} "), child.get_short_help_str(200)


def _records(title: str, records: Iterable[tuple[str, str]]) -> Iterator[str]:
    for number, (term, meaning) in enumerate(records):
        if not number:
            yield f".SH {title}"
        yield from (".TP", f".B {literal(term)}", *map(literal, meaning.splitlines()))


def _see_also(context: click.Context) -> Iterator[str]:
    if context.parent is not None:
        yield ".BR gpuprov (1),"
    yield "https://github.com/gpuprov/gpuprov/tree/main/docs"


def literal(text: str) -> str:
    """Return a line that groff prints as it stands: no requests, hyphens that can be copied from the page."""
    made = "".join(_ESCAPES.get(one, one if one.isascii() else f"\\[u{ord(one):04X}]") for one in text.rstrip())
    return f"\\&{made}" if made.startswith(".") else made


def write_pages(folder: Path, moment: int) -> list[Path]:
    """Write all pages into a folder, which is made; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, text in pages(moment).items():
        made.append(folder / name)
        made[-1].write_text(text, encoding="utf-8")
    return made


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]), 0)
