"""Which program does the containers' work: runc, crun, or what the settings name; the launcher keeps the answer."""

from __future__ import annotations

import posix
import sys

from .settings import read_settings

CACHE = "/run/gpuprov/low-level"
# Where root's programs are; a caller's PATH decides nothing.
FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


def find(names: tuple[str, ...]) -> str:
    """Return the path of the first low-level runtime that is there, nothing for none; a name with a slash is a path."""
    for name in names:
        for path in [name] if "/" in name else [f"{folder}/{name}" for folder in FOLDERS]:
            if posix.access(path, posix.X_OK):
                return path
    return ""


def keep(cache: str = CACHE) -> None:
    """Write, for a shell, which low-level runtime it is. Ends the program with a sentence if there is none."""
    settings, _ = read_settings()
    path = find(settings.runtimes)
    if not path:
        sys.exit(f"gpuprov: none of the low-level runtimes {', '.join(settings.runtimes)} is installed")
    folder = cache.rpartition("/")[0]
    try:
        posix.mkdir(folder, 0o755)
    except FileExistsError:
        pass
    temporary = f"{cache}.{posix.getpid()}"
    quoted = path.replace("'", "'\\''")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(f"low_level='{quoted}'\n")
    posix.rename(temporary, cache)
