"""Run one command over one or many hosts, from options to exit code: read, run, report."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprov.agent.agent import ADDRESSES
from gpuprov.agent.result import HostResult, HostSink
from gpuprov.core.commands import lift_memory_limit
from gpuprov.core.files import expanded
from gpuprov.fleet import options as program
from gpuprov.fleet import rolling
from gpuprov.fleet.agent_file import build_agent
from gpuprov.fleet.history import Run, drivers_by_gpus, inventory_names, moment, new_identifier, save
from gpuprov.fleet.inventory import HostTarget, Inventory, configured, read_extra_vars, read_inventory, site_words
from gpuprov.fleet.options import FLAG, Options
from gpuprov.fleet.rolling import HostCommands, Rollout, parse_host_commands, parse_rollout, require_safe_hosts
from gpuprov.fleet.standard_streams import say
from gpuprov.protocol.errors import ExitCode, Problem, UsageError, os_errors, worst
from gpuprov.protocol.request import Request
from gpuprov.protocol.secrets import masked_settings
from gpuprov.protocol.spec import IMAGE, parse_spec, spec_to_json
from gpuprov.protocol.words import line

if TYPE_CHECKING:
    from rich.console import Console

_NEEDS_ROOT = ("install", "verify", "accept", "doctor", "rollback", "uninstall")
# The next command: after a successful installation, and after a failed verification.
_FOLLOWING = {"install": "verify", "verify": "doctor"}
_PIPE_WIDTH = 160
_ASKED = {"connection": ("ask_pass", "SSH password", "-k"), "become": ("become_ask_pass", "sudo password", "-K")}
# A word of -e may set several variables.
_OWN_ALONE = r"gpuprov_\w+=(?!.*\s(?!gpuprov_)\w+=)"
_CHANGING = r"\bgpuprov (install|rollback|uninstall)\b"


def run_command(options: Options) -> ExitCode:
    """Run the command and print its results. Raises GpuprovError for an invalid call."""
    _require_sound(options)
    commands = parse_host_commands(options.before_host, options.after_host, options.host_command_timeout)
    rollout = parse_rollout(
        options.serial, options.max_fail, options.canary, options.window, rollback=options.rollback_on_failure
    )
    bundle, digest = _checked_bundle(options)
    inventory = inventory_of(options)
    require_safe_hosts(commands, inventory.hosts)
    sources = inventory_names(options.hosts)
    request = Request(
        options.command, check=options.check, diff=options.diff, bundle=bundle, bundle_digest=digest, fix=options.fix,
        allow=_allowed(options), remember=options.remember, upgrade=options.upgrade,
        arguments={"minutes": options.minutes} if options.command == "accept" else options.arguments,
        fleet_drivers=drivers_by_gpus(sources) if options.hosts and options.command == "install" else {},
    )  # fmt: skip
    if options.command == "accept":
        from gpuprov.fleet import accepted

        accepted.signature(b"", options.sign)  # a key that can't sign is reported before the GPUs work for minutes
    rolling.require_whole_domains(inventory.hosts, request, rollback=options.rollback_on_failure)
    now, begun = time.time(), time.monotonic()
    if options.command == "install" and (in_domains := rolling.hosts_in_domains(inventory.hosts, request)):
        look = replace(request, check=True, diff=False)
        planned, ended_by = _run(options, in_domains, look, Rollout(), HostCommands(), make_console(stderr=True))
        if ended_by:
            raise SystemExit(int(ended_by))
        rolling.require_possible_domains(planned)
    results, ended_by = _run(options, inventory.hosts, request, rollout, commands)
    if options.command == "doctor" or (options.command == "install" and (options.hosts or options.root)):
        results = with_whole_commands(results, options)
    earlier = {}
    if options.command == "accept":
        earlier = accepted.read_records()
        results = accepted.compared(results, earlier, sources)
    run = Run(
        new_identifier(now), options.command, moment(now), round(time.monotonic() - begun, 1), results,
        options.check, sources, options.limit, ended_by=ended_by,
    )  # fmt: skip
    try:
        conclude(options, run, inventory.hosts, next_command(options))
    finally:  # a page that can't be written loses no results
        if options.command == "accept":
            with os_errors("the results are not kept for the next comparison"):
                for path in accepted.write_records(run, earlier, options.sign, _passwords(options, inventory.hosts)):
                    say(f"kept: {path}", err=True)
    drifted = options.detailed_exitcode and any(one.changed for one in results)
    return worst((run.exit_code, ExitCode.WOULD_CHANGE if drifted else ExitCode.DONE))


def _require_sound(options: Options) -> None:
    """Raise UsageError for options that do not go together, and for files that can't be written."""
    needing = {"--check": options.check, "--diff": options.diff, "--allow": options.allow, "--window": options.window,
               "--before-host": options.before_host}  # fmt: skip
    if options.command == "doctor" and any(needing.values()) and not options.fix:
        named = " and ".join(name for name, given in needing.items() if given)
        raise UsageError(f"{named}: only with --fix", "without --fix, doctor changes nothing", "add --fix")
    if unknown := set(_allowed(options)) - {"reset", "reboot"}:
        raise UsageError(f"--allow does not know {min(unknown)!r}", options.allow, "--allow reset, or reset,reboot")
    if options.detailed_exitcode and not options.check:
        raise UsageError("--detailed-exitcode needs --check", "", "add --check")
    for file in filter(None, (options.report, options.metrics)):
        require_writable(file)


