"""`gpuprov docker-args`: GPUs for one container by plain flags, on hosts where no runtime may be registered."""

from __future__ import annotations

import json
import posix
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from gpuprov.wire.errors import ExitCode, GpuprovError

if TYPE_CHECKING:
    from gpuprov.engines.plain_flags import PlainFlags

_FORMATS = ("shell", "json", "compose", "quadlet")
# What flags never give, whatever the host has; docs/docker-args.md explains.
_NEVER = (
    "no loader cache is written: an image whose loader searches neither /usr/lib/MULTIARCH nor /usr/lib64 needs "
    "LD_LIBRARY_PATH",
    "the image's NVIDIA_REQUIRE_* and its compatibility libraries are not considered",
)


@click.command("docker-args", short_help="Print flags that give one container GPUs, without a runtime.")
@click.option("--gpus", metavar="all|none|N,…|UUID,…", default="all", show_default=True,
              help="GPUs, as NVIDIA_VISIBLE_DEVICES names them.")  # fmt: skip
@click.option("--capabilities", metavar="NAME,…", default="", help="Driver capabilities. Default: compute,utility.")
@click.option("--format", "form", type=click.Choice(_FORMATS), default="shell", show_default=True,
              help="shell: for $(…); compose: for `docker compose -f`; quadlet: for a .container file.")  # fmt: skip
@click.option("--service", metavar="NAME", default="app", show_default=True, help="The service of --format compose.")
@click.option("--verbose", "-v", is_flag=True, help="Say on standard error what flags can't give.")
def docker_args(gpus: str, capabilities: str, form: str, service: str, verbose: bool) -> None:
    """Print flags of `docker run` and `podman run` that give a container GPUs: devices, read-only mounts, environment.

    Nothing has to be installed or configured but the driver. With a runtime or CDI a container gets more; use this
    where neither may be set up, and for tools that only take flags.

    \b
    Examples:
      docker run --rm $(gpuprov docker-args) IMAGE nvidia-smi
      podman run --rm $(gpuprov docker-args --gpus 0,1) IMAGE nvidia-smi
      gpuprov docker-args --format compose --service trainer > gpu.yaml
      docker compose -f compose.yaml -f gpu.yaml up
    """
    from gpuprov.engines.plain_flags import compose, plain_flags, quadlet, shell_words

    try:
        flags = plain_flags(_edits(gpus, capabilities), f"/usr/lib/{posix.uname().machine}-linux-gnu")
        _require_nodes(flags)
        text = {
            "shell": lambda: " ".join(shell_words(flags)) + "\n",
            "json": lambda: json.dumps(_document(flags)) + "\n",
            "compose": lambda: compose(flags, service),
            "quadlet": lambda: quadlet(flags),
        }[form]()
    except ValueError as error:
        raise GpuprovError(
            str(error), "", "gpuprov docker-args --format json has it as data", exit_code=ExitCode.FAILED
        ) from None
    for sentence in (*flags.left_out, *_NEVER) if verbose else flags.left_out:
        click.echo(f"note: {sentence}", err=True)
    click.echo(text, nl=False)


def _document(flags: PlainFlags) -> dict[str, Any]:
    from gpuprov.engines.plain_flags import words

    return {"schema": 1, "args": words(flags), **asdict(flags), "left_out": [*flags.left_out, *_NEVER]}


def _edits(gpus: str, capabilities: str) -> dict[str, Any]:
    """Return what the runtime would give a container that asks for the same by its environment."""
    import tempfile

    from gpuprov.runtime_hook.explain import explain
    from gpuprov.runtime_hook.settings import read_settings

    asked = [f"NVIDIA_VISIBLE_DEVICES={gpus}"]
    if capabilities:
        asked.append(f"NVIDIA_DRIVER_CAPABILITIES={capabilities}")
    config = {"process": {"env": asked, "user": {}}}
    settings, trouble = read_settings()
    # That setting is about what images and users ask for; here root's command does.
    settings.accept_envvar_when_unprivileged = True
    with tempfile.TemporaryDirectory(prefix="gpuprov-") as folder:
        if not _has_specification(settings.spec_dirs):
            _write_specification(f"{folder}/nvidia.json")
            settings.spec_dirs = (folder,)
        found = explain(config, settings, trouble)
    if found["error"]:
        raise GpuprovError(found["error"], f"--gpus {gpus}", "gpuprov doctor")
    edits: dict[str, Any] = found["edits"]
    return edits


def _has_specification(folders: tuple[str, ...]) -> bool:
    from pathlib import Path

    return any(Path(folder, "nvidia.json").is_file() for folder in folders)


def _write_specification(path: str) -> None:
    """Describe the driver for this call alone, where gpuprov has not installed."""
    from pathlib import Path

    from gpuprov.cdi.specification import render_json
    from gpuprov.cli.cdi_generate import generated

    Path(path).write_bytes(render_json(generated("auto", "/", (), ())))


def _require_nodes(flags: PlainFlags) -> None:
    from pathlib import Path

    for device in flags.devices:
        if not Path(device.source).is_char_device():
            raise GpuprovError(
                f"the device node {device.source} is missing",
                f"ls: {device.source}: not a device",
                "nvidia-modprobe -u -c 0",
            )
