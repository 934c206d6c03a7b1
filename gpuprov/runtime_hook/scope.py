"""Tells systemd which device nodes a container of the hook may open, so that `systemctl daemon-reload` keeps them.

With systemd's cgroups (docker's default on cgroup version 2) the container has a scope, a unit whose device rules
systemd writes again at its next reload. runc has given the scope the rules of config.json; this adds the hook's nodes.
Source: systemd.resource-control(5), DeviceAllow= and DevicePolicy=; nvidia-container-toolkit issue 48.

As much of D-Bus as that needs: a connection to systemd, and calls that send strings and get a string. As runc does, it
takes the system bus, and systemd's own socket on a host without one. Source: D-Bus Specification 0.42, "Message
Protocol" and "Authentication Protocol"; org.freedesktop.systemd1(5).
"""

from __future__ import annotations

import posix
import time
from _struct import pack, pack_into, unpack_from

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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
    bus = Bus()
    if get_property(bus, unit_path(scope), _SCOPE, "DevicePolicy") not in _RESTRICTS:
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

    __slots__ = ("_buffer", "_connection", "_serial", "_until")

    def __init__(self) -> None:
        """Connect. Raises OSError if no socket answers."""
        import _socket

        self._buffer = b""
        self._serial = 0
        self.begin()
        for path in SOCKETS:
            self._connection: Any = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            self._connection.settimeout(_SECONDS)
            try:
                self._connection.connect(path)
                break
            except OSError:
                self._connection.close()
                if path == SOCKETS[-1]:
                    raise
        user = str(posix.geteuid()).encode().hex()
        self._connection.sendall(f"\0AUTH EXTERNAL {user}\r\nBEGIN\r\n".encode())
        if not self._line().startswith(b"OK "):
            raise OSError(_BAD_MESSAGE, "D-Bus refuses the authentication")
        if path != SOCKETS[-1]:
            self.call(f"/{_BUS.replace('.', '/')}", _BUS, "Hello", "", b"", _BUS)

    def begin(self) -> None:
        """Begin the time that answers may take, all together."""
        self._until = time.monotonic() + _SECONDS

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

    def _line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            self._more()
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._more()
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def _drop(self, size: int) -> None:
        while size > len(self._buffer):
            size -= len(self._buffer)
            self._buffer = b""
            self._more()
        self._buffer = self._buffer[size:]

    def _more(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise OSError(_TIMED_OUT, "D-Bus does not answer in time")
        self._connection.settimeout(left)
        more = self._connection.recv(4096)
        if not more or len(self._buffer) > 4 * _LARGEST_ANSWER:
            raise OSError(_BAD_MESSAGE, "D-Bus ends the connection")
        self._buffer += more


def get_property(bus: Bus, path: str, interface: str, name: str) -> str:
    """Return a property that is a string, nothing for one of another type. Raises OSError."""
    body = bytearray()
    add_string(body, interface)
    add_string(body, name)
    answer = bus.call(path, f"{_BUS}.Properties", "Get", "ss", bytes(body))
    return _first_string(answer[4:]) if answer.startswith(b"\1s\0") else ""


def unit_path(unit: str) -> str:
    """Return the path of a unit's object: what is no letter or digit stands there as a number."""
    escaped = "".join(one if one.isascii() and one.isalpha() else _escaped(one) for one in unit[:1])
    escaped += "".join(one if one.isascii() and one.isalnum() else _escaped(one) for one in unit[1:])
    return f"/org/freedesktop/systemd1/unit/{escaped}"


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


def _escaped(character: str) -> str:
    return "".join(f"_{byte:02x}" for byte in character.encode())


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
