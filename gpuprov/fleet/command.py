"""Run one command over one or many hosts, from options to exit code: read, run, report."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprov.agent.result import HostResult
from gpuprov.fleet.batches import Rollout, parse_rollout
from gpuprov.fleet.history import Run, moment, new_identifier, save
from gpuprov.fleet.host_command import HostCommands, parse_host_commands, require_safe_hosts
from gpuprov.fleet.inventory import read_extra_vars, read_inventory
from gpuprov.fleet.options import Options
from gpuprov.fleet.standard_streams import say
from gpuprov.fleet.target import HostTarget, Inventory
from gpuprov.protocol.errors import ExitCode, Problem, UsageError, from_os_error, worst
from gpuprov.protocol.request import Request
from gpuprov.protocol.secrets import masked
from gpuprov.protocol.spec import IMAGE, parse_spec, spec_to_json
from gpuprov.protocol.words import line

if TYPE_CHECKING:
    from rich.console import Console

    from gpuprov.fleet.agent_build import Agent
    from gpuprov.fleet.progress import Progress

_NEEDS_ROOT = ("install", "verify", "doctor", "rollback", "uninstall")
# The next command: after a successful installation, and after a failed verification.
_FOLLOWING = {"install": "verify", "verify": "doctor"}
_PIPE_WIDTH = 160


def run_command(options: Options) -> ExitCode:
    """Run the command and print its results. Raises GpuprovError for an invalid call."""
    if options.command == "doctor" and (options.check or options.diff) and not options.fix:
        raise UsageError("--check and --diff need --fix", "without --fix, doctor changes nothing", "add --fix")
    commands = parse_host_commands(options.before_host, options.after_host, options.host_command_timeout)
    rollout = parse_rollout(options.serial, options.max_fail, options.canary)
    if options.detailed_exitcode and not options.check:
        raise UsageError("--detailed-exitcode needs --check", "", "add --check")
    for file in filter(None, (options.report, options.metrics)):
        require_writable(file)
    bundle, digest = _checked_bundle(options)
    inventory = inventory_of(options)
    require_safe_hosts(commands, inventory.hosts)
    request = Request(
        options.command, check=options.check, diff=options.diff, bundle=bundle, bundle_digest=digest, fix=options.fix,
        remember=options.remember, arguments=options.arguments,
    )  # fmt: skip
    now, begun = time.time(), time.monotonic()
    results, ended_by = _run(options, inventory.hosts, request, rollout, commands)
    if options.command == "doctor":
        results = _with_whole_commands(results, options)
    run = Run(
        new_identifier(now), options.command, moment(now), round(time.monotonic() - begun, 1), results,
        options.check, options.hosts, options.limit, ended_by=ended_by,
    )  # fmt: skip
    conclude(options, run, inventory.hosts, _next_command(options))
    drifted = options.detailed_exitcode and any(one.changed for one in results)
    return worst((run.exit_code, ExitCode.WOULD_CHANGE if drifted else ExitCode.DONE))


def conclude(options: Options, run: Run, targets: Sequence[HostTarget], next_command: str) -> None:
    """Store a finished run, print its report, and write its page and its metrics if requested."""
    _keep(run, options, targets)
    _report(options, run, next_command)
    _write_metrics(options, run)


def require_writable(path: str) -> None:
    """Raise GpuprovError (exit code 2) if a file can't be written, so that this shows before the run."""
    place = Path(path).expanduser()
    existed = place.exists()
    try:
        place.open("ab").close()
        if not existed:
            place.unlink()
    except OSError as error:
        raise UsageError(f"{path} cannot be written", str(error), "name another file") from None


def _keep(run: Run, options: Options, targets: Sequence[HostTarget]) -> None:
    """Put the run into the history; a failure to store it does not affect the run."""
    if any(target.connection == "local" and target.spec.target == IMAGE for target in targets):
        # It would be stored in the image.
        return
    passwords = [secret for target in targets for secret in (target.password, target.become_password)]
    try:
        save(run, (*passwords, options.password, options.become_password))
    except OSError as error:
        say(f"warning: the run is not kept for `gpuprov report`: {error}", err=True)


def _checked_bundle(options: Options) -> tuple[str, str]:
    """Return the bundle's absolute path and its digest: a bad one is refused before any host is contacted."""
    if not options.bundle:
        if options.bundle_key:
            raise UsageError("--bundle-key needs --bundle", "", "add --bundle FILE")
        return "", ""
    from gpuprov.bundle.check import checked
    from gpuprov.fleet.standard_streams import percentage

    path = str(Path(options.bundle).absolute())
    if not Path(path).is_file():
        raise UsageError(
            f"there is no bundle {options.bundle}", f"{path}: no such file",
            "name the file that `gpuprov bundle create` wrote",
        )  # fmt: skip
    return path, checked(path, options.bundle_key, percentage("checking every digest of the bundle:")).digest


def inventory_of(options: Options) -> Inventory:
    """Return the hosts that the options choose, with the command line's additions; warnings go to standard error."""
    if options.root and options.before_host:
        raise UsageError(
            "--before-host is for hosts that run", f"--root {options.root} is an image", "leave --before-host out",
        )  # fmt: skip
    if options.root and options.hosts:
        raise UsageError("--root is a folder of this machine", "", "leave --hosts out")
    if options.hosts:
        inventory = read_inventory(
            options.hosts,
            limit=options.limit,
            extra_vars=options.extra_vars,
            vault_password_file=options.vault_password_file,
        )
    else:
        _require_local_call_to_make_sense(options)
        here = read_extra_vars(options.extra_vars)
        if options.root:
            here = replace(here, name=options.root, connection="chroot", address=options.root)
        inventory = Inventory((here,))
    for warning in inventory.warnings:
        say(f"warning: {warning}", err=True)
    return replace(inventory, hosts=tuple(_completed(target, options) for target in inventory.hosts))


