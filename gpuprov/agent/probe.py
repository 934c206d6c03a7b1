"""Probe a host in the first round trip: one shell script, and a parser for its output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuprov.agent.refusals import sudo_problem
from gpuprov.agent.same_machine import SCRIPT, machine_of
from gpuprov.core.commands import SYSTEM_PATH
from gpuprov.core.proxy import Proxy
from gpuprov.facts.interpreter import NAMES, OLDEST, PLATFORM_PYTHON
from gpuprov.protocol.errors import GpuprovError, Problem

if TYPE_CHECKING:
    from gpuprov.machine.distros import Distribution
    from gpuprov.packages.interface import Commands

_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]{0,99}")
_NUMBER = re.compile(r"[0-9]{1,10}")
PYTHONS = (*NAMES, PLATFORM_PYTHON)
BOOTSTRAP_OPTION = "--bootstrap-python"

# sh reads it on stdin, so the login shell (fish, csh) need not understand it. $1 is the agent's digest; the
# interpreters to try follow. Every argument has passed an allow-list. Root will run the Python found here, so another
# user's own PATH does not count: it may begin with a folder that every process of that user can write to.
PROBE = (
    r"""
umask 077
LC_ALL=C; export LC_ALL
digest=$1; shift
system="""
    + SYSTEM_PATH
    + r"""
[ "$(id -u)" != 0 ] || system=$PATH
echo "gpuprov-probe 1"
echo "system $(uname -s) $(uname -m)"
echo "uid $(id -u)"
echo "cache $HOME/.cache/gpuprov"
echo "agent $(sha256sum "$HOME/.cache/gpuprov/agent-$digest.pyz" 2>/dev/null | cut -c1-64)"
( . /etc/os-release 2>/dev/null &&
  echo "os $ID|$VERSION_ID|$VERSION_CODENAME|$ID_LIKE|$PRETTY_NAME|$UBUNTU_CODENAME|$VARIANT_ID" )
