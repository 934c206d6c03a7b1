"""Where the dynamic loader looks for a library, in its order, and what it takes. Runs nothing.

Source: glibc, elf/dl-load.c (_dl_map_object, open_verify), elf/dl-cache.c; ld.so(8); gABI, "Program Header" and
"Dynamic Section". ELF is read by hand and not with pyelftools, which follows a file's own tables without a limit.
Nothing is said of programs with more rights than their caller, for which the loader ignores most variables.
"""

from __future__ import annotations

import posixpath
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from gpuprov.cdi.files import CACHE, parse_cache
from gpuprov.checks.cuda.trees import Tree, chain, read_start

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


_GLIBC = (("/lib64/ld-linux-x86-64.so.2", "x86_64"), ("/lib/ld-linux-aarch64.so.1", "aarch64"))
_MUSL = ("/lib/ld-musl-x86_64.so.1", "/lib/ld-musl-aarch64.so.1")
_LARGEST_LOADER = 8 << 20
_FOLDER_LIST = re.compile(rb"(?:/[\w.+/-]*lib[\w.+/-]*/\0){2,8}")
# For a loader whose file names none: /usr/lib/MULTIARCH is Debian's, the others everybody's.
_USUAL_FOLDERS = ("/lib/{0}-linux-gnu", "/usr/lib/{0}-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
GLIBC, MUSL = "glibc", "musl"
# Which flags of /proc/cpuinfo each level adds (x86-64 psABI, "Microarchitecture levels").
_LEVELS = (
    ("x86-64-v2", frozenset(("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"))),
    ("x86-64-v3", frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"))),
    ("x86-64-v4", frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))),
)


@dataclass(frozen=True)
class Loader:
    """A loader: `library` is glibc, musl or nothing; `variants` are subfolders that it tries in each folder first."""

    path: str = ""
    library: str = ""
    machine: str = ""
    folders: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    token_lib: str = ""

    def tried(self, folder: str) -> Iterator[str]:
        """Yield the folders that the loader tries for one of its search path."""
        for variant in self.variants:
            yield f"{folder.rstrip('/')}/{variant}"
        yield folder


def find_loader(tree: Tree, levels: tuple[str, ...]) -> Loader:
    """Return the loader of 64-bit programs, glibc's first; `levels` are those that the processor has, best first."""
    for path, machine in _GLIBC:
        content = read_start(tree, path, _LARGEST_LOADER)
        if content or chain(tree, path):
            folders = _own_folders(content) or tuple(one.format(machine) for one in _USUAL_FOLDERS)
            token = folders[0].lstrip("/")
            return Loader(path, GLIBC, machine, folders, _variants(content, levels), token)
    musl = next((path for path in _MUSL if chain(tree, path)), "")
    return Loader(musl, MUSL) if musl else Loader()


def processor_levels(cpuinfo: str) -> tuple[str, ...]:
    """Return the x86-64 levels that a processor has, best first, from /proc/cpuinfo."""
    found = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    levels: list[str] = []
    for name, needed in _LEVELS:
        if not needed <= flags:
            break
        levels.insert(0, name)
    return tuple(levels)


def _own_folders(content: bytes) -> tuple[str, ...]:
    found = _FOLDER_LIST.search(content)
    return tuple(one.decode().rstrip("/") for one in found[0].split(b"\0") if one) if found else ()


