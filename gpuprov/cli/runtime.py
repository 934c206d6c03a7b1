"""`gpuprov runtime configure` registers the runtime with an engine, or removes it; the flags are nvidia-ctk's.

`gpuprov docker-args` prints plain GPU flags for one container, for hosts where no runtime may be registered.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuprov.fleet.options import AS_JSON, FILE
from gpuprov.fleet.standard_streams import say, say_text
from gpuprov.protocol.errors import ExitCode, GpuprovError, UsageError
from gpuprov.protocol.tables import packaged

if TYPE_CHECKING:
    from gpuprov.core.system import System
    from gpuprov.engines.known import Configuration


_WITHOUT_SUCH_COMMAND = ("docker", "podman")


def _require_valid(options: dict[str, Any]) -> None:
    """Raise UsageError for a relative path, a directory in place of a file, or a wrong name."""
    files = {"--config": "config", "--drop-in-config": "drop_in", "--hook-path": "hook_file"}
    programs = {"--nvidia-runtime-path": "path", "--nvidia-runtime-hook-path": "hook_program"}
    for option, key in {**files, **programs}.items():
        value = options[key]
        if value and not value.startswith("/"):
            raise UsageError(f"{option} must be an absolute path", value, f"{option} {Path(value).absolute()}")
        if value and option in files and Path(value).exists() and not Path(value).is_file():
            raise UsageError(f"{option} must name a file", f"{value} is a directory or a device", f"{option} FILE")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", options["name"]):
        hint = "letters, digits, dots, dashes and underscores: --nvidia-runtime-name nvidia"
        raise UsageError("--nvidia-runtime-name is no name of a runtime", repr(options["name"]), hint)


@click.group(short_help="Register the runtime with container engines.")
def runtime() -> None:
    """Container engines and the runtime that gives containers their GPUs.

    \b
    Examples:
      sudo gpuprov runtime configure --runtime containerd
      sudo gpuprov runtime configure --runtime docker --unset
    """


@runtime.command()
@click.option("--runtime", "engine", type=click.Choice(["docker", *packaged("engines")]), default=None,
              help="The engine. Default: docker; with --config-mode hook, podman.")  # fmt: skip
@click.option("--config", type=FILE, default="", help="The engine's main file. Default: the engine's usual one.")
@click.option("--drop-in-config", "drop_in", type=FILE, default=None,
              help="The runtime's own file; empty: use the main file. Default: the engine's usual one.")  # fmt: skip
@click.option("--config-source", "source", type=click.Choice(["file", "command"]), default="file", show_default=True,
              help="Copy the runtime's options from the files or from the engine's answer.")  # fmt: skip
@click.option("--executable-path", "executable", type=FILE, default="",
              help="The engine's program, for --config-source command.")  # fmt: skip
@click.option("--config-mode", "mode", type=click.Choice(["config-file", "config", "hook", "oci-hook"]),
              default="config-file", show_default=True,
              help="With hook: write an OCI hook for podman and CRI-O instead of a runtime.")  # fmt: skip
@click.option("--hook-path", "--oci-hook-path", "hook_file", type=FILE, default="", help="Where the OCI hook goes. "
              "Default: /usr/share/containers/oci/hooks.d/oci-nvidia-hook.json.")  # fmt: skip
@click.option("--nvidia-runtime-hook-path", "hook_program", type=FILE, default="",
              help="The hook's program. Default: nvidia-container-runtime-hook, else the bundled one.")  # fmt: skip
@click.option("--nvidia-runtime-name", "name", metavar="NAME", default="nvidia", show_default=True,
              help="The runtime's name in the engine.")  # fmt: skip
@click.option("--nvidia-runtime-path", "--runtime-path", "path", type=FILE, default="",
              help="The runtime's program. Default: nvidia-container-runtime, else the bundled one.")  # fmt: skip
@click.option("--nvidia-set-as-default", "--set-as-default", "set_default", is_flag=True,
              help="Make it the engine's default runtime.")  # fmt: skip
@click.option("--cdi.enabled", "--cdi.enable", "--enable-cdi", "cdi", is_flag=True, help="Let the engine read CDI.")
@click.option("--unset", is_flag=True, help="Remove what gpuprov added, and nothing else.")
@click.option("--dry-run", is_flag=True, help="Print the files as they would be; write nothing.")
@click.option("--diff", is_flag=True, help="Show what changes.")
@AS_JSON
@click.option("--restart-mode", type=click.Choice(["none"]), default="none", show_default=True, expose_value=False,
              help="gpuprov restarts no engine; it prints the command.")  # fmt: skip
def configure(dry_run: bool, diff: bool, as_json: bool, **options: Any) -> None:
    """Register the runtime with an engine. Run twice, it changes no byte the second time.

    Comments, order and keys of others stay; the default runtime and CDI change only when asked for. No engine is
    restarted.

    \b
    Examples:
      sudo gpuprov runtime configure                                   docker
      sudo gpuprov runtime configure --runtime containerd --dry-run --diff
      sudo gpuprov runtime configure --runtime containerd --nvidia-set-as-default
      sudo gpuprov runtime configure --runtime crio --nvidia-runtime-path /usr/bin/gpuprov-container-runtime
      sudo gpuprov runtime configure --runtime k3s
      sudo gpuprov runtime configure --config-mode hook                podman and CRI-O
      sudo gpuprov runtime configure --runtime containerd --unset
    """
    from gpuprov.core.system import System
    from gpuprov.engines.configure import write

    system = System("/")
    found = _configuration(system, options)
    if not dry_run:
        write(system, found.edits)
    if as_json:
        say_text(json.dumps(_as_json(found, dry_run=dry_run), indent=2))
        return
    for line in _lines(found, dry_run=dry_run, diff=diff):
        say_text(line)
    for note in found.notes:
        say(f"note: {note}", err=True)
    text = "nothing needs a restart: the next container reads this"
    if not any(edit.changes for edit in found.edits):
        text = "nothing to change"
    elif dry_run:
        text = "nothing was written (--dry-run)"
    elif found.reload_command:
        text = f"nothing was restarted; the engine reads this after: {found.reload_command}"
    say(text, err=True)


def _configuration(system: System, options: dict[str, Any]) -> Configuration:
    """Return what a call would do; `options` by the names of the click options."""
    from gpuprov.engines import configure as engines
    from gpuprov.engines.known import ConfigureRequest, RuntimeEntry

    _require_valid(options)
    is_hook = options["mode"] in ("hook", "oci-hook")
    # nvidia-ctk accepts no engine with a hook: podman and CRI-O read the same folder.
    engine = options["engine"] or ("podman" if is_hook else "docker")
    if is_hook:
        program = options["hook_program"] or engines.usual_hook(system)
        return engines.hook(system, engine, options["hook_file"], program, unset=options["unset"])
    path = options["path"] or engines.usual_runtime(system)
    from_command = options["source"] == "command"
    request = ConfigureRequest(
        engine, RuntimeEntry(options["name"], path, options["set_default"], options["cdi"]), options["config"],
        options["drop_in"], from_command, options["executable"], options["unset"],
    )  # fmt: skip
    found = engines.configuration(system, request)
    if engine in _WITHOUT_SUCH_COMMAND and (from_command or options["executable"]):
        note = f"{engine} has no command that prints its configuration: its file is read"
        return replace(found, notes=(note, *found.notes))
    return found


def _lines(found: Configuration, *, dry_run: bool, diff: bool) -> list[str]:
    from gpuprov.core.changes import text_diff

    changing = [edit for edit in found.edits if edit.changes]
    if diff:
        return [text_diff(edit.path, edit.before, edit.after) for edit in changing]
    if dry_run:
        heads = {edit.path: f"# {edit.path}\n" if len(found.edits) > 1 else "" for edit in found.edits}
        return [f"# {edit.path}: no file" if edit.after is None
                else heads[edit.path] + edit.after.decode().removesuffix("\n") for edit in found.edits]  # fmt: skip
    return [f"{'removed' if edit.after is None else 'wrote'} {edit.path}" for edit in changing]


def _as_json(found: Configuration, *, dry_run: bool) -> dict[str, Any]:
    def text(content: bytes | None) -> str | None:
        return None if content is None else content.decode("utf-8", "replace")

    files = [
        {"path": edit.path, "changed": edit.changes, "before": text(edit.before), "after": text(edit.after)}
        for edit in found.edits
    ]
    changed = any(edit.changes for edit in found.edits)
    head = {"changed": changed, "written": changed and not dry_run}
    return {**head, "files": files, "notes": list(found.notes), "restart": found.reload_command}


@click.command("docker-args", short_help="Print flags that give one container GPUs, without a runtime.")
@click.option("--gpus", metavar="all|none|N,…|UUID,…", default="all", show_default=True,
              help="GPUs, as NVIDIA_VISIBLE_DEVICES names them.")  # fmt: skip
@click.option("--capabilities", metavar="NAME,…", default="", help="Driver capabilities. Default: compute,utility.")
@click.option("--format", "form", type=click.Choice(["shell", "json", "compose", "quadlet"]),
              help="shell: for $(…), the default. compose: for `docker compose`. quadlet: a .container.")  # fmt: skip
@click.option("--for", "guest", type=click.Choice(("incus", "lxc")),
              help="In place of flags print an Incus (LXD) profile, or lines for LXC and Proxmox VE.")  # fmt: skip
@click.option("--service", metavar="NAME", default="app", show_default=True, help="The service of --format compose.")
@click.option("--verbose", "-v", is_flag=True, help="Say on standard error what flags can't give.")
def docker_args(gpus: str, capabilities: str, form: str | None, guest: str | None, service: str, verbose: bool) -> None:
    """Print flags of `docker run` and `podman run` that give a container GPUs: devices, read-only mounts, environment.

    It needs the driver only. A runtime or CDI gives a container more: use this if you can set up neither.

    \b
    Examples:
      docker run --rm $(gpuprov docker-args) IMAGE nvidia-smi
      podman run --rm $(gpuprov docker-args --gpus 0,1) IMAGE nvidia-smi
      gpuprov docker-args --format compose --service trainer > gpu.yaml
      docker compose -f compose.yaml -f gpu.yaml up
      gpuprov docker-args --for incus > gpus.yaml
      gpuprov docker-args --for lxc > gpus.conf
    """
    if guest and form:
        raise click.UsageError("--for prints a file of its own: leave --format out")
    from gpuprov.boot.docker_args import NEVER, granted_flags
    from gpuprov.engines.plain_flags import compose, incus, lxc, quadlet, shell_words, words

    try:
        flags = granted_flags(gpus, capabilities)
        left_out = [*flags.left_out, *NEVER]
        nodes = {one.source: Path(one.source).stat() for one in flags.devices}
        document = {"schema": 1, "args": words(flags), **asdict(flags), "left_out": left_out}
        text = {
            "shell": lambda: " ".join(shell_words(flags)) + "\n",
            "json": lambda: json.dumps(document) + "\n",
            "compose": lambda: compose(flags, service),
            "quadlet": lambda: quadlet(flags),
            "incus": lambda: incus(flags, nodes),
            "lxc": lambda: lxc(flags, nodes),
        }[guest or form or "shell"]()
    except ValueError as error:
        step = "gpuprov docker-args --format json has it as data"
        raise GpuprovError(str(error), "", step, exit_code=ExitCode.FAILED) from None
    for sentence in left_out if verbose else flags.left_out:
        say(f"note: {sentence}", err=True)
    say_text(text, nl=False)
