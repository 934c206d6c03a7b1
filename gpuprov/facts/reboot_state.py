"""Facts about boots: the current boot id, and a recorded request for a reboot, which survives the reboot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.system import System

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_ASKED = f"{STATE_DIRECTORY}/reboot.json"
# Written when a loaded driver could not be unloaded: the id of that boot.
IN_USE_MARK = f"{STATE_DIRECTORY}/driver-in-use"


@dataclass(frozen=True)
class RebootFacts:
    """`boot_id`: of this boot (random(4)); `asked_in`, `asked_for`: the boot in which a reboot was asked, and why."""

    boot_id: str = ""
    asked_in: str = ""
    asked_for: tuple[str, ...] = ()


def gather_reboot(system: System) -> RebootFacts:
    """Return the facts; reads only."""
    boot_id = (system.read_text(_BOOT_ID) or "").strip()
    try:
        asked = json.loads(system.read_text(_ASKED) or "")
        return RebootFacts(boot_id, str(asked["boot_id"]), tuple(str(reason) for reason in asked["reasons"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return RebootFacts(boot_id)


def note_asked(system: System, boot_id: str, reasons: Sequence[str]) -> None:
    """Record that a reboot is requested."""
    system.make_directory(STATE_DIRECTORY, 0o700)
    content = json.dumps({"boot_id": boot_id, "reasons": list(reasons)}) + "\n"
    system.write(_ASKED, content.encode(), mode=0o600)


def forget_asked(system: System) -> None:
    """Remove the record: the reasons no longer apply."""
    system.remove(_ASKED)
    system.remove(IN_USE_MARK)
