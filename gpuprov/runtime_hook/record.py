"""Record what each running container was given, in a root-owned file, for `gpuprov hook explain`. Never fails a start.

config.json no longer says it: the runtime has rewritten it by then. No value of the container's environment is kept,
for it may hold secrets: names of this host's devices and files alone. `delete` removes the file; so does the next start
where a container has gone without it (plain runc with the prestart hook, a killed engine).
"""

from __future__ import annotations

import posix

from . import jsonio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .decision import Decision

FOLDER = "/run/gpuprov/containers"
FORMAT = 1
_LONGEST_NAME = 128
# At one start: each is read and parsed.
_MOST_LOOKED_AT = 8
_MOST_BYTES = 1 << 20
_CREATE = posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_NOFOLLOW | posix.O_CLOEXEC
_READ = posix.O_RDONLY | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC


def keep(container: str, bundle: str, decision: Decision, way: str) -> None:
    """Record what a container was given by `way` (runtime, hook), and remove the files of ended containers."""
    if not is_name(container):
        return
    bundle = bundle if bundle.startswith("/") else f"{posix.getcwd()}/{bundle}"
    try:
        _write(
            container,
            jsonio.dumps({"format": FORMAT, "container": container, "bundle": bundle, **_told(decision, way)}),
        )
        _sweep(container)
    except (OSError, ValueError):
        pass  # a full disk, or a rootless engine: the container is none the worse for it


def is_name(container: str) -> bool:
    """Say whether this is a container's id as low-level runtimes take it; it becomes a file's name."""
    return (
        0 < len(container) <= _LONGEST_NAME
        and container[0] != "."
        and all(sign.isascii() and (sign.isalnum() or sign in "_+-.") for sign in container)
    )


def _told(decision: Decision, way: str) -> dict[str, Any]:
    """Return what was decided. What the host does not have was refused before: so all names here are the host's."""
    request, edits = decision.request, decision.equipment.edits
    return {
        "way": way, "legacy": request.legacy, "privileged": request.privileged,
        "devices": list(request.devices or [""]), "capabilities": sorted(request.capabilities),
        "requirements": len(request.requirements), "imex_channels": request.imex_channels,
        "mig_config": bool(request.mig_config), "mig_monitor": bool(request.mig_monitor),
        "nodes": [node["path"] for node in edits.get("deviceNodes") or ()],
        "files": [mount["containerPath"] for mount in edits.get("mounts") or ()],
        "links": [f"{target}::{path}" for target, path in decision.equipment.links],
        "decisions": [*request.decisions, *decision.equipment.decisions],
    }  # fmt: skip


def read(container: str) -> dict[str, Any] | None:
    """Return the record of a container, None if there is none. Raises OSError if it can't be read."""
    try:
        return parse(_content(f"{FOLDER}/{container}"))
    except FileNotFoundError:
        return None


def parse(text: str) -> dict[str, Any] | None:
    """Return what a file says, None for one of another version, or none of ours."""
    try:
        document = jsonio.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) and document.get("format") == FORMAT else None


def names() -> list[str]:
    """Return the ids of all containers with a record. Raises OSError if the folder can't be read."""
    try:
        return sorted(name for name in posix.listdir(FOLDER) if is_name(name))
    except FileNotFoundError:
        return []


def _content(path: str) -> str:
    handle = posix.open(path, _READ)
    try:
        return posix.read(handle, _MOST_BYTES).decode("utf-8", "replace")
    finally:
        posix.close(handle)


def _write(container: str, text: str) -> None:
    for folder, mode in ((FOLDER.rpartition("/")[0], 0o755), (FOLDER, 0o700)):
        try:
            posix.mkdir(folder, mode)
        except FileExistsError:
            pass
    temporary = f"{FOLDER}/.{container}.{posix.getpid()}"
    handle = posix.open(temporary, _CREATE, 0o600)
    try:
        try:
            content = text.encode()
            while content:
                content = content[posix.write(handle, content) :]
        finally:
            posix.close(handle)
        posix.rename(temporary, f"{FOLDER}/{container}")
    except OSError:
        posix.unlink(temporary)
        raise


def _sweep(own: str) -> None:
    """Remove the files of containers whose bundle is gone; where there are many, some at each start."""
    others = [name for name in names() if name != own]
    first = posix.getpid() % max(len(others), 1)
    for name in [*others[first:], *others[:first]][:_MOST_LOOKED_AT]:
        found = read(name)
        try:
            if found is None:
                posix.unlink(f"{FOLDER}/{name}")
            else:
                posix.stat(f"{found.get('bundle')}/config.json")
        except (FileNotFoundError, NotADirectoryError):
            try:
                posix.unlink(f"{FOLDER}/{name}")
            except FileNotFoundError:
                pass
