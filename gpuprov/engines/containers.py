"""Containers and images that docker and podman know: the recorded decision of a running container, an image's identity.

Reader only.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from gpuprov.core.system import System, sha256_of
from gpuprov.protocol.codec import json_at
from gpuprov.protocol.errors import GpuprovError, UsageError, require_format
from gpuprov.runtime_hook import record

_ENGINES = ("docker", "podman")
_SECONDS = 20
_STATE = "{{.Id}} {{.State.Running}}"
# How swarm names the container of a service: slot or node, and the task.
_SWARM_TASK = re.compile(r"(.+)\.(\d+|[a-z0-9]{25})\.[a-z0-9]{25}")


def stop_command(names: Collection[str], engine: str = "docker") -> str:
    """Return the commands that end containers of one host: swarm would start another one for a task that is stopped."""
    tasks = [match for name in names if (match := _SWARM_TASK.fullmatch(name))]
    others = [name for name in names if not _SWARM_TASK.fullmatch(name)]
    commands = [f"{engine} stop {' '.join(others)}"] if others else []
    # A global service can't be scaled; a node that is drained ends the tasks of every service.
    if nodes := sorted({task[2] for task in tasks if not task[2].isdecimal()}):
        commands.append(f"docker node update --availability drain {nodes[0]}")
    elif services := sorted({f"{task[1]}=0" for task in tasks}):
        commands.append(f"docker service scale {' '.join(services)}")
    return " and ".join(commands)


def decision_of(system: System, container: str) -> dict[str, Any]:
    """Return the record of a container. Raises GpuprovError if there is no such container or no record."""
    try:
        known = [name for name in system.list_directory(record.FOLDER) if record.is_name(name)]
    except PermissionError as error:
        raise UsageError("what containers were given is for root to read", str(error), "put sudo before it") from None
    identifier, engine, runs = _identifier(system, container, known)
    if engine and not runs:
        # plain runc keeps the hook's file until the next start: it is not valid for a container that ended.
        what = f"the container {container} does not run, and a decision is kept only while one does"
        seen = f"{engine} inspect {container}: State.Running is false"
        raise GpuprovError(what, seen, f"{engine} start {container}, then run this command again")
    if identifier in known:
        text = system.read_text(f"{record.FOLDER}/{identifier}") or ""
        require_format(json_at(text), record.FORMAT, f"the decision for {container}", f"{record.FOLDER}/{identifier}")
        if found := record.parse(text):
            return found
    if engine:
        what = f"no decision is kept for {container}"
        step = f"it asked for no GPU, or the engine itself gave it devices by CDI: {engine} inspect {container}"
        raise GpuprovError(what, f"{engine} knows it as {identifier}; {record.FOLDER} does not have it", step)
    seen = f"kept in {record.FOLDER}: {', '.join(one[:12] for one in known) or 'none'}"
    step = "docker ps, or podman ps, shows names"
    raise UsageError(f"there is no container {container} with GPUs on this host", seen, step)


def decision_of_bundle(bundle: str) -> dict[str, Any] | None:
    """Return the record of a bundle's container, None if there is none or the user may not read it."""
    try:
        found = [record.read(name) for name in record.names()]
    except OSError:
        return None
    return next((one for one in found if one and one.get("bundle") == bundle.rstrip("/")), None)


def _identifier(system: System, container: str, known: list[str]) -> tuple[str, str, bool]:
    """Return a container's id, the engine that knows it, and whether it runs there.

    The engine is "" for a full id or a prefix that only the files contain.
    """
    if container in known:
        return container, "", False
    for engine in filter(system.which, _ENGINES):
        asked = (engine, "inspect", "--type", "container", "--format", _STATE, "--", container)
        done = system.run(asked, timeout=_SECONDS)
        words = done.stdout.split()
        if done.ok and len(words) == 2:
            return words[0], engine, words[1] == "true"
    begun = [one for one in known if one.startswith(container)]
    return begun[0] if len(begun) == 1 else "", "", False


# Not docker's image id: that depends on how a daemon stores images (with containerd's store it is another). In podman's
# template the time is a value, which only JSON shows as docker does.
_IDENTITY = {"docker": "{{.Created}} {{json .RootFS.Layers}}", "podman": "{{json .Created}} {{json .RootFS.Layers}}"}


def image_identity(system: System, reference: str, engine: str = "docker") -> str:
    """Return an identity that is the same wherever the image is loaded, or "" if docker or podman does not have it."""
    done = system.run((engine, "image", "inspect", "--format", _IDENTITY[engine], reference))
    created, blank, layers = done.stdout.strip().partition(" ")
    return sha256_of(f"{created.strip(chr(34))}{blank}{layers}".encode()) if done.ok else ""
