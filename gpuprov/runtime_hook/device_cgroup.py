"""Lets a container that is being started open device nodes: the device cgroup, of version 1 or 2; for the hook alone.

Version 1: a line for each node into devices.allow. Version 2: each eBPF program on the container's cgroup is replaced
by one that first allows our nodes and then does what the old one did. Both are lost when systemd writes a unit's device
rules again (`systemctl daemon-reload`), unless systemd is told of the nodes too.
Source: Linux, Documentation/admin-guide/cgroup-v1/devices.rst and cgroup-v2.rst, include/uapi/linux/bpf.h.

With systemd's cgroups (docker's default on cgroup version 2) the container has a scope, a unit whose device rules
systemd has from config.json, by runc; this adds the hook's nodes. As much of D-Bus as that needs: a connection to
systemd, and calls that send strings and get a string. As runc does, it takes the system bus, and systemd's own socket
on a host without one. Source: systemd.resource-control(5), DeviceAllow= and DevicePolicy=; nvidia-container-toolkit
issue 48; D-Bus Specification 0.42; org.freedesktop.systemd1(5).
"""

from __future__ import annotations

import posix
import time
from _struct import pack, pack_into, unpack_from
from typing import Any

from .errors import Refused
from .system_calls import address, room, system_call

_BPF = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _PROG_ATTACH, _PROG_GET_FD_BY_ID, _OBJ_GET_INFO_BY_FD, _PROG_QUERY = 5, 8, 13, 15, 16
_TYPE_CGROUP_DEVICE = 15
_ATTACH_CGROUP_DEVICE = 6
_ALLOW_MULTI, _REPLACE = 2, 4
_MOST_PROGRAMS = 64
_EPERM, _ENOENT = 1, 2
# Systemd replaces a cgroup's programs when it reads its units again: what the kernel has just named may be gone.
_TRIES = 10
# struct bpf_cgroup_dev_ctx: access << 16 | type, major, minor.
_KINDS = {"b": 1, "c": 2}
_ACCESS = {"m": 1, "r": 2, "w": 4}
# Instructions: operation, registers (source << 4 | destination), offset of a jump, number.
_LOAD_32, _AND_32, _SHIFT_32, _MOVE_32, _MOVE, _EXIT = 0x61, 0x54, 0x74, 0xBC, 0xB7, 0x95
_JUMP_UNLESS_NUMBER, _JUMP_UNLESS_REGISTER = 0x56, 0x5E
_SIZE = 8
SOCKETS = ("/run/dbus/system_bus_socket", "/run/systemd/private")
_SYSTEMD = "org.freedesktop.systemd1"
_BUS = "org.freedesktop.DBus"
# For all that is said until systemd is asked, and for its answer again: the hook must not end by its own limit.
_SECONDS = 3
_LARGEST_ANSWER = 1 << 16
_LARGEST_MESSAGE = 1 << 27
_CALL, _RETURN, _ERROR = 1, 2, 3
_PATH, _INTERFACE, _MEMBER, _DESTINATION, _SIGNATURE = 1, 2, 3, 6, 8
_ENDIAN = b"l" if pack("=H", 1) == b"\1\0" else b"B"
_BAD_MESSAGE, _TIMED_OUT = 74, 110
_SCOPE = "org.freedesktop.systemd1.Scope"
_MANAGER = "org.freedesktop.systemd1.Manager"
_MANAGER_PATH = "/org/freedesktop/systemd1"
# With the third, `auto`, a scope without rules may open everything: a privileged container's. A rule would restrict it.
_RESTRICTS = ("strict", "closed")
_FOLDERS = {"c": "/dev/char", "b": "/dev/block"}


def allow(pid: int, nodes: list[dict[str, Any]]) -> str:
    """Let the cgroup of a process open these nodes (type, major, minor, access), and return the cgroup's folder.

    Raises Refused.
    """
    version, folder = cgroup_of(read_proc(f"/proc/{pid}/cgroup"), read_proc("/proc/self/mountinfo"))
    try:
        if version == 1:
            for node in nodes:
                with open(f"{folder}/devices.allow", "w", encoding="utf-8") as file:  # one rule at a time
                    file.write(f"{node['type']} {node['major']}:{node['minor']} {node['access']}\n")
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


def _with_programs(folder: str, work: Any) -> list[Any]:
    """Return what `work` makes of each program on a cgroup's folder; all again if one of them is gone meanwhile."""
    cgroup = posix.open(folder, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC)
    try:
        for left in reversed(range(_TRIES)):
            found = []
            try:
                numbers, flags = _attached(cgroup)
                for number in numbers:
                    handle = _bpf(_PROG_GET_FD_BY_ID, pack("=III", number, 0, 0))
                    found.append(work(handle, cgroup, flags))
                    posix.close(handle)
                break
            except OSError as error:
                if error.errno != _ENOENT or not left:
                    raise
        return found
    finally:
        posix.close(cgroup)