def _allowed(options: Options) -> tuple[str, ...]:
    return tuple(word.strip() for word in options.allow.split(",")) if options.allow else ()


def inspect_hosts(options: Options) -> tuple[HostResult, ...]:
    """Return the facts of hosts for another command, which has a table of them on standard error."""
    from gpuprov.fleet.report import print_report

    console, targets = make_console(stderr=True), inventory_of(options).hosts
    results, ended_by = _run(options, targets, Request("facts"), Rollout(), HostCommands(), console)
    print_report(console, Run("", "facts", "", 0, results, ended_by=ended_by))
    if ended_by:
        raise SystemExit(int(ended_by))
    return results


def conclude(options: Options, run: Run, targets: Sequence[HostTarget], next_command: str) -> None:
    """Store a finished run, print its report, and write its page and its metrics if requested."""
    from gpuprov.fleet.report import print_report, summary, write_metrics, write_page

    # In an image's own disk it would be stored in the image.
    if not any(target.connection == "local" and target.spec.target == IMAGE for target in targets):
        try:
            save(run, _passwords(options, targets))
        except OSError as error:
            say(f"warning: the run is not kept for `gpuprov report`: {error}", err=True)
    console = make_console()
    if options.json:
        console.file.write(json.dumps(summary(run), separators=(",", ":")) + "\n")
    else:
        print_report(console, run, next_command, verbose=options.verbose)
    if options.report:
        write_page(run, options.report)
    if options.metrics:
        with os_errors(f"the metrics {options.metrics} were not written"):
            write_metrics(run, options.metrics, time.time())


def _passwords(options: Options, targets: Sequence[HostTarget]) -> tuple[str, ...]:
    passwords = [secret for target in targets for secret in (target.password, target.become_password)]
    return (*passwords, options.password, options.become_password)


def require_writable(path: str) -> None:
    """Raise GpuprovError (exit code 2) if a file can't be written, so that this shows before the run."""
    place = expanded(path)
    existed = place.exists()
    if place.is_fifo():  # its reader would take this for all that comes
        return
    try:
        place.open("ab").close()
        if not existed:
            place.resolve().unlink()  # not the user's link to it
    except OSError as error:
        raise UsageError(f"{path} cannot be written", str(error), "name another file") from None


def _checked_bundle(options: Options) -> tuple[str, str]:
    """Return the bundle's absolute path and its digest: a bad one is refused before any host is contacted."""
    if not options.bundle:
        if options.bundle_key:
            raise UsageError("--bundle-key needs --bundle", "", "add --bundle FILE")
        return "", ""
    from gpuprov.bundle.open import checked
    from gpuprov.fleet.standard_streams import percentage

    path = str(Path(options.bundle).absolute())
    if not Path(path).is_file():
        step = "name the file that `gpuprov bundle create` wrote"
        raise UsageError(f"there is no bundle {options.bundle}", f"{path}: no such file", step)
    return path, checked(path, options.bundle_key, percentage("checking every digest of the bundle:")).digest


