"""Facts about NVSwitches and their fabric manager; changes nothing."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

from gpuprov.core.system import System

# PCI Code and ID Assignment Specification: 0680 is a bridge of another kind; NVIDIA's are its NVSwitches.
_NVIDIA_VENDOR, _BRIDGE_CLASS = "0x10de", "0x0680"
# From B200 on the switches hide behind network adapters, whose vital product data says so (NVIDIA's driver container).
_ADAPTERS, _SWITCH_MANAGEMENT = "/sys/class/infiniband", b"SW_MNG"
UNIT = "nvidia-fabricmanager.service"
_PROGRAM = "nv-fabricmanager"


@dataclass(frozen=True)
class FabricFacts:
    """`switches`: bus ids of NVSwitches, or names of the adapters before them, which `nvlsm` has to manage (`managed`).

    `version`: of the fabric manager's program, "" if there is none; `active`, `enabled`: its unit.
    """

    switches: tuple[str, ...] = ()
    managed: bool = False
    version: str = ""
    active: bool = False
    enabled: bool = False


def gather_fabric(system: System, *, managed: bool | None = None) -> FabricFacts:
    """Return the facts; three commands, and none on a machine without switches.

    `managed`: the system is an image for machines with switches; whether adapters stand before them.
    """
    if managed is not None:
        return _fabric_facts(system, ("to come",), managed=managed)
    adapters = tuple(name for name in system.list_directory(_ADAPTERS) if _manages_switches(system, name))
    switches = (*_switches(system), *adapters)
    return _fabric_facts(system, switches, managed=bool(adapters)) if switches else FabricFacts()


def _fabric_facts(system: System, switches: tuple[str, ...], *, managed: bool) -> FabricFacts:
    told = system.run((_PROGRAM, "--version"), timeout=20)
    return FabricFacts(
        switches,
        managed,
        parse_version(told.stdout + told.stderr),
        system.run(("systemctl", "is-active", "--quiet", UNIT)).ok,
        system.run(("systemctl", "is-enabled", "--quiet", UNIT)).ok,
    )


def _switches(system: System) -> tuple[str, ...]:
    base = "/sys/bus/pci/devices"
    return tuple(
        bus_id
        for bus_id in system.list_directory(base)
        if (system.read_text(f"{base}/{bus_id}/vendor") or "").strip() == _NVIDIA_VENDOR
        and (system.read_text(f"{base}/{bus_id}/class") or "").startswith(_BRIDGE_CLASS)
    )


def _manages_switches(system: System, adapter: str) -> bool:
    # Reading a card's vital product data may fail on a card that is busy with its firmware.
    with contextlib.suppress(OSError):
        return _SWITCH_MANAGEMENT in (system.read_bytes(f"{_ADAPTERS}/{adapter}/device/vpd") or b"")
    return False


def parse_version(text: str) -> str:
    """Return the version in what `nv-fabricmanager --version` says, or nothing."""
    found = re.search(r"Fabric Manager version is\s*:\s*(\d+(?:\.\d+)+)", text)
    return found[1] if found else ""
