"""The bundle as a tar file: written in one canonical form, and read only in that form.

Members: the manifest, every file that it lists in order of their paths, and a detached signature of the manifest if
there is one. A header is accepted only if it is byte for byte what gpuprov writes for its name and size. That excludes
links, devices, modes, owners, extensions and sparse files. `tar -tf` can read the file.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO, Callable

from gpuprov.bundle.manifest import LARGEST_MANIFEST, LONGEST_PATH, MANIFEST, SIGNATURE, BundleFile, Manifest
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.words import counted

# POSIX.1-1988, ustar: blocks of 512 bytes; an archive ends with two of zeros.
_BLOCK = 512
_END = bytes(2 * _BLOCK)
_SIZE_FIELD = slice(124, 136)
_LARGEST_OCTAL = 8**11
_CHUNK = 1 << 20
_LARGEST_SIGNATURE = 1 << 16
_NEXT = "get the whole bundle again, or recreate it: gpuprov bundle create"

# Called after each chunk: bytes done, bytes in all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Contents:
    """A bundle whose manifest was read: its bytes, what they say, the signature (or nothing), where files begin."""

    manifest: Manifest
    manifest_bytes: bytes
    signature: bytes
    offsets: Mapping[str, int]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.manifest_bytes).hexdigest()


def header(name: str, size: int) -> bytes:
    """Return the tar header of a plain file of root's, readable by all, with a fixed timestamp."""
    block = bytearray(_BLOCK)
    encoded = name.encode("ascii")
    if not 0 < len(encoded) <= LONGEST_PATH or size < 0:
        raise ValueError(f"no tar header for {name[:120]!r} of {counted(size, 'byte')}")
    block[0 : len(encoded)] = encoded
    block[100:124] = b"0000644\0" + b"0000000\0" * 2
    # GNU's encoding for sizes of more than eleven octal digits: 8 GiB and more.
    block[_SIZE_FIELD] = b"%011o\0" % size if size < _LARGEST_OCTAL else b"\x80" + size.to_bytes(11, "big")
    block[136:148] = b"00000000000\0"
    block[156:157] = b"0"
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def write_bundle(target: BinaryIO, manifest: Manifest, open_file: Callable[[str], BinaryIO], signature: bytes) -> None:
    """Write a bundle; `open_file` opens the content of each path in the manifest."""
    _write_bytes(target, MANIFEST, manifest.to_bytes())
    for one in manifest.files:
        target.write(header(one.path, one.size))
        size = 0
        with open_file(one.path) as source:
            while chunk := source.read(_CHUNK):
                target.write(chunk)
                size += len(chunk)
        if size != one.size:
            seen = f"{counted(size, 'byte')}, at first {one.size}"
            raise GpuprovError(f"{one.path} changed while the bundle was written", seen, "run it again")
        target.write(_padding(size))
    if signature:
        _write_bytes(target, SIGNATURE, signature)
    target.write(_END)


def _write_bytes(target: BinaryIO, name: str, content: bytes) -> None:
    target.write(header(name, len(content)) + content + _padding(len(content)))


def read_contents(file: BinaryIO) -> Contents:
    """Return the content of a bundle by its manifest and layout; the digests of the files are not checked yet.

    Raises GpuprovError for a file that gpuprov did not write, and for a truncated bundle.
    """
    length = file.seek(0, 2)
    file.seek(0)
    manifest_bytes = _read_small(file, MANIFEST, LARGEST_MANIFEST)
    manifest = Manifest.from_bytes(manifest_bytes)
    offsets = {}
    for one in manifest.files:
        if _take(file, _BLOCK, f"the header of {one.path}") != header(one.path, one.size):
            raise _foreign(f"at byte {file.tell() - _BLOCK}: not the file {one.path} that the manifest lists")
        offsets[one.path] = file.tell()
        end = file.tell() + one.size
        if end > length:
            raise _cut_off(f"{one.path} ends at byte {end}, the bundle at {length}")
        file.seek(end)
        _require_padding(file, one.size, one.path)
    signature, place = b"", file.tell()
    if file.read(_BLOCK) != bytes(_BLOCK):
        file.seek(place)
        signature, place = _read_small(file, SIGNATURE, _LARGEST_SIGNATURE), file.tell()
    file.seek(place)
    rest = file.read(len(_END) + 1)
    if rest != _END:
        seen = f"after the last file: {counted(len(rest), 'byte')}"
        raise _cut_off(seen) if len(rest) < len(_END) else _foreign(seen)
    return Contents(manifest, manifest_bytes, signature, offsets)


