"""`gpuprov cdi generate`: write the CDI specification of a host, with the flags of nvidia-ctk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpuprov.fleet.options import FILE, FOLDER
from gpuprov.fleet.standard_streams import say
from gpuprov.protocol.errors import GpuprovError, UsageError, from_os_error

if TYPE_CHECKING:
    from gpuprov.cdi.specification import Specification

_Command = TypeVar("_Command", bound=Callable[..., Any])
_MODES = ("auto", "nvml", "gds", "mofed", "gdrcopy", "nvswitch", "imex", "management", "csv", "wsl")
_NOT_HERE = {"csv": "Tegra", "wsl": "WSL"}
_STRATEGIES = ("index", "uuid", "type-index")
_GENERATE = "NVIDIA_CTK_CDI_GENERATE_"


def _by_commas(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of a flag that nvidia-ctk accepts repeated or separated by commas, also in its variables."""
    return tuple(value for word in words for value in word.split(",") if value)


def _strategies(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    found = _by_commas(context, parameter, words)
    for value in found:
        if value not in _STRATEGIES:
            raise click.BadParameter(f"{value!r} is not one of {', '.join(_STRATEGIES)}.", context, parameter)
    return found


def _refuse_csv(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> None:
    if words:
        raise _not_served("--csv.*", "csv")


def _not_served(flag: str, mode: str) -> UsageError:
    what = f"{flag} is for {_NOT_HERE[mode]}, which gpuprov does not serve"
    return UsageError(what, "", "use nvidia-ctk cdi generate there")


# Names, short names and variables are nvidia-ctk's (cmd/nvidia-ctk/cdi/generate/generate.go).
_GENERATE_OPTIONS = (
    click.option("--output", "-o", type=FILE, default="-", show_default=True,
                 envvar="NVIDIA_CTK_CDI_OUTPUT_FILE_PATH", help="`-` or nothing for standard output."),
    click.option("--format", "form", type=click.Choice(["yaml", "json"], case_sensitive=False),
                 envvar=f"{_GENERATE}OUTPUT_FORMAT", help="Default: by the file's name, else yaml."),
    click.option("--mode", "--discovery-mode", type=click.Choice(_MODES, case_sensitive=False), default="auto",
                 envvar=f"{_GENERATE}MODE", show_default=True, help="auto, nvml: GPUs; others: what goes with them."),
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
    click.option("--device-name-strategy", "strategies", multiple=True, callback=_strategies,
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
    click.option("--csv.file", "--csv.ignore-pattern", "--csv.compat-container-root", hidden=True, multiple=True,
                 expose_value=False, callback=_refuse_csv),
)  # fmt: skip


def _generate_options(command: _Command) -> _Command:
    for option in reversed(_GENERATE_OPTIONS):
        command = option(command)
    return command


@click.command(short_help="Write the specification of this host.")
@_generate_options
def generate(
    output: str,
    form: str | None,
    mode: str,
    driver_root: str,
    dev_root: str,
    library_folders: tuple[str, ...],
    configuration_folders: tuple[str, ...],
    ldconfig_path: str,
    feature_flags: tuple[str, ...],
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
        raise _not_served(f"--mode {mode}", mode)
    for note in _without_effect(ldconfig_path, feature_flags, options["disabled"]):
        say(f"note: {note}", err=True)
    found = generated(mode, driver_root, library_folders, configuration_folders)
    if dev_root:
        found = with_device_root(found, dev_root)
    write_specification(_chosen(found, **options), output, form or ("json" if output.endswith(".json") else "yaml"))


def _without_effect(ldconfig_path: str, feature_flags: tuple[str, ...], disabled: tuple[str, ...]) -> Iterator[str]:
    """Yield the nvidia-ctk options that were given and have no effect in gpuprov."""
    if ldconfig_path:
        yield f"--ldconfig-path {ldconfig_path} has no effect: the loader's cache is written without ldconfig"
    for flag in feature_flags:
        yield f"--feature-flag {flag} has no effect: gpuprov has no feature flags"
    for hook in disabled:
        if hook != "all":
            yield f"--disable-hook {hook} has no effect: gpuprov has one hook, and `all` leaves it out"


def generated(
    mode: str, driver_root: str, library_folders: tuple[str, ...], configuration_folders: tuple[str, ...]
) -> Specification:
    """Return the specification of the driver below that root, or of its other devices."""
    from dataclasses import replace

    from gpuprov.cdi.discover import ask_nvml, discover
    from gpuprov.cdi.generate import specification
    from gpuprov.cdi.other_devices import specification_of
    from gpuprov.cdi.transform import with_root
    from gpuprov.core.system import System

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
    # The hook belongs to this host, wherever the driver lies.
    moved = with_root(found, "/", driver_root)
    return replace(moved, edits=replace(moved.edits, hooks=found.edits.hooks))


def _chosen(
    found: Specification, *, vendor: str, class_: str, strategies: tuple[str, ...], hook_path: str,
    disabled: tuple[str, ...], enabled: tuple[str, ...], no_all_device: bool, ids: tuple[str, ...],
) -> Specification:  # fmt: skip
    from dataclasses import replace

    from gpuprov.cdi.transform import chosen_devices

    devices = chosen_devices(found, strategies=strategies, ids=ids, no_all_device=no_all_device)
    hooks = () if "all" in disabled and not enabled else found.edits.hooks
    if hook_path:
        hooks = tuple(replace(hook, path=hook_path) for hook in hooks)
    kind = f"{vendor or found.kind.partition('/')[0]}/{class_ or found.kind.partition('/')[2]}"
    return replace(found, devices=devices, edits=replace(found.edits, hooks=hooks), kind=kind)


def write_specification(found: Specification, output: str, form: str) -> None:
    """Write a specification to a file or standard output. Raises GpuprovError if it is not valid."""
    from gpuprov.cdi.specification import problems, render

    wrong = problems(found)
    if wrong:
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
