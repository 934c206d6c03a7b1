"""Detect one machine under two names of an inventory, and explain it; used by both ways to a host.

Boot id and machine id must both match: clones share the machine id, containers share their host's boot id. The PID
namespace distinguishes containers of one host whose images share a machine id. A host sends these itself, and may send
another's: they alone never keep a run from a host.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from gpuprov.core.system import System
from gpuprov.protocol.errors import Problem

_MACHINE_ID = "/etc/machine-id"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NAMESPACE = "/proc/self/ns/pid"
_SSHD = "/etc/ssh"
_PUBLIC_KEY = re.compile(r"ssh_host_\w+_key\.pub")
# One line of the probe; `local_machine` returns the same for this machine.
SCRIPT = f'echo "machine $(cat {_MACHINE_ID} 2>/dev/null) $(cat {_BOOT_ID}) $(readlink {_NAMESPACE})"'


def machine_of(text: str) -> str:
    """Return the identity from SCRIPT's output after its first word; "" if a part is missing."""
    parts = text.split()
    return " ".join(parts) if len(parts) == 3 else ""


def local_machine(system: System) -> str:
    """Return the identity of this machine."""
    namespace = system.status(_NAMESPACE)
    parts = (
        system.read_text(_MACHINE_ID) or "",
        system.read_text(_BOOT_ID) or "",
        namespace.target if namespace else "",
    )
    return machine_of(" ".join(parts))


def local_host_keys(system: System) -> frozenset[str]:
    """Return this machine's public SSH host keys, in base64."""
    paths = (f"{_SSHD}/{name}" for name in system.list_directory(_SSHD) if _PUBLIC_KEY.fullmatch(name))
    keys = ((system.read_text(path) or "").split() for path in paths)
    return frozenset(words[1] for words in keys if len(words) > 1)


def sentence(name: str, other: str) -> str:
    """Return the note for a case in which both names may be served: nothing is changed."""
    return f"{name} is the same machine as {other}: it is counted once"


def unproven(name: str, other: str) -> str:
    """Return the warning about a host that only says so: any host can send the machine id of another one."""
    return f"{name} has the machine id and the boot id of {other}: if they are one machine, take out one name"


def problem(name: str, other: str, machine: str) -> Problem:
    """Return the error for the second of two names."""
    parts = machine.split()
    return Problem(
        f"{name} is the same machine as {other}: two runs would get in each other's way",
        f"machine id {parts[0]} and boot id {parts[1]} are the same on both",
        f"take {name} or {other} out of the inventory, or leave one out: --limit 'all:!{name}'",
    )


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
