"""One command over one or many hosts, from options to exit code: read, run, report."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprov.errors import ExitCode, GpuprovError
from gpuprov.fleet.inventory import read_extra_vars, read_inventory
from gpuprov.fleet.result import HostResult, overall_exit_code
from gpuprov.fleet.target import HostTarget, Inventory
from gpuprov.fleet.text import one_line
from gpuprov.request import Request
from gpuprov.spec import parse_spec, spec_to_json

if TYPE_CHECKING:
    from rich.console import Console

    from gpuprov.fleet.progress import Progress

_NEEDS_ROOT = ("install", "verify", "rollback")
_PIPE_WIDTH = 160


@dataclass(frozen=True)
class Options:
    """What the command line asks for. `overrides` are options of the specification that win over the inventory."""

    command: str
    hosts: tuple[str, ...] = ()
    limit: str = ""
    extra_vars: tuple[str, ...] = ()
    vault_password_file: str = ""
    check: bool = False
    diff: bool = False
    json: bool = False
    verbose: bool = False
    forks: int = 20
    password: str = field(default="", repr=False)
    become_password: str = field(default="", repr=False)
    accept_new_host_keys: bool = False
    connect_timeout: float = 10.0
    bootstrap_python: bool = False
    overrides: tuple[tuple[str, str], ...] = ()
    bundle: str = ""
    bundle_key: str = ""


def run_command(options: Options) -> ExitCode:
    """Carry the command out and print what comes of it. Raises GpuprovError for a call that makes no sense."""
    bundle, digest = _checked_bundle(options)
    inventory = _inventory(options)
    for warning in inventory.warnings:
        print(f"warning: {one_line(warning)}", file=sys.stderr)  # noqa: T201
    request = Request(options.command, check=options.check, diff=options.diff, bundle=bundle, bundle_digest=digest)
    results = _run(options, inventory.hosts, request)
    return overall_exit_code(results)


def _checked_bundle(options: Options) -> tuple[str, str]:
    """Return the bundle's absolute path and its digest: a bad one is refused before any host is asked."""
    if not options.bundle:
        if options.bundle_key:
            raise GpuprovError("--bundle-key needs --bundle", "", "add --bundle FILE", exit_code=ExitCode.USAGE)
        return "", ""
    from gpuprov.bundle.check import checked

    path = str(Path(options.bundle).absolute())
    return path, checked(path, options.bundle_key).digest


def _inventory(options: Options) -> Inventory:
    if options.hosts:
        inventory = read_inventory(
            options.hosts,
            limit=options.limit,
            extra_vars=options.extra_vars,
            vault_password_file=options.vault_password_file,
        )
    else:
        _require_local_call_to_make_sense(options)
        inventory = Inventory((read_extra_vars(options.extra_vars),))
    return replace(inventory, hosts=tuple(_completed(target, options) for target in inventory.hosts))


def _require_local_call_to_make_sense(options: Options) -> None:
    if options.limit:
        raise GpuprovError("--limit needs an inventory", "", "add --hosts INVENTORY", exit_code=ExitCode.USAGE)
    if options.command in _NEEDS_ROOT and os.geteuid() != 0:
        raise GpuprovError(
            f"`gpuprov {options.command}` needs root on this machine",
            f"running as user id {os.geteuid()}",
            f"run it with sudo: sudo gpuprov {options.command}; or name other hosts with --hosts INVENTORY",
            exit_code=ExitCode.USAGE,
        )


def _completed(target: HostTarget, options: Options) -> HostTarget:
    """Add what the command line says; as with Ansible, passwords from the inventory win over typed ones."""
    spec = parse_spec({**spec_to_json(target.spec), **dict(options.overrides)}, "the command line")
    return replace(
        target,
        spec=spec,
        password=target.password or options.password,
        become_password=target.become_password or options.become_password,
    )


def _run(options: Options, targets: Sequence[HostTarget], request: Request) -> tuple[HostResult, ...]:
    from gpuprov.fleet.agent_build import build_agent
    from gpuprov.fleet.run import Fleet, RunSettings
    from gpuprov.fleet.ssh import SshSettings

    console = _console()
    settings = RunSettings(
        build_agent,
        lambda text: console.print(text) if not options.json else print(text, file=sys.stderr),  # noqa: T201
        SshSettings(options.accept_new_host_keys, options.connect_timeout),
        options.bootstrap_python,
        options.forks,
    )
    progress = _progress(options, console, [target.name for target in targets])
    with progress if isinstance(progress, contextlib.AbstractContextManager) else contextlib.nullcontext():
        results = Fleet(settings).run(targets, request, progress)
    _report(options, console, results)
    return results


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    # In a pipe nobody's window limits the line; rich would break tables at 80 columns.
    return console if console.is_terminal else Console(width=_PIPE_WIDTH, highlight=False, markup=False, emoji=False)


def _progress(options: Options, console: Console, hosts: Sequence[str]) -> Progress:
    from gpuprov.fleet.progress import JsonLines, LiveTable, PlainLines

    if options.json:
        return JsonLines(console)
    if console.is_terminal:
        return LiveTable(console, hosts, diff=options.diff)
    return PlainLines(console, verbose=options.verbose, diff=options.diff)


def _report(options: Options, console: Console, results: tuple[HostResult, ...]) -> None:
    from gpuprov.fleet.report import print_report, summary_json

    if options.json:
        import json

        console.file.write(json.dumps(summary_json(options.command, results), separators=(",", ":")) + "\n")
        return
    print_report(
        console,
        options.command,
        results,
        check=options.check,
        next_command=_next_command(options),
        verbose=options.verbose,
    )


def _next_command(options: Options) -> str:
    """Return the command that proves what was done, with the words that chose the hosts."""
    if options.command != "install":
        return ""
    words = ["gpuprov", "verify"]
    for source in options.hosts:
        words += ["--hosts", source]
    if options.limit:
        words += ["--limit", options.limit]
    return shlex.join(words)
