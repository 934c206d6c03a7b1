"""The device cgroup: which one rules, and what the eBPF program says to each opening, by an interpreter of its own."""

import ctypes
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from gpuprov.runtime_hook import device_cgroup
from gpuprov.runtime_hook.device_cgroup import cgroup_of, program
from gpuprov.runtime_hook.errors import Refused

BLOCK, CHARACTER = 1, 2
MKNOD, READ, WRITE = 1, 2, 4
HYBRID = """25 1 0:22 / /sys/fs/cgroup ro - tmpfs tmpfs ro
26 25 0:23 / /sys/fs/cgroup/unified rw shared:4 - cgroup2 cgroup2 rw,nsdelegate
30 25 0:27 / /sys/fs/cgroup/devices rw shared:8 - cgroup cgroup rw,devices
31 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
"""
NESTED = "40 1 0:30 /outer/inner /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
NESTED_V1 = "41 1 0:31 /docker/abc /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n"


@pytest.mark.parametrize(
    ("cgroups", "mounts", "found"),
    [
        ("5:devices:/docker/x\n0::/docker/x\n", HYBRID, (1, "/sys/fs/cgroup/devices/docker/x")),
        ("5:cpu,cpuacct:/a\n0::/system.slice/x.scope\n", HYBRID, (2, "/sys/fs/cgroup/unified/system.slice/x.scope")),
        ("0::/\n", "40 1 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", (2, "/sys/fs/cgroup")),
        ("0::/outer/inner/x:y\n", NESTED, (2, "/sys/fs/cgroup/x:y")),
        ("3:devices:/docker/abc/def\n", NESTED_V1, (1, "/sys/fs/cgroup/devices/def")),
        ("3:name=systemd,devices:/x\n", HYBRID, (1, "/sys/fs/cgroup/devices/x")),
    ],
)
def test_the_cgroup_that_rules_devices(cgroups: str, mounts: str, found: tuple[int, str]) -> None:
    assert cgroup_of(cgroups, mounts) == found


@pytest.mark.parametrize(
    ("cgroups", "mounts"),
    [
        ("", HYBRID),
        ("0::/x\n", ""),
        ("3:devices:/elsewhere\n", NESTED_V1),
        ("0::/outer/innermost\n", NESTED),
        ("x\n", HYBRID),
    ],
)
def test_where_none_is_mounted_the_container_is_refused(cgroups: str, mounts: str) -> None:
    with pytest.raises(Refused, match="no cgroup hierarchy that rules devices"):
        cgroup_of(cgroups, mounts)


def node(kind: str, major: int, minor: int, access: str = "rw") -> dict[str, Any]:
    return {"type": kind, "major": major, "minor": minor, "access": access}


NODES = [node("c", 195, 0), node("c", 195, 255, "r"), node("b", 8, 1, "rwm"), node("c", 4_000_000, 1_048_575)]
ALLOW, DENY = struct.pack("=BBhi", 0xB7, 0, 0, 1), struct.pack("=BBhi", 0xB7, 0, 0, 0)
EXIT = struct.pack("=BBhi", 0x95, 0, 0, 0)
# As runc's begin: they load what they need from the context in register 1, and from nowhere else.
LOADS = struct.pack("=BBhi", 0x61, 0x12, 0, 0)


def verdict(code: bytes, kind: int, access: int, major: int, minor: int) -> int:
    """Run the program as the kernel does (Documentation/bpf/standardization/instruction-set.rst)."""
    context = struct.pack("=III", access << 16 | kind, major, minor)
    registers: dict[int, Any] = {1: "context"}
    steps = [struct.unpack_from("=BBhi", code, place) for place in range(0, len(code), 8)]
    place = 0
    while True:
        operation, both, offset, number = steps[place]
        to, source = both & 15, both >> 4
        place += 1
        if operation == 0x61:
            assert registers[source] == "context"
            registers[to] = struct.unpack_from("=I", context, offset)[0]
        elif operation == 0xBC:
            registers[to] = registers[source] & 0xFFFFFFFF
        elif operation == 0xB7:
            registers[to] = number
        elif operation == 0x54:
            registers[to] &= number & 0xFFFFFFFF
        elif operation == 0x74:
            registers[to] >>= number
        elif operation == 0x56:
            place += offset if registers[to] != number & 0xFFFFFFFF else 0
        elif operation == 0x5E:
            place += offset if registers[to] != registers[source] else 0
        else:
            assert operation == 0x95, hex(operation)
            return int(registers[0])


