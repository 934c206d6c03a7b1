"""Lets a container that is being started open device nodes: the device cgroup, of version 1 or 2; for the hook alone.

Version 1: a line for each node into devices.allow. Version 2: each eBPF program on the container's cgroup is replaced
by one that first allows our nodes and then does what the old one did. Both are lost when systemd writes a unit's device
rules again (`systemctl daemon-reload`), unless systemd is told of the nodes too (scope.py).
Source: Linux, Documentation/admin-guide/cgroup-v1/devices.rst and cgroup-v2.rst, include/uapi/linux/bpf.h.
"""

from __future__ import annotations

import posix
from _struct import pack, unpack_from

from .errors import Refused
from .system_calls import address, room, system_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_BPF = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _PROG_ATTACH, _PROG_GET_FD_BY_ID, _OBJ_GET_INFO_BY_FD, _PROG_QUERY = 5, 8, 13, 15, 16
_TYPE_CGROUP_DEVICE = 15
_ATTACH_CGROUP_DEVICE = 6
_ALLOW_MULTI, _REPLACE = 2, 4
_MOST_PROGRAMS = 64
_EPERM = 1
# struct bpf_cgroup_dev_ctx: access << 16 | type, major, minor.
_KINDS = {"b": 1, "c": 2}
_ACCESS = {"m": 1, "r": 2, "w": 4}
# Instructions: operation, registers (source << 4 | destination), offset of a jump, number.
_LOAD_32, _AND_32, _SHIFT_32, _MOVE_32, _MOVE, _EXIT = 0x61, 0x54, 0x74, 0xBC, 0xB7, 0x95
_JUMP_UNLESS_NUMBER, _JUMP_UNLESS_REGISTER = 0x56, 0x5E
_SIZE = 8


def allow(pid: int, nodes: list[dict[str, Any]]) -> str:
    """Let the cgroup of a process open these nodes (type, major, minor, access), and return the cgroup's folder.

    Raises Refused.
    """
    version, folder = cgroup_of(read_proc(f"/proc/{pid}/cgroup"), read_proc("/proc/self/mountinfo"))
    try:
        if version == 1:
            for node in nodes:
                _write(f"{folder}/devices.allow", f"{node['type']} {node['major']}:{node['minor']} {node['access']}\n")
        elif nodes:
            _replace_programs(folder, nodes)
    except OSError as error:
        hint = ": use --runtime=nvidia, or no-cgroups = true if docker is rootless" if error.errno == _EPERM else ""
        raise Refused(f"the device cgroup {folder} can't be changed: {error.strerror}{hint}") from None
    return folder


def cgroup_of(cgroups: str, mounts: str) -> tuple[int, str]:
    """Return (version, folder) of the cgroup that rules devices, from /proc/PID/cgroup and /proc/self/mountinfo.

    Raises Refused if no such hierarchy is mounted here.
    """
    rows = [line.split(":", 2) for line in cgroups.splitlines() if line.count(":") >= 2]
    first = next((path for _, controllers, path in rows if "devices" in controllers.split(",")), None)
    unified = next((path for number, controllers, path in rows if number == "0" and not controllers), None)
    for version, path, kind in ((1, first, "cgroup"), (2, unified, "cgroup2")):
        if path is None:
            continue
        for line in mounts.splitlines():
            before, _, after = line.partition(" - ")
            fields, options = before.split(" "), after.split(" ")
            if options[0] != kind or (version == 1 and "devices" not in options[-1].split(",")):
                continue
            top, place = fields[3], fields[4]
            if path == top or path.startswith(f"{top.rstrip('/')}/"):
                return version, (place + "/" + path[len(top.rstrip("/")) :].lstrip("/")).rstrip("/")
    raise Refused("no cgroup hierarchy that rules devices is mounted on this host")


def program(nodes: list[dict[str, Any]], then: bytes) -> bytes:
    """Return the instructions that allow these nodes, and for all else do what `then` says.

    Register 1, the context, stays as it was, because `then` begins with it.
    """
    code = [
        _instruction(_LOAD_32, 1 << 4 | 2, 0, 0), _instruction(_MOVE_32, 2 << 4 | 3, 0, 0),
        _instruction(_AND_32, 2, 0, 0xFFFF), _instruction(_SHIFT_32, 3, 0, 16),
        _instruction(_LOAD_32, 1 << 4 | 4, 4, 0), _instruction(_LOAD_32, 1 << 4 | 5, 8, 0),
    ]  # fmt: skip
    for node in nodes:
        mask = sum(_ACCESS[letter] for letter in dict.fromkeys(node["access"]))
        # Type, major and minor are these, and nothing is asked for but what is allowed; else on to the next node.
        code += [
            _instruction(_JUMP_UNLESS_NUMBER, 2, 7, _KINDS[node["type"]]),
            _instruction(_JUMP_UNLESS_NUMBER, 4, 6, node["major"]),
            _instruction(_JUMP_UNLESS_NUMBER, 5, 5, node["minor"]),
            _instruction(_MOVE_32, 3 << 4 | 0, 0, 0), _instruction(_AND_32, 0, 0, mask),
            _instruction(_JUMP_UNLESS_REGISTER, 3 << 4 | 0, 2, 0),
            _instruction(_MOVE, 0, 0, 1), _instruction(_EXIT, 0, 0, 0),
        ]  # fmt: skip
    return b"".join(code) + then


