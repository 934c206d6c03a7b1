"""Which program does the containers' work: runc, crun, or what the settings name; the launcher keeps the answer."""

from __future__ import annotations

import posix
import sys

from .settings import SETTINGS_PATH, read_settings

CACHE = "/run/gpuprov/low-level"
# Where root's programs are; a caller's PATH decides nothing.
FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_CREATE = posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_NOFOLLOW | posix.O_CLOEXEC


def find(names: tuple[str, ...]) -> str:
    """Return the path of the first low-level runtime that is there, nothing for none; a name with a slash is a path."""
    for name in names:
        for path in [name] if "/" in name else [f"{folder}/{name}" for folder in FOLDERS]:
            if posix.access(path, posix.X_OK):
                return path
    return ""


def keep(arguments: list[str], cache: str = CACHE) -> None:
    """Print which low-level runtime it is, and write it for a shell; end with a sentence if there is none.

    `arguments`: what stood behind the runtime's name; they say where the engine looks for that sentence.
    """
    settings, _ = read_settings()
    path = find(settings.runtimes)
    if not path:
        names = ", ".join(settings.runtimes)
        from .main import refuse  # here alone: most starts need no more than a path

        refuse(
            arguments,
            f"gpuprov: none of the low-level runtimes {names} is installed: install one, "
            f"or change runtimes in {SETTINGS_PATH}",
        )
    try:
        _write(cache, path)
    except OSError:
        pass  # a full disk, or a rootless engine: then the next start looks for it again
    sys.stdout.write(f"{path}\n")


def _write(cache: str, path: str) -> None:
    try:
        posix.mkdir(cache.rpartition("/")[0], 0o755)
    except FileExistsError:
        pass
    temporary = f"{cache}.{posix.getpid()}"
    quoted = path.replace("'", "'\\''")
    # A shell of root's reads it: nobody else may write it, whatever the caller's umask is.
    handle = posix.open(temporary, _CREATE, 0o644)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(f"low_level='{quoted}'\n")
        posix.rename(temporary, cache)
    except OSError:
        posix.unlink(temporary)
        raise
