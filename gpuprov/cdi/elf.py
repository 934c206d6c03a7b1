"""The name by which the loader knows a library: its soname, read from the file itself. Reads only.

A few hundred bytes of the file say it. A library that knows all of ELF costs more than all else that is found out
about a driver, at every run and every boot.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

from gpuprov.system import System

# No library of a driver has a name as long as this; a hostile one may.
_LONGEST = 128
# A library has about ten segments, and some dozens of entries in its dynamic section.
_MOST_BYTES = 1 << 16
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_STRTAB, _DT_SONAME = 0, 5, 14


@dataclass(frozen=True)
class _Layout:
    """How a class of ELF files is laid out (gABI, "ELF Header", "Program Header", "Dynamic Section").

    `header`: what precedes e_phoff, e_phoff, what lies between, e_phentsize, e_phnum. `segment`: p_type, p_offset,
    p_vaddr and p_filesz, the rest left out. `entry`: d_tag and d_val.
    """

    header: str
    segment: str
    entry: str


# By e_ident[EI_CLASS]: 32 and 64 bits.
_LAYOUTS = {1: _Layout("28xI10xHH", "III4xI12x", "iI"), 2: _Layout("32xQ14xHH", "I4xQQ8xQ16x", "qQ")}
# By e_ident[EI_DATA].
_BYTE_ORDERS = {1: "<", 2: ">"}


def soname(system: System, path: str) -> str:
    """Return the DT_SONAME of a library (gABI, "Dynamic Section"); nothing for a file that is none or has none."""
    try:
        with system.open(path) as file:
            name = _soname(file).decode("ascii", "replace")
    except (OSError, ValueError, OverflowError, struct.error):
        return ""
    return name if 0 < len(name) <= _LONGEST and "/" not in name and name.isprintable() and name.isascii() else ""


def _soname(file: BinaryIO) -> bytes:
    start = file.read(64)
    if len(start) < 64 or not start.startswith(b"\x7fELF"):
        return b""
    layout, order = _LAYOUTS.get(start[4]), _BYTE_ORDERS.get(start[5])
    if layout is None or order is None:
        return b""
    place, size, count = struct.unpack_from(order + layout.header, start)
    if size != struct.calcsize(order + layout.segment):
        return b""
    segments = list(struct.iter_unpack(order + layout.segment, _read(file, place, size * count)))
    dynamic = next(((offset, length) for kind, offset, _, length in segments if kind == _PT_DYNAMIC), (0, 0))
    tags: dict[int, int] = {}
    for tag, value in struct.iter_unpack(order + layout.entry, _read(file, *dynamic)):
        if tag == _DT_NULL:
            break
        tags.setdefault(tag, value)
    if not {_DT_STRTAB, _DT_SONAME} <= tags.keys():
        return b""
    # The table of names is told by its address in memory.
    address = tags[_DT_STRTAB]
    loaded = (
        address - begin + offset
        for kind, offset, begin, length in segments
        if kind == _PT_LOAD and begin <= address < begin + length
    )
    text, end, _ = _read(file, next(loaded, 0) + tags[_DT_SONAME], _LONGEST + 1).partition(b"\0")
    return text if end else b""


def _read(file: BinaryIO, place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(min(size, _MOST_BYTES))
