"""`gpuprov playbooks`: write the playbooks that came with gpuprov into a folder."""

import importlib.metadata
import shutil
import tempfile
from pathlib import Path

import click

import gpuprov
from gpuprov.fleet.options import require_whole_program
from gpuprov.fleet.standard_streams import say
from gpuprov.protocol.errors import GpuprovError, UsageError, os_errors


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
    require_whole_program("`gpuprov playbooks`")
    for path in write_playbooks(folder):
        say(f"wrote {path}")


_AGENT = "files/gpuprov-agent.pyz"
_COLLECTION = "collections/ansible_collections/gpuprov/host"
# Made again below, of no use without a clone, or written by Python.
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "collection.py", "collections")


def write_playbooks(folder: Path) -> tuple[Path, ...]:
    """Write playbooks/, inventories/example and ansible.cfg into `folder`; return what was written.

    playbooks/ of an earlier version is replaced. An inventory or ansible.cfg that exists is the user's and stays.
    Raises GpuprovError if another playbooks/ is there, or if the folder can't be written.
    """
    from gpuprov.fleet.agent_file import build_agent

    playbooks = folder / "playbooks"
    if playbooks.is_symlink() or (playbooks.exists() and not (playbooks / _AGENT).is_file()):
        step = "name another folder"
        raise UsageError(f"{playbooks} exists and was not written by gpuprov", f"it is a link, or lacks {_AGENT}", step)
    written = [playbooks]
    with os_errors(f"the playbooks can't be written into {folder}"):
        source = _source()
        folder.mkdir(parents=True, exist_ok=True)
        # Made beside the earlier ones: if it fails or is interrupted, those stay whole.
        with tempfile.TemporaryDirectory(prefix=".gpuprov-", dir=folder) as place:
            made = Path(place, "playbooks")
            shutil.copytree(source / "playbooks", made, ignore=_LEFT_OUT)
            (made / _AGENT).parent.mkdir()
            (made / _AGENT).write_bytes(build_agent().content)
            (made / _COLLECTION).mkdir(parents=True)
            for name in ("plugins", "roles"):
                (made / _COLLECTION / name).symlink_to(f"../../../../{name}")
            if playbooks.exists():
                playbooks.rename(Path(place, "earlier"))
            made.rename(playbooks)
        for name, copy in (("inventories/example", shutil.copytree), ("ansible.cfg", shutil.copyfile)):
            if not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                copy(source / name, folder / name)
                written.append(folder / name)
    return tuple(written)


def _source() -> Path:
    """Return the folder that holds playbooks/: a clone, or where the wheel's data are."""
    clone = Path(gpuprov.__file__).resolve().parents[1]
    if (clone / "playbooks/site.yml").is_file():
        return clone
    for path in importlib.metadata.files("gpuprov") or ():
        if path.parts[-2:] == ("playbooks", "site.yml"):
            return Path(str(path.locate())).resolve().parents[1]
    step = "pip install --force-reinstall gpuprov"
    raise GpuprovError("this installation of gpuprov has no playbooks", f"gpuprov is in {clone}", step)
