"""The first inventory: ask for what it needs, look at the hosts over SSH, write it. For `gpuprov init`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from gpuprov.agent.result import HostResult, fact
from gpuprov.core.files import expanded, own_target, write_whole
from gpuprov.driver import recommended
from gpuprov.fleet.ansible_reader import ansible_output, ansible_temporary_folder
from gpuprov.fleet.command import inspect_hosts, inventory_of
from gpuprov.fleet.history import inventory_names, latest_choices
from gpuprov.fleet.inventory import read_inventory, with_ranges
from gpuprov.fleet.options import DRIVERS, Options, made_options
from gpuprov.fleet.standard_streams import say, say_text
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import UsageError, os_errors
from gpuprov.protocol.secrets import masked_settings
from gpuprov.protocol.spec import HostSpec, spec_to_json
from gpuprov.protocol.spec_fields import ENGINES, PREFIX
from gpuprov.protocol.words import counted, line

_SSH_CONFIG = "ssh-config"
_FILES = {_SSH_CONFIG: "~/.ssh/config", "known-hosts": "~/.ssh/known_hosts"}
# Names, addresses and Ansible's ranges, as gpu[01:16].example.org.
_HOSTS = re.compile(r"(?!-)[\w.:%-]*(?:\[\w+:\w+(?::\d+)?\][\w.-]*)*", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
# The other options are those of connections.
_OWN = ("hosts", "user", "driver", "driver_version", "engines", "look")
_Ask = Callable[..., str]


@dataclass
class _Draft:
    """The inventory to be: name → comment of its hosts, and the variables of all."""

    hosts: dict[str, str]
    variables: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Return the file: every value as the YAML library quotes it, comments in ASCII."""
        lines = ["# Written by `gpuprov init`. All variables: gpuprov options", "gpu_hosts:", "  hosts:"]
        for name, comment in self.hosts.items():
            lines.append(f"    {yaml.safe_dump(name).splitlines()[0]}:{comment and '  # '}{comment}")
        if self.variables:
            lines += (f"  {one}" for one in yaml.safe_dump({"vars": self.variables}, sort_keys=False).splitlines())
        return "".join(f"{one}\n" for one in lines)

    @contextlib.contextmanager
    def as_file(self) -> Iterator[str]:
        """Give a file that has the text, until the end."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "inventory.yml")
            path.write_text(self.text(), encoding="utf-8")
            yield str(path)


def write_inventory(file: str, given: Mapping[str, Any], *, silent: bool, force: bool, as_json: bool) -> None:
    """Write an inventory from what is given by the options of `gpuprov init`, and asked for what is not.

    Raises GpuprovError (exit code 2) for wrong values and for a file that exists.
    """
    require_absent(file, force=force)
    ask: _Ask = functools.partial(_ask, silent)
    connection = {name: value for name, value in given.items() if name not in _OWN}
    hosts = given["hosts"] or ask(f"Hosts (names, gpu[01:16], {', '.join(_FILES)})")
    draft = _Draft(dict.fromkeys(_hosts(hosts, ask), ""))
    user = given["user"] or ask("User for SSH (- for that of your SSH configuration)", "-")
    if user != "-":
        draft.variables["ansible_user"] = user
    found = _look(draft, connection) if given["look"] else []
    draft.variables |= {PREFIX + name: value for name, value in _chosen(found, given, ask)}
    with draft.as_file() as written:
        read_inventory((written,))  # a wrong value is refused before the file is written
    say_text(draft.text(), err=as_json)
    if not silent:
        click.confirm(f"Write {file}?", default=True, abort=True, err=True)
    write_new(file, draft.text(), force=force)
    asks = [flag for flag, name in (("-k", "ask_pass"), ("-K", "ask_become_pass")) if given[name]]
    following = shlex.join(("gpuprov", "install", "--hosts", file, *asks, "--check", "--diff"))
    if as_json:
        made = {"file": file, "hosts": list(draft.hosts), "variables": draft.variables, "next": following}
        say_text(json.dumps(made, ensure_ascii=False))
    else:
        say(f"wrote {file}; next: {following}")


def _chosen(found: Sequence[Mapping[str, Any]], given: Mapping[str, Any], ask: _Ask) -> Iterator[tuple[str, Any]]:
    """Yield the variables of driver and engines: as given, else as answered; what the hosts have is proposed."""
    has_driver = bool(found) and all(fact(one, ("driver", "kernel_version")) for one in found)
    driver = given["driver"] or ask("Driver", "preinstalled" if has_driver else "runfile", DRIVERS)
    yield "driver", driver
    if driver != "preinstalled":
        yield "driver_version", given["driver_version"] or ask("Driver version or branch", "recommended")
    present = [name for name in ENGINES if found and all(fact(one, ("engines", name, "program")) for one in found)]
    engines = given["engines"] or ask("Engines besides docker (- for none)", ",".join(present) or "-")
    if names := [one for one in re.split(r"[,\s]+", engines) if one.strip("-")]:
        yield "engines", names
    if present and not any(fact(one, ("docker", "version")) for one in found):
        yield "docker", "none"


def _ask(silent: bool, question: str, proposed: str | None = None, choices: Sequence[str] = ()) -> str:
    """Return an answer from the terminal, or what is proposed. Raises UsageError if nothing is, and nobody asked."""
    if not silent:
        kind = click.Choice(choices) if choices else None
        return str(click.prompt(question, proposed, type=kind, err=True)).strip()
    if proposed is None:
        raise UsageError("--yes needs --hosts", "nothing says which hosts", "add --hosts 'gpu[01:16]'")
    return proposed


def _hosts(given: str, ask: _Ask) -> list[str]:
    """Return names and ranges, each once. Raises UsageError for text that is neither, or if a file names no host."""
    found: list[str] = []
    for word in filter(None, re.split(r"[,\s]+", given)):
        if word in _FILES:
            names = dict.fromkeys(_names_in(word))
            if not names:
                raise UsageError(f"{word} names no host", "hashed names and patterns are left out", "type the names")
            found += re.split(r"[,\s]+", ask("Which of them", ",".join(names)))
        else:
            found.append(word)
    with ansible_temporary_folder(), ansible_output():
        for name in found:
            if not _HOSTS.fullmatch(name) or not 0 < len(name) < 254 or with_ranges(name) == ",":
                step = "type gpu01.example.org, or a range: gpu[01:16]"
                raise UsageError("that is no name of a host", repr(name), step)
    return list(dict.fromkeys(found))


def _names_in(word: str) -> Iterator[str]:
    """Give the hosts that ~/.ssh/config or ~/.ssh/known_hosts names: no patterns, hashes and ports."""
    try:
        text = Path(_FILES[word]).expanduser().read_text("utf-8", "replace")
    except (OSError, RuntimeError):
        return
    for words in filter(None, (one.replace("=", " ", 1).split() for one in text.splitlines())):
        if word == _SSH_CONFIG:
            yield from filter(_NAME.fullmatch, words[1:] if words[0].lower() == "host" else ())
        else:  # a machine's addresses follow its name
            yield from filter(_NAME.fullmatch, words[0].split(",")[:1])


def _look(draft: _Draft, connection: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Show what the hosts are, leave out those without a GPU, and return the facts of the others that answered."""
    with _Draft(draft.hosts, {**draft.variables, f"{PREFIX}engines": list(ENGINES)}).as_file() as inventory:
        results = inspect_hosts(made_options("facts", dict(connection), hosts=(inventory,)))
    without = [one.host for one in results if one.facts is not None and one.versions.get("gpus") in ("0", "")]
    ported = {name.partition(":")[0]: name for name in draft.hosts if name.count(":") == 1}
    kept = {ported.get(one.host, one.host): _comment(one) for one in results if one.host not in without}
    if without:
        say(f"left out, no NVIDIA GPU: {', '.join(without)}", err=True)
    if not kept:
        raise UsageError("no host has an NVIDIA GPU", "each that answered was asked", "name others, or add --no-look")
    # A range stays one if all its hosts do.
    if without or set(kept) == set(draft.hosts):
        draft.hosts = kept
    return [one.facts for one in results if one.host not in without and one.facts is not None]


