"""`gpuprov playbooks`: write the playbooks that came with gpuprov into a folder."""

from __future__ import annotations

from pathlib import Path

import click

from gpuprov.fleet import one_file
from gpuprov.fleet.standard_streams import say


@click.command(short_help="Write the playbooks and an example inventory into a folder.")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def playbooks(folder: Path) -> None:
    """Write the playbooks, their roles and an example inventory into FOLDER.

    Run it again after an upgrade of gpuprov: it replaces playbooks/ and keeps your inventory and ansible.cfg.

    \b
    Examples:
      gpuprov playbooks ~/gpu-hosts
      cd ~/gpu-hosts && ansible-playbook -i inventories/example playbooks/site.yml --check --diff
    """
    from gpuprov.fleet.playbook_files import write_playbooks

    one_file.require_whole_program("`gpuprov playbooks`")
    for path in write_playbooks(folder):
        say(f"wrote {path}")
