"""Reads the dynamic loader's cache, so that a driver is found wherever this host's loader finds it. Pure.

Source: glibc, sysdeps/generic/dl-cache.h. Read by ourselves, not with `ldconfig -p`: no process, and the cache of a
tree below a root prefix is read just as well.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

CACHE = "/etc/ld.so.cache"
# `ldconfig -c compat` puts an old-style cache in front; offsets count from this mark in either case.
_MARK = b"glibc-ld.so.cache1.1"
_HEADER = struct.Struct("=20s2I4x4I")
_ENTRY = struct.Struct("=iIIIQ")
# The machine's kind in an entry's flags: x86-64 and AArch64; i386 and armhf have others, or none.
_MACHINE = 0xFF00
_64_BIT = (0x0300, 0x0A00)


@dataclass(frozen=True)
class CachedLibrary:
    """What the loader takes for a name."""

    name: str
    path: str
    is_64_bit: bool


def parse_cache(content: bytes) -> tuple[CachedLibrary, ...]:
    """Return the libraries in the order of the cache; none for a file that is no cache, or a torn one."""
    start = content.find(_MARK)
    if start < 0 or len(content) < start + _HEADER.size:
        return ()
    content = content[start:]
    _, count, *_ = _HEADER.unpack_from(content)
    if len(content) < _HEADER.size + count * _ENTRY.size:
        return ()
    entries = _ENTRY.iter_unpack(content[_HEADER.size : _HEADER.size + count * _ENTRY.size])
    return tuple(
        CachedLibrary(_string(content, name), _string(content, path), flags & _MACHINE in _64_BIT)
        for flags, name, path, _, _ in entries
    )


def _string(content: bytes, offset: int) -> str:
    return content[offset : content.find(b"\0", offset)].decode("utf-8", "replace")