def _instruction(operation: int, registers: int, offset: int, number: int) -> bytes:
    return pack("=BBhi", operation, registers, offset, number)


def _replace_programs(folder: str, nodes: list[dict[str, Any]]) -> None:
    cgroup = posix.open(folder, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC)
    try:
        numbers, flags = _attached(cgroup)
        # No program is no restriction: a privileged container's cgroup.
        for number in numbers:
            old = _bpf(_PROG_GET_FD_BY_ID, pack("=III", number, 0, 0))
            new = _load(program(nodes, _instructions(old)))
            replaced = flags & _ALLOW_MULTI
            how = (_ALLOW_MULTI | _REPLACE) if replaced else flags
            _bpf(_PROG_ATTACH, pack("=IIIII", cgroup, new, _ATTACH_CGROUP_DEVICE, how, old if replaced else 0))
            posix.close(new)
            posix.close(old)
    finally:
        posix.close(cgroup)


def programs(folder: str) -> list[bytes]:
    """Return the instructions of the programs on a cgroup's folder. Raises OSError, or Refused (lockdown)."""
    cgroup = posix.open(folder, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC)
    found = []
    try:
        for number in _attached(cgroup)[0]:
            handle = _bpf(_PROG_GET_FD_BY_ID, pack("=III", number, 0, 0))
            found.append(_instructions(handle))
            posix.close(handle)
    finally:
        posix.close(cgroup)
    return found


def _attached(cgroup: int) -> tuple[list[int], int]:
    """Return the numbers of the programs on a cgroup itself, and how they are attached."""
    numbers = room(b"", 4 * _MOST_PROGRAMS)
    # Linux 6.17 writes the revision, bytes 56 to 64, whatever size it is told.
    attributes = room(pack("=IIIIQI36x", cgroup, _ATTACH_CGROUP_DEVICE, 0, 0, address(numbers), _MOST_PROGRAMS))
    _bpf(_PROG_QUERY, attributes)
    _, _, _, flags, _, count = unpack_from("=IIIIQI", attributes)
    return list(unpack_from(f"={count}I", numbers)), flags


def _instructions(handle: int) -> bytes:
    """Return a program's instructions. Raises Refused if the kernel does not tell (lockdown)."""
    size = unpack_from("=I", _information(handle, 0), 20)[0]
    code = room(b"", max(size, _SIZE))
    _information(handle, size, address(code))
    found: bytes = code.raw[:size]
    if not any(found):
        raise Refused("this kernel does not show the device cgroup's program: use --runtime=nvidia, not --gpus")
    return found


def _information(handle: int, size: int, place: int = 0) -> bytes:
    # struct bpf_prog_info: of it, lengths and addresses of the instructions stand in the first 40 bytes.
    information = room(pack("=II8sIIQQ", 0, 0, b"", 0, size, 0, place), 80)
    _bpf(_OBJ_GET_INFO_BY_FD, pack("=IIQ", handle, len(information), address(information)))
    found: bytes = information.raw
    return found


def _load(code: bytes) -> int:
    instructions, license_ = room(code), room(b"Apache-2.0\0")
    count = len(code) // _SIZE
    return _bpf(
        _PROG_LOAD,
        pack("=IIQQIIQ", _TYPE_CGROUP_DEVICE, count, address(instructions), address(license_), 0, 0, 0),
    )


def _bpf(command: int, attributes: Any) -> int:
    """Call bpf(2) with attributes as bytes, which are copied, or in memory from `room`, which it changes."""
    # It may write into what it is given: never into bytes, which Python shares.
    memory = room(attributes) if isinstance(attributes, bytes) else attributes
    try:
        return system_call(_number(), command, memory, len(memory))
    except OSError as error:
        raise OSError(error.errno, f"bpf command {command}: {error.strerror}") from None


def _number() -> int:
    machine = posix.uname().machine
    if machine not in _BPF:
        raise Refused(f"on {machine} the device cgroup of version 2 can't be changed: use --runtime=nvidia, not --gpus")
    return _BPF[machine]


def read_proc(path: str) -> str:
    """Return what the kernel says of a process. Raises Refused if that has ended."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError as error:
        raise Refused(f"{path} can't be read: {error.strerror}: the container's process is gone") from None


def _write(path: str, text: str) -> None:
    handle = posix.open(path, posix.O_WRONLY | posix.O_CLOEXEC)
    try:
        posix.write(handle, text.encode())
    finally:
        posix.close(handle)
