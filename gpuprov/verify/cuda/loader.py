"""The dynamic loader of a root file system, as it is found there: whose it is, and in which folders it looks by itself.

Its own file says both: glibc's loader has its default folders and its names of optimised variants as text.
Source: glibc, elf/dl-load.c (system_dirs), sysdeps/x86/dl-hwcap.h, manual "Hardware capabilities"; ld.so(8).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gpuprov.verify.cuda.trees import Tree, chain, read_start

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