def _comment(result: HostResult) -> str:
    """Return what the host says it is, in plain ASCII: no text of a host ends a comment or begins a line."""
    found = result.versions
    parts = (found.get("os"), counted(found.get("gpus", ""), "GPU"), f"driver {found.get('driver') or 'none'}")
    text = ", ".join(filter(None, parts)) if result.facts is not None else f"not seen: {result.word}"
    return re.sub(r"[^ -~]", "?", line(text))[:120]


def chosen_variables(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that all hosts of the options have in common and that are not defaults, by name.

    With the driver's version that their last installations chose, if it is one for all. No value has a password.
    """
    inventory = inventory_of(Options("options", **options))
    defaults, *specs = (spec_to_json(one) for one in (HostSpec(), *(host.spec for host in inventory.hosts)))
    common = {name: value for name, value in specs[0].items() if all(one[name] == value for one in specs)}
    # Another site's host may have the same name.
    latest = {**latest_choices(), **latest_choices(inventory_names(options["hosts"]))}
    chosen = [latest.get(host.name) for host in inventory.hosts if recommended.is_open(host.spec)]
    # Not what packages brought, nor what follows a kernel outside.
    versions = {one.version if one and one.can_be_named else "" for one in chosen}
    if len(versions) == 1 and len(chosen) == len(inventory.hosts):
        common["driver_version"] = versions.pop()
    texts = {name: json.dumps(value) for name, value in common.items()}
    hidden = {name for name, text in texts.items() if masked_settings(text) != text}
    for name in sorted(hidden):
        say(f"warning: {PREFIX}{name} is left out: it has a password", err=True)
    return {PREFIX + name: value for name, value in common.items() if value != defaults[name] and name not in hidden}


def require_absent(file: str, *, force: bool) -> None:
    """Raise GpuprovError (exit code 2) if a file is there and may not be replaced."""
    path = expanded(file)
    if path.is_dir() or (not force and (path.exists() or path.is_symlink())):
        raise UsageError(f"{file} exists", "nothing was written", "name another file, or add --force to replace it")


def write_new(file: str, text: str, *, force: bool) -> None:
    """Write a file whole, in a folder that is made; an existing one only by force. Raises GpuprovError."""
    require_absent(file, force=force)
    path = expanded(file)
    with os_errors(f"{file} can't be written", "name another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not force:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))  # one may have appeared meanwhile
        try:
            write_whole(own_target(path), text.encode(), 0o644, None)
        except OSError:
            if not force:
                path.unlink()  # the empty one would keep the same call from succeeding later
            raise
