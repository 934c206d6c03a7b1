"""`gpuprov cdi`: make, list, check, change and try CDI specifications, with the flags of nvidia-ctk."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuprov.fleet.options import AS_JSON, FILE, FOLDER, with_options
from gpuprov.fleet.standard_streams import object_text, say, show, standard_input
from gpuprov.protocol.errors import GpuprovError, UsageError, from_os_error

if TYPE_CHECKING:
    from gpuprov.cdi.specification import Specification


_MODES = ("auto", "nvml", "gds", "mofed", "gdrcopy", "nvswitch", "imex", "management", "csv", "wsl")

_STRATEGIES = ("index", "uuid", "type-index")
_GENERATE = "NVIDIA_CTK_CDI_GENERATE_"
_SPEC_DIRS = click.option(
    "--spec-dir", "folders", type=FOLDER, multiple=True, envvar="NVIDIA_CTK_CDI_SPEC_DIRS",
    help="Where specifications are; later ones win. Default: /etc/cdi, /var/run/cdi.",
)  # fmt: skip


def _by_commas(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of a flag that nvidia-ctk accepts repeated or separated by commas, also in its variables."""
    found = tuple(value for word in words for value in word.split(",") if value)
    if parameter.name == "strategies" and (wrong := [value for value in found if value not in _STRATEGIES]):
        raise click.BadParameter(f"{wrong[0]!r} is not one of {', '.join(_STRATEGIES)}.", context, parameter)
    return found


