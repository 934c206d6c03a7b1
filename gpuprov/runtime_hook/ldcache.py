"""The dynamic loader's cache (/etc/ld.so.cache) with the driver's libraries put in. Pure: bytes in, bytes out.

So no ldconfig runs at container start: not the image's, which would be the image's code as root, and not the host's,
which needs namespaces of its own. Source: glibc, sysdeps/generic/dl-cache.h and elf/cache.c. The image's cache is
hostile: what can't be read counts as no cache at all, as it does for the loader.

An image may have thousands of libraries: entries are looked at by halves, and moved as raw numbers. What no real cache
has (names longer than a file's, dozens of entries of one name) counts as torn, so that no image costs more than others.
"""

from __future__ import annotations

from _struct import error as _StructError  # type: ignore[attr-defined,unused-ignore]  # noqa: N812
from _struct import pack, pack_into, unpack_from

MAGIC = b"glibc-ld.so.cache1.1"
# Magic, entries, bytes of strings, byte order (2: little), offset of the extensions.
_HEADER = "=20sIIB3xI12x"
_HEADER_SIZE = 48
# An entry: kind of library, offsets of name and path, oldest kernel, hardware capabilities.
ENTRY = "=iIIIQ"
_ENTRY_SIZE = 24
EXTENSION_MAGIC = 0xEAA42174
# The names of glibc-hwcaps folders: a list of offsets, like the entries' own.
HWCAPS_TAG = 1
_LITTLE_ENDIAN = 2
MACHINE = 0xFF00
MOST_SECTIONS = 16
# glibc knows some ten folders of optimised variants; 4 bytes each.
_LARGEST_SECTION = 256
# As the kernel's own limits on names and paths: entries may share one text, and each that is compared is taken apart.
_LONGEST_NAME = 256
LONGEST_PATH = 4096
# libboost_python311-mt-x64.so.1.83.0 has six.
_MOST_NUMBERS = 32
# Of one library there are a 32-bit form, and one for each folder of optimised variants.
_MOST_EQUAL_NAMES = 64
# Of the strings, what is searched for those of an earlier driver: they were added at the end.
_SEARCHED = 32 << 10
# ELF for glibc 2 and later, and the machine: x86-64, AArch64, 32-bit x86.
FLAGS = {"x86_64": 0x0303, "aarch64": 0x0A03}
FLAGS_32_BIT = 0x0003
# Ubuntu's desktop has 0.2 MiB for 3000 libraries.
LARGEST = 1 << 20
_DIGITS_ALONE = bytes(byte if 48 <= byte <= 57 else 32 for byte in range(256))


def merge(old: bytes, added: list[tuple[str, str, int]]) -> bytes:
    """Return the cache in which these libraries (name, path, flags) are found, and nothing else under their names.

    The same bytes come back if that is so already: a container that starts again is not written to.
    """
    wanted: dict[bytes, dict[int, tuple[bytes, int]]] = {}
    for name, path, flags in added:
        wanted.setdefault(name.encode(), {})[flags & MACHINE] = (path.encode(), flags)
    names = sorted(((_key(name), name) for name in wanted), reverse=True)
    try:
        return _merged(Cache(old if len(old) <= LARGEST else b""), names, wanted)
    except (_StructError, ValueError, IndexError, OverflowError):
        return _merged(Cache(b""), names, wanted)


class Cache:
    """A cache: its entries one behind the other, and everything behind them, to which their offsets refer."""

    def __init__(self, content: bytes) -> None:
        # A cache of `ldconfig -c compat` begins with one of the old form; offsets count from the new one's start.
        start = content.find(MAGIC)
        usable = start >= 0
        self.content = content[start:] if usable else b""
        self.count = self.extensions = 0
        if usable:
            _, self.count, _, _, self.extensions = unpack_from(_HEADER, self.content)
        self.tail = _HEADER_SIZE + self.count * _ENTRY_SIZE
        if usable and self.tail > len(self.content):
            raise ValueError("torn")

    def entries(self, first: int, last: int) -> bytes:
        """Return entries as they stand there."""
        return self.content[_HEADER_SIZE + first * _ENTRY_SIZE : _HEADER_SIZE + last * _ENTRY_SIZE]

    def entry(self, number: int) -> tuple[int, bytes, bytes, int]:
        """Return an entry's flags, name, path, and hardware capabilities."""
        flags, name, path, _, capabilities = unpack_from(ENTRY, self.content, _HEADER_SIZE + number * _ENTRY_SIZE)
        return flags, self._text(name, _LONGEST_NAME), self._text(path, LONGEST_PATH), capabilities

    def name(self, number: int) -> bytes:
        """Return an entry's name alone."""
        place = unpack_from("=I", self.content, _HEADER_SIZE + number * _ENTRY_SIZE + 4)[0]
        return self._text(place, _LONGEST_NAME)

    def _text(self, place: int, longest: int) -> bytes:
        return self.content[place : self.content.index(b"\0", place, place + longest)]