def verify_files(file: BinaryIO, contents: Contents, progress: Progress = lambda done, total: None) -> None:
    """Raise GpuprovError that names every file whose digest differs from the manifest."""
    total = sum(one.size for one in contents.manifest.files)
    done = 0

    def count(chunk: bytes) -> None:
        nonlocal done
        done += len(chunk)
        progress(done, total)

    digests = [(one, _digest(file, contents, one, count)) for one in contents.manifest.files]
    wrong = [f"{one.path}: its SHA-256 is {found}, the manifest says {one.sha256}"
             for one, found in digests if found != one.sha256]  # fmt: skip
    if wrong:
        files = "a file in the bundle was" if len(wrong) == 1 else f"{counted(len(wrong), 'file')} in the bundle were"
        raise GpuprovError(f"{files} tampered with or damaged", "\n".join(wrong[:5]), _NEXT)


def unpack(file: BinaryIO, contents: Contents, paths: Iterable[str], open_new: Callable[[str], BinaryIO]) -> None:
    """Copy files out and check their digests again while copying: a change after the first check is detected.

    `open_new` opens a new file for a path of the manifest. Raises GpuprovError if a digest is wrong.
    """
    for path in paths:
        one = contents.manifest.file(path)
        with open_new(path) as target:
            digest = _digest(file, contents, one, target.write)
        if digest != one.sha256:
            raise GpuprovError("a file in the bundle changed while it was unpacked", path, _NEXT)


def _digest(file: BinaryIO, contents: Contents, one: BundleFile, use: Callable[[bytes], object]) -> str:
    """Return the SHA-256 of a file in a bundle; `use` gets each chunk."""
    digest = hashlib.sha256()
    for chunk in chunks(file, contents.offsets[one.path], one.size):
        digest.update(chunk)
        use(chunk)
    return digest.hexdigest()


def chunks(file: BinaryIO, offset: int, size: int) -> Iterator[bytes]:
    """Yield a part of a file. Raises GpuprovError if it ends too early."""
    file.seek(offset)
    while size > 0:
        chunk = file.read(min(_CHUNK, size))
        if not chunk:
            raise _cut_off(f"it lacks {counted(size, 'byte')}")
        size -= len(chunk)
        yield chunk


def _take(file: BinaryIO, size: int, part: str) -> bytes:
    found = file.read(size)
    if len(found) < size:
        raise _cut_off(f"it ends within {part}, after {counted(file.tell(), 'byte')}")
    return found


def _read_small(file: BinaryIO, name: str, largest: int) -> bytes:
    """Return the content of the next member, which must have this name."""
    block = _take(file, _BLOCK, f"the header of {name}")
    digits = block[_SIZE_FIELD].rstrip(b"\0")
    # int() would accept more than octal digits: blanks, signs, underscores.
    size = int(digits, 8) if re.fullmatch(rb"[0-7]+", digits) else -1
    if not 0 <= size <= largest or header(name, size) != block:
        raise _foreign(f"at byte {file.tell() - _BLOCK}: expected {name}, found {block[:40].rstrip(bytes(1))!r}")
    content = _take(file, size, name)
    _require_padding(file, size, name)
    return content


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)


def _require_padding(file: BinaryIO, size: int, name: str) -> None:
    padding = _padding(size)
    if _take(file, len(padding), f"the padding of {name}") != padding:
        raise _foreign(f"before byte {file.tell()}: something is hidden behind a file")


def _cut_off(evidence: str) -> GpuprovError:
    return GpuprovError("the bundle is cut off", evidence, _NEXT)


def _foreign(evidence: str) -> GpuprovError:
    return GpuprovError("this is no bundle that gpuprov wrote, or it was changed since", evidence, _NEXT)