# Names, short names and variables are nvidia-ctk's (cmd/nvidia-ctk/cdi/generate/generate.go).
_generate_options = with_options(
    click.option("--output", "-o", type=FILE, default="-", show_default=True,
                 envvar="NVIDIA_CTK_CDI_OUTPUT_FILE_PATH", help="`-` or nothing for standard output."),
    click.option("--format", "form", type=click.Choice(["yaml", "json"], case_sensitive=False),
                 envvar=f"{_GENERATE}OUTPUT_FORMAT", help="Default: by the file's name, else yaml."),
    click.option("--mode", "--discovery-mode", type=click.Choice(_MODES, case_sensitive=False), default="auto",
                 envvar=f"{_GENERATE}MODE", show_default=True, help="auto, nvml, wsl: GPUs; others: more."),
    click.option("--driver-root", type=FOLDER, default="/", envvar="NVIDIA_CTK_DRIVER_ROOT", show_default=True,
                 help="The root of the driver's files."),
    click.option("--dev-root", type=FOLDER, default="", envvar="NVIDIA_CTK_DEV_ROOT",
                 help="The root of /dev for the engine. Default: the driver's root."),
    click.option("--library-search-path", "library_folders", type=FOLDER, multiple=True, callback=_by_commas,
                 envvar=f"{_GENERATE}LIBRARY_SEARCH_PATHS", help="Search here first for the driver's libraries."),
    click.option("--config-search-path", "configuration_folders", type=FOLDER, multiple=True, callback=_by_commas,
                 envvar=f"{_GENERATE}CONFIG_SEARCH_PATHS",
                 help="Search here first for its configuration (vulkan/icd.d/…)."),
    click.option("--ldconfig-path", type=FILE, default="", envvar=f"{_GENERATE}LDCONFIG_PATH",
                 help="Has no effect: gpuprov writes the loader's cache itself."),
    click.option("--feature-flag", "--feature-flags", "feature_flags", metavar="NAME", multiple=True,
                 callback=_by_commas, envvar=f"{_GENERATE}FEATURE_FLAGS", help="Has no effect; a note says so."),
    click.option("--vendor", "--cdi-vendor", metavar="NAME", default="", envvar=f"{_GENERATE}VENDOR",
                 help="Default: nvidia.com."),
    click.option("--class", "--cdi-class", "class_", metavar="NAME", default="", envvar=f"{_GENERATE}CLASS",
                 help="Default: gpu."),
    click.option("--device-name-strategy", "strategies", multiple=True, callback=_by_commas,
                 metavar=f"[{'|'.join(_STRATEGIES)}]", envvar=f"{_GENERATE}DEVICE_NAME_STRATEGIES",
                 help="Default: index, uuid and PCI bus id."),
    click.option("--nvidia-cdi-hook-path", "--nvidia-ctk-path", "hook_path", type=FILE, default="",
                 envvar="NVIDIA_CTK_CDI_HOOK_PATH",
                 help="The path of gpuprov-container-runtime-hook on the hosts."),
    click.option("--disable-hook", "--disable-hooks", "disabled", metavar="HOOK", multiple=True, callback=_by_commas,
                 envvar=f"{_GENERATE}DISABLED_HOOKS", help="`all`: no hook; then links are missing."),
    click.option("--enable-hook", "--enable-hooks", "enabled", metavar="HOOK", multiple=True, callback=_by_commas,
                 envvar=f"{_GENERATE}ENABLED_HOOKS", help="Wins over --disable-hook."),
    click.option("--no-all-device", is_flag=True, envvar=f"{_GENERATE}NO_ALL_DEVICE", help="No device `all`."),
    click.option("--device-id", "--device-ids", "--device", "--devices", "ids", metavar="NAME", multiple=True,
                 callback=_by_commas, envvar=f"{_GENERATE}DEVICE_IDS", help="Only these devices. Default: all."),
    click.option("--csv.file", "--csv.ignore-pattern", "--csv.compat-container-root", "of_tegra", hidden=True,
                 multiple=True),
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


@cdi.command(short_help="Write the specification of this host.")
@_generate_options
def generate(
    output: str, form: str | None, mode: str, driver_root: str, dev_root: str, library_folders: tuple[str, ...],
    configuration_folders: tuple[str, ...], ldconfig_path: str, feature_flags: tuple[str, ...],
    of_tegra: tuple[str, ...], **options: Any,
) -> None:  # fmt: skip
    """Write the specification of this host's driver and GPUs, or of what goes with them (--mode).

    \b
    Examples:
      gpuprov cdi generate
      gpuprov cdi generate --output /etc/cdi/nvidia.json
      gpuprov cdi generate --mode gds --output /etc/cdi/nvidia-gds.json
      gpuprov cdi generate --device-name-strategy uuid --no-all-device
    """
    from gpuprov.cdi.specification import with_device_root

    if mode == "csv" or of_tegra:
        what = f"{'--csv.*' if of_tegra else '--mode csv'} is for Tegra, which gpuprov does not serve"
        raise UsageError(what, "", "use nvidia-ctk cdi generate there")
    without_effect = [
        *((f"--ldconfig-path {path}", "the loader's cache is written without ldconfig")
          for path in (ldconfig_path,) if path),
        *((f"--feature-flag {flag}", "gpuprov has no feature flags") for flag in feature_flags),
        *((f"--disable-hook {hook}", "gpuprov has one hook, and `all` leaves it out")
          for hook in options["disabled"] if hook != "all"),
    ]  # fmt: skip
    for given, reason in without_effect:
        say(f"note: {given} has no effect: {reason}", err=True)
    found = generated(mode, driver_root, library_folders, configuration_folders)
    if dev_root:
        found = with_device_root(found, dev_root)
    write_specification(_chosen(found, **options), output, form or ("json" if output.endswith(".json") else "yaml"))


def generated(
    mode: str, driver_root: str, library_folders: tuple[str, ...], configuration_folders: tuple[str, ...]
) -> Specification:
    """Return the specification of the driver below that root, or of its other devices."""
    from dataclasses import replace

    from gpuprov.cdi.discover import ask_nvml, discover
    from gpuprov.cdi.generate import WSL_DEVICE, specification, specification_of
    from gpuprov.cdi.specification import with_root
    from gpuprov.core.system import System

    system = System(driver_root)
    if mode == "auto" and system.exists(WSL_DEVICE):
        mode = "wsl"
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
    # The hook belongs to this host, wherever the driver lies.
    moved = with_root(found, "/", driver_root)
    return replace(moved, edits=replace(moved.edits, hooks=found.edits.hooks))


def _chosen(
    found: Specification, *, vendor: str, class_: str, strategies: tuple[str, ...], hook_path: str,
    disabled: tuple[str, ...], enabled: tuple[str, ...], no_all_device: bool, ids: tuple[str, ...],
) -> Specification:  # fmt: skip
    from dataclasses import replace

    from gpuprov.cdi.generate import chosen_devices

    devices = chosen_devices(found, strategies=strategies, ids=ids, no_all_device=no_all_device)
    hooks = () if "all" in disabled and not enabled else found.edits.hooks
    if hook_path:
        hooks = tuple(replace(hook, path=hook_path) for hook in hooks)
    kind = f"{vendor or found.kind.partition('/')[0]}/{class_ or found.kind.partition('/')[2]}"
    return replace(found, devices=devices, edits=replace(found.edits, hooks=hooks), kind=kind)


def write_specification(found: Specification, output: str, form: str) -> None:
    """Write a specification to a file or standard output. Raises GpuprovError if it is not valid."""
    from gpuprov.cdi.specification import problems, render

    if wrong := problems(found):
        raise GpuprovError("this would be no valid CDI specification", wrong[0], "gpuprov cdi generate --help")
    write_output(output, render(found, form))


def write_output(output: str, content: bytes) -> None:
    """Write to a file and make its folders; `-` or "" means standard output."""
    if output in ("", "-"):
        sys.stdout.buffer.write(content)
        return
    from gpuprov.core.system import System

    path = Path(output).absolute()
    try:
        System("/").make_directory(str(path.parent))
        System("/").write(str(path), content)
    except OSError as error:
        hint = "put sudo before it" if isinstance(error, PermissionError) else "name another file with --output"
        raise from_os_error(f"{output} can't be written", error, hint) from None


@cdi.command("list", short_help="List the devices that engines can name.")
@_SPEC_DIRS
@AS_JSON
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
    rows = [{"name": name, "file": found.path} for name, found in sorted(registry.devices.items())]
    show({"devices": rows, "errors": registry.errors}, sorted(registry.devices), as_json=as_json)


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

    hint = "--bundle DIR reads the config.json of an OCI bundle, --input FILE any other"
    config = json.loads(object_text(f"{bundle}/config.json" if bundle else source, "OCI configuration", hint))
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
    from gpuprov.cdi.specification import is_yaml, parse, with_root

    content = _read(name)
    changed = with_root(parse(content, name), source, target, relative_to=relative_to)
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
