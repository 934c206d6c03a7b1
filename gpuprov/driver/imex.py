"""NVIDIA's IMEX on hosts of a rack: the driver's exact version, the domain's list of nodes, its unit, and channel 0.

The list comes with the specification (protocol/imex.py). Sources: NVIDIA's IMEX guide (files, keys, nvidia-imex-ctl);
package, unit and module option as Azure/azhpc-images, awslabs/amazon-eks-ami and aws-parallelcluster set them up;
`nvidia-imex-ctl -N -j` as NVIDIA's ai-cloud-validation reads it. Channels other than 0 are the site's.
"""

from __future__ import annotations

import json
from typing import Callable, ClassVar

from gpuprov.cdi.discover import IMEX_CHANNEL, imex_channel
from gpuprov.core.changes import Change, Json, MakeNode, Tell, capture_path, restore_paths, text_diff, write_files
from gpuprov.core.system import System
from gpuprov.core.units import is_active, log_of, restart, systemctl
from gpuprov.driver import fabric_manager
from gpuprov.driver.source import DriverSource
from gpuprov.facts.gpus import IMEX_CONFIG, IMEX_FILES, IMEX_NODES, IMEX_PROGRAM, IMEX_UNIT, FabricFacts, gather_imex
from gpuprov.packages.interface import Installation, PackageManager
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.words import counted

_SERVICE, _LEFT_ALONE = "service", "left alone"
_LOOK = f"systemctl status {IMEX_UNIT}; less /var/log/nvidia-imex.log"
_MARK = "# By gpuprov: what follows; a key that it sets has no line above."
_OPTION = "# By gpuprov: the driver makes IMEX's channel 0.\noptions nvidia NVreg_CreateImexChannel0=1\n"
# Nodes of a domain that has just been changed connect within this time.
_CONNECT_SECONDS = 20


def _mode(driver: DriverSource) -> str:
    """Return service, dra or off; in a system container IMEX is the container host's, unless it is asked for."""
    facts, spec = driver.facts, driver.spec
    if spec.imex != "auto":
        return spec.imex
    return _SERVICE if facts.fabric.rack and spec.imex_nodes and not facts.kernel.container else _LEFT_ALONE


def wanted_version(driver: DriverSource) -> str:
    """Return the version that IMEX must have, the driver's; "" if it is not wanted, or not known yet."""
    version = driver.version if "." in driver.version else driver.facts.driver_installed_version
    return version if _mode(driver) in (_SERVICE, "dra") else ""


def wanted_packages(driver: DriverSource) -> tuple[str, ...]:
    """Return the package that is to be installed; its name has the branch before 580, and in Ubuntu's own archive."""
    version, own = wanted_version(driver), driver.fabric_package()
    if driver.facts.imex.version == version or not version:
        return ()
    return (package(version, driver.facts.package_manager, own),)


def package(version: str, manager: PackageManager, own: str = "") -> str:
    """Return IMEX's package of this version, in this package manager's syntax; `own`: a source's fabric manager."""
    branch = version.split(".")[0]
    plain = int(branch) >= fabric_manager.PLAIN_NAME_SINCE and not own.endswith(f"-{branch}")
    return f"nvidia-imex{'' if plain else f'-{branch}'}={version}{manager.any_release}"


def may_run(spec: HostSpec) -> bool:
    """Say whether a host of this specification may get IMEX; by default that depends on its GPUs."""
    return spec.imex in (_SERVICE, "dra") or (spec.imex == "auto" and bool(spec.imex_nodes))


def fabric_packages(driver: DriverSource) -> tuple[str, ...]:
    """Return the packages of fabric manager and IMEX that are to be installed."""
    return (*fabric_manager.wanted_packages(driver), *wanted_packages(driver))


def warning(driver: DriverSource) -> str:
    """Return a warning for a rack's host of which no domain is known, or ""."""
    alone = driver.facts.fabric.rack and not driver.facts.kernel.container and _mode(driver) == _LEFT_ALONE
    return "the GPUs are a rack's: set gpuprov_imex_domain in the inventory, or gpuprov_imex" if alone else ""


def problems(driver: DriverSource) -> tuple[Problem, ...]:
    """Return what prevents IMEX from serving a domain here."""
    if driver.facts.imex.silent and _mode(driver) != _LEFT_ALONE:
        return (Problem("whether IMEX runs on this host is not known", driver.facts.imex.silent, _LOOK),)
    if driver.spec.imex != _SERVICE or (driver.spec.imex_nodes and driver.facts.image is None):
        return ()
    seen = "gpuprov_imex is service; there is no gpuprov_imex_domain, or gpuprov_target is image"
    step = "set gpuprov_imex_domain in the inventory of the machines, and run over that; or gpuprov_imex_nodes"
    return (Problem("the nodes of this host's IMEX domain are not known", seen, step),)


