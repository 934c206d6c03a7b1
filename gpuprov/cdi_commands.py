"""`gpuprov cdi`: CDI specifications made, listed, checked, changed and tried; flags as nvidia-ctk has them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuprov.errors import ExitCode, GpuprovError

if TYPE_CHECKING:
    from gpuprov.cdi.specification import Specification

_MODES = ("auto", "nvml", "gds", "mofed", "gdrcopy", "nvswitch", "imex", "management", "csv", "wsl")
_NOT_HERE = {"csv": "Tegra", "wsl": "WSL"}
_GENERATE = "NVIDIA_CTK_CDI_GENERATE_"
_SPEC_DIRS = click.option(
    "--spec-dir", "folders", metavar="DIR", multiple=True, envvar="NVIDIA_CTK_CDI_SPEC_DIRS",
    help="Where specifications are; later ones win. Default: /etc/cdi, /var/run/cdi.",
)  # fmt: skip


@click.group()
def cdi() -> None:
    """Container Device Interface: make, list, check, change and try specifications.

    \b
    Examples:
      gpuprov cdi generate --output /etc/cdi/nvidia.json --format json
      gpuprov cdi list
      gpuprov cdi validate /etc/cdi/nvidia.json
    """


@cdi.command()
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    default="-",
    envvar="NVIDIA_CTK_CDI_OUTPUT_FILE_PATH",
    help="`-` for standard output.",
    show_default=True,
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["yaml", "json"]),
    envvar=f"{_GENERATE}OUTPUT_FORMAT",
    help="Default: by the file's name, else yaml.",
)
@click.option("--mode", type=click.Choice(_MODES), default="auto", envvar=f"{_GENERATE}MODE", show_default=True)
@click.option(
    "--driver-root",
    metavar="DIR",
    default="/",
    envvar=f"{_GENERATE}DRIVER_ROOT",
    show_default=True,
    help="Where the driver's files lie.",
)
@click.option(
    "--dev-root",
    metavar="DIR",
    default="",
    envvar=f"{_GENERATE}DEV_ROOT",
    help="Where /dev lies. Default: in the driver's root.",
)
@click.option(
    "--library-search-path",
    "library_folders",
    metavar="DIR",
    multiple=True,
    envvar=f"{_GENERATE}LIBRARY_SEARCH_PATHS",
    help="Where the driver's libraries are looked for first.",
)
@click.option(
    "--config-search-path",
    "configuration_folders",
    metavar="DIR",
    multiple=True,
    envvar=f"{_GENERATE}CONFIG_SEARCH_PATHS",
    help="Where its configuration (vulkan/icd.d/…) is looked for first.",
)
@click.option(
    "--ldconfig-path",
    metavar="FILE",
    default="",
    envvar=f"{_GENERATE}LDCONFIG_PATH",
    help="Not needed: the loader's cache is written without it.",
)
@click.option(
    "--feature-flag",
    metavar="NAME",
    multiple=True,
    envvar=f"{_GENERATE}FEATURE_FLAGS",
    help="Taken as nvidia-ctk takes it; there is none here.",
)
@click.option("--vendor", default="", envvar=f"{_GENERATE}VENDOR", help="Default: nvidia.com.")
@click.option("--class", "class_", default="", envvar=f"{_GENERATE}CLASS", help="Default: gpu.")
@click.option(
    "--device-name-strategy",
    "strategies",
    multiple=True,
    envvar=f"{_GENERATE}DEVICE_NAME_STRATEGIES",
    type=click.Choice(["index", "uuid", "type-index"]),
    help="Default: index, uuid and PCI bus id.",
)
@click.option(
    "--nvidia-cdi-hook-path",
    "hook_path",
    metavar="FILE",
    default="",
    envvar=f"{_GENERATE}HOOK_PATH",
    help="The hook's path in the specification.",
)
@click.option(
    "--disable-hook",
    "disabled",
    metavar="HOOK",
    multiple=True,
    envvar=f"{_GENERATE}DISABLED_HOOKS",
    help="`all`: no hook; then links are missing.",
)
@click.option(
    "--enable-hook",
    "enabled",
    metavar="HOOK",
    multiple=True,
    envvar=f"{_GENERATE}ENABLED_HOOKS",
    help="Wins over --disable-hook.",
)
@click.option("--no-all-device", is_flag=True, help="Leave the device `all` out.")
@click.option("--device-id", "ids", metavar="NAME", multiple=True, help="Only these devices.")
def generate(
    output: str,
    form: str | None,
    mode: str,
    driver_root: str,
    dev_root: str,
    library_folders: tuple[str, ...],
    configuration_folders: tuple[str, ...],
    ldconfig_path: str,
    feature_flag: tuple[str, ...],
    **options: Any,
) -> None:
    """Write the specification of this host's driver and GPUs, or of what goes with them (--mode).

    \b
    Examples:
      gpuprov cdi generate
      gpuprov cdi generate --output /etc/cdi/nvidia.json
      gpuprov cdi generate --mode gds --output /etc/cdi/nvidia-gds.json
      gpuprov cdi generate --device-name-strategy uuid --no-all-device
    """
    from gpuprov.cdi.transform import with_device_root

    if mode in _NOT_HERE:
        raise GpuprovError(f"--mode {mode} is for {_NOT_HERE[mode]}, which gpuprov does not serve", "",
                           "use nvidia-ctk cdi generate there", exit_code=ExitCode.USAGE)  # fmt: skip
    found = _generated(mode, driver_root, library_folders, configuration_folders)
    if dev_root:
        found = with_device_root(found, dev_root)
    _write(_chosen(found, **options), output, form or _form_of(output))


def _generated(
    mode: str, driver_root: str, library_folders: tuple[str, ...], configuration_folders: tuple[str, ...]
) -> Specification:
    """Return what the driver below that root, or what goes with it, calls for."""
    from dataclasses import replace

    from gpuprov.cdi.discover import ask_nvml, discover
    from gpuprov.cdi.generate import specification
    from gpuprov.cdi.other_devices import specification_of
    from gpuprov.cdi.transform import with_root
    from gpuprov.system import System

    system = System(driver_root)
    if mode in ("auto", "nvml"):
        driver = discover(system, library_folders, configuration_folders)
        if not driver.library_version:
            raise GpuprovError("there is no NVIDIA driver here", f"no libnvidia-ml.so.1 below {driver_root}",
                               "sudo gpuprov install")  # fmt: skip
        found = specification(ask_nvml(system, driver) if driver_root == "/" else driver)
    else:
        found = specification_of(system, mode)
    if driver_root == "/":
        return found
    # The hook is this host's, wherever the driver lies.
    moved = with_root(found, "/", driver_root)
    return replace(moved, edits=replace(moved.edits, hooks=found.edits.hooks))


def _chosen(
    found: Specification, *, vendor: str, class_: str, strategies: tuple[str, ...], hook_path: str,
    disabled: tuple[str, ...], enabled: tuple[str, ...], no_all_device: bool, ids: tuple[str, ...],
) -> Specification:  # fmt: skip
    from dataclasses import replace

    from gpuprov.cdi.choice import chosen_devices

    devices = chosen_devices(found, strategies=strategies, ids=ids, no_all_device=no_all_device)
    hooks = () if "all" in disabled and not enabled else found.edits.hooks
    if hook_path:
        hooks = tuple(replace(hook, path=hook_path) for hook in hooks)
    kind = f"{vendor or found.kind.partition('/')[0]}/{class_ or found.kind.partition('/')[2]}"
    return replace(found, devices=devices, edits=replace(found.edits, hooks=hooks), kind=kind)


@cdi.command("list")
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
            click.echo(f"{path}: {error}", err=True)
    if as_json:
        rows = [{"name": name, "file": found.path} for name, found in sorted(registry.devices.items())]
        click.echo(json.dumps({"devices": rows, "errors": registry.errors}, indent=2))
        return
    for name in sorted(registry.devices):
        click.echo(name)


@cdi.command()
@_SPEC_DIRS
@click.argument("files", metavar="[FILE]...", nargs=-1)
def validate(folders: tuple[str, ...], files: tuple[str, ...]) -> None:
    """Say what is wrong with specifications, a line each; exit 1 if anything is.

    \b
    Examples:
      gpuprov cdi validate
      gpuprov cdi validate /etc/cdi/nvidia.json other.yaml
      gpuprov cdi generate | gpuprov cdi validate -
    """
    from gpuprov.cdi.documents import parse
    from gpuprov.cdi.validation import problems

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
        click.echo(f"{name}: {text}")
    sys.exit(1 if faults else 0)


@cdi.command()
@click.option("--device", "names", metavar="NAME", multiple=True, required=True, help="Qualified: nvidia.com/gpu=0.")
@click.option("--bundle", metavar="DIR", type=click.Path(exists=True, file_okay=False), help="Its config.json is read.")
@click.option("--input", "source", metavar="FILE", default="-", help="A config.json.", show_default=True)
@click.option("--output", "-o", metavar="FILE", default="-", help="`-` for standard output.", show_default=True)
@_SPEC_DIRS
def inject(names: tuple[str, ...], bundle: str | None, source: str, output: str, folders: tuple[str, ...]) -> None:
    """Put devices into an OCI configuration, as an engine that reads CDI does, and print it.

    \b
    Examples:
      gpuprov cdi inject --device nvidia.com/gpu=all < config.json
      gpuprov cdi inject --device nvidia.com/gpu=0 --bundle . --output config.json
    """
    from gpuprov.cdi.inject import inject as injected

    name = f"{bundle}/config.json" if bundle else source
    try:
        config = json.loads(_read(name))
    except (ValueError, RecursionError) as error:
        raise GpuprovError(f"{name} holds no config.json", str(error), exit_code=ExitCode.USAGE) from None
    if not isinstance(config, dict):
        raise GpuprovError(f"{name} holds no config.json", "it is no object", exit_code=ExitCode.USAGE)
    _put(output, (json.dumps(injected(config, names, _registry(folders)), indent=1) + "\n").encode())


@cdi.group()
def transform() -> None:
    """Change a specification.

    \b
    Example:
      gpuprov cdi transform root --from / --to /host --input nvidia.yaml
    """


@transform.command("root")
@click.option("--from", "source", metavar="DIR", default="/", show_default=True)
@click.option("--to", "target", metavar="DIR", default="/", show_default=True)
@click.option("--input", "name", metavar="FILE", default="-", show_default=True)
@click.option("--output", "-o", metavar="FILE", default="-", show_default=True)
@click.option("--format", "form", type=click.Choice(["yaml", "json"]), help="Default: as the input.")
@click.option("--relative-to", type=click.Choice(["host", "container"]), default="host", show_default=True)
def transform_root(source: str, target: str, name: str, output: str, form: str | None, relative_to: str) -> None:
    """Move paths of the host, or of the container, from below one folder to below another.

    \b
    Examples:
      gpuprov cdi transform root --from / --to /host --input nvidia.yaml --output nvidia-host.yaml
      gpuprov cdi transform root --input nvidia.yaml --format json --output nvidia.json
    """
    from gpuprov.cdi.documents import is_yaml, parse
    from gpuprov.cdi.transform import with_root

    content = _read(name)
    found = parse(content, name)
    changed = with_root(found, source, target, relative_to=relative_to)
    _write(changed, output, form or ("yaml" if is_yaml(content, name) else "json"))


def _registry(folders: tuple[str, ...]) -> Any:
    from gpuprov.cdi.registry import FOLDERS, read_registry
    from gpuprov.system import System

    # The variable may hold several, as a shell's PATH does.
    named = [part for folder in folders for part in folder.split(":") if part]
    return read_registry(System("/"), [str(Path(folder).absolute()) for folder in named] or FOLDERS)


def _read(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise GpuprovError(f"{name} can't be read", str(error.strerror), exit_code=ExitCode.USAGE) from None


def _form_of(output: str) -> str:
    return "json" if output.endswith(".json") else "yaml"


def _write(found: Specification, output: str, form: str) -> None:
    from gpuprov.cdi.documents import render
    from gpuprov.cdi.validation import problems

    wrong = problems(found)
    if wrong:
        raise GpuprovError("this would be no valid CDI specification", wrong[0], "gpuprov cdi generate --help")
    _put(output, render(found, form))


def _put(output: str, content: bytes) -> None:
    if output == "-":
        sys.stdout.buffer.write(content)
        return
    from gpuprov.system import System

    path = Path(output).absolute()
    try:
        System("/").make_directory(str(path.parent))
        System("/").write(str(path), content)
    except OSError as error:
        raise GpuprovError(f"{output} can't be written", str(error)) from None