broken=
for python in "$@"; do
  case $python in /*) place=$python;; *) place=/usr/bin/$python;; esac
  path=$(PATH=$system; command -v "$python") || { broken="$broken $place"; continue; }
  version=$("$path" -E -s -S -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)
  echo "python ${version:-0.0.0} $path"
  case $version in 3.9.*|3.[1-9][0-9]*) broken=; break;; "") broken="$broken $path";; esac
done
# Packages that are installed and whose Python is gone or does not run: to install them again is no work for apt or dnf.
for place in $broken; do
  dpkg -S "$place" 2>/dev/null | cut -d: -f1 | sed 's/^/owner /'
  rpm -q --whatprovides --queryformat 'owner %{NAME}\n' "$place" 2>/dev/null | grep '^owner '
done
if [ "$(id -u)" != 0 ]; then
  said=$(sudo -n true 2>&1 </dev/null); code=$?
  echo "sudo $code $(echo "$said" | head -n 4 | tr "\n" " ")"
fi
"""
    + f'{SCRIPT}\necho "end"\n'
)


@dataclass(frozen=True)
class Python:
    """An interpreter that the host has."""

    path: str
    version: tuple[int, ...]

    @property
    def is_usable(self) -> bool:
        return self.version >= OLDEST


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
        return next((python for python in self.pythons if python.is_usable), None)


def parse_probe(text: str) -> Probe | None:
    """Return the script's output, ignoring any login banner before it; None if the script did not finish."""
    _, found, answer = text.partition("gpuprov-probe 1\n")
    values: dict[str, list[str]] = {}
    for line in answer.splitlines():
        word, _, rest = line.partition(" ")
        values.setdefault(word, []).append(rest)
    if not found or "end" not in values or not _NUMBER.fullmatch(values.get("uid", [""])[0]):
        return None
    code, _, output = values.get("sudo", [""])[0].partition(" ")
    return Probe(
        system=values.get("system", [""])[0],
        uid=int(values["uid"][0]),
        cache=values.get("cache", [""])[0],
        agent_digest=values.get("agent", [""])[0],
        pythons=tuple(filter(None, map(_python, values.get("python", ())))),
        owners=tuple(dict.fromkeys(name for name in values.get("owner", ()) if _PACKAGE.fullmatch(name))),
        sudo_code=int(code) if _NUMBER.fullmatch(code) else None,
        sudo_output=output.strip(),
        os_release=tuple((values.get("os", [""])[0].split("|") + [""] * 7)[:7]),
        machine=machine_of(values.get("machine", [""])[0]),
    )


def _python(text: str) -> Python | None:
    version, _, path = text.partition(" ")
    numbers = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})", version)
    return Python(path, tuple(map(int, numbers.groups()))) if numbers and path else None


def probe_problem(probe: Probe, *, become: bool, has_password: bool) -> Problem | None:
    """Return why the agent can't run on this host, apart from a missing Python; None if it can."""
    if not probe.system.startswith("Linux "):
        return Problem(
            "this host does not run Linux", f"uname says {probe.system}", "leave it out: --limit 'all:!HOST'"
        )
    if probe.uid == 0:
        return None
    if not become:
        return Problem(
            "gpuprov needs root on the host, and ansible_become is false",
            f"logged in with user id {probe.uid}",
            "set ansible_become to true, or ansible_user to root",
        )
    if probe.sudo_code == 127:
        return Problem(
            "there is no sudo on the host, and we are not root there",
            f"`sudo -n true` exited 127: {probe.sudo_output}",
            "install sudo, or set ansible_user to root",
        )
    refused = sudo_problem(probe.sudo_output) if probe.sudo_code != 0 else None
    if refused is not None:
        return refused
    if probe.sudo_code != 0 and not has_password:
        return Problem(
            "sudo on the host wants a password",
            f"`sudo -n true` exited {probe.sudo_code}: {probe.sudo_output}",
            "run again with -K to be asked for it, or set ansible_become_password",
        )
    return None


def bootstrap_script(probe: Probe) -> str:
    """Return the shell command that installs a Python that gpuprov supports. It is one line, for any login shell.

    It reads its environment from bootstrap_input: a proxy's password must not be on a command line.
    Raises GpuprovError if the distribution is not supported: gpuprov would refuse such a host in any case.
    """
    row = _distribution(probe)
    commands = _commands(row)
    again = f"export DEBIAN_FRONTEND=noninteractive; {commands.reinstall} {' '.join(probe.owners)}"
    tries = (*((again,) if probe.owners else ()), *(f"{commands.script} {name}" for name in row.pythons))
    installations = " || ".join(f"{{ {one}; }}" for one in tries)
    return f'while IFS= read -r line && [ -n "$line" ]; do export "$line"; done; {installations}'


def bootstrap_input(spec: Mapping[str, Any]) -> bytes:
    """Return the bootstrap script's input: the environment of its package manager, then an empty line."""
    proxy = Proxy(str(spec.get("proxy", "")), str(spec.get("no_proxy", "")))
    lines = (f"{name}={value}" for name, value in proxy.environment.items())
    return "".join(f"{line}\n" for line in (*lines, "")).encode()


def python_problem(probe: Probe, named_python: str, option: str = BOOTSTRAP_OPTION) -> Problem | None:
    """Return what is wrong with the host's Python, or None. `option` is the option that makes gpuprov install one."""
    if probe.python is not None:
        return None
    seen = ", ".join(map(_seen, probe.pythons))
    looked = f"looked for {named_python or ', '.join(PYTHONS)}"
    try:
        row = _distribution(probe)
    except GpuprovError as unsupported:
        return unsupported.problems[0]
    commands = _commands(row)
    by_hand = (
        f"{commands.reinstall} {' '.join(probe.owners)}" if probe.owners else f"{commands.install} {row.pythons[0]}"
    )
    get = f"run again with {option} to install it, or by hand: {by_hand}"
    if named_python:
        get = f"set ansible_python_interpreter to a Python ≥ 3.9, or leave it out; else {get}"
    what = "there is no Python on the host"
    if probe.pythons:
        runs = any(any(python.version) for python in probe.pythons)
        what = "the host's Python is older than 3.9" if runs else "the host's Python does not run"
    return Problem(what, seen or looked, get)


def _seen(python: Python) -> str:
    return (
        f"{python.path} is {'.'.join(map(str, python.version))}"
        if any(python.version)
        else f"{python.path} does not run"
    )


def _distribution(probe: Probe) -> Distribution:
    """Return the table row of the host's distribution. Raises GpuprovError if there is none."""
    # Most hosts have a Python, so this is rarely needed.
    from gpuprov.machine.distros import distribution_of, machine_problems
    from gpuprov.machine.machine import OperatingSystem

    id_, version, codename, like, name, ubuntu, variant = probe.os_release
    os = OperatingSystem(id_, version, codename, tuple(like.split()), name or id_ or "this system", ubuntu, variant)
    row = distribution_of(os)
    if row is None:
        raise GpuprovError.several(machine_problems(os, probe.system.rpartition(" ")[2]))
    return row


def _commands(row: Distribution) -> Commands:
    from gpuprov.packages.managers import manager_of

    return manager_of(row).commands