def _variants(content: bytes, levels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the subfolders in their order: glibc-hwcaps since 2.33; until 2.36 others too.

    Of these others, those that every x86-64 processor has. haswell and avx512_1 are left out: which processors count
    differs from release to release.
    """
    found = [f"glibc-hwcaps/{level}" for level in levels if b"x86-64-v2" in content]
    if b"xeon_phi\0" in content:
        found += ["tls/x86_64/x86_64", "tls/x86_64", "tls", "x86_64/x86_64", "x86_64"]
    return tuple(found)


LIBCUDA, LIBNVIDIA_ML = "libcuda.so.1", "libnvidia-ml.so.1"
_PRELOAD_FILE = "/etc/ld.so.preload"
_LARGEST_CACHE = 8 << 20
_LARGEST_PRELOAD = 64 << 10
_MOST_FOLDERS = 1000
_MOST_OBJECTS = 1000
# libcudart.so.12, torch's libcudart-9335f6a2.so.11.0.
_OPENS = re.compile(r"libcudart[.-]")
_TOKENS = re.compile(r"\$(?:\{(ORIGIN|LIB|PLATFORM)\}|(ORIGIN|LIB|PLATFORM))")
_VERSION = re.compile(r"\.so\.(\d{2,}(?:\.\d+)+)$")
# Where libraries lie that the loader does not find by itself: CUDA's stubs and compatibility libraries, Conda's, those
# of NVIDIA's older images, other distributions' folders.
_KNOWN_FOLDERS = (
    "/usr/local/cuda/compat", "/usr/local/cuda/lib64/stubs", "/usr/local/cuda/lib64", "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib",
    "/usr/lib/x86_64-linux-gnu/nvidia/current", "/usr/lib/wsl/lib", "/usr/local/lib", "/opt/conda/lib",
    "/opt/conda/lib/stubs", "/opt/conda/targets/x86_64-linux/lib/stubs",
)  # fmt: skip
_CUDA_FOLDER = re.compile(r"cuda-\d+(\.\d+)?")


@dataclass(frozen=True)
class Program:
    """What decides a search beside the root file system: environment, working folder, the program that loads."""

    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = "/"
    path: str = ""


@dataclass(frozen=True)
class Candidate:
    """A library that the loader could take.

    `path` is the name by which the loader opens it, `chain` that and what its links lead to, `reason` why the loader
    looks there (empty: it does not), `fault` why it can't be used.
    """

    path: str
    chain: tuple[str, ...]
    reason: str = ""
    version: str = ""
    fault: str = ""
    stub: bool = False
    compat: bool = False


@dataclass(frozen=True)
class Found:
    """The libraries of one name: the one that wins, None for none, and all others in the loader's order."""

    name: str
    winner: Candidate | None
    others: tuple[Candidate, ...]


@dataclass(frozen=True)
class _Place:
    path: str
    reason: str


@dataclass(frozen=True)
class _Object:
    """A program or library. `origin`: the folder that $ORIGIN is; `above`: what it is loaded for, nearest first."""

    path: str = ""
    elf: ElfFile = field(default_factory=ElfFile)
    origin: str = ""
    above: tuple[_Object, ...] = ()


def search(tree: Tree, loader: Loader, program: Program, name: str) -> Found:
    """Return what the loader takes for a name such as libcuda.so.1, and every other that lies in the root."""
    seen: dict[str, Candidate] = {}
    winner: Candidate | None = None
    places = _places(tree, loader, program, name) if loader.library == GLIBC else iter(())
    for place in places:
        made, elf = _candidate(tree, place)
        if made is None or made.path in seen:
            continue
        if elf.machine and elf.machine != loader.machine and not elf.fault:
            made = replace(made, fault=f"for {elf.machine}: the loader passes over it")
        elif winner is None:
            winner = made
        seen[made.path] = made
    for place in _elsewhere(tree, loader, name, seen):
        made, _ = _candidate(tree, place)
        if made is not None:
            seen.setdefault(made.path, made)
    return Found(name, winner, _others(seen.values(), winner))


def _others(candidates: Iterable[Candidate], winner: Candidate | None) -> tuple[Candidate, ...]:
    """Return each other file once, by the first of its paths."""
    reals = {winner.chain[-1]} if winner is not None else set()
    found = []
    for one in candidates:
        if one.chain[-1] not in reals:
            reals.add(one.chain[-1])
            found.append(one)
    return tuple(found)


def _candidate(tree: Tree, place: _Place) -> tuple[Candidate | None, ElfFile]:
    links = chain(tree, place.path)
    if not links:
        return None, ElfFile()
    elf = _elf(tree, place.path)
    version = next((found[1] for path in reversed(links) if (found := _VERSION.search(path))), "")
    stub = any("/stubs/" in path for path in (place.path, *links))
    compat = any("/compat/" in path for path in (place.path, *links))
    return Candidate(place.path, links, place.reason, version, elf.fault, stub, compat), elf


def _elf(tree: Tree, path: str) -> ElfFile:
    links = chain(tree, path)
    try:
        with tree.open(links[-1]) as file:
            return read_elf(file)
    except (OSError, IndexError) as error:
        return ElfFile(fault=f"it can't be read: {error}")


def _places(tree: Tree, loader: Loader, program: Program, name: str) -> Iterator[_Place]:
    """Yield every path at which the loader would look, in its order."""
    yield from _preloaded(tree, loader, program, name)
    yield from _searched(tree, loader, program, name, _asking(tree, loader, program, name))


def _asking(tree: Tree, loader: Loader, program: Program, name: str) -> _Object:
    """Return what asks for a library: the first object that is linked with it, else libcudart, else the program.

    libcudart opens libcuda.so.1 by itself (dlopen), with its own search path. The loader goes by breadth.
    """
    main = _main(tree, program)
    waiting, names, opening = [main], set[str](), None
    for one in waiting:
        if name in one.elf.needed:
            return one
        if opening is None and _OPENS.match(one.path.rpartition("/")[2]):
            opening = one
        for needed in one.elf.needed:
            if needed in names or len(waiting) >= _MOST_OBJECTS:
                continue
            path = _first(tree, loader, program, needed, one)
            elf = _elf(tree, path) if path else ElfFile()
            names.update((needed, elf.soname))
            if path:
                waiting.append(_Object(path, elf, path.rpartition("/")[0], (one, *one.above)))
    return opening or main


def _main(tree: Tree, program: Program) -> _Object:
    if not program.path:
        return _Object()
    origin = (chain(tree, program.path) or ("",))[-1].rpartition("/")[0]
    return _Object(program.path, _elf(tree, program.path), origin)


def _first(tree: Tree, loader: Loader, program: Program, name: str, asking: _Object) -> str:
    """Return the path at which the loader finds a library, nothing if it finds none."""
    found = (one.path for one in _searched(tree, loader, program, name, asking))
    paths = iter((_absolute(name, program),)) if "/" in name else found
    return next((path for path in paths if _is_usable(tree, loader, path)), "")


def _preloaded(tree: Tree, loader: Loader, program: Program, name: str) -> Iterator[_Place]:
    """Yield libraries loaded before all others that have the name, by their soname if not by that of their file."""
    variable = re.split(r"[ :]", program.environment.get("LD_PRELOAD", ""))
    text = read_start(tree, _PRELOAD_FILE, _LARGEST_PRELOAD).decode("utf-8", "replace")
    lines = [word for line in text.splitlines() for word in re.split(r"[ :\t]", line.partition("#")[0])]
    main = _main(tree, program)
    for source, words in (("LD_PRELOAD", variable), (_PRELOAD_FILE, lines)):
        for word in filter(None, words):
            if "/" not in word:
                found = _first(tree, loader, program, word, main)
            else:
                found = _absolute(_expanded(word, loader, main.origin), program)
            if found and (word == name or _elf(tree, found).soname == name):
                yield _Place(found, f"{source} names {word}")


def _is_usable(tree: Tree, loader: Loader, path: str) -> bool:
    return bool(chain(tree, path)) and _elf(tree, path).machine in (loader.machine, "")


def _searched(tree: Tree, loader: Loader, program: Program, name: str, asking: _Object) -> Iterator[_Place]:
    """Yield every path at which the loader looks for the object that asks: its RUNPATH counts for itself alone."""
    line = (asking, *asking.above)
    variable = program.environment.get("LD_LIBRARY_PATH", "")
    for text, separators, reason, origin in (
        *((one.elf.rpath, ":", f"RPATH of {one.path}", one.origin) for one in line if not asking.elf.runpath),
        (variable, "[:;]", "LD_LIBRARY_PATH", line[-1].origin),
        (asking.elf.runpath, ":", f"RUNPATH of {asking.path}", asking.origin),
    ):
        # An empty variable is as good as none; an empty part of one is the working folder.
        parts = re.split(separators, text)[:_MOST_FOLDERS] if text else []
        for part in parts:
            where = f"{reason} has {part}" if part else f"{reason} has an empty part: the working folder"
            folder = _absolute(_expanded(part, loader, origin) or ".", program)
            yield from (_Place(f"{one}/{name}", where) for one in loader.tried(folder))
    cached = _cached(tree, loader, name)
    defaults = () if asking.elf.no_defaults else loader.folders
    yield from (one for one in cached if defaults or one.path.rpartition("/")[0] not in loader.folders)
    for folder in defaults:
        yield from (_Place(f"{one}/{name}", "a default folder of the loader") for one in loader.tried(folder))


def _cached(tree: Tree, loader: Loader, name: str) -> Iterator[_Place]:
    """Yield the one entry of the loader's cache that counts: the best variant that the processor has, or the first."""
    entries = [
        one for one in parse_cache(read_start(tree, CACHE, _LARGEST_CACHE)) if one.name == name and one.is_64_bit
    ]
    ranks = {one.rpartition("/")[2]: number for number, one in enumerate(loader.variants) if "glibc-hwcaps/" in one}
    usable = [one for one in entries if one.variant in ("", *ranks)]
    usable.sort(key=lambda one: ranks.get(one.variant, len(ranks)))
    if usable:
        yield _Place(usable[0].path, f"the loader's cache {CACHE} names it")


def _expanded(text: str, loader: Loader, origin: str) -> str:
    values = {"ORIGIN": origin, "LIB": loader.token_lib, "PLATFORM": loader.machine}
    return _TOKENS.sub(lambda found: values[found[1] or found[2]], text)


def _absolute(path: str, program: Program) -> str:
    # Not normalised: a `..` behind a link is the link's target's.
    return (
        path if path.startswith("/") else posixpath.join(program.folder or "/", path) if path != "." else program.folder
    )


def _elsewhere(tree: Tree, loader: Loader, name: str, seen: Mapping[str, Candidate]) -> Iterator[_Place]:
    """Yield libraries of that name that the loader does not take by itself, wherever such libraries usually lie."""
    stem = name.removesuffix("1")
    known = {real for one in seen.values() for real in one.chain}
    versions = [one for one in tree.names("/usr/local") if _CUDA_FOLDER.fullmatch(one)]
    more = [f"/usr/local/{one}/{part}" for one in versions for part in ("compat", "lib64/stubs")]
    targets = [f"/usr/local/cuda/targets/{one}/lib/stubs" for one in tree.names("/usr/local/cuda/targets")]
    for folder in dict.fromkeys(tree.real_folder(one) for one in (*_KNOWN_FOLDERS, *more, *targets, *loader.folders)):
        stub = stem.removesuffix(".") if (folder or "").endswith("/stubs") else name
        names = tree.names(folder) if folder is not None else []
        yield from _unknown(tree, (f"{folder}/{one}" for one in names if one.startswith(stem) or one == stub), known)
    yield from _unknown(tree, tree.everywhere(stem), known)


def _unknown(tree: Tree, paths: Iterable[str], known: set[str]) -> Iterator[_Place]:
    """Yield the paths that lead to files not known before; these are known from then on."""
    for path in paths:
        reals = chain(tree, path)
        if reals and reals[-1] not in known:
            known.update(reals)
            yield _Place(path, "")
