"""A crun newer than Debian 12's: that of Debian 13 with its own libraries, on any machine."""

import shutil
import subprocess
from pathlib import Path

from tests.simgpu import cache, debian

_SUITE = "trixie"
_PACKAGES = ("crun", "libc6", "libcap2", "libseccomp2", "libsystemd0", "libyajl2", "libgcc-s1")


def newer_crun(folder: Path) -> str:
    """Write it into a folder and return its path. It executes itself again, so its file names loader and libraries."""

    def fetch(into: Path) -> None:
        debian.fetch(into, _SUITE, "main", _PACKAGES)

    root = cache.built("crun", cache.digest_of((_SUITE, *_PACKAGES)), fetch) / "unpacked/usr"
    libraries = root / "lib/x86_64-linux-gnu"
    program = shutil.copy(root / "bin/crun", folder / "newer-crun")
    words = ("--set-interpreter", libraries / "ld-linux-x86-64.so.2", "--force-rpath", "--set-rpath", libraries)
    subprocess.run(("patchelf", *words, program), check=True, timeout=60)
    return str(program)