def inventory_of(options: Options) -> Inventory:
    """Return the hosts that the options choose, with the command line's additions; warnings go to standard error."""
    for option, given in (
        ("--before-host", options.before_host),
        ("--rollback-on-failure", options.rollback_on_failure),
    ):
        if options.root and given:
            what = f"{option} is for hosts that run"
            raise UsageError(what, f"--root {options.root} is an image", f"leave {option} out")
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
        here = read_extra_vars((*(() if options.root else site_words()), *options.extra_vars))
        if options.root:
            here = replace(here, name=options.root, connection="chroot", address=options.root)
        inventory = Inventory((here,))
    for warning in inventory.warnings:
        say(f"warning: {warning}", err=True)
    return replace(inventory, hosts=tuple(_completed(target, options) for target in inventory.hosts))


def _require_local_call_to_make_sense(options: Options) -> None:
    if options.limit:
        raise UsageError("--limit needs an inventory", "", "add --hosts INVENTORY")
    if options.command in _NEEDS_ROOT and os.geteuid() != 0:
        raise UsageError(
            f"`gpuprov {options.command}` needs root on this machine",
            f"running as user id {os.geteuid()}",
            # Not the command by its name: without --check or --root it would change this machine.
            "put sudo before it" + ("" if program.one_file else "; or name other hosts with --hosts INVENTORY"),
        )
    if options.command in _NEEDS_ROOT:
        lift_memory_limit(ADDRESSES)


def _completed(target: HostTarget, options: Options) -> HostTarget:
    """Add the command line's values; as with Ansible, passwords from the inventory win over typed ones."""
    overrides = {**dict(options.overrides), **({"target": IMAGE} if options.image or options.root else {})}
    wanted = {**spec_to_json(target.spec), **overrides}
    ssh = target.connection == "ssh"
    return replace(
        target,
        spec=parse_spec(wanted, "the command line") if overrides else target.spec,
        password=target.password or options.password or (ssh and ansible_password("connection")) or "",
        become_password=target.become_password or options.become_password or (ssh and ansible_password("become")) or "",
    )


@functools.cache
def ansible_password(kind: str) -> str:
    """Return what Ansible's settings name: a password in a file, of a program, or asked for; "" for none."""
    if not (path := configured(f"{kind.upper()}_PASSWORD_FILE")):
        given = os.environ.get("ANSIBLE_BECOME_PASS", "") if kind == "become" else ""
        name, what, flag = _ASKED[kind]
        if given or configured(f"DEFAULT_{name.upper()}") != "True":
            return given
        if program.has_terminal():
            return program.asked(what, wanted=True)
        say(f"warning: {name} of Ansible's settings: no terminal to ask for the {what}; {flag} reads a pipe", err=True)
        return ""
    fault = "it is empty"
    try:
        if os.access(path, os.X_OK):
            found = subprocess.run((path,), stdout=subprocess.PIPE, check=True).stdout.strip(b"\r\n")
        else:
            found = Path(path).read_bytes().strip()
        if password := found.decode():
            return password
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        fault = str(error)
    what = f"{kind}_password_file of Ansible's settings gives no password"
    raise UsageError(what, f"{path}: {fault}", f"ls -l {path}  # an executable one is run, and prints the password")


def _run(
    options: Options, targets: Sequence[HostTarget], request: Request, rollout: Rollout, commands: HostCommands,
    console: Console | None = None,
) -> tuple[tuple[HostResult, ...], ExitCode | None]:  # fmt: skip
    """Return the results, and the exit code of the signal that ended the run."""
    from gpuprov.fleet.run import Fleet

    console = console or make_console()
    fleet = Fleet(
        build_agent, options,
        lambda text: console.print(line(text), soft_wrap=True) if not options.json else say(text, err=True),
        rollout, commands, command_line(options),
    )  # fmt: skip
    with progress_display(options, console, [target.name for target in targets]) as progress:
        return fleet.run(targets, request, progress), fleet.ended_by


