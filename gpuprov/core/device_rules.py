"""GPUs of running containers that systemd does not know of: `systemctl daemon-reload` would take them away.

With systemd's cgroups a container has a scope, whose device rules systemd writes again when it reads its units again.
Hooks that change the rules beside systemd (gpuprov's first one, NVIDIA's) leave it unaware. What a container may open
is asked of the kernel, never of files that the container or another user can write.
Source: systemd.resource-control(5); Linux, Documentation/bpf/standardization/instruction-set.rst.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from struct import iter_unpack, pack, unpack_from
from typing import Callable

from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook import device_cgroup
from gpuprov.runtime_hook.errors import Refused

_CONTAINER = re.compile(r"[a-z-]+-([0-9a-f]{64})\.scope")
_GPU = re.compile(r"/dev/nvidia[0-9]+")
_PROPERTIES = "--property=Id,ControlGroup,DevicePolicy,DeviceAllow"
# With `auto`, a scope may open everything: a privileged container's. A rule would restrict it.
_RESTRICTS = ("strict", "closed")
_CGROUPS = "/sys/fs/cgroup"
_FOLDERS = ("nvidia-caps", "nvidia-caps-imex-channels", "dri", "infiniband")
_NAMES = ("nvidia", "gdrdrv", "nvmap", "dxg")
# struct bpf_cgroup_dev_ctx: access << 16 | type, major, minor.
_CHARACTER = 2
_ACCESS = {"r": 2, "w": 4, "m": 1}
_MOST_STEPS = 1 << 16
_SECONDS = 20
_ALL_USERS = "0 0 4294967295"
# Loads of words, halves and bytes from the context; operations of two registers, or of a register and a number.
_LOADS = {0x61: "=I", 0x69: "=H", 0x71: "=B"}
_Operation = Callable[[int, int], int]
_ARITHMETIC: Mapping[int, _Operation] = {
    0x40: lambda one, two: one | two, 0x50: lambda one, two: one & two, 0x60: lambda one, two: one << (two & 63),
    0x70: lambda one, two: one >> (two & 63), 0xB0: lambda _, two: two,
}  # fmt: skip
_JUMPS: Mapping[int, _Operation] = {
    0x00: lambda _one, _two: True, 0x10: lambda one, two: one == two, 0x50: lambda one, two: one != two,
    0x40: lambda one, two: one & two != 0, 0x20: lambda one, two: one > two, 0xA0: lambda one, two: one < two,
}  # fmt: skip


@dataclass(frozen=True)
class UnregisteredDevices:
    """The device nodes that a running container may open without systemd's knowledge: path → (major:minor, access).

    `fault`: why the kernel does not show the container's rules; then the nodes are those that it has open.
    """

    scope: str
    nodes: Mapping[str, tuple[str, str]]
    fault: str = ""

    @property
    def identifier(self) -> str:
        """The start of the container's id, which engines take for a name."""
        return self.scope.rpartition("-")[2][:12]

    @property
    def stop(self) -> str:
        """The command that stops the container."""
        engines = {"docker": "docker", "libpod": "podman", "nerdctl": "nerdctl"}
        return f"{engines.get(self.scope.partition('-')[0], 'crictl')} stop {self.identifier}"

    def __str__(self) -> str:
        gpus = [path for path in self.nodes if _GPU.fullmatch(path)]
        return f"{self.scope.rpartition('-')[0]} {self.identifier} ({', '.join(gpus or self.nodes)})"


def unregistered_devices(system: System) -> tuple[UnregisteredDevices, ...]:
    """Return the running containers that `systemctl daemon-reload` takes devices from. Reads only.

    Raises GpuprovError if systemd does not tell: no container would be saved.
    """
    # In a user namespace neither runc nor systemd can load device programs: a reload takes nothing away.
    if (system.read_text("/proc/self/uid_map") or _ALL_USERS).split() != _ALL_USERS.split():
        return ()
    listed = ("systemctl", "list-units", "--type=scope", "--state=running", "--plain", "--no-legend", "--full")
    listing = require_systemd(system.run(listed, timeout=_SECONDS), "which containers run")
    names = [line.split()[0] for line in listing.stdout.splitlines() if line.strip()]
    scopes = [name for name in names if _CONTAINER.fullmatch(name)]
    nodes = _nodes(system) if scopes else {}
    if not nodes:
        return ()
    shown = system.run(("systemctl", "show", _PROPERTIES, *scopes), timeout=_SECONDS)
    blocks = require_systemd(shown, "which devices containers have").stdout.split("\n\n")
    return tuple(filter(None, (_unknown_of(system, block, nodes) for block in blocks)))


def require_systemd(done: Completed, what: str) -> Completed:
    """Return the answer of systemctl. Raises GpuprovError if systemd itself gave none."""
    if done.unanswered:
        raise GpuprovError(f"systemd does not tell {what}", done.evidence(3), "run the same command again")
    return done


def register_devices(system: System) -> tuple[tuple[UnregisteredDevices, str], ...]:
    """Tell systemd of the devices of all running containers; return the containers where that fails, and the error."""
    failed = []
    for one in unregistered_devices(system):
        if one.fault:
            failed.append((one, one.fault))
            continue
        rules = [f"DeviceAllow=/dev/char/{number} {access}" for number, access in one.nodes.values()]
        for path, (number, _) in one.nodes.items():
            # By this link older systemds find a node (runc issue 3708).
            if system.status(f"/dev/char/{number}") is None:
                system.make_directory("/dev/char")
                system.make_link(f"/dev/char/{number}", f"..{path[len('/dev') :]}")
        done = system.run(("systemctl", "set-property", "--runtime", one.scope, *rules), timeout=_SECONDS)
        if not done.ok:
            failed.append((one, done.evidence(1)))
    return tuple(failed)