def _replace_programs(folder: str, nodes: list[dict[str, Any]]) -> None:
    def replace(old: int, cgroup: int, flags: int) -> None:
        code, license_ = room(program(nodes, _instructions(old))), room(b"Apache-2.0\0")
        load = (_TYPE_CGROUP_DEVICE, len(code) // _SIZE, address(code), address(license_), 0, 0, 0)
        new = _bpf(_PROG_LOAD, pack("=IIQQIIQ", *load))
        replaced = flags & _ALLOW_MULTI
        how = (_ALLOW_MULTI | _REPLACE) if replaced else flags
        _bpf(_PROG_ATTACH, pack("=IIIII", cgroup, new, _ATTACH_CGROUP_DEVICE, how, old if replaced else 0))
        posix.close(new)

    # No program is no restriction: a privileged container's cgroup.
    _with_programs(folder, replace)


def programs(folder: str) -> list[bytes]:
    """Return the instructions of the programs on a cgroup's folder. Raises OSError, or Refused (lockdown)."""
    return _with_programs(folder, lambda handle, _cgroup, _flags: _instructions(handle))


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


def _bpf(command: int, attributes: Any) -> int:
    """Call bpf(2) with attributes as bytes, which are copied, or in memory from `room`, which it changes."""
    machine = posix.uname().machine
    if machine not in _BPF:
        raise Refused(f"on {machine} the device cgroup of version 2 can't be changed: use --runtime=nvidia, not --gpus")
    # It may write into what it is given: never into bytes, which Python shares.
    memory = room(attributes) if isinstance(attributes, bytes) else attributes
    try:
        return system_call(_BPF[machine], command, memory, len(memory))
    except OSError as error:
        raise OSError(error.errno, f"bpf command {command}: {error.strerror}") from None


def read_proc(path: str) -> str:
    """Return what the kernel says of a process. Raises Refused if that has ended."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError as error:
        raise Refused(f"{path} can't be read: {error.strerror}: the container's process is gone") from None


def scope_of(folder: str, identifier: str) -> str:
    """Return the container's scope, from its cgroup's folder; nothing if its cgroup is not systemd's.

    crun's containers are in a cgroup below their scope.
    """
    end = f"-{identifier}.scope"
    return next((name for name in folder.split("/")[-2:] if identifier and name.endswith(end) and name.isascii()), "")


def tell(scope: str, nodes: list[dict[str, Any]]) -> Bus | None:
    """Ask systemd to let the scope open the nodes too. Raises OSError if systemd does not answer.

    Returns the connection, on which the answer comes later: systemd works for some milliseconds. Returns None if the
    scope may open everything.
    """
    bus, body = Bus(), bytearray()
    add_string(body, _SCOPE)
    add_string(body, "DevicePolicy")
    policy = bus.call(unit_path(scope), f"{_BUS}.Properties", "Get", "ss", bytes(body))
    # A variant that holds a string.
    if not policy.startswith(b"\1s\0") or _first_string(policy[4:]) not in _RESTRICTS:
        bus.close()
        return None
    bus.send(_MANAGER_PATH, _MANAGER, "SetUnitProperties", "sba(sv)", properties(scope, nodes))
    return bus


def wait(bus: Bus | None) -> None:
    """Wait until systemd has done it; an error changes nothing, and nothing is logged.

    The caller is in the container's mount namespace, where the log's path may be another file.
    """
    if bus is None:
        return
    try:
        bus.begin()
        bus.answer()
    except OSError:
        pass
    bus.close()


def properties(scope: str, nodes: list[dict[str, Any]]) -> bytes:
    """Return the body of the call: the unit, until the next boot, and its property DeviceAllow, which is added to."""
    body = bytearray()
    add_string(body, scope)
    align(body, 4)
    body += pack("=I", True)
    settings = begin_array(body)
    add_string(body, "DeviceAllow")
    body += b"\5a(ss)\0"
    allowed = begin_array(body)
    for node in nodes:
        align(body, 8)
        add_string(body, f"{_FOLDERS[node['type']]}/{node['major']}:{node['minor']}")
        add_string(body, node["access"])
    end_array(body, allowed)
    end_array(body, settings)
    return bytes(body)


class Bus:
    """A connection to systemd, which answers one call after the other."""

    def __init__(self, seconds: float = _SECONDS) -> None:
        """Connect; answers that belong together may take so long. Raises OSError if no socket answers."""
        import _socket

        self._buffer, self._serial, self._seconds = b"", 0, seconds
        self.begin()
        for path in SOCKETS:
            self._connection: Any = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            self._connection.settimeout(seconds)
            try:
                self._connection.connect(path)
                break
            except OSError:
                self._connection.close()
                if path == SOCKETS[-1]:
                    raise
        user = str(posix.geteuid()).encode().hex()
        self._connection.sendall(f"\0AUTH EXTERNAL {user}\r\nBEGIN\r\n".encode())
        while b"\r\n" not in self._buffer:
            self._more()
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        if not line.startswith(b"OK "):
            raise OSError(_BAD_MESSAGE, "D-Bus refuses the authentication")
        if path != SOCKETS[-1]:
            self.call(f"/{_BUS.replace('.', '/')}", _BUS, "Hello", "", b"", _BUS)

    def begin(self) -> None:
        """Begin the time that answers may take, all together."""
        self._until = time.monotonic() + self._seconds

    def call(self, *words: Any) -> bytes:
        """Call a method, as `send` does, and return the body of its answer. Raises OSError, with what an error says."""
        self.send(*words)
        return self.answer()

    def send(
        self, path: str, interface: str, member: str, signature: str, body: bytes, destination: str = _SYSTEMD
    ) -> None:
        """Send a call whose answer `answer` gives. Raises OSError."""
        self._serial += 1
        self._connection.sendall(_message(self._serial, path, interface, member, signature, body, destination))

    def answer(self) -> bytes:
        """Return the body of the answer to the call that was sent. Raises OSError, with what an error says."""
        while True:
            # Signals come between. Any user may send them to any client, of any size and in any byte order.
            kind, answer = self._receive()
            if kind == _RETURN:
                return answer
            if kind == _ERROR:
                raise OSError(_BAD_MESSAGE, _first_string(answer) or "D-Bus answers with an error")

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _receive(self) -> tuple[int, bytes]:
        """Return type and body of the next message, without a body if it is no answer."""
        head = self._take(16)
        kind, body, fields = head[1], *unpack_from("<I4xI" if head[:1] == b"l" else ">I4xI", head, 4)
        is_answer = kind in (_RETURN, _ERROR)
        largest = _LARGEST_ANSWER if is_answer else _LARGEST_MESSAGE
        if head[:1] not in (b"l", b"B") or (is_answer and head[:1] != _ENDIAN) or max(body, fields) > largest:
            raise OSError(_BAD_MESSAGE, "D-Bus sends a message that can't be read")
        self._drop(-(-fields // 8) * 8)
        if is_answer:
            return kind, self._take(body)
        self._drop(body)
        return kind, b""

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._more()
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def _drop(self, size: int) -> None:
        while size > 0:
            size -= len(self._take(min(size, _LARGEST_ANSWER)))

    def _more(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise OSError(_TIMED_OUT, "D-Bus does not answer in time")
        self._connection.settimeout(left)
        more = self._connection.recv(4096)
        if not more or len(self._buffer) > 4 * _LARGEST_ANSWER:
            raise OSError(_BAD_MESSAGE, "D-Bus ends the connection")
        self._buffer += more


def unit_path(unit: str) -> str:
    """Return the path of a unit's object: what is no letter or digit stands there as a number."""
    escaped = ""
    for one in unit:
        is_plain = one.isascii() and (one.isalpha() or (one.isdigit() and escaped))
        escaped += one if is_plain else "".join(f"_{byte:02x}" for byte in one.encode())
    return f"{_MANAGER_PATH}/unit/{escaped}"


def add_string(body: bytearray, text: str) -> None:
    """Add a string to the body of a message."""
    content = text.encode()
    align(body, 4)
    body += pack("=I", len(content)) + content + b"\0"


def align(body: bytearray, size: int) -> None:
    """Fill the body up to a multiple of a size."""
    body += b"\0" * (-len(body) % size)


def begin_array(body: bytearray) -> tuple[int, int]:
    """Begin an array of structures; return what `end_array` needs."""
    align(body, 4)
    place = len(body)
    body += pack("=I", 0)
    align(body, 8)
    return place, len(body)


def end_array(body: bytearray, array: tuple[int, int]) -> None:
    """End an array: its length goes before it."""
    place, start = array
    pack_into("=I", body, place, len(body) - start)


def _first_string(body: bytes) -> str:
    if len(body) < 4:
        return ""
    size = unpack_from("=I", body)[0]
    return body[4 : 4 + size].decode("utf-8", "replace")


def _message(
    serial: int, path: str, interface: str, member: str, signature: str, body: bytes, destination: str
) -> bytes:
    message = bytearray(_ENDIAN + bytes((_CALL, 0, 1)) + pack("=II", len(body), serial))
    fields = begin_array(message)
    for number, kind, text in (
        (_PATH, "o", path), (_INTERFACE, "s", interface), (_MEMBER, "s", member), (_DESTINATION, "s", destination),
    ):  # fmt: skip
        align(message, 8)
        message += bytes((number, 1)) + kind.encode() + b"\0"
        add_string(message, text)
    if signature:
        align(message, 8)
        message += bytes((_SIGNATURE, 1)) + b"g\0" + bytes((len(signature),)) + signature.encode() + b"\0"
    end_array(message, fields)
    align(message, 8)
    return bytes(message) + body
