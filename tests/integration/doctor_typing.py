"""Type what the doctor says, word for word, until it is silent; return the rules whose command was typed."""

import json
import re
import shlex
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.lab import Host
from tests.lab.fixtures import Site, gpuprov_succeeds
from tests.lab.lab import REPOSITORY
from tests.lab.shell import wait_for

PROGRAM = "/usr/local/bin/gpuprov"
# By the host's own Python, which may be another than the checkout's. Its packages come last.
_PROGRAM = f"""#!/usr/bin/python3
import runpy, sys
sys.path += ["{REPOSITORY}", "{sysconfig.get_path("purelib")}"]
runpy.run_module("gpuprov", run_name="__main__", alter_sys=True)
"""
# More than any group has: a loop never ends.
_MOST_STEPS = 20
# Asides about the simulated driver's age and about when docker was started.
ALWAYS = frozenset({"driver-old", "hook-unseen"})
# What a person leaves in an editor: the test's own script, which gets the file as its last word.
_EDITOR = "/root/edit"
_SHELL = f"export EDITOR={_EDITOR} DEBIAN_FRONTEND=noninteractive\n"
_BOOT_SECONDS = 300
# Verification itself starts eight containers: it runs if docker has lost the image, and once after all groups.
_ASKED = ("--gpus=all", "--runtime=nvidia --env=NVIDIA_VISIBLE_DEVICES=all")
_CONTAINER = f"""
[ -n "$(docker images --quiet gpuprov-verify)" ] || {PROGRAM} verify >&2
exec docker run --rm --network=none --pull=never {{}} $(docker images --quiet gpuprov-verify | head -n 1) nvidia-smi -L
"""
# The simulated kernel's log, which a boot empties; real dmesg reads it.
_DMESG = '#!/bin/sh\n[ -e /run/kernel.log ] || exit 0\nexec /usr/bin/dmesg --file /run/kernel.log "$@"\n'
# How the simulated GPUs are ends with a boot, too.
_STATE = "ln -sfn /run/simgpu.conf /etc/simgpu.conf"
CONTAINER = "/run/systemd/container"
# A driver beside the host's.
OTHER_VERSION = "535.261.03"
OTHER = f"libnvidia-ml.so.{OTHER_VERSION}"
OTHER_CUDA = f"libcuda.so.{OTHER_VERSION}"
SLEEPER = (
    "mkdir -p /root/image; tar -hc /bin/sleep /lib/x86_64-linux-gnu/libc.so.6 /lib64/ld-linux-x86-64.so.2 "
    "-C /root/image . | docker import - sleeper:1"
)
FORGET = "journalctl --rotate; journalctl --vacuum-size=1"
# So that the host does not put right by itself what is broken next.
NO_REFRESH = "systemctl stop gpuprov-refresh.path gpuprov-changed.service gpuprov-refresh.service"


@dataclass(frozen=True)
class Group:
    """Troubles that are made together. `typed`: the rules whose commands are typed, each of which must end its rule.

    `then`: rule → what is left to a person after the command (a program started again, a GPU replaced), or the next
    trouble. `editor`: what the person does in the editor, with `$file`. `names`: what a word of the command that only
    the person knows stands for. `metal`: the host is no system container. `options`: the specification. `quiet`:
    rules that the group's own means bring, and that are not looked at. `short`: for each run, not for `make test-long`.
    """

    name: str
    breaking: tuple[str, ...]
    typed: frozenset[str]
    then: Mapping[str, str] = field(default_factory=dict)
    editor: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    metal: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    quiet: frozenset[str] = frozenset()
    short: bool = False


def prepare(host: Host) -> None:
    """Give a host gpuprov's own program, a kernel's log of its own, and GPUs whose state a test may change."""
    host.ssh(f"cat > {PROGRAM}; chmod 755 {PROGRAM}", stdin=_PROGRAM)
    host.ssh(f"cat > /usr/local/bin/dmesg; chmod 755 /usr/local/bin/dmesg; {_STATE}", stdin=_DMESG)


