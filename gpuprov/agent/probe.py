"""Probe a host in the first round trip: one shell script, and a parser for its output.

It also finds one machine under two names of an inventory. Boot id and machine id must both match: clones share the
machine id, containers share their host's boot id. The PID namespace distinguishes containers of one host whose images
share a machine id. A host sends these itself, and may send another's: they alone never keep a run from a host.
"""

from __future__ import annotations

import collections
import hashlib
import os
import pkgutil
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprov.core.commands import SYSTEM_PATH, Completed, first_match
from gpuprov.core.proxy import Proxy
from gpuprov.core.system import System
from gpuprov.facts.interpreter import NAMES, OLDEST, PLATFORM_PYTHON
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError, Problem

if TYPE_CHECKING:
    from gpuprov.machine.distros import Distribution
    from gpuprov.packages.interface import Commands

_MACHINE_ID = "/etc/machine-id"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NAMESPACE = "/proc/self/ns/pid"
_SSHD = "/etc/ssh"
_PUBLIC_KEY = re.compile(r"ssh_host_\w+_key\.pub")
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]{0,99}")
_NUMBER = re.compile(r"[0-9]{1,10}")
PYTHONS = (*NAMES, PLATFORM_PYTHON)
BOOTSTRAP_OPTION = "--bootstrap-python"
_BY_HAND = "correct the host's package repositories, or install Python ≥ 3.9 by hand"
NOT_BOOTSTRAPPED = ("Python cannot be installed on the host", _BY_HAND)
PROBE = f"system={SYSTEM_PATH}\n" + (pkgutil.get_data("gpuprov.agent", "probe.sh") or b"").decode()
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_OTHER_USER = "set ansible_user to an account that may"


def probe_command(digest: str, named_python: str, sudo: str = "sudo") -> str:
    """Return the command that reads PROBE on its standard input; `named_python` is "" where the inventory has none."""
    return shlex.join(("sh", "-s", digest, sudo, *((named_python,) if named_python else PYTHONS)))


def machine_of(text: str) -> str:
    """Return the identity from the probe's line `machine`, without that word; "" if a part is missing."""
    parts = text.split()
    return " ".join(parts) if len(parts) == 3 else ""


def local_machine(system: System) -> str:
    """Return the identity of this machine."""
    namespace = system.status(_NAMESPACE)
    parts = (system.read_text(_MACHINE_ID), system.read_text(_BOOT_ID), namespace and namespace.target)
    return machine_of(" ".join(part or "" for part in parts))


def local_host_keys(system: System) -> frozenset[str]:
    """Return this machine's public SSH host keys, in base64."""
    paths = (f"{_SSHD}/{name}" for name in system.list_directory(_SSHD) if _PUBLIC_KEY.fullmatch(name))
    keys = ((system.read_text(path) or "").split() for path in paths)
    return frozenset(words[1] for words in keys if len(words) > 1)


def unproven_note(name: str, other: str) -> str:
    """Return the warning about a host that only says so: any host can send the machine id of another one."""
    return f"{name} has the machine id and the boot id of {other}: if they are one machine, take out one name"


def same_machine_problem(name: str, other: str, machine: str) -> Problem:
    """Return the error for the second of two names."""
    parts = machine.split()
    seen = f"machine id {parts[0]} and boot id {parts[1]} are the same on both"
    step = f"take {name} or {other} out of the inventory, or leave one out: --limit 'all:!{name}'"
    return Problem(f"{name} is the same machine as {other}: two runs would get in each other's way", seen, step)


def claim_in(folder: Path, name: str, machine: str) -> str:
    """Record in a folder that this name means this machine; return another name that was recorded first, or "".

    The processes of one ansible-playbook share nothing else.
    """
    if not machine:
        return ""
    folder.mkdir(mode=0o700, exist_ok=True)
    place, own = folder / hashlib.sha256(machine.encode()).hexdigest(), folder / f".{os.getpid()}"
    own.write_text(name, "utf-8")
    try:
        # A link appears with its content, and only once.
        place.hardlink_to(own)
    except FileExistsError:
        first = place.read_text("utf-8")
        return "" if first == name else first
    finally:
        own.unlink()
    return ""


