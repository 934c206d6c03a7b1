"""Query a running engine through CRI, Kubernetes' interface to engines, for the handlers that pods can name.

It makes a single gRPC call over HTTP/2 (RFC 9113), so hosts need no gRPC library.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import BinaryIO

from gpuprov.core.system import System
from gpuprov.protocol.dataclass import dataclass

_SECONDS = 10.0
# containerd's answer has about 20 KiB.
_LARGEST = 4 << 20
_STREAM = 1
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_INITIAL_WINDOW_SIZE = 4
_LARGEST_FRAME = 16384
_CALL = (
    (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/runtime.v1.RuntimeService/Status"),
    (b":authority", b"localhost"), (b"content-type", b"application/grpc"), (b"te", b"trailers"),
)  # fmt: skip
# StatusRequest with verbose, its field 1.
_VERBOSE = b"\x08\x01"


@dataclass(frozen=True)
class CriStatus:
    """The runtime handlers that a running engine knows, and whether it reads CDI (None: unknown)."""

    handlers: tuple[str, ...]
    cdi: bool | None = None


def ask(system: System, path: str) -> CriStatus | None:
    """Return the status of the engine at this socket; None if it does not respond or does not report handlers."""
    try:
        with system.connect(path, _SECONDS) as connection:
            return parse(_answer(connection))
    except (OSError, ValueError, RecursionError):
        return None


def parse(message: bytes) -> CriStatus | None:
    """Return the content of a StatusResponse. Raises ValueError for an invalid one."""
    handlers: list[str] = []
    config: object = {}
    for number, value in _fields(message):
        inner = list(_fields(value)) if number in (2, 3) else []
        if number == 3:  # runtime_handlers, since Kubernetes 1.30; the one without a name is the default
            handlers.append(b"".join(one for field, one in inner if field == 1).decode("utf-8", "replace"))
        elif number == 2 and (1, b"config") in inner:  # info, a map
            text = b"".join(one for field, one in inner if field == 2)
            config = json.loads(text) if text.startswith(b"{") else {}
    containerd = config.get("containerd") if isinstance(config, dict) else None
    runtimes = containerd.get("runtimes") if isinstance(containerd, dict) else None
    names = {*filter(None, handlers), *(runtimes if isinstance(runtimes, dict) else ())}
    cdi = config.get("enableCDI") if isinstance(config, dict) else None
    return CriStatus(tuple(sorted(names)), cdi if isinstance(cdi, bool) else None) if names else None


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Return number → content of the length-delimited fields; numeric fields are skipped."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == 0:
            _, place = _varint(message, place)
        elif kind == 2:
            length, place = _varint(message, place)
            if place + length > len(message):
                raise ValueError("the message is cut off")
            yield key >> 3, message[place : place + length]
            place += length
        elif kind in (1, 5):
            place += 8 if kind == 1 else 4
        else:
            raise ValueError(f"there is no field of kind {kind}")


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            raise ValueError("the message is cut off")
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("a number has no end")


def _answer(connection: socket.socket) -> bytes:
    """Make the call; return the response message. Raises ValueError or OSError if there is none."""
    window = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _LARGEST)
    # HPACK's plainest form (RFC 7541, 6.2.2): new names, not indexed, not compressed.
    headers = b"".join(b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in _CALL)
    connection.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(_SETTINGS, 0, 0, window)
        + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _LARGEST))
        + _frame(_HEADERS, _END_HEADERS, _STREAM, headers)
        + _frame(_DATA, _END_STREAM, _STREAM, struct.pack(">BI", 0, len(_VERBOSE)) + _VERBOSE)
    )
    data, answer = b"", connection.makefile("rb")
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and len(data) <= _LARGEST:
        kind, flags, stream, payload = _next_frame(answer)
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            connection.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind in (_GOAWAY, _RST_STREAM):
            break
        elif stream == _STREAM and kind == _DATA:
            data += payload[1 : len(payload) - payload[0]] if flags & _PADDED and payload else payload
        if stream == _STREAM and kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            break
    if len(data) < 5 or data[0] != 0 or len(data) - 5 != int.from_bytes(data[1:5], "big"):
        raise ValueError("the engine gave no answer")
    return data[5:]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _next_frame(answer: BinaryIO) -> tuple[int, int, int, bytes]:
    head = answer.read(9)
    length = int.from_bytes(head[:3], "big")
    if length > _LARGEST_FRAME:
        raise ValueError("a frame is larger than was agreed")
    payload = answer.read(length)
    if len(head) + len(payload) < 9 + length:
        raise ValueError("the engine hung up")
    kind, flags, stream = struct.unpack(">BBI", head[3:])
    return kind, flags, stream & 0x7FFFFFFF, payload
