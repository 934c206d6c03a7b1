"""What the loader reads of a library or program: machine, soname, search path, loader. Hostile files are bounded.

By hand and not with pyelftools, which follows a file's own tables without a limit. Source: gABI, "Program Header" and
"Dynamic Section"; glibc, elf/dl-load.c (open_verify) for what the loader says of a file that is none.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import BinaryIO

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_TAG = struct.Struct("<qQ")
_LOAD, _DYNAMIC, _INTERPRETER = 1, 2, 3
_NEEDED, _STRTAB, _SONAME, _RPATH, _RUNPATH, _FLAGS_1 = 1, 5, 14, 15, 29, 0x6FFFFFFB
_NO_DEFAULT_FOLDERS = 0x800  # DF_1_NODEFLIB
_MOST_NEEDED = 500
_MOST_SEGMENTS = 64
_LARGEST_DYNAMIC = 64 << 10
_LONGEST = 4096
MACHINES = {62: "x86_64", 183: "aarch64", 3: "i386", 40: "arm", 21: "ppc64le", 243: "riscv64"}
_64_BIT, _LITTLE_ENDIAN = 2, 1


@dataclass(frozen=True)
class ElfFile:
    """A library or program. `fault` is why the loader stops at it, "" for none; `machine` "" where it is not known.

    `needed`: the libraries it is linked with; `no_defaults`: it is linked with `-z nodefaultlib`.
    """

    machine: str = ""
    soname: str = ""
    rpath: str = ""
    runpath: str = ""
    interpreter: str = ""
    fault: str = ""
    needed: tuple[str, ...] = ()
    no_defaults: bool = False


def read_elf(file: BinaryIO) -> ElfFile:
    """Return what a file says of itself; never raises for what is in it."""
    try:
        return _read(file)
    except (OSError, struct.error, ValueError, OverflowError):
        return ElfFile(fault="the file is torn")


def _read(file: BinaryIO) -> ElfFile:
    start = file.read(_HEADER.size)
    if len(start) < _HEADER.size:
        return ElfFile(fault="file too short")
    if start[:4] != b"\x7fELF":
        return ElfFile(fault="invalid ELF header")
    number = int.from_bytes(start[18:20], "little")
    if start[4] != _64_BIT or start[5] != _LITTLE_ENDIAN:
        return ElfFile(machine=MACHINES.get(number, "another machine") if number in (3, 40) else "another machine")
    header = _HEADER.unpack(start)
    machine = MACHINES.get(header[2], f"machine {header[2]}")
    file.seek(header[5])
    count = min(header[10], _MOST_SEGMENTS)
    segments = [_SEGMENT.unpack(file.read(_SEGMENT.size)) for _ in range(count)]
    interpreter = next((_text(file, one[2], one[5]) for one in segments if one[0] == _INTERPRETER), "")
    found = ElfFile(machine, interpreter=interpreter)
    for segment in segments:
        if segment[0] == _DYNAMIC:
            found = _with_dynamic(found, file, segment, segments)
    return found


def _with_dynamic(found: ElfFile, file: BinaryIO, segment: tuple[int, ...], segments: list[tuple[int, ...]]) -> ElfFile:
    """Return what is known with what the dynamic section says."""
    file.seek(segment[2])
    content = file.read(min(segment[5], _LARGEST_DYNAMIC))
    tags: dict[int, int] = {}
    needed: list[int] = []
    for tag, value in _TAG.iter_unpack(content[: len(content) // _TAG.size * _TAG.size]):
        if tag == 0:
            break
        tags.setdefault(tag, value)
        needed += [value] if tag == _NEEDED else []
    place = tags.get(_STRTAB, 0)
    offset = next(
        (one[2] + place - one[3] for one in segments if one[0] == _LOAD and one[3] <= place < one[3] + one[5]), None
    )
    if offset is None:
        return found
    texts = {tag: _text(file, offset + tags[tag], _LONGEST) for tag in (_SONAME, _RPATH, _RUNPATH) if tag in tags}
    return replace(
        found,
        soname=texts.get(_SONAME, ""),
        # With both the loader ignores RPATH.
        rpath="" if _RUNPATH in texts else texts.get(_RPATH, ""),
        runpath=texts.get(_RUNPATH, ""),
        needed=tuple(_text(file, offset + value, _LONGEST) for value in needed[:_MOST_NEEDED]),
        no_defaults=bool(tags.get(_FLAGS_1, 0) & _NO_DEFAULT_FOLDERS),
    )


def _text(file: BinaryIO, offset: int, size: int) -> str:
    file.seek(offset)
    return file.read(min(size, _LONGEST)).partition(b"\0")[0].decode("utf-8", "replace")