def make_console(*, stderr: bool = False) -> Console:
    """Return the console for human-readable output."""
    from rich.console import Console

    make = functools.partial(Console, stderr=stderr, highlight=False, markup=False, emoji=False)
    console = make()
    if console.is_terminal and console.file.isatty():
        # With NO_COLOR rich would keep bold: disable that too.
        return make(color_system=None) if console.no_color else console
    # A pipe has no window width; rich would wrap tables at 80 columns. FORCE_COLOR makes no terminal of it.
    return make(width=_PIPE_WIDTH, force_interactive=False)


@contextlib.contextmanager
def progress_display(options: Options, console: Console, hosts: Sequence[str]) -> Iterator[HostSink]:
    """Show the events of a run over these hosts, from any thread, until the end."""
    from gpuprov.fleet.progress import JsonLines, LiveTable, PlainLines

    if options.json:
        yield JsonLines(console)
    elif console.is_interactive and not console.no_color:
        with LiveTable(console, hosts, verbose=options.verbose, diff=options.diff) as table:
            yield table
    else:
        yield PlainLines(console, verbose=options.verbose, diff=options.diff)


def next_command(options: Options) -> str:
    """Return the command that verifies the result, or explains a failed verification, for the same hosts."""
    following = _FOLLOWING.get(options.command, "")
    shown, others = _shown_variables(options)
    words = ("gpuprov", following, *_hosts_words(options, options.limit), *shown)
    return shlex.join(words) + others if following else ""


def _hosts_words(options: Options, limit: str) -> tuple[str, ...]:
    root = ("--root", options.root) if options.root else ()
    words = tuple(word for source in options.hosts for word in ("--hosts", source))
    vault = ("--vault-password-file", options.vault_password_file) if options.vault_password_file else ()
    return (*root, *words, *(("--limit", limit) if limit else ()), *vault, *_asks(options))


def _asks(options: Options) -> tuple[str, ...]:
    """Return the flags by which the passwords were asked for."""
    return ("-k",) * bool(options.password) + ("-K",) * bool(options.become_password)


def command_line(options: Options) -> str:
    """Return the command of this run; of -e only what is no password, as pages and stored runs have it."""
    words = ["gpuprov", options.command]
    shown, others = _shown_variables(options)
    for one in fields(options):
        value = getattr(options, one.name)
        if one.name == "extra_vars":
            words += shown
        elif FLAG in one.metadata and value != one.default:
            for part in value if isinstance(value, tuple) else (value,):
                words += [one.metadata[FLAG], *([] if part is True else [str(part)])]
    words += _asks(options)
    words += [word for name, value in options.overrides for word in ("-e", f"gpuprov_{name}={value}")]
    return shlex.join(words) + others


def _shown_variables(options: Options) -> tuple[list[str], str]:
    """Return the words of -e that are no passwords (Ansible's own variables may be), and a mark if there are others."""
    shown = [
        one for one in options.extra_vars
        if one.startswith("@") or (re.match(_OWN_ALONE, one, re.DOTALL) and masked_settings(one) == one)
    ]  # fmt: skip
    mark = " -e …" if len(shown) < len(options.extra_vars) else ""
    return [word for variable in shown for word in ("-e", variable)], mark


def with_whole_commands(results: tuple[HostResult, ...], options: Options) -> tuple[HostResult, ...]:
    """Return the results with complete commands that change hosts: a host does not know its inventory."""
    shown, others = _shown_variables(options)

    def whole(problem: Problem, host: str) -> Problem:
        hosts = _hosts_words(options, host if options.hosts else "")
        words = shlex.join((*hosts, *shown)) + others
        step = re.sub(_CHANGING, lambda found: f"{found[0]} {words.strip()}".rstrip(), problem.next_step)
        return replace(problem, next_step=step)

    return tuple(
        replace(result, problems=tuple(whole(problem, result.host) for problem in result.problems))
        for result in results
    )
