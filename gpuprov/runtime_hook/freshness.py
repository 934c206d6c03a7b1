"""Whether specification, driver files and loaded module are of one version, and the one sentence if they are not.

The versions come from names of files and from the kernel; nothing is written. Every command says the same words.
"""

from __future__ import annotations

import posix

from .errors import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .specification import Specification

_MODULE = "/proc/driver/nvidia/version"
# systemd writes it in a system container: there is no module to change there.
CONTAINER = "/run/systemd/container"
_LONGEST = 4096


def disagreement(files: str, module: str, since: str = "") -> str:
    """Return how files and module differ; `since` is what is known of the change, such as ` since apt upgraded …`."""
    return f"the driver's files are {files}{since}, the loaded module is {module}"


def next_step(module: str, *, container: bool) -> str:
    """Return after which step files and module have one version; a system container's module is its host's."""
    if container:
        return f"run `gpuprov install -e gpuprov_driver_version={module}`: the module belongs to the container host"
    return "reboot, or run `gpuprov install`"


def require_current(specification: Specification, mounts: list[dict[str, Any]]) -> None:
    """Raise Refused if the specification is not of the loaded driver, or names files of it that are not there.

    Only files that have the driver's version in their names are looked for.
    """
    version = specification.host.get("driver", "")
    if not version:
        return
    ending = f".so.{version}"
    named = [mount["hostPath"] for mount in mounts if mount["hostPath"].endswith(ending)]
    missing = next((path for path in named if not _exists(path)), "")
    loaded = _loaded_line()
    if missing or (loaded and f" {version} " not in loaded):
        raise Refused(_reason(specification.path, version, missing, (named or [""])[0], _version_in(loaded)))


def _reason(path: str, version: str, missing: str, library: str, module: str) -> str:
    files = _installed(missing or library, version) or ("" if missing else version)
    if not files:
        return f"{missing}, a file of the driver, is gone: run `gpuprov install`"
    if module and module != files:
        return f"{disagreement(files, module)}: {next_step(module, container=_exists(CONTAINER))}"
    stale = f"{path} is of driver {version}, the driver is {files}"
    if files == version:
        stale = f"{path} names {missing or library}, which is gone"
    return f"{stale}: systemctl start gpuprov-refresh, or run `gpuprov install`"


def _installed(path: str, version: str) -> str:
    """Return the version of the library that has taken a library's place; the loader's link decides between several."""
    folder, _, name = path.rpartition("/")
    stem = name[: -len(version)]
    try:
        linked = posix.readlink(f"{folder}/{stem}1").rpartition("/")[2]
        names = [linked] if _exists(f"{folder}/{linked}") else []
        names = names if _is_version(linked[len(stem) :]) else posix.listdir(folder)
    except (OSError, ValueError):
        return ""
    found = [one[len(stem) :] for one in names if one.startswith(stem) and _is_version(one[len(stem) :])]
    return max(found, key=lambda text: [int(part) for part in text.split(".")], default="")


def _is_version(text: str) -> bool:
    parts = text.split(".")
    return len(parts) > 1 and all(part.isdigit() for part in parts)


def _loaded_line() -> str:
    try:
        handle = posix.open(_MODULE, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return posix.read(handle, _LONGEST).decode("utf-8", "replace").partition("\n")[0] + " "
    finally:
        posix.close(handle)


def _version_in(line: str) -> str:
    return next((word for word in line.split() if _is_version(word)), "")


def _exists(path: str) -> bool:
    try:
        posix.stat(path)
    except (OSError, ValueError):
        return False
    return True
