"""The interpreters of this machine on which gpuprov's host side is tried: each version from 3.9 on, once."""

from __future__ import annotations

import re
from pathlib import Path

from tests.simgpu import cache, debian

# The oldest, what Debian 12 and 13 have.
NAMED = ("3.9", "3.11", "3.13")
_FOLDERS = (Path("/usr/bin"), Path("/usr/local/bin"), *sorted((Path.home() / ".pyenv/versions").glob("*/bin")))


def _here(pattern: str) -> dict[str, str]:
    """Return version → path of the interpreters whose version matches; the first folder's where several have one."""
    found: dict[str, str] = {}
    for path in (path for folder in _FOLDERS for path in sorted(folder.glob("python3.*"))):
        version = path.name[len("python") :]
        if re.fullmatch(pattern, version):
            found.setdefault(version, str(path))
    return dict(sorted(found.items(), key=lambda item: int(item[0].split(".")[1])))


PYTHONS = tuple(_here(r"3\.(9|[1-9]\d)").values())
TOO_OLD = tuple(_here(r"3\.[678]").values())
ABSENT = tuple(version for version in NAMED if not any(path.endswith(f"python{version}") for path in PYTHONS))

# What Debian's unstable release has, newer than any stable one's.
NEWEST = "3.14"
_NEWEST_PACKAGES = (
    f"python{NEWEST}-minimal", f"libpython{NEWEST}-minimal", f"libpython{NEWEST}-stdlib",
    "libc6", "zlib1g", "libexpat1",
)  # fmt: skip
# It needs a newer C library than this machine has: that one's own loader starts it.
_STARTER = """#!/bin/sh
exec {root}/usr/lib64/ld-linux-x86-64.so.2 --library-path {root}/usr/lib/x86_64-linux-gnu \\
    --argv0 {root}/usr/bin/python{version} {root}/usr/bin/python{version} "$@"
"""


def newest() -> str:
    """Return the path of Debian's newest Python, fetched once. Raises BuildError where that can't be had."""

    def fetch(folder: Path) -> None:
        debian.fetch(folder, "sid", "main", _NEWEST_PACKAGES)

    folder = cache.built("python", cache.digest_of(("sid", *_NEWEST_PACKAGES)), fetch)
    starter = folder / f"python{NEWEST}"
    starter.write_text(_STARTER.format(root=folder / "unpacked", version=NEWEST))
    starter.chmod(0o755)
    return str(starter)
