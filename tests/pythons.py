"""The interpreters of this machine on which gpuprov's host side is tried: each version from 3.9 on, once."""

from __future__ import annotations

import re
from pathlib import Path

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
