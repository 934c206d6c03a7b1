"""`gpuprov docker-args`: print plain GPU flags for one container, for hosts where no runtime may be registered."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from gpuprov.fleet.standard_streams import say, say_text
from gpuprov.protocol.errors import ExitCode, GpuprovError

if TYPE_CHECKING:
    from gpuprov.engines.plain_flags import PlainFlags

_FORMATS = ("shell", "json", "compose", "quadlet")


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

    It needs the driver only. A runtime or CDI gives a container more: use this if you can set up neither.

    \b
    Examples:
      docker run --rm $(gpuprov docker-args) IMAGE nvidia-smi
      podman run --rm $(gpuprov docker-args --gpus 0,1) IMAGE nvidia-smi
      gpuprov docker-args --format compose --service trainer > gpu.yaml
      docker compose -f compose.yaml -f gpu.yaml up
    """
    from gpuprov.boot.plain_gpus import NEVER, granted_flags
    from gpuprov.engines.plain_flags import compose, quadlet, shell_words

    try:
        flags = granted_flags(gpus, capabilities)
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
    for sentence in (*flags.left_out, *NEVER) if verbose else flags.left_out:
        say(f"note: {sentence}", err=True)
    say_text(text, nl=False)


def _document(flags: PlainFlags) -> dict[str, Any]:
    from gpuprov.boot.plain_gpus import NEVER
    from gpuprov.engines.plain_flags import words

    return {"schema": 1, "args": words(flags), **asdict(flags), "left_out": [*flags.left_out, *NEVER]}
