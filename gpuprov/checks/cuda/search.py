"""Where the dynamic loader looks for a library, in its order, and what it takes. Runs nothing.

Source: glibc, elf/dl-load.c (_dl_map_object, open_verify), elf/dl-cache.c; ld.so(8). Not examined: RPATH and RUNPATH of
programs, subfolders for the processor (glibc-hwcaps), the soname of preloaded libraries, setuid programs.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Mapping

from gpuprov.cdi.files import CACHE, parse_cache
from gpuprov.checks.cuda.files import ELF_HEADER, chain, names, read
from gpuprov.facts.driver import PRELOAD
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.runtime_hook.rootfs import Root

LIBCUDA, LIBNVIDIA_ML = "libcuda.so.1", "libnvidia-ml.so.1"
GLIBC, MUSL = "glibc", "musl"
_GLIBC = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}
_MUSL = ("/lib/ld-musl-x86_64.so.1", "/lib/ld-musl-aarch64.so.1")
_MACHINES = {62: "x86_64", 183: "aarch64", 3: "i386", 40: "arm"}
# Of bounded length, and begun once in each run of such characters: hostile files must not take long.
_FOLDER_LIST = re.compile(rb"(?:(?<![\w.+/-])/[\w.+/-]{1,200}/\0){2,8}")
# For a loader whose file names none: /usr/lib/MULTIARCH is Debian's, the others everybody's.
_USUAL_FOLDERS = ("/lib/{0}-linux-gnu", "/usr/lib/{0}-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
_LARGEST = 8 << 20
_LARGEST_PRELOAD = 64 << 10
_MOST_FOLDERS = 1000
_VERSION = re.compile(r"\.so\.(\d{2,}(?:\.\d+)+)$")
# Where libraries lie that the loader does not find by itself: CUDA's stubs and compatibility libraries, Conda's, those
# of NVIDIA's older images, other distributions' folders.
_KNOWN_FOLDERS = (
    "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/local/lib", "/usr/lib/wsl/lib", "/usr/lib64", "/usr/lib",
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib/x86_64-linux-gnu/nvidia/current",
)  # fmt: skip
_FOLDERS_OF_CUDA = ("compat", "lib64", "lib64/stubs", "lib", "lib/stubs")


@dataclass(frozen=True)
class Program:
    """What decides a search beside the files: the program's environment and its working folder."""

    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = "/"


@dataclass(frozen=True)
class Loader:
    """A loader: `library` is glibc, musl or nothing; `folders` are those that it searches by default."""

    path: str = ""
    library: str = ""
    machine: str = ""
    folders: tuple[str, ...] = ()


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
class Libraries:
    """The libraries of one name: the one that wins, None for none, and all others in the loader's order."""

    name: str
    winner: Candidate | None
    others: tuple[Candidate, ...]


def find_loader(root: Root) -> Loader:
    """Return the loader of 64-bit programs: glibc's before musl's, this machine's before that of another one."""
    for machine, path in sorted(_GLIBC.items(), key=lambda one: one[0] != os.uname().machine):
        content = read(root, path, _LARGEST)
        if content is not None:
            lists = (found[0].rstrip(b"\0").split(b"\0") for found in _FOLDER_LIST.finditer(content))
            stated: list[bytes] = next((one for one in lists if all(b"lib" in folder for folder in one)), [])
            own = tuple(str(folder, "ascii").rstrip("/") for folder in stated)
            return Loader(path, GLIBC, machine, own or tuple(one.format(machine) for one in _USUAL_FOLDERS))
    musl = next((path for path in _MUSL if chain(root, path)), "")
    return Loader(musl, MUSL) if musl else Loader()