def plan(driver: DriverSource) -> tuple[Change, ...]:
    """Return installation, files and start of IMEX, or the end of its unit; to be done after the driver."""
    facts, spec, mode, names = driver.facts, driver.spec, _mode(driver), wanted_packages(driver)
    wanted = Installation(names, facts.bundle, unfiltered_repository=fabric_manager.REPOSITORY)
    unmask = (UnmaskImex(),) if facts.imex.masked else ()
    manager = facts.package_manager
    installed = (*unmask, *_removal(driver), *manager.plan_installation(facts.packages, wanted)) if names else ()
    if mode == _SERVICE:
        run = RunImex(wanted_version(driver), spec.imex_nodes, _settings(spec))
        there = {path: found.content for path in IMEX_FILES if (found := facts.files.get(path))}
        runs = facts.imex == FabricFacts(version=run.version, active=True, enabled=True)
        return (*installed, run) if run.version and not (runs and run.files(there.get) == there) else ()
    # A package enables the unit that it brings.
    masks = mode == "dra" and not facts.imex.masked and bool(names or facts.imex.version)
    stops = mode != _LEFT_ALONE and (facts.imex.active or facts.imex.enabled or bool(names))
    return (*installed, *((StopImex(mode == "dra"),) if stops or masks else ()))


def _removal(driver: DriverSource) -> tuple[Change, ...]:
    """Return the removal of IMEX under another branch's name, whose package has the same files; it may be held."""
    packages, manager = driver.facts.packages, driver.facts.package_manager
    wanted = {name.partition("=")[0] for name in wanted_packages(driver)}
    others = tuple(name for name in packages.installed if name.startswith("nvidia-imex") and name not in wanted)
    # An earlier change of this run may hold them.
    ours = {*others} - packages.held if packages.manager == "apt" and driver.spec.driver_updates == "hold" else set()
    unheld = manager.hold_driver(replace(packages, held_here=packages.held_here | ours), False, False)
    runs = driver.facts.imex.active or driver.facts.imex.enabled  # Its undo starts what the removal's undo brings back.
    return (*unheld, *((StopImex(),) if runs else ()), manager.removal(others, (IMEX_CONFIG,))) if others else ()


def _settings(spec: HostSpec) -> tuple[str, ...]:
    # nvidia-imex-ctl asks each node at its port, and so knows which one is missing.
    given = dict(one.split("=", 1) for one in ("IMEX_CMD_ENABLED=1", "IMEX_CMD_PORT=50005", *spec.imex_settings))
    own = {"IMEX_NODE_CONFIG_FILE": IMEX_NODES, "IMEX_WAIT_FOR_QUORUM": spec.imex_quorum.upper()}
    return tuple(f"{key}={value}" for key, value in {**given, **own}.items())


def edited(text: str, settings: tuple[str, ...]) -> str:
    """Return a config.cfg with these lines at its end; other keys and comments stay."""
    keys = {one.partition("=")[0] for one in settings}
    above = (line for line in text.partition(_MARK)[0].splitlines() if line.partition("=")[0].strip() not in keys)
    return "".join(f"{line}\n" for line in (*above, _MARK, *settings))


class _UnitChange(Change):
    """A change of IMEX's unit and files, which ends what shares memory with other hosts; so does its undo."""

    undo_disturbs: ClassVar[bool] = True
    disturbs = True

    def capture(self, system: System) -> Json:
        for verb in ("is-active", "is-enabled"):
            is_active(system, IMEX_UNIT, verb)  # raises if systemd does not answer
        facts, images = gather_imex(system), [capture_path(system, path) for path in (*IMEX_FILES, IMEX_CHANNEL)]
        return {"files": images, "active": facts.active, "enabled": facts.enabled, "masked": facts.masked}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        restore_paths(system, before["files"])
        # Journals of older versions know no mask.
        systemctl(system, "mask" if before.get("masked") else "unmask", IMEX_UNIT)
        systemctl(system, "enable" if before["enabled"] else "disable", IMEX_UNIT)
        systemctl(system, "restart" if before["active"] else "stop", IMEX_UNIT)

    @classmethod
    def skipped_paths(cls, system: System, before: Json) -> tuple[str, ...]:
        # It came, and goes, with the package.
        return () if system.exists(IMEX_PROGRAM) else (IMEX_CONFIG,)