@dataclass(frozen=True)
class Python:
    """An interpreter that the host has."""

    path: str
    version: tuple[int, ...]


@dataclass(frozen=True)
class Probe:
    """Results of the first round trip. `sudo_code` is the exit code of `sudo -n true`, None if the user is root.

    `owners`: installed packages whose Python is missing or broken, if no Python is usable. `machine` is the same under
    every name of a machine, and "" if unknown.
    """

    system: str
    uid: int
    cache: str
    agent_digest: str = ""
    pythons: tuple[Python, ...] = ()
    sudo_code: int | None = None
    sudo_output: str = ""
    os_release: tuple[str, ...] = ("",) * 7
    machine: str = ""
    owners: tuple[str, ...] = ()

    @property
    def python(self) -> Python | None:
        """The interpreter to use."""
        return next((python for python in self.pythons if python.version >= OLDEST), None)


def parse_probe(text: str) -> Probe | None:
    """Return the script's output, ignoring any login banner before it; None if the script did not finish."""
    _, found, answer = text.partition("gpuprov-probe 1\n")
    lines = [line.partition(" ")[::2] for line in answer.splitlines()]
    # Of several lines with one word the first counts.
    first = collections.defaultdict(str, reversed(lines))
    if not found or "end" not in first or not _NUMBER.fullmatch(first["uid"]):
        return None
    code, _, output = first["sudo"].partition(" ")
    return Probe(
        system=first["system"],
        uid=int(first["uid"]),
        cache=first["cache"],
        agent_digest=first["agent"],
        pythons=tuple(filter(None, (_python(rest) for word, rest in lines if word == "python"))),
        owners=tuple(dict.fromkeys(rest for word, rest in lines if word == "owner" and _PACKAGE.fullmatch(rest))),
        sudo_code=int(code) if _NUMBER.fullmatch(code) else None,
        sudo_output=output.strip(),
        os_release=tuple((first["os"].split("|") + [""] * 7)[:7]),
        machine=machine_of(first["machine"]),
    )


def _python(text: str) -> Python | None:
    version, _, path = text.partition(" ")
    numbers = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})", version)
    return Python(path, tuple(map(int, numbers.groups()))) if numbers and path else None


# -- why a host accepts a login but runs no command: messages of sudo, shadow, OpenSSH and Linux-PAM ----


def sudo_problem(output: str) -> Problem | None:
    """Return why sudo refuses regardless of the password, None if its output names no such reason."""
    return _found("sudo", output)


def account_problem(done: Completed, user: str = "") -> Problem | None:
    """Return why an account runs no command, from what came instead of the probe's answer; None if unknown.

    `user`: its name, where the inventory has it.

    A shell that runs the probe writes to stdout. stderr proves nothing: sshd complains there of a missing home.
    """
    found = _found("login", f"{done.stderr}\n{done.stdout}", user)
    name = user if _NAME.fullmatch(user) else "USER"
    if found is None and not done.stdout.strip() and done.returncode == 1:
        seen = "\n".join(["exit code 1, no output", *done.stderr.strip().splitlines()[-4:]])
        step = f"on the host: getent passwd {name}; as root: usermod -s /bin/sh {name}; or {_OTHER_USER}"
        return Problem("the account's shell ends at once and runs nothing, as /bin/false does", seen, step)
    return found


def _found(program: str, output: str, known: str = "") -> Problem | None:
    found = first_match(program, output.splitlines())
    if found is None:
        return None
    row, line = found
    match = re.search(row.pattern, line)
    named = match.groupdict() if match else {}
    # The host chooses this text, and the next step is a command: a name or nothing.
    user = named.get("user") or known
    step = row.next_step.replace("USER", user) if _NAME.fullmatch(user) else row.next_step
    return Problem(row.what.format(**named), line.strip()[:300], step)


def system_problem(probe: Probe) -> Problem | None:
    """Return that this host does not run Linux; None if it does."""
    if probe.system.startswith("Linux "):
        return None
    return Problem("this host does not run Linux", f"uname says {probe.system}", "leave it out: --limit 'all:!HOST'")


