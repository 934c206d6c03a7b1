"""`gpuprov cdi`: list, check, change and try CDI specifications, with the flags of nvidia-ctk."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from gpuprov.cli.cdi_generate import generate, write_output, write_specification
from gpuprov.fleet.options import FILE, FOLDER
from gpuprov.fleet.standard_streams import say, say_text, standard_input
from gpuprov.protocol.errors import GpuprovError, UsageError

_SPEC_DIRS = click.option(
    "--spec-dir", "folders", type=FOLDER, multiple=True, envvar="NVIDIA_CTK_CDI_SPEC_DIRS",
    help="Where specifications are; later ones win. Default: /etc/cdi, /var/run/cdi.",
)  # fmt: skip


@click.group(short_help="Make, list, check, change and try CDI specifications.")
def cdi() -> None:
    """Container Device Interface: make, list, check, change and try specifications.

    \b
    Examples:
      gpuprov cdi generate --output /etc/cdi/nvidia.json --format json
      gpuprov cdi list
      gpuprov cdi validate /etc/cdi/nvidia.json
    """


cdi.add_command(generate)


@cdi.command("list", short_help="List the devices that engines can name.")
@_SPEC_DIRS
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def list_devices(folders: tuple[str, ...], as_json: bool) -> None:
    """List the devices that engines can name, one a line; what is wrong with specifications goes to stderr.

    \b
    Examples:
      gpuprov cdi list
      gpuprov cdi list --spec-dir /etc/cdi --json
    """
    registry = _registry(folders)
    for path, errors in registry.errors.items():
        for error in errors:
            say(f"{path}: {error}", err=True)
    if as_json:
        rows = [{"name": name, "file": found.path} for name, found in sorted(registry.devices.items())]
        say_text(json.dumps({"devices": rows, "errors": registry.errors}, indent=2))
        return
    for name in sorted(registry.devices):
        say(name)


@cdi.command(short_help="Say what is wrong with specifications.")
@_SPEC_DIRS
@click.argument("files", type=FILE, metavar="[FILE]...", nargs=-1)
def validate(folders: tuple[str, ...], files: tuple[str, ...]) -> None:
    """Say what is wrong with specifications, a line each; exit 1 if anything is.

    \b
    Examples:
      gpuprov cdi validate
      gpuprov cdi validate /etc/cdi/nvidia.json other.yaml
      gpuprov cdi generate | gpuprov cdi validate -
    """
    from gpuprov.cdi.specification import parse, problems

    faults = []
    for name in files:
        content = _read(name)
        try:
            faults += [(name, text) for text in problems(parse(content, name))]
        except GpuprovError as error:
            faults.append((name, error.problems[0].evidence or error.problems[0].what))
    if not files:
        faults = [(path, text) for path, errors in _registry(folders).errors.items() for text in errors]
    for name, text in faults:
        say(f"{name}: {text}")
    sys.exit(1 if faults else 0)


@cdi.command(short_help="Put devices into an OCI configuration.")
@click.option("--device", "names", metavar="NAME", multiple=True, required=True, help="Qualified: nvidia.com/gpu=0.")
@click.option("--bundle", metavar="DIR", type=click.Path(exists=True, file_okay=False), help="Its config.json is read.")
@click.option("--input", "source", type=FILE, default="-", help="A config.json.", show_default=True)
@click.option("--output", "-o", type=FILE, default="-", help="`-` for standard output.", show_default=True)
@_SPEC_DIRS
def inject(names: tuple[str, ...], bundle: str | None, source: str, output: str, folders: tuple[str, ...]) -> None:
    """Put devices into an OCI configuration, as an engine that reads CDI does, and print it.

    \b
    Examples:
      gpuprov cdi inject --device nvidia.com/gpu=all < config.json
      gpuprov cdi inject --device nvidia.com/gpu=0 --bundle . --output config.json
    """
    from gpuprov.cdi.registry import inject as injected

    name = f"{bundle}/config.json" if bundle else source
    evidence = "it is no object"
    try:
        config = json.loads(_read(name))
    except (ValueError, RecursionError) as error:
        config, evidence = None, str(error)
    if not isinstance(config, dict):
        where = "standard input" if name == "-" else name
        hint = "--bundle DIR reads the config.json of an OCI bundle, --input FILE any other"
        raise UsageError(f"{where} holds no OCI configuration", evidence, hint)
    write_output(output, (json.dumps(injected(config, names, _registry(folders)), indent=1) + "\n").encode())


@cdi.group()
def transform() -> None:
    """Change a specification.

    \b
    Example:
      gpuprov cdi transform root --from / --to /host --input nvidia.yaml
    """


@transform.command("root", short_help="Move paths from below one folder to below another.")
@click.option("--from", "source", type=FOLDER, default="/", show_default=True, help="The folder that paths leave.")
@click.option("--to", "target", type=FOLDER, default="/", show_default=True, help="The folder that they come to.")
@click.option("--input", "name", type=FILE, default="-", show_default=True, help="`-` for standard input.")
@click.option("--output", "-o", type=FILE, default="-", show_default=True, help="`-` for standard output.")
@click.option("--format", "form", type=click.Choice(["yaml", "json"]), help="Default: as the input.")
@click.option("--relative-to", type=click.Choice(["host", "container"]), default="host", show_default=True,
              help="Whose paths move.")  # fmt: skip
def transform_root(source: str, target: str, name: str, output: str, form: str | None, relative_to: str) -> None:
    """Move paths of the host, or of the container, from below one folder to below another.

    \b
    Examples:
      gpuprov cdi transform root --from / --to /host --input nvidia.yaml --output nvidia-host.yaml
      gpuprov cdi transform root --input nvidia.yaml --format json --output nvidia.json
    """
    from gpuprov.cdi.specification import is_yaml, parse
    from gpuprov.cdi.transform import with_root

    content = _read(name)
    found = parse(content, name)
    changed = with_root(found, source, target, relative_to=relative_to)
    write_specification(changed, output, form or ("yaml" if is_yaml(content, name) else "json"))


def _registry(folders: tuple[str, ...]) -> Any:
    from gpuprov.cdi.registry import FOLDERS, read_registry
    from gpuprov.core.system import System

    # The variable may hold several folders, like a shell's PATH.
    named = [part for folder in folders for part in folder.split(":") if part]
    return read_registry(System("/"), [str(Path(folder).absolute()) for folder in named] or FOLDERS)


def _read(name: str) -> bytes:
    if name == "-":
        return standard_input("a file")
    try:
        return Path(name).read_bytes()
    except OSError as error:
        hint = "put sudo before it" if isinstance(error, PermissionError) else "gpuprov cdi list names what is there"
        raise UsageError(f"{name} can't be read", str(error.strerror), hint) from None