def _merged(
    cache: Cache, names: list[tuple[list[bytes | int], bytes]], wanted: dict[bytes, dict[int, tuple[bytes, int]]]
) -> bytes:
    """Return the cache with the wanted entries in their places; `names` are in the cache's order, descending."""
    parts: list[bytes | tuple[bytes, bytes, int]] = []
    keys: dict[int, list[bytes | int]] = {}
    begun, unchanged = 0, True
    for key, name in names:
        first = _place(cache, key, begun, keys)
        parts.append(cache.entries(begun, first))
        begun, left = first, dict(wanted[name])
        while begun < cache.count and cache.name(begun) == name:
            if begun - first == _MOST_EQUAL_NAMES:
                raise ValueError("too many entries of one name")
            flags, _, path, capabilities = cache.entry(begun)
            machine = flags & MACHINE
            if left.get(machine) == (path, flags) and not capabilities:
                del left[machine]
                parts.append(cache.entries(begun, begun + 1))
            elif machine not in wanted[name]:
                parts.append(cache.entries(begun, begun + 1))
            else:
                unchanged = False
            begun += 1
        for path, flags in left.values():
            unchanged = False
            parts.append((name, path, flags))
    if unchanged and cache.content:
        return cache.content
    parts.append(cache.entries(begun, cache.count))
    return _render(cache, parts)


def _place(cache: Cache, key: list[bytes | int], low: int, keys: dict[int, list[bytes | int]]) -> int:
    """Return the first entry from `low` on whose name does not come before that of the key."""
    high = cache.count
    while low < high:
        middle = (low + high) // 2
        if middle not in keys:
            keys[middle] = _key(cache.name(middle))
        if keys[middle] > key:
            low = middle + 1
        else:
            high = middle
    return low


def _key(name: bytes) -> list[bytes | int]:
    """Return what names are ordered by (_dl_cache_libcmp): bytes by value, digits as numbers, and after other bytes."""
    key: list[bytes | int] = []
    start = 0
    numbers = name.translate(_DIGITS_ALONE).split()
    if len(numbers) > _MOST_NUMBERS:
        raise ValueError("too many numbers in a name")
    for digits in numbers:
        place = name.index(digits, start)
        # A number comes after every other byte, the end before.
        key += (name[start:place] + b"\xff", int(digits))
        start = place + len(digits)
    key.append(name[start:])
    return key


def _render(cache: Cache, parts: list[bytes | tuple[bytes, bytes, int]]) -> bytes:
    """Return the file: the old strings stand behind the new table, the new ones behind them."""
    tail = bytearray(cache.content[cache.tail :])
    # Put in before, for another driver: then its strings serve again, and the file does not grow from driver to driver.
    recent = max(0, len(tail) - _SEARCHED)
    again = any(tail.find(part[1], recent) >= 0 for part in parts if isinstance(part, tuple))
    recent = recent if again else -1
    table = b"".join(
        part
        if isinstance(part, bytes)
        else pack(ENTRY, part[2], *(cache.tail + _string(tail, text, recent) for text in part[:2]), 0, 0)
        for part in parts
    )
    shift = _HEADER_SIZE + len(table) - cache.tail
    extensions = cache.extensions + shift if cache.extensions and _shift_extensions(cache, tail, shift) else 0
    header = pack(_HEADER, MAGIC, len(table) // _ENTRY_SIZE, len(tail), _LITTLE_ENDIAN, extensions)
    return b"".join((header, _shifted(table, shift), tail))


def _string(tail: bytearray, text: bytes, recent: int) -> int:
    """Return where in the strings a text stands, from `recent` on (-1: nowhere); added if need be."""
    place = tail.find(b"\0" + text + b"\0", recent) if recent >= 0 else -1
    if place < 0:
        # The zero in front: to be found again, whatever the byte before the strings is.
        place = len(tail)
        tail += b"\0" + text + b"\0"
    return place + 1


def _shifted(table: bytes, shift: int) -> bytes:
    """Return the entries with the offsets of name and path moved: one addition, instead of one for each entry."""
    step = int.from_bytes(pack(ENTRY, 0, abs(shift), abs(shift), 0, 0) * (len(table) // _ENTRY_SIZE), "little")
    number = int.from_bytes(table, "little") + (step if shift >= 0 else -step)
    # An offset of a hostile cache may run over into its neighbour: it was wrong before.
    return (number % (1 << 8 * len(table))).to_bytes(len(table), "little")


def _shift_extensions(cache: Cache, tail: bytearray, shift: int) -> bool:
    """Move the offsets in the extensions too; say whether there are any that this glibc's loader would read."""
    place = cache.extensions - cache.tail
    magic, count = unpack_from("=II", tail, place)
    if magic != EXTENSION_MAGIC or count > MOST_SECTIONS:
        return False
    for section in range(place + 8, place + 8 + 16 * count, 16):
        tag, flags, offset, size = unpack_from("=IIII", tail, section)
        pack_into("=IIII", tail, section, tag, flags, offset + shift, size)
        if tag == HWCAPS_TAG:
            if size > _LARGEST_SECTION:
                return False
            for name in range(offset - cache.tail, offset - cache.tail + size, 4):
                pack_into("=I", tail, name, unpack_from("=I", tail, name)[0] + shift)
    return True