@functools.cache
def _agent() -> Agent:
    from gpuprov.fleet.agent_build import build_agent

    return build_agent()


def _require_local_call_to_make_sense(options: Options) -> None:
    if options.limit:
        raise UsageError("--limit needs an inventory", "", "add --hosts INVENTORY")
    if options.command in _NEEDS_ROOT and os.geteuid() != 0:
        raise UsageError(
            f"`gpuprov {options.command}` needs root on this machine",
            f"running as user id {os.geteuid()}",
            f"run it with sudo: sudo gpuprov {options.command}; or name other hosts with --hosts INVENTORY",
        )


def _completed(target: HostTarget, options: Options) -> HostTarget:
    """Add the command line's values; as with Ansible, passwords from the inventory win over typed ones."""
    overrides = {**dict(options.overrides), **({"target": IMAGE} if options.image or options.root else {})}
    wanted = {**spec_to_json(target.spec), **overrides}
    return replace(
        target,
        spec=parse_spec(wanted, "the command line") if overrides else target.spec,
        password=target.password or options.password,
        become_password=target.become_password or options.become_password,
    )


def _run(
    options: Options, targets: Sequence[HostTarget], request: Request, rollout: Rollout, commands: HostCommands
) -> tuple[tuple[HostResult, ...], ExitCode | None]:
    """Return the results, and the exit code of the signal that ended the run."""
    from gpuprov.fleet.run import Fleet, RunSettings

    console = make_console()
    settings = RunSettings(
        _agent,
        options,
        lambda text: console.print(line(text)) if not options.json else say(text, err=True),
        rollout,
        commands,
    )
    progress = make_progress(options, console, [target.name for target in targets])
    with progress if isinstance(progress, contextlib.AbstractContextManager) else contextlib.nullcontext():
        fleet = Fleet(settings)
        return fleet.run(targets, request, progress), fleet.ended_by


def make_console() -> Console:
    """Return the console for human-readable output."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        # With NO_COLOR rich would keep bold: disable that too.
        return Console(highlight=False, markup=False, emoji=False, color_system=None) if console.no_color else console
    # A pipe has no window width; rich would wrap tables at 80 columns.
    return Console(width=_PIPE_WIDTH, highlight=False, markup=False, emoji=False)


def make_progress(options: Options, console: Console, hosts: Sequence[str]) -> Progress:
    """Return the progress display for a run over these hosts."""
    from gpuprov.fleet.progress import JsonLines, LiveTable, PlainLines

    if options.json:
        return JsonLines(console)
    if console.is_terminal and not console.is_dumb_terminal and not console.no_color:
        return LiveTable(console, hosts, verbose=options.verbose, diff=options.diff)
    return PlainLines(console, verbose=options.verbose, diff=options.diff)


def _report(options: Options, run: Run, next_command: str) -> None:
    from gpuprov.fleet.report import print_report, summary, write_page

    console = make_console()
    if options.json:
        import json

        console.file.write(json.dumps(summary(run), separators=(",", ":")) + "\n")
    else:
        print_report(
            console, run.command, run.results, check=run.check, next_command=next_command,
            verbose=options.verbose, ended_by=run.ended_by,
        )  # fmt: skip
    if options.report:
        write_page(run, options.report)


def _write_metrics(options: Options, run: Run) -> None:
    if options.metrics:
        from gpuprov.fleet.report import write_metrics

        try:
            write_metrics(run, options.metrics, time.time())
        except OSError as error:
            raise from_os_error(f"the metrics {options.metrics} were not written", error) from None


def _next_command(options: Options) -> str:
    """Return the command that verifies the result, or explains a failed verification, for the same hosts."""
    following = _FOLLOWING.get(options.command, "")
    where = ("--root", options.root) if options.root else ()
    words = ("gpuprov", following, *where, *_hosts_words(options, options.limit))
    return shlex.join(words) if following else ""


def _hosts_words(options: Options, limit: str) -> tuple[str, ...]:
    words = tuple(word for source in options.hosts for word in ("--hosts", source))
    return (*words, "--limit", limit) if limit else words


def _with_whole_commands(results: tuple[HostResult, ...], options: Options) -> tuple[HostResult, ...]:
    """Return the doctor's results with complete `gpuprov install` commands: a host does not know its inventory."""
    return tuple(
        replace(result, problems=tuple(_whole(problem, options, result.host) for problem in result.problems))
        for result in results
    )


def _may_be_shown(variable: str) -> bool:
    """Say whether a word of -e may be shown in a page and in stored runs: Ansible's own variables may be passwords."""
    return variable.startswith("@") or (bool(re.match(r"gpuprov_\w+=", variable)) and masked(variable) == variable)


def _whole(problem: Problem, options: Options, host: str) -> Problem:
    shown = [variable for variable in options.extra_vars if _may_be_shown(variable)]
    extra = tuple(word for variable in shown for word in ("-e", variable))
    words = shlex.join(("gpuprov", "install", *_hosts_words(options, host if options.hosts else ""), *extra))
    words += " -e …" if len(shown) < len(options.extra_vars) else ""
    return replace(problem, next_step=re.sub(r"\bgpuprov install\b", lambda _: words, problem.next_step))