def _nodes(system: System) -> dict[str, str]:
    """Return the host's device nodes that containers get with GPUs: path → major:minor."""
    paths = [f"/dev/{name}" for name in system.list_directory("/dev") if name.startswith(_NAMES)]
    paths += [f"/dev/{folder}/{name}" for folder in _FOLDERS for name in system.list_directory(f"/dev/{folder}")]
    found = {path: system.status(path) for path in paths}
    return {path: f"{one.major}:{one.minor}" for path, one in found.items() if one is not None and one.kind == "char"}


def _unknown_of(system: System, block: str, nodes: Mapping[str, str]) -> UnregisteredDevices | None:
    """Return the unknown devices of a scope, from systemd's properties; None if there are none."""
    lines = [line.partition("=")[::2] for line in block.splitlines()]
    properties = dict(lines)
    if properties.get("DevicePolicy") not in _RESTRICTS or not properties.get("ControlGroup"):
        return None
    allowed = dict(value.rpartition(" ")[::2] for name, value in lines if name == "DeviceAllow")
    new = {
        path: number
        for path, number in nodes.items()
        if not {"r", "w"} <= {*allowed.get(f"/dev/char/{number}", ""), *allowed.get(path, "")}
    }
    fault = ""
    try:
        opened = _opened(system, properties["ControlGroup"], new)
    except (OSError, Refused) as error:
        fault = getattr(error, "strerror", "") or str(error)
        opened = _held(system, properties["ControlGroup"], new)
    return UnregisteredDevices(properties.get("Id", ""), opened, fault) if opened else None


def _opened(system: System, group: str, nodes: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return which of the nodes a cgroup may read or write. Raises OSError or Refused if the kernel does not tell."""
    if not system.exists(f"{_CGROUPS}/cgroup.controllers"):
        rules = (system.read_text(f"{_CGROUPS}/devices{group}/devices.list") or "").split("\n")
        access = {number: "".join(_of_version_1(rules, number)) for number in nodes.values()}
    else:
        programs = tuple(device_cgroup.programs(str(system.path(_CGROUPS + group))))
        access = {number: _of_programs(programs, number) for number in nodes.values()} if programs else {}
    found = {path: (number, access.get(number, "")) for path, number in nodes.items()}
    return {path: (number, letters) for path, (number, letters) in found.items() if {"r", "w"} & {*letters}}


def _of_version_1(rules: Sequence[str], number: str) -> list[str]:
    """Return the letters that devices.list allows for a node; none if it allows everything."""
    wanted = (f"c {number} ", f"c {number.partition(':')[0]}:* ")
    unrestricted = any(rule.startswith("a ") for rule in rules)
    letters = {letter for rule in rules if rule.startswith(wanted) for letter in rule.rpartition(" ")[2]}
    return [] if unrestricted else [letter for letter in "rwm" if letter in letters]


@lru_cache(maxsize=4096)  # containers with the same devices have the same programs
def _of_programs(programs: tuple[bytes, ...], number: str) -> str:
    major, minor = map(int, number.split(":"))
    passing = (one for one, bit in _ACCESS.items() if all(allows(x, _CHARACTER, major, minor, bit) for x in programs))
    return "".join(passing)


def allows(program: bytes, kind: int, major: int, minor: int, access: int) -> bool:
    """Say whether a device program lets this access to a device pass; False if an instruction is not known."""
    context = pack("=III", access << 16 | kind, major, minor)
    steps = list(iter_unpack("=BBhi", program))
    registers = [0] * 16
    place = 0
    for _ in range(_MOST_STEPS):
        if not 0 <= place < len(steps):
            return False
        operation, both, offset, number = steps[place]
        family, to = operation & 7, both & 15
        place += 1
        # Families 4 and 7 calculate with 32 and 64 bits, 6 and 5 compare and jump.
        wide = (1 << 64 if family in (5, 7) else 1 << 32) - 1
        value = (registers[both >> 4] if operation & 8 else number) & wide
        if operation == 0x95:
            return registers[0] != 0
        if operation in _LOADS and 0 <= offset <= 8:
            registers[to] = unpack_from(_LOADS[operation], context, offset)[0]
        elif family in (4, 7) and operation & 0xF0 in _ARITHMETIC:
            registers[to] = _ARITHMETIC[operation & 0xF0](registers[to] & wide, value) & wide
        elif family in (5, 6) and operation & 0xF0 in _JUMPS:
            place += offset if _JUMPS[operation & 0xF0](registers[to] & wide, value) else 0
        else:
            return False
    return False


def _held(system: System, group: str, nodes: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return which of the nodes the processes of a cgroup have open."""
    found = set()
    for process in (system.read_text(f"{_CGROUPS}{group}/cgroup.procs") or "").split():
        for name in system.list_directory(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                found.add(system.device_number(f"/proc/{process}/fd/{name}"))
    numbers = {f"{one[0]}:{one[1]}" for one in found if one is not None}
    return {path: (number, "rw") for path, number in nodes.items() if number in numbers}
