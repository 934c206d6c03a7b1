"""Containers and images that docker and podman know: the recorded decision of a running container, an image's identity.

Reader only.
"""

from __future__ import annotations

from typing import Any

from gpuprov.core.system import System, sha256_of
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.runtime_hook import record

_ENGINES = ("docker", "podman")
_SECONDS = 20
_STATE = "{{.Id}} {{.State.Running}}"


def decision_of(system: System, container: str) -> dict[str, Any]:
    """Return the record of a container. Raises GpuprovError if there is no such container or no record."""
    known = _names(system)
    identifier, engine, runs = _identifier(system, container, known)
    if engine and not runs:
        # plain runc keeps the hook's file until the next start: it is not valid for a container that ended.
        raise GpuprovError(
            f"the container {container} does not run, and a decision is kept only while one does",
            f"{engine} inspect {container}: State.Running is false",
            f"{engine} start {container}, then run this command again",
        )
    found = _read(system, identifier) if identifier in known else None
    if found is not None:
        return found
    if engine:
        raise GpuprovError(
            f"no decision is kept for {container}",
            f"{engine} knows it as {identifier}; {record.FOLDER} does not have it",
            "it asked for no GPU, or the engine itself gave it devices by CDI: "
            f"{engine} inspect {container}",
        )  # fmt: skip
    raise GpuprovError(
        f"there is no container {container} with GPUs on this host",
        f"kept in {record.FOLDER}: {', '.join(one[:12] for one in known) or 'none'}",
        "docker ps, or podman ps, shows names",
        exit_code=ExitCode.USAGE,
    )


def decision_of_bundle(bundle: str) -> dict[str, Any] | None:
    """Return the record of a bundle's container, None if there is none or the user may not read it."""
    try:
        found = [record.read(name) for name in record.names()]
    except OSError:
        return None
    return next((one for one in found if one and one.get("bundle") == bundle.rstrip("/")), None)


def _names(system: System) -> list[str]:
    try:
        return [name for name in system.list_directory(record.FOLDER) if record.is_name(name)]
    except PermissionError as error:
        raise GpuprovError(
            "what containers were given is for root to read", str(error), "put sudo before it", exit_code=ExitCode.USAGE
        ) from None


def _read(system: System, identifier: str) -> dict[str, Any] | None:
    return record.parse(system.read_text(f"{record.FOLDER}/{identifier}") or "")


def _identifier(system: System, container: str, known: list[str]) -> tuple[str, str, bool]:
    """Return a container's id, the engine that knows it, and whether it runs there.

    The engine is "" for a full id or a prefix that only the files contain.
    """
    if container in known:
        return container, "", False
    for engine in _ENGINES:
        if system.which(engine):
            done = system.run((engine, "inspect", "--type", "container", "--format", _STATE, "--", container),
                              timeout=_SECONDS)  # fmt: skip
            words = done.stdout.split()
            if done.ok and len(words) == 2:
                return words[0], engine, words[1] == "true"
    begun = [one for one in known if one.startswith(container)]
    return begun[0] if len(begun) == 1 else "", "", False


# Not docker's image id: that depends on how a daemon stores images (with containerd's store it is another). In podman's
# template the time is a value, which only JSON shows as docker does.
_IDENTITY = {
    "docker": "{{.Created}} {{json .RootFS.Layers}}",
    "podman": "{{json .Created}} {{json .RootFS.Layers}}",
}


def image_identity(system: System, reference: str, engine: str = "docker") -> str:
    """Return an identity that is the same wherever the image is loaded, or "" if docker or podman does not have it."""
    done = system.run((engine, "image", "inspect", "--format", _IDENTITY[engine], reference))
    created, blank, layers = done.stdout.strip().partition(" ")
    return sha256_of(f"{created.strip(chr(34))}{blank}{layers}".encode()) if done.ok else ""
