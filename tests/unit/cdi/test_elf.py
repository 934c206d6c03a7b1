"""Sonames: of the machine's own libraries, of a file made by hand, and of files that are none or broken."""

from __future__ import annotations

import random
import re
import struct
from pathlib import Path

import pytest

from gpuprov.cdi.files import soname
from gpuprov.core.system import System

_OWN = sorted(set(re.findall(r" (/\S+\.so[.\d]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)))


def elf32(name: bytes, *, order: str = ">") -> bytes:
    """Return a 32-bit library with nothing but a dynamic section: headers, one entry for each tag, names."""
    names = b"\0" + name + b"\0"
    headers, dynamic = 52 + 2 * 32, 3 * 8
    address = 0x10000 + headers + dynamic
    length = headers + dynamic + len(names)
    return b"".join((
        b"\x7fELF", bytes((1, 2 if order == ">" else 1, 1)), bytes(9),
        struct.pack(order + "HHIIIIIHHHHHH", 3, 20, 1, 0, 52, 0, 0, 52, 32, 2, 40, 0, 0),
        struct.pack(order + "8I", 1, 0, 0x10000, 0x10000, length, length, 4, 0x1000),
        struct.pack(order + "8I", 2, headers, 0x10000 + headers, 0x10000 + headers, dynamic, dynamic, 4, 4),
        struct.pack(order + "6I", 14, 1, 5, address, 0, 0),
        names,
    ))  # fmt: skip


def name_in(folder: Path, content: bytes) -> str:
    (folder / "lib.so").write_bytes(content)
    return soname(System(str(folder)), "/lib.so")


def test_the_c_library_bears_its_name() -> None:
    (path,) = (path for path in _OWN if re.search(r"/libc[.-]", path))
    assert soname(System(), path) == "libc.so.6"


@pytest.mark.parametrize("order", ["<", ">"])
def test_32_bits_and_both_byte_orders(tmp_path: Path, order: str) -> None:
    assert name_in(tmp_path, elf32(b"libcuda.so.1", order=order)) == "libcuda.so.1"


@pytest.mark.parametrize("name", [b"", b"a/../b.so", b"line\n.so", b"\xff.so", b"x" * 129])
def test_a_name_that_no_library_bears_is_none(tmp_path: Path, name: bytes) -> None:
    assert name_in(tmp_path, elf32(name)) == ""


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"#!/bin/sh\n", bytes(64), b"\x7fELF\x03\x01" + bytes(58)])
def test_what_is_no_library_has_none(tmp_path: Path, content: bytes) -> None:
    assert name_in(tmp_path, content) == ""
    assert soname(System(), "/nowhere.so") == ""


def test_a_library_cut_off_anywhere_has_none(tmp_path: Path) -> None:
    whole = elf32(b"libcuda.so.1")
    assert {name_in(tmp_path, whole[:length]) for length in range(len(whole))} == {""}


def test_broken_bytes_never_break_the_reader(tmp_path: Path) -> None:
    chance = random.Random(1)
    for _ in range(300):
        broken = bytearray(elf32(b"libcuda.so.1"))
        for _ in range(chance.randrange(1, 6)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        assert len(name_in(tmp_path, bytes(broken))) <= 128
