"""`gpuprov hook`: what the container runtime would do, and why; changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from gpuprov.fleet.options import AS_JSON, CONNECTION_FIELDS, INVENTORY_FIELDS, made_options, named_options
from gpuprov.fleet.standard_streams import object_text, say, say_text, show
from gpuprov.protocol.errors import GpuprovError, UsageError
from gpuprov.protocol.events import no_agent_sends


@click.group()
def hook() -> None:
    """What the container runtime decides, and why.

    \b
    Examples:
      gpuprov hook explain --bundle /run/containerd/io.containerd.runtime.v2.task/moby/ID
      gpuprov hook requirements --cuda 13.0 --driver 580.178.04 'cuda>=13.2'
    """


@hook.command(short_help="Say what a container gets, and which rule decided.")
@click.option("--config", "settings_file", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="A config.toml instead of the host's own two.")  # fmt: skip
@click.option("--bundle", metavar="DIR", type=click.Path(exists=True, file_okay=False),
              help="An OCI bundle. Default: a config.json on standard input.")  # fmt: skip
@AS_JSON
@named_options(*INVENTORY_FIELDS, *CONNECTION_FIELDS, passwords=True)
@click.argument("container", metavar="[CONTAINER]", default="")
def explain(settings_file: str | None, bundle: str | None, as_json: bool, container: str, **options: Any) -> None:
    """Say what a container asks for, what it gets on this host, and which rule decided.

    CONTAINER is a running one of docker or podman: what was decided when it started. Without it: what the runtime would
    decide now. `gpuprov cuda CONTAINER` shows which libcuda.so.1 its programs load.

    \b
    Examples:
      sudo gpuprov hook explain my-container
      gpuprov hook explain my-container --hosts inventory.ini --limit gpu07
      gpuprov hook explain --bundle /run/containerd/io.containerd.runtime.v2.task/moby/ID
      gpuprov hook explain --json < config.json
      gpuprov hook explain --config /tmp/config.toml < config.json
    """
    from gpuprov.core.system import System
    from gpuprov.engines.containers import decision_of, decision_of_bundle
    from gpuprov.runtime_hook.decision import explain as explained
    from gpuprov.runtime_hook.settings import read_settings

    if options["hosts"] or options["limit"]:
        _explain_on_hosts(options, container, as_json=as_json)
        return
    if container and bundle:
        raise UsageError("a container or a bundle, not both", "", "leave --bundle out")
    of_bundle = decision_of_bundle(bundle) if bundle else None
    recorded = decision_of(System("/"), container) if container else of_bundle
    if recorded is not None:
        show(recorded, _recorded_lines(recorded), as_json=as_json)
        return
    hint = "give a bundle with --bundle DIR, or its config.json on standard input"
    text = object_text(f"{bundle}/config.json" if bundle else "-", "config.json", hint)
    settings, trouble = read_settings(own=settings_file, nvidia="") if settings_file else read_settings()
    found = explained(text, settings, trouble, bundle or "")
    show(found, _lines(found), as_json=as_json)


@hook.command(short_help="Hold NVIDIA_REQUIRE_* expressions against a driver.")
@click.option("--cuda", metavar="VERSION", default="", help="The newest CUDA version that the driver supports.")
@click.option("--driver", metavar="VERSION", default="", help="The driver's version.")
@click.option("--arch", metavar="VERSION", default="", help="The GPU's compute capability, such as 9.0.")
@click.option("--brand", metavar="BRAND", default="", help="The GPU's brand, such as tesla.")
@click.argument("expressions", metavar="[EXPR]...", nargs=-1)
def requirements(cuda: str, driver: str, arch: str, brand: str, expressions: tuple[str, ...]) -> None:
    """Hold NVIDIA_REQUIRE_* expressions against a driver: exit 0 if satisfied, 1 if violated, 2 if invalid.

    Blanks separate alternatives, commas conditions that must all hold; all expressions must hold.

    \b
    Examples:
      gpuprov hook requirements --cuda 13.0 --driver 580.178.04 'cuda>=13.2'
      gpuprov hook requirements --cuda 12.4 --brand tesla 'brand=tesla,driver>=525 cuda>=12.5'
    """
    from gpuprov.runtime_hook.requirements import check, version_key

    for option, version in (("--cuda", cuda), ("--driver", driver), ("--arch", arch)):
        try:
            version_key(version or "0")
        except ValueError as error:
            raise click.BadParameter(f"{error}: give numbers and dots, such as 12.4", param_hint=option) from None
    host = {"cuda": cuda, "driver": driver, "arch": arch, "brand": brand}
    state, reason = check(list(expressions), {name: value for name, value in host.items() if value})
    say(f"{state}: {reason}" if reason else state)
    sys.exit({"satisfied": 0, "violated": 1, "invalid": 2}[state])


def _explain_on_hosts(options: dict[str, Any], container: str, *, as_json: bool) -> None:
    """Print the decision for the container on each host; one host that has it is enough for success."""
    from gpuprov.engines.containers import decision_of
    from gpuprov.fleet.agent_run import RemoteSystem
    from gpuprov.fleet.command import inventory_of
    from gpuprov.fleet.ssh import connected

    if not options["hosts"] or not container:
        hint = "gpuprov hook explain CONTAINER --hosts INVENTORY --limit HOST"
        raise UsageError("--hosts and --limit need an inventory and a container", "", hint)
    settings = made_options("hook explain", options)
    found: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    problem: GpuprovError | None = None
    for target in inventory_of(settings).hosts:
        try:
            with connected(target, settings) as connection:
                recorded = decision_of(RemoteSystem(connection, target), container)
            lines += [f"host           {target.name}", *_recorded_lines(recorded)]
            found[target.name] = recorded
        except (GpuprovError, AttributeError, LookupError, RecursionError, TypeError) as error:
            problem = error if isinstance(error, GpuprovError) else no_agent_sends(repr(error))
            say_text(f"{target.name}: {problem}", err=True)
    show(found, lines, as_json=as_json)
    if problem is not None and not found:
        sys.exit(problem.exit_code)


def _recorded_lines(recorded: dict[str, Any]) -> list[str]:
    requirements = f"{recorded['requirements']} satisfied" if recorded["requirements"] else ""
    paths = recorded["nodes"], recorded["files"], recorded["links"]
    head = f"container      {recorded['container']}, started with GPUs by the {recorded['way']}"
    return [head, *_decision_lines(recorded, requirements, *paths)]


def _lines(found: dict[str, Any]) -> list[str]:
    if not found["gpu_container"]:
        return ["asks for no GPU: the container is left alone", *(f"  because {one}" for one in found["decisions"])]
    edits = found["edits"]
    nodes = [node["path"] for node in edits.get("deviceNodes", ())]
    files = [one["containerPath"] for one in edits.get("mounts", ())]
    labels = {"imex_channels": "IMEX channels", "mig_config": "MIG config", "mig_monitor": "MIG monitor"}
    asked = [(label, found[name]) for name, label in labels.items() if found[name]]
    paths = nodes, files, edits.get("links", ())
    lines = _decision_lines(found, ", ".join(found["requirements"]), *paths, asked)
    return [*lines, f"refused        {found['error']}"] if found["error"] else lines


def _decision_lines(
    found: dict[str, Any], requirements: str, nodes: Sequence[str], files: Sequence[str], links: Sequence[str],
    asked: Sequence[tuple[str, Any]] = (),
) -> list[str]:  # fmt: skip
    """Return what was asked for, with what else is `asked` (label and value), and what was given."""
    return [
        f"devices        {', '.join(one for one in found['devices'] if one) or 'none: the driver files alone'}",
        f"capabilities   {', '.join(found['capabilities']) or 'none'}",
        f"requirements   {requirements or 'none'}",
        f"privileged     {'yes' if found['privileged'] else 'no'}",
        f"legacy image   {'yes' if found['legacy'] else 'no'}",
        *(f"{label:15}{', '.join(value) if isinstance(value, list) else value}" for label, value in asked),
        *(f"device         {path}" for path in nodes),
        *(f"file           {path}" for path in files),
        *(f"link           {' <- '.join(link.split('::'))}" for link in links),
        *(f"because        {one}" for one in found["decisions"]),
    ]