@pytest.mark.parametrize(
    ("kind", "access", "major", "minor", "allowed"),
    [
        (CHARACTER, READ, 195, 0, True),
        (CHARACTER, READ | WRITE, 195, 0, True),
        (CHARACTER, MKNOD, 195, 0, False),
        (CHARACTER, READ | WRITE | MKNOD, 195, 0, False),
        (CHARACTER, READ, 195, 1, False),
        (CHARACTER, READ, 196, 0, False),
        (BLOCK, READ, 195, 0, False),
        (CHARACTER, READ, 195, 255, True),
        (CHARACTER, WRITE, 195, 255, False),
        (BLOCK, READ | WRITE | MKNOD, 8, 1, True),
        (CHARACTER, WRITE, 4_000_000, 1_048_575, True),
    ],
)
def test_new_rules_come_before_the_old_program(kind: int, access: int, major: int, minor: int, allowed: bool) -> None:
    assert verdict(program(NODES, LOADS + DENY + EXIT), kind, access, major, minor) == int(allowed)
    assert verdict(program(NODES, LOADS + ALLOW + EXIT), kind, access, major, minor) == 1
    assert verdict(program([], LOADS + DENY + EXIT), kind, access, major, minor) == 0


class Kernel:
    """One cgroup's programs, by number; `systemd` replaces them, each time between two calls, so many times."""

    def __init__(self, systemd: int) -> None:
        self.attached = {7: LOADS + DENY + EXIT}
        self.systemd = systemd
        self.loaded: dict[int, bytes] = {}

    def query(self, attributes: Any) -> None:
        (place,) = struct.unpack_from("=Q", attributes, 16)
        ctypes.memmove(place, struct.pack(f"={len(self.attached)}I", *self.attached), 4 * len(self.attached))
        # Linux 6.17 writes a revision behind what older ones know (union bpf_attr, `query`), whatever size it is told.
        struct.pack_into("=I8xI28xQ", attributes, 12, 2, len(self.attached), 7)
        if self.systemd:
            self.systemd -= 1
            self.attached = {max(self.attached) + 1: LOADS + DENY + EXIT}

    def describe(self, attributes: Any) -> None:
        handle, size, place = struct.unpack_from("=IIQ", attributes)
        information = (ctypes.c_char * size).from_address(place)
        room, instructions = struct.unpack_from("=I8xQ", information, 20)
        ctypes.memmove(instructions, self.loaded[handle], room)
        struct.pack_into("=I", information, 20, len(self.loaded[handle]))

    def load(self, code: bytes) -> int:
        handle = os.open("/dev/null", os.O_RDONLY)
        self.loaded[handle] = code
        return handle

    def call(self, number: int, command: int, attributes: Any, size: int) -> int:
        if command == 13:
            (wanted,) = struct.unpack_from("=I", attributes)
            if wanted not in self.attached:
                raise OSError(2, "No such file or directory")
            return self.load(self.attached[wanted])
        if command == 5:
            count, place = struct.unpack_from("=IQ", attributes, 4)
            return self.load(ctypes.string_at(place, 8 * count))
        if command in (15, 16):
            self.describe(attributes) if command == 15 else self.query(attributes)
            return 0
        assert command == 8
        _, new, _, how, old = struct.unpack_from("=IIIII", attributes)
        assert how == 6
        # The kernel knows the program that goes by its handle: here, its content is enough.
        (number,) = (one for one, code in self.attached.items() if code == self.loaded[old])
        self.attached = {**self.attached, number: self.loaded[new]}
        return 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(systemd: int) -> Kernel:
        made = Kernel(systemd)
        monkeypatch.setattr(device_cgroup, "system_call", made.call)
        return made

    return make


def test_replaced_program_is_looked_up_again(kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`systemctl daemon-reload` between the query and the attachment: the start failed with ENOENT."""
    monkeypatch.setattr(device_cgroup, "cgroup_of", lambda cgroups, mounts: (2, str(tmp_path)))
    made = kernel(systemd=2)
    device_cgroup.allow(os.getpid(), NODES)
    (code,) = made.attached.values()
    assert verdict(code, CHARACTER, READ, 195, 0) == 1 and verdict(code, CHARACTER, READ, 9, 9) == 0
    assert len(device_cgroup.programs(str(tmp_path))) == 1
    kernel(systemd=2)
    assert device_cgroup.programs(str(tmp_path)) == [LOADS + DENY + EXIT]


def test_ever_changing_programs_fail_the_start(kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_cgroup, "cgroup_of", lambda cgroups, mounts: (2, str(tmp_path)))
    kernel(systemd=1000)
    with pytest.raises(Refused, match="can't be changed: bpf command 13: No such file"):
        device_cgroup.allow(os.getpid(), NODES)