def causes_on(host: Host, options: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the causes that the doctor finds when asked on the host itself, without those that are always there."""
    # It waits two minutes for an nvidia-smi that hangs.
    said = host.ssh(f"{PROGRAM} doctor --json {_words(options or {})}", check=False, timeout=600).stdout
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert events, said
    return [event for event in events if event.get("event") == "CauseFound" and event["rule"] not in ALWAYS]


def _words(options: Mapping[str, Any]) -> str:
    return f"-e {shlex.quote(json.dumps(options))}" if options else ""


def type_until_silent(site: Site, host: Host, group: Group) -> None:
    """Make a group's troubles, type what the doctor says first, and repeat until nothing is left."""
    host.ssh("systemctl reset-failed docker")
    if group.editor:
        host.ssh(f"cat > {_EDITOR}; chmod 755 {_EDITOR}",
                 stdin=f"#!/bin/sh\nfor file; do :; done\n{group.editor}\n")  # fmt: skip
    if group.metal:
        host.ssh(f"rm -f {CONTAINER}")
    if any("apt-get" in line for line in group.breaking):
        host.add_archive()
        host.ssh("apt-get -qq update")
    for line in group.breaking:
        host.ssh(line)
    steps = _typed(site, host, group)
    if group.metal:
        # A reboot has brought it back.
        host.ssh(f"echo systemd-nspawn > {CONTAINER}")
    done = {rule for rules, _ in steps for rule in rules}
    assert done == group.typed, f"not typed: {group.typed - done}, not foreseen: {done - group.typed}; {steps}"
    for asked in _ASKED:
        given = host.ssh(_CONTAINER.format(asked), check=False)
        assert given.stdout.startswith("GPU 0"), f"typed: {steps}\n{given}"


def _typed(site: Site, host: Host, group: Group) -> list[tuple[frozenset[str], str]]:
    """Return the steps: the rules that told a command, of which the first one came first, and the command."""
    steps: list[tuple[frozenset[str], str]] = []
    # Of the kernel's log a line stays until the next boot: an aside, once it prevents nothing.
    past: set[str] = set()
    causes = _left(host, group, past)
    assert causes, f"the doctor finds nothing after {group.breaking}"
    while causes:
        assert len(steps) < _MOST_STEPS, f"no end: {steps}"
        command = _command(causes[0])
        rules = frozenset(cause["rule"] for cause in causes if _command(cause) == command)
        assert (rules, command) not in steps, f"typed before: {rules}: {command}; {steps}"
        steps.append((rules, command))
        said = _type(site, host, group, command)
        assert not re.search(r"(?:command )?not found$", said, re.MULTILINE), f"{command}: {said}"
        for rule in sorted(rules):
            if rule in group.then:
                host.ssh(group.then[rule])
        before = {cause["rule"]: cause["confidence"] for cause in causes}
        causes = _left(host, group, past)
        past |= {c["rule"] for c in causes if c["confidence"] == "aside" != before.get(c["rule"], "aside")} & rules
        causes = [cause for cause in causes if cause["rule"] not in past]
        left = {cause["rule"] for cause in causes} & rules
        assert not left, f"typed without effect for {left}: {command}: {said}\n{causes}; {steps}"
    return steps


def _left(host: Host, group: Group, past: set[str]) -> list[dict[str, Any]]:
    return [one for one in causes_on(host, group.options) if one["rule"] not in past | group.quiet]


def _command(cause: dict[str, Any]) -> str:
    """Return the command without its comment, and without a look into the log before it: that changes nothing."""
    return re.sub(r"^journalctl [^;]*; ", "", str(cause["next_step"]).partition("  # ")[0])


def _type(site: Site, host: Host, group: Group, command: str) -> str:
    """Type a command on the host; an installation here, with the host's inventory. Return what it says."""
    for name, value in group.names.items():
        command = command.replace(name, value)
    if re.search(r"\bgpuprov (?:un)?install\b", command):
        return "".join(_type_part(site, host, group, part.strip()) for part in command.split(";"))
    if "systemctl reboot" in command or "poweroff" in command:
        return _until_booted(host, command)
    if "systemctl edit" in command:
        # It asks for a terminal.
        command = f"script -qec {shlex.quote(command)} /dev/null"
    done = host.ssh(_SHELL + command, check=False, timeout=300)
    return done.stdout + done.stderr


def _type_part(site: Site, host: Host, group: Group, part: str) -> str:
    words = shlex.split(part)
    if words[:1] != ["gpuprov"]:
        done = host.ssh(_SHELL + part, check=False, timeout=300)
        return done.stdout + done.stderr
    installed = gpuprov_succeeds(*words[1:], "--hosts", site.inventory(host.name, **group.options))
    return installed.stdout


def _until_booted(host: Host, command: str) -> str:
    """Type a command that ends in a reboot, or in the machine's end: then somebody switches it on again."""
    before = host.boot_id()
    done = host.ssh(_SHELL + command, check=False)
    if "poweroff" in command:
        host.switch_on()
    else:
        wait_for(f"the reboot of {host.name}", lambda: host.boot_id() != before, _BOOT_SECONDS)
        host.wait_until_settled()
    return done.stdout + done.stderr
