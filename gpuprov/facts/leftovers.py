"""Remains of nvidia-docker 1 and 2 on a host, and who still uses them. Reads only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpuprov.core.system import System
from gpuprov.packages import retired
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH

if TYPE_CHECKING:
    from gpuprov.engines.docker import DockerFacts
    from gpuprov.packages.interface import PackageFacts, PackageManager

PLUGIN = "nvidia-docker"
# The command: theirs, or gpuprov's.
NVIDIA_DOCKER = "/usr/bin/nvidia-docker"
UNIT = "nvidia-docker.service"
FOLDER = "/var/lib/nvidia-docker"
# From nvidia-docker 1's packages, and from its archive, which users unpack by hand.
_FILES = (
    NVIDIA_DOCKER, "/usr/bin/nvidia-docker-plugin",
    "/usr/local/bin/nvidia-docker", "/usr/local/bin/nvidia-docker-plugin",
    f"/etc/systemd/system/{UNIT}", f"/lib/systemd/system/{UNIT}", "/etc/init/nvidia-docker.conf",
    "/etc/default/nvidia-docker", "/etc/docker/plugins/nvidia-docker.spec",
    "/usr/lib/docker/plugins/nvidia-docker.spec",
)  # fmt: skip
# Names of nvidia-docker 1; a site's own volume may begin in the same way.
_VOLUME = re.compile(r"nvidia_driver_[0-9][0-9.]*\Z")
# Configuration files of engines besides docker.
_ENGINE_FILES = ("/etc/containerd/config.toml", "/etc/crio/crio.conf", "/etc/containers/containers.conf")
_ENGINE_FOLDERS = ("/etc/containerd/conf.d", "/etc/crio/crio.conf.d", "/etc/containers/containers.conf.d")
_HOOK_FOLDERS = ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d")
_PROGRAM = re.compile(r"[\w./-]*nvidia-container-(runtime|toolkit|cli)[\w.-]*")
_SECONDS = 30
_WHAT = "docker does not tell which containers use what nvidia-docker has left"
_NEXT = "systemctl status docker"


@dataclass(frozen=True)
class Volume:
    """A volume of nvidia-docker 1; `containers`: those that use it, each with its state."""

    name: str
    driver: str
    containers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Leftovers:
    """Remains of nvidia-docker besides packages and repositories, which are among other facts.

    `files`: those that no package owns. `unit`: the state of its service (`active`, `inactive`), "" without one.
    `folder`: /var/lib/nvidia-docker exists. `has_settings`: NVIDIA's config.toml exists. `dead_runtimes`: NVIDIA's in
    docker's configuration whose program is missing. `users`: file → NVIDIA's programs that an engine uses by it.
    `needed_by`: package → others that need it. Of docker: `volumes`, None if it was not queried; `unseen`: volumes that
    exist while docker does not run; `running`: containers that run with one of NVIDIA's programs; `folder_users`: those
    that mount something below /var/lib/nvidia-docker by its path.
    """

    files: tuple[str, ...] = ()
    unit: str = ""
    folder: bool = False
    has_settings: bool = False
    dead_runtimes: tuple[str, ...] = ()
    users: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needed_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    volumes: tuple[Volume, ...] | None = None
    unseen: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    folder_users: tuple[str, ...] = ()

    @property
    def has_plugin(self) -> bool:
        """Whether there are remains of nvidia-docker 1 that no package owns."""
        return bool(self.files or self.unit or self.folder)


def gather_leftovers(system: System, packages: PackageFacts, docker: DockerFacts, manager: PackageManager) -> Leftovers:
    """Return the remains without querying docker; a host without them needs only a check of a few paths."""
    names = retired.old_packages(packages.installed)
    # gpuprov has a command of this name, too.
    there = [one for one in _FILES if system.status(one) and b"gpuprov" not in (system.read_start(one, 4096) or b"")]
    folder, unit = system.status(FOLDER), ""
    if any(path.endswith(UNIT) for path in there):
        unit = "active" if system.run(("systemctl", "is-active", UNIT), timeout=_SECONDS).ok else "inactive"
    return Leftovers(
        files=tuple(manager.unowned(system, there)) if there else (),
        unit=unit,
        folder=folder is not None and folder.kind == "directory",
        has_settings=system.exists(NVIDIA_SETTINGS_PATH),
        dead_runtimes=tuple(name for name, path in _runtimes(docker) if not is_program(system, path)),
        users=_users(system, docker) if names else {},
        needed_by=manager.needed_by(system, names) if names else {},
    )


def with_docker(
    system: System, found: Leftovers, docker: DockerFacts, packages: PackageFacts, *, always: bool = False
) -> Leftovers:
    """Return the remains with docker's facts: volumes, their users, and running containers.

    Docker is asked where there is a trace of nvidia-docker, or `always`: then it must answer. Raises GpuprovError.
    """
    on_disk = tuple(name for name in system.list_directory("/var/lib/docker/volumes") if _VOLUME.match(name))
    if not docker.active:
        return replace(found, unseen=on_disk)
    if not (always or on_disk or found.has_plugin or retired.old_packages(packages.installed)):
        return replace(found, volumes=())
    try:
        return _told_by_docker(system, found)
    except GpuprovError:
        if always:
            raise
        return found


def _told_by_docker(system: System, found: Leftovers) -> Leftovers:
    words = ("docker", "volume", "ls", "--format", "{{.Driver}} {{.Name}}")
    listed = system.require(words, _WHAT, _NEXT, timeout=_SECONDS).stdout.splitlines()
    rows = [(driver, name) for driver, _, name in (line.partition(" ") for line in listed) if _VOLUME.match(name)]
    users: dict[str, tuple[str, ...]] = dict.fromkeys((name for _, name in rows), ())
    running, folder_users = [], []
    for container, state, runtime, mounts in _containers(system):
        for one in json.loads(mounts) or ():
            if one.get("Name") in users:
                users[one["Name"]] += (f"{container} ({state})",)
            elif f"{one.get('Source')}/".startswith(f"{FOLDER}/"):
                folder_users.append(container)
        if runtime.startswith("nvidia") and state not in ("created", "exited", "dead"):
            running.append(container)
    volumes = tuple(Volume(name, driver, users[name]) for driver, name in rows)
    return replace(found, volumes=volumes, running=tuple(running), folder_users=tuple(dict.fromkeys(folder_users)))


def _containers(system: System) -> list[tuple[str, ...]]:
    """Return the name, state, runtime and mounts (JSON) of each container.

    Raises GpuprovError if docker does not tell: nobody is no answer to that.
    """
    ids = system.require(("docker", "ps", "--all", "--quiet", "--no-trunc"), _WHAT, _NEXT, timeout=_SECONDS).stdout
    if not ids.split():
        return []
    form = "{{.Name}} {{.State.Status}} {{.HostConfig.Runtime}} {{json .Mounts}}"
    done = system.run(("docker", "inspect", "--format", form, *ids.split()), timeout=_SECONDS)
    # A container may have gone since it was listed; docker tells of the others then.
    if not done.ok and "no such" not in done.stderr.lower():
        raise GpuprovError(_WHAT, done.evidence(4), _NEXT)
    return sorted(tuple(line.lstrip("/").split(" ", 3)) for line in done.stdout.splitlines())


def _runtimes(docker: DockerFacts) -> list[tuple[str, str]]:
    """Return docker's runtimes, besides `nvidia`, that run a program of NVIDIA's: name, path."""
    runtimes = docker.config.get("runtimes") or {}
    paths = {name: str(one.get("path") or "") for name, one in runtimes.items() if isinstance(one, Mapping)}
    theirs = (name for name, path in paths.items() if path.rpartition("/")[2].startswith("nvidia-container-"))
    return [(name, paths[name]) for name in theirs if name != "nvidia"]


def is_program(system: System, path: str) -> bool:
    """Say whether a program exists; an engine looks up a name without a folder on its PATH."""
    return system.exists(path) if path.startswith("/") else system.which(path) is not None


def _users(system: System, docker: DockerFacts) -> Mapping[str, tuple[str, ...]]:
    """Return file → NVIDIA's programs that an engine uses by it, except docker's runtime nvidia."""
    folders = (*_ENGINE_FOLDERS, *(_HOOK_FOLDERS if system.which("podman") or system.which("crio") else ()))
    found = {}
    for path in (*_ENGINE_FILES, *(f"{folder}/{name}" for folder in folders for name in system.list_directory(folder))):
        lines = (line for line in (system.read_text(path) or "").splitlines() if not line.lstrip().startswith("#"))
        if named := dict.fromkeys(match[0] for line in lines for match in _PROGRAM.finditer(line)):
            found[path] = tuple(named)
    living = ((name, path) for name, path in _runtimes(docker) if is_program(system, path))
    return {**found, **{f"{docker.config_path}, runtime {name}": (path,) for name, path in living}}
