"""Read the dynamic loader's cache, to find the driver where this host's loader finds it. Pure.

Source: glibc, sysdeps/generic/dl-cache.h. Not parsed from `ldconfig -p`: this needs no process, and it can read the
cache of a tree below a root prefix.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

CACHE = "/etc/ld.so.cache"
# `ldconfig -c compat` puts an old-style cache in front; offsets count from this magic in both cases.
_MARK = b"glibc-ld.so.cache1.1"
_HEADER = struct.Struct("=20s2I4x4I")
_ENTRY = struct.Struct("=iIIIQ")
# The machine's kind in an entry's flags: x86-64 and AArch64; i386 and armhf have others, or none.
_MACHINE = 0xFF00
_64_BIT = (0x0300, 0x0A00)
# An entry's capabilities: with this bit, the number of a glibc-hwcaps folder in the extension's list (glibc 2.33).
_IN_EXTENSION = 1 << 62
_EXTENSION_MAGIC = 0xEAA42174
_VARIANTS_TAG = 1
_MOST_SECTIONS = 16
_MOST_VARIANTS = 64


@dataclass(frozen=True)
class CachedLibrary:
    """What the loader takes for a name; with a `variant` (x86-64-v3, or `legacy`) only on processors that have it."""

    name: str
    path: str
    is_64_bit: bool
    variant: str = ""


def parse_cache(content: bytes) -> tuple[CachedLibrary, ...]:
    """Return the libraries in the order of the cache; none for an invalid or truncated file."""
    start = content.find(_MARK)
    if start < 0 or len(content) < start + _HEADER.size:
        return ()
    content = content[start:]
    _, count, _, extensions, *_ = _HEADER.unpack_from(content)
    if len(content) < _HEADER.size + count * _ENTRY.size:
        return ()
    entries = _ENTRY.iter_unpack(content[_HEADER.size : _HEADER.size + count * _ENTRY.size])
    variants = _variants(content, extensions)
    return tuple(
        CachedLibrary(
            _string(content, name),
            _string(content, path),
            flags & _MACHINE in _64_BIT,
            _variant(capabilities, variants),
        )
        for flags, name, path, _, capabilities in entries
    )


def _variants(content: bytes, extensions: int) -> tuple[str, ...]:
    """Return the names of the glibc-hwcaps folders that entries refer to."""
    try:
        magic, count = struct.unpack_from("=II", content, extensions)
        if not extensions or magic != _EXTENSION_MAGIC:
            return ()
        for number in range(min(count, _MOST_SECTIONS)):
            tag, _, offset, size = struct.unpack_from("=IIII", content, extensions + 8 + 16 * number)
            if tag == _VARIANTS_TAG:
                places = struct.unpack_from(f"={min(size // 4, _MOST_VARIANTS)}I", content, offset)
                return tuple(_string(content, place) for place in places)
    except struct.error:
        pass
    return ()


def _variant(capabilities: int, variants: tuple[str, ...]) -> str:
    if not capabilities & _IN_EXTENSION:
        return "legacy" if capabilities else ""
    number = capabilities & 0xFFFFFFFF
    return variants[number] if number < len(variants) else "unknown"


def _string(content: bytes, offset: int) -> str:
    return content[offset : content.find(b"\0", offset)].decode("utf-8", "replace")
