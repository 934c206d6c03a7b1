"""The container's own mounts in config.json: what they cover, and which of them are no volumes of the host's.

Everything of a host that is mounted into a container stays as it is: nothing is made or replaced there, whatever the
mount's options are (crun makes a volume read-only only after the prestart and createRuntime hooks). Exempt are file
systems that the engine made for this container alone: /dev, /proc, and other tmpfs.
"""

from __future__ import annotations

import posix
from typing import Any

from .config import at, mounts_of
from .errors import Refused
from .files import DIRECTORY, TYPE, normal_path, status_of
from .rootfs import Root, mount_id

_PRIVATE = ("tmpfs", "proc")
# What a kernel has no files of the host's in.
_WITHOUT_FILES = (*_PRIVATE, "sysfs", "mqueue", "devpts", "cgroup", "cgroup2")


class Volume:
    """A mount of config.json: its destination, its type ("bind" for every bind mount), and its source."""

    def __init__(self, destination: str, kind: str, source: str) -> None:
        self.destination = destination
        self.kind = kind
        self.source = source


def volumes_of(config: dict[str, Any], bundle: str) -> list[Volume]:
    """Return the mounts in the order in which they are made."""
    found = []
    for mount in mounts_of(config):
        destination, source = at(mount, str, "destination"), at(mount, str, "source")
        kind, words = mount.get("type"), at(mount, list, "options")
        if not destination:
            continue
        if kind == "bind" or "bind" in words or "rbind" in words:
            found.append(Volume(destination, "bind", source if source.startswith("/") else f"{bundle}/{source}"))
        else:
            found.append(Volume(destination, str(kind), source))
    return found


def cover(root: Root, volumes: list[Volume]) -> None:
    """Let the root be seen as it will be with the volumes mounted. Raises Refused if one covers the root itself.

    In the order that edits.py and the engines' own CDI code give them: by depth.
    """
    root.volume_over = lambda path: _volume_over(root, volumes, path)
    try:
        for volume in sorted(volumes, key=lambda one: normal_path(one.destination).count("/")):
            root.cover(volume.destination, volume.source if volume.kind == "bind" else "")
    except OSError as error:
        raise Refused(f"the container's root file system can't be used: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"config.json has a mount whose destination is not a path: {error}") from None


def watch(root: Root, volumes: list[Volume]) -> None:
    """Let the root, in which the volumes are mounted, tell them from the engine's own file systems.

    Raises Refused if one of them is mounted over the root itself, as crun does where an image's link says so.
    """
    for volume in volumes:
        source = status_of(volume.source) if volume.kind == "bind" else None
        if source and (source.st_dev, source.st_ino) == root.identity:
            raise Refused(f"the volume at {volume.destination} covers the container's root file system")
    root.volume_over = lambda path: _volume_over(root, volumes, path)
    known: list[set[bytes]] = []

    def allowed() -> set[bytes]:
        if not known:
            known.append(_private_mounts(root, volumes))
        return known[0]

    root.allowed_mounts = allowed


def mounts_to_make(root: Root, volumes: list[Volume], mounts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mounts whose files are not in the container anyway, because a volume brings them.

    Raises Refused for a mount below a volume: its target would be made there, on the host.
    """
    sources = [status_of(volume.source) for volume in volumes if volume.kind == "bind"]
    if not any(source and source.st_mode & TYPE == DIRECTORY for source in sources):
        return mounts
    found = []
    for mount in mounts:
        path = mount["containerPath"]
        real = root.resolve(path)
        # A mount to the very same place is replaced.
        replaced = any(normal_path(volume.destination) == normal_path(path) for volume in volumes)
        if replaced or not root.cover_of(real):
            found.append(mount)
        elif not is_same_file(root, real, posix.stat(mount["hostPath"])):
            raise Refused(f"{path} can't be put into the container: {root.volume_over(real)}")
    return found


def is_same_file(root: Root, path: str, wanted: posix.stat_result) -> bool:
    """Say whether a file of the host is in the container already, at this path."""
    found = root.status(path)
    return found is not None and (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)


def _volume_over(root: Root, volumes: list[Volume], path: str) -> str:
    """Return what to say of the mount in which a path without links is."""
    for volume in reversed(volumes):
        try:
            real = root.resolve(volume.destination)
        except (OSError, ValueError):
            continue
        if path == real or path.startswith(f"{real}/"):
            return f"it is in the volume at {volume.destination}, and nothing is written into volumes"
    return "it is on another mount than the root file system"


def _private_mounts(root: Root, volumes: list[Volume]) -> set[bytes]:
    """Return the ids of the mounts that are the engine's own for this container.

    Right on the root's mount, reached over no link: then what is mounted there is one of config.json's mounts itself.
    It is none of the volumes if it is on another file system than their sources.
    """
    of_volumes = [volume for volume in volumes if volume.kind not in _WITHOUT_FILES]
    sources = [status_of(volume.source) for volume in of_volumes if volume.kind == "bind"]
    devices = {source.st_dev for source in sources if source}
    others = {root.resolve(volume.destination) for volume in of_volumes if volume.kind != "bind"}
    found = set()
    for volume in volumes:
        path = normal_path(volume.destination)
        if volume.kind not in _PRIVATE or path in others:
            continue
        try:
            handle, above = root.open_directory(path), root.open_directory(path.rpartition("/")[0])
            is_on_root = root.real_path(path) == path and mount_id(above) == root.mount
            if is_on_root and posix.fstat(handle).st_dev not in devices:
                found.add(mount_id(handle))
        except OSError:
            continue
    return found
