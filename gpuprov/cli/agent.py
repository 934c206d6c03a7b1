"""`gpuprov agent`: the program that runs on hosts, as one file."""

from __future__ import annotations

import click

from gpuprov.fleet import one_file
from gpuprov.fleet.standard_streams import say
from gpuprov.protocol.words import counted


@click.group()
def agent() -> None:
    """The program that runs on the hosts.

    \b
    Example:
      gpuprov agent build -o agent.pyz
    """


@agent.command()
@click.option("--output", "-o", metavar="FILE", required=True, type=click.Path(dir_okay=False, writable=True),
              help="The file to write.")  # fmt: skip
def build(output: str) -> None:
    """Write the agent as one file that runs on Python 3.9 and later.

    \b
    Example:
      gpuprov agent build -o agent.pyz
      echo '{"command": "facts"}' | sudo python3 -I agent.pyz
    """
    from pathlib import Path

    from gpuprov.fleet.agent_build import build_agent
    from gpuprov.protocol.errors import from_os_error

    one_file.require_whole_program("`gpuprov agent build`")
    made = build_agent()
    try:
        Path(output).write_bytes(made.content)
    except OSError as error:
        raise from_os_error(f"the agent {output} can't be written", error, "name another file with -o") from None
    say(f"{output}: {counted(len(made.content), 'byte')}, SHA-256 {made.digest}")