def search(root: Root, loader: Loader, program: Program, name: str) -> Libraries:
    """Return what the loader takes for a name such as libcuda.so.1, and every other that lies in the root."""
    winner: Candidate | None = None
    others: list[Candidate] = []
    for path, reason in _places(root, loader, program, name):
        links = chain(root, path)
        if not links:
            continue
        machine, fault = _header(read(root, path, ELF_HEADER))
        version = next((found[1] for one in reversed(links) if (found := _VERSION.search(one))), "")
        stub, compat = (any(part in one for one in (path, *links)) for part in ("/stubs/", "/compat/"))
        one = Candidate(path, links, reason, version, fault, stub, compat)
        if machine not in ("", loader.machine):
            others.append(replace(one, fault=f"for {machine}: the loader passes over it"))
        elif winner is None and reason:
            winner = one
        else:
            others.append(one)
    # Each other file once, by the first of its paths.
    reals = {one.chain[-1]: one for one in reversed(others)}
    if winner is not None:
        reals.pop(winner.chain[-1], None)
    return Libraries(name, winner, tuple(one for one in others if reals.get(one.chain[-1]) is one))


def _header(content: bytes | None) -> tuple[str, str]:
    """Return for which machine a library is, and why the loader stops at it; "" if unknown, or if it does not."""
    if content is None:
        return "", "it can't be read"
    if len(content) < ELF_HEADER:
        return "", "file too short"
    if not content.startswith(b"\x7fELF"):
        return "", "invalid ELF header"
    return _MACHINES.get(int.from_bytes(content[18:20], "little"), "another machine"), ""


def _places(root: Root, loader: Loader, program: Program, name: str) -> Iterator[tuple[str, str]]:
    """Yield every path at which the loader would look, in its order, with the reason; then the others, without."""
    if loader.library == GLIBC:
        yield from _preloaded(root, program, name)
        variable = program.environment.get("LD_LIBRARY_PATH", "")
        # An empty variable is as good as none; an empty part of one is the working folder.
        for part in re.split("[:;]", variable)[:_MOST_FOLDERS] if variable else ():
            reason = f"LD_LIBRARY_PATH has {part or 'an empty part: the working folder'}"
            yield f"{_absolute(part, program).rstrip('/')}/{name}", reason
        cached = parse_cache(read(root, CACHE, _LARGEST) or b"")
        # The first entry counts alone. Those for some processors only are left out.
        entries = [one.path for one in cached if one.name == name and one.is_64_bit and not one.variant]
        yield from ((path, f"the loader's cache {CACHE} names it") for path in entries[:1])
        yield from ((f"{folder}/{name}", "a default folder of the loader") for folder in loader.folders)
    yield from ((path, "") for path in _elsewhere(root, loader, name))


def _preloaded(root: Root, program: Program, name: str) -> Iterator[tuple[str, str]]:
    """Yield libraries loaded before all others, by their file's name; one without a path is searched as any other."""
    text = (read(root, PRELOAD, _LARGEST_PRELOAD) or b"").decode("utf-8", "replace")
    lines = " ".join(line.partition("#")[0] for line in text.splitlines())
    for source, words in (("LD_PRELOAD", program.environment.get("LD_PRELOAD", "")), (PRELOAD, lines)):
        for word in re.split(r"[ :\t]+", words):
            folder, _, file = word.rpartition("/")
            if folder and file.startswith(name.removesuffix(".1")):
                yield _absolute(word, program), f"{source} names {word}"


def _absolute(path: str, program: Program) -> str:
    # Not normalised: a `..` behind a link is the link's target's.
    return posixpath.join(program.folder or "/", path)


def _elsewhere(root: Root, loader: Loader, name: str) -> Iterator[str]:
    """Yield libraries of that name that the loader does not take by itself, wherever such libraries usually lie."""
    toolkits = (f"/usr/local/{one}" for one in names(root, "/usr/local") if re.fullmatch(r"cuda(-\d+(\.\d+)?)?", one))
    prefixes = ["/opt/conda", *toolkits]
    prefixes += [f"{prefix}/targets/{one}" for prefix in prefixes for one in names(root, f"{prefix}/targets")]
    of_cuda = (f"{prefix}/{folder}" for prefix in prefixes for folder in _FOLDERS_OF_CUDA)
    for folder in (*_KNOWN_FOLDERS, *of_cuda, *loader.folders):
        for file in names(root, folder):
            if file.startswith(name.removesuffix("1")) or (folder.endswith("/stubs") and f"{file}.1" == name):
                yield f"{folder}/{file}"
