"""The interpreters on which gpuprov's host side is tried: those of Debian's suites, fetched once each."""

import shutil
from pathlib import Path

from tests.simgpu import cache, debian
from tests.triplet import TRIPLET

# Version → suite, and the libraries that its parts want of that suite.
_SUITES = {
    "3.9": ("bullseye", "libffi7", "libssl1.1"), "3.11": ("bookworm", "libffi8", "libssl3"),
    "3.13": ("trixie", "libffi8", "libssl3t64"), "3.15": ("sid", "libffi8", "libssl3t64"),
}  # fmt: skip
VERSIONS = ("3.9", "3.11", "3.13")
# What Debian's unstable release has, newer than any stable one's.
NEWEST = "3.15"
_LIBRARIES = ("libc6", "libgcc-s1", "zlib1g", "libexpat1", "libbz2-1.0", "liblzma5")
# It may need a newer C library than this machine has: its own loader starts it.
# tests/spoilt.py preloads libraries that are of this machine's C library.
_STARTER = '#!/bin/sh\nunset LD_PRELOAD\nexec {loader} --library-path {libraries} {argv0} {program} "$@"\n'
_TOO_OLD = "3.8.20"


def interpreter(version: str) -> str:
    """Return the path of a Python of Debian's. Raises BuildError where that can't be had."""
    suite, *libraries = _SUITES[version]
    names = (f"python{version}-minimal", f"libpython{version}-minimal", f"libpython{version}-stdlib")
    packages = (*names, *libraries, *_LIBRARIES)

    def fetch(folder: Path) -> None:
        debian.fetch(folder, suite, "main", packages)
        _prepare(folder / "unpacked", version)

    folder = cache.built("python", cache.digest_of((suite, *packages, _STARTER, "4")), fetch)
    return str(folder / f"unpacked/usr/bin/python{version}")


def too_old() -> str:
    """Return a stand-in for an older Python, which no suite of Debian's archive has: 3.9 that says that it is 3.8."""

    def build(folder: Path) -> None:
        shutil.copytree(Path(interpreter("3.9")).parents[2], folder / "unpacked", symlinks=True)
        numbers = (*map(int, _TOO_OLD.split(".")), "final", 0)
        _at_each_start(folder / "unpacked", f"sys.version_info, sys.version = {numbers}, '{_TOO_OLD} (a stand-in)'")

    folder = cache.built("python", cache.digest_of((interpreter("3.9"), _TOO_OLD)), build)
    return str(folder / "unpacked/usr/bin/python3.9")


def _prepare(root: Path, version: str) -> None:
    """Put a script in the interpreter's place that starts it by its own loader, wherever the folder is."""
    libraries = [folder for folder in (root / f"usr/lib/{TRIPLET}", root / f"lib/{TRIPLET}") if folder.exists()]
    loader = next(path for folder in libraries for path in folder.glob("ld-*.so*") if not path.is_symlink())
    program = root / f"usr/bin/python{version}"
    real = program.rename(program.with_name(f"real-{program.name}"))
    here = {path: f'"${{0%/usr/bin/*}}"/{path.relative_to(root)}' for path in (loader, real, *libraries)}
    # Python finds its library, and itself, by its name. The loader of bullseye has no --argv0.
    argv0 = "" if version == "3.9" else '--argv0 "$0"'
    program.write_text(
        _STARTER.format(
            loader=here[loader], libraries=":".join(here[one] for one in libraries), argv0=argv0, program=here[real]
        )
    )
    program.chmod(0o755)
    if not argv0:
        _at_each_start(root, 'sys.executable = sys.executable.replace("/real-", "/")')


def _at_each_start(root: Path, line: str) -> None:
    """Have each start of 3.9 run a line, with -I and -S too: all import this module."""
    with (root / "usr/lib/python3.9/encodings/__init__.py").open("a") as file:
        file.write(f"\n{line}\n")