def probe_problem(probe: Probe, *, become: bool, has_password: bool, sudo: str = "sudo") -> Problem | None:
    """Return why the agent can't run on this host, apart from a missing Python; None if it can."""
    if (other := system_problem(probe)) or probe.uid == 0:
        return other
    if not become:
        seen = f"logged in with user id {probe.uid}"
        step = "set ansible_become to true, or ansible_user to root"
        return Problem("gpuprov needs root on the host, and ansible_become is false", seen, step)
    if probe.sudo_code == 127:
        what = f"there is no {sudo} on the host, and we are not root there"
        seen = f"`{sudo} -n true` exited 127: {probe.sudo_output}"
        step = "install sudo" if sudo == "sudo" else "correct ansible_become_exe"
        return Problem(what, seen, f"{step}, or set ansible_user to root")
    refused = sudo_problem(probe.sudo_output) if probe.sudo_code != 0 else None
    if refused is not None:
        return refused
    if probe.sudo_code != 0 and not has_password:
        what = "sudo on the host wants a password"
        seen = f"`{sudo} -n true` exited {probe.sudo_code}: {probe.sudo_output}"
        return Problem(what, seen, "run again with -K to be asked for it, or set ansible_become_password")
    return None


def bootstrap_script(probe: Probe) -> str:
    """Return the shell command that installs a Python that gpuprov supports. It is one line, for any login shell.

    It reads its environment from bootstrap_input: a proxy's password must not be on a command line.
    Raises GpuprovError if the distribution is not supported: gpuprov would refuse such a host in any case.
    """
    row, commands = _distribution(probe)
    again = f"export DEBIAN_FRONTEND=noninteractive; {commands.reinstall} {' '.join(probe.owners)}"
    tries = (*((again,) if probe.owners else ()), *(f"{commands.script} {name}" for name in row.pythons))
    installations = " || ".join(f"{{ {one}; }}" for one in tries)
    return f'while IFS= read -r line && [ -n "$line" ]; do export "$line"; done; {installations}'


def bootstrap_input(spec: Mapping[str, Any]) -> bytes:
    """Return the bootstrap script's input: the environment of its package manager, then an empty line."""
    from gpuprov.packages.dpkg import HOOKS

    proxy = Proxy(str(spec.get("proxy", "")), str(spec.get("no_proxy", "")))
    lines = (f"{name}={value}" for name, value in {**HOOKS, **proxy.environment}.items())
    return "".join(f"{line}\n" for line in (*lines, "")).encode()


def python_problem(probe: Probe, named_python: str, option: str = BOOTSTRAP_OPTION) -> Problem | None:
    """Return what is wrong with the host's Python, or None. `option` is the option that makes gpuprov install one."""
    if probe.python is not None:
        return None
    seen = ", ".join(
        f"{one.path} {'is ' + '.'.join(map(str, one.version)) if any(one.version) else 'does not run'}"
        for one in probe.pythons
    )
    looked = f"looked for {named_python or ', '.join(PYTHONS)}"
    try:
        row, commands = _distribution(probe)
    except GpuprovError as unsupported:
        return unsupported.problems[0]
    again, new = f"{commands.reinstall} {' '.join(probe.owners)}", f"{commands.install} {row.pythons[0]}"
    get = f"run again with {option} to install it, or by hand: {again if probe.owners else new}"
    if named_python:
        get = f"set ansible_python_interpreter to a Python ≥ 3.9, or leave it out; else {get}"
    what = "there is no Python on the host"
    if probe.pythons:
        runs = any(any(python.version) for python in probe.pythons)
        what = "the host's Python is older than 3.9" if runs else "the host's Python does not run"
    return Problem(what, seen or looked, get)


def _distribution(probe: Probe) -> tuple[Distribution, Commands]:
    """Return the row of the host's distribution, and its package manager's commands. Raises GpuprovError for none."""
    # Most hosts have a Python, so this is rarely needed.
    from gpuprov.machine.distros import distribution_of, machine_problems
    from gpuprov.machine.machine import OperatingSystem
    from gpuprov.packages.managers import manager_of

    id_, version, codename, like, name, ubuntu, variant = probe.os_release
    os = OperatingSystem(id_, version, codename, tuple(like.split()), name or id_ or "this system", ubuntu, variant)
    row = distribution_of(os)
    if not row.id:
        raise GpuprovError.several(machine_problems(os, probe.system.rpartition(" ")[2]))
    return row, manager_of(row).commands