@dataclass(frozen=True)
class RunImex(_UnitChange):
    """Require that IMEX of this version runs with these nodes, now and at each boot, and that channel 0 exists."""

    version: str
    nodes: tuple[str, ...]
    settings: tuple[str, ...]

    def summary(self) -> str:
        return f"enable and restart {IMEX_UNIT} ({self.version}) with {counted(len(self.nodes), 'node')}"

    def files(self, read: Callable[[str], bytes | None]) -> dict[str, bytes]:
        """Return path → content of its files; `read` returns what is there."""
        text = (read(IMEX_CONFIG) or b"").decode("utf-8", "replace")
        addresses = "".join(f"{node.partition(' ')[0]}\n" for node in self.nodes)
        return {path: new.encode() for path, new in zip(IMEX_FILES, (edited(text, self.settings), addresses, _OPTION))}

    def diff(self, system: System) -> str:
        wanted = self.files(system.read_bytes).items()
        return "\n".join(filter(None, (text_diff(path, system.read_bytes(path), new) for path, new in wanted)))

    def apply(self, system: System, tell: Tell) -> None:
        write_files(system, ((path, new, 0o644) for path, new in self.files(system.read_bytes).items()))
        for node in imex_channel(system):
            MakeNode(node.path, node.major, node.minor).apply(system, tell)
        systemctl(system, "unmask", IMEX_UNIT)
        system.require(("systemctl", "enable", IMEX_UNIT), f"{IMEX_UNIT} can't be enabled", _LOOK)
        trouble = restart(system, IMEX_UNIT)
        # With a quorum it waits for other nodes, without a limit.
        if trouble and not gather_imex(system).active:
            raise GpuprovError(f"{IMEX_UNIT} does not start", f"{trouble}\n{log_of(system, IMEX_UNIT)}".strip(), _LOOK)


class UnmaskImex(_UnitChange):
    """Unmask IMEX's unit, so that scripts of its package can enable it."""

    def summary(self) -> str:
        return f"unmask {IMEX_UNIT} for its package"

    def apply(self, system: System, tell: Tell) -> None:
        system.require(("systemctl", "unmask", IMEX_UNIT), f"{IMEX_UNIT} can't be unmasked", _LOOK)


@dataclass(frozen=True)
class StopImex(_UnitChange):
    """Stop and disable IMEX's unit, and no longer make channel 0; its other files stay.

    `mask`: nothing starts it either. The driver gives one IMEX a session, and a cluster's ComputeDomains run their own
    (NVIDIA's DRA driver, Prerequisites: `systemctl disable --now`, `systemctl mask`).
    """

    mask: bool = False

    def summary(self) -> str:
        return f"stop, disable and mask {IMEX_UNIT}" if self.mask else f"stop and disable {IMEX_UNIT}"

    def apply(self, system: System, tell: Tell) -> None:
        system.require(("systemctl", "disable", "--now", IMEX_UNIT), f"{IMEX_UNIT} can't be disabled", _LOOK)
        if self.mask:
            system.require(("systemctl", "mask", IMEX_UNIT), f"{IMEX_UNIT} can't be masked", _LOOK)
        system.remove(IMEX_FILES[-1])


def verify_domain(system: System, spec: HostSpec) -> tuple[str, str]:
    """Return what to show of a domain that is whole. Raises GpuprovError with each node that is missing."""
    deadline = system.now() + _CONNECT_SECONDS
    while found := _fault(system, spec):
        if system.now() >= deadline:
            raise GpuprovError(f"the IMEX domain {spec.imex_domain} is not whole", found, _LOOK)
        system.sleep(2)
    return f"{spec.imex_domain}, {counted(len(spec.imex_nodes), 'node')}", ""


def _fault(system: System, spec: HostSpec) -> str:
    done = system.run(("nvidia-imex-ctl", "-N", "-j"), timeout=60)
    try:
        answer = json.loads(done.stdout)
        status, nodes = str(answer["status"]), {str(one["host"]): one for one in answer["nodes"].values()}
        states = {host: str(one["status"]) for host, one in nodes.items()}
        links = [(host, str(to["host"]), str(to["status"])) for host, one in nodes.items()
                 for to in one.get("connections", {}).values()]  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"nvidia-imex-ctl -N says nothing of it: {done.evidence(2)}"
    parts = [node.partition(" ") for node in spec.imex_nodes]
    named = {address: f"{name} ({address})" if name else address for address, _, name in parts}
    if states.keys() != named.keys():
        return f"the IMEX that runs has other nodes: {', '.join(states)}"
    found = [f"{named[host]} is {states[host]}" for host in named if states[host] != "READY"]
    # A node that does not answer knows no connection of its own.
    found += [f"{named[one]} to {named[other]}: {state}" for one, other, state in links
              if states[one] == states.get(other) == "READY" and state != "CONNECTED"]  # fmt: skip
    return f"it is {status}; {', '.join(found)}" if found or status != "UP" else ""
