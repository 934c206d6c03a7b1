"""Remains of nvidia-docker 1 and 2 on a host, and who still uses them. Reads only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gpuprov.core.system import System
from gpuprov.packages import retired
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH, Settings, read_settings

if TYPE_CHECKING:
    from gpuprov.engines.docker import DockerFacts
    from gpuprov.packages.interface import PackageFacts, PackageManager

PLUGIN = "nvidia-docker"
# The command: theirs, or gpuprov's.
NVIDIA_DOCKER = "/usr/bin/nvidia-docker"
UNIT = "nvidia-docker.service"
FOLDER = "/var/lib/nvidia-docker"
SETTINGS_FOLDER = NVIDIA_SETTINGS_PATH.rpartition("/")[0]
# From nvidia-docker 1's packages, and from its archive, which users unpack by hand.
_FILES = (
    NVIDIA_DOCKER, "/usr/bin/nvidia-docker-plugin",
    "/usr/local/bin/nvidia-docker", "/usr/local/bin/nvidia-docker-plugin",
    f"/etc/systemd/system/{UNIT}", f"/lib/systemd/system/{UNIT}", "/etc/init/nvidia-docker.conf",
    "/etc/default/nvidia-docker", "/etc/docker/plugins/nvidia-docker.spec",
    "/usr/lib/docker/plugins/nvidia-docker.spec",
)  # fmt: skip
_OLD_SETTINGS = re.compile(r"config\.toml\.(rpmsave|rpmnew|rpmorig|dpkg-(old|dist|new|bak))")
# Names of nvidia-docker 1; a site's own volume may begin in the same way.
_VOLUME = re.compile(r"nvidia_driver_[0-9][0-9.]*\Z")
# Configuration files of engines besides docker.
_ENGINE_FILES = ("/etc/containerd/config.toml", "/etc/crio/crio.conf", "/etc/containers/containers.conf")
_ENGINE_FOLDERS = ("/etc/containerd/conf.d", "/etc/crio/crio.conf.d", "/etc/containers/containers.conf.d")
_HOOK_FOLDERS = ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d")
_PROGRAM = re.compile(r"[\w./-]*nvidia-container-(runtime|toolkit|cli)[\w.-]*")
_SECONDS = 30
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
    `account`: its user's line of /etc/passwd. `folder`: /var/lib/nvidia-docker exists. `settings`: old copies in
    /etc/nvidia-container-runtime, and config.toml if no package owns it; `settings_count`: it has settings that
    gpuprov's runtime uses. `dead_runtimes`: NVIDIA's in docker's configuration whose program is missing. `users`: file
    → NVIDIA's programs that an engine uses by it. `running`: containers that run with one. `needed_by`: package →
    others that need it. `volumes` is None if docker was not queried; `unseen`: volumes that exist while docker does not
    run. `folder_users`: containers that mount something below /var/lib/nvidia-docker by its path.
    """

    files: tuple[str, ...] = ()
    unit: str = ""
    account: str = ""
    folder: bool = False
    settings: tuple[str, ...] = ()
    settings_count: bool = False
    dead_runtimes: tuple[str, ...] = ()
    users: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    running: tuple[str, ...] = ()
    needed_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    volumes: tuple[Volume, ...] | None = None
    unseen: tuple[str, ...] = ()
    folder_users: tuple[str, ...] = ()

    @property
    def has_plugin(self) -> bool:
        """Whether there are remains of nvidia-docker 1 that no package owns."""
        return bool(self.files or self.unit or self.account or self.folder)


def gather_leftovers(system: System, packages: PackageFacts, docker: DockerFacts, manager: PackageManager) -> Leftovers:
    """Return the remains without querying docker; a host without them needs only a check of a few paths."""
    names = (*retired.retired_packages(packages.installed), *retired.old_toolkit(packages.installed))
    there = [path for path in _FILES if _is_theirs(system, path)]
    settings = _settings(system)
    unowned = manager.unowned(system, (*there, *settings)) if there or settings else ()
    return Leftovers(
        files=tuple(path for path in there if path in unowned),
        unit=_unit(system) if any(path.endswith(UNIT) for path in there) else "",
        account=_account(system),
        folder=system.status(FOLDER) is not None,
        settings=tuple(path for path in settings if path in unowned),
        settings_count=NVIDIA_SETTINGS_PATH in settings and _settings_count(system),
        dead_runtimes=_dead_runtimes(system, docker),
        users=_users(system, docker) if names else {},
        needed_by=manager.needed_by(system, names) if names else {},
    )


def with_docker(
    system: System, found: Leftovers, docker: DockerFacts, packages: PackageFacts, *, always: bool = False
) -> Leftovers:
    """Return the remains with docker's facts: volumes, their users, and running containers.

    Docker is asked where there is a trace of nvidia-docker, or `always`: then it must answer. Raises GpuprovError.
    """
    if not docker.active:
        return replace(found, unseen=_local_volumes(system))
    try:
        return _told_by_docker(system, found, docker, packages, always=always)
    except GpuprovError:
        if always:
            raise
        return found


def _told_by_docker(
    system: System, found: Leftovers, docker: DockerFacts, packages: PackageFacts, *, always: bool
) -> Leftovers:
    hints = always or found.has_plugin or PLUGIN in packages.installed or _local_volumes(system)
    names = (*retired.retired_packages(packages.installed), *retired.old_toolkit(packages.installed))
    running = _running(system) if names and docker.running_containers else ()
    return replace(
        found,
        volumes=_volumes(system) if hints else (),
        running=running,
        folder_users=_folder_users(system) if found.folder else (),
    )


def _local_volumes(system: System) -> tuple[str, ...]:
    """Return the volumes with nvidia-docker's names that docker itself keeps, without querying it."""
    return tuple(name for name in system.list_directory("/var/lib/docker/volumes") if _VOLUME.match(name))


def _is_theirs(system: System, path: str) -> bool:
    if system.status(path) is None:
        return False
    # gpuprov has a command of this name, too.
    return b"gpuprov" not in (system.read_start(path, 4096) or b"")


def _unit(system: System) -> str:
    done = system.run(("systemctl", "is-active", UNIT), timeout=_SECONDS)
    return "active" if done.ok else "inactive"


def _account(system: System) -> str:
    """Return the line of the user that the package makes; a site's own of this name has another home."""
    lines = (system.read_text("/etc/passwd") or "").splitlines()
    return next((line for line in lines if line.startswith(f"{PLUGIN}:") and line.split(":")[5:6] == [FOLDER]), "")


def _settings(system: System) -> tuple[str, ...]:
    names = system.list_directory(SETTINGS_FOLDER)
    return tuple(
        f"{SETTINGS_FOLDER}/{name}" for name in names if name == "config.toml" or _OLD_SETTINGS.fullmatch(name)
    )


def _settings_count(system: System) -> bool:
    """Say whether the file has any setting that gpuprov's runtime uses; an unreadable file counts."""
    found, fault = read_settings("/dev/null", str(system.path(NVIDIA_SETTINGS_PATH)))
    defaults = Settings({})
    return bool(fault) or any(getattr(found, name) != getattr(defaults, name) for name in Settings.__slots__)


def _dead_runtimes(system: System, docker: DockerFacts) -> tuple[str, ...]:
    runtimes = docker.config.get("runtimes") or {}
    paths = {name: str(one.get("path") or "") for name, one in runtimes.items() if isinstance(one, Mapping)}
    return tuple(
        name for name, path in paths.items() if name != "nvidia" and is_nvidias(path) and not _is_program(system, path)
    )


def is_nvidias(path: str) -> bool:
    """Say whether a runtime's program is one of NVIDIA's, by its name."""
    return path.rpartition("/")[2].startswith("nvidia-container-")


def _is_program(system: System, path: str) -> bool:
    return system.exists(path) if path.startswith("/") else system.which(path) is not None


def _users(system: System, docker: DockerFacts) -> Mapping[str, tuple[str, ...]]:
    """Return file → NVIDIA's programs that an engine uses by it, except docker's runtime nvidia."""
    listed = [f"{folder}/{name}" for folder in _ENGINE_FOLDERS for name in system.list_directory(folder)]
    if system.which("podman") or system.which("crio"):
        listed += [f"{folder}/{name}" for folder in _HOOK_FOLDERS for name in system.list_directory(folder)]
    found = {}
    for path in (*_ENGINE_FILES, *listed):
        lines = (line for line in (system.read_text(path) or "").splitlines() if not line.lstrip().startswith("#"))
        named = dict.fromkeys(match[0] for line in lines for match in _PROGRAM.finditer(line))
        if named:
            found[path] = tuple(named)
    runtimes = docker.config.get("runtimes") or {}
    for name, one in runtimes.items():
        path = str(one.get("path") or "") if isinstance(one, Mapping) else ""
        if name != "nvidia" and is_nvidias(path) and _is_program(system, path):
            found[f"{docker.config_path}, runtime {name}"] = (path,)
    return found


def _volumes(system: System) -> tuple[Volume, ...]:
    words = ("docker", "volume", "ls", "--format", "{{.Driver}} {{.Name}}")
    done = system.require(words, "docker does not tell which volumes there are", _NEXT, timeout=_SECONDS)
    rows = [line.split(" ", 1) for line in done.stdout.splitlines()]
    named = [(row[0], row[1]) for row in rows if len(row) == 2 and _VOLUME.match(row[1])]
    return tuple(Volume(name, driver, _containers(system, name)) for driver, name in named)


def _containers(system: System, volume: str) -> tuple[str, ...]:
    """Return the containers, running or stopped, that refer to a volume, each with its state."""
    form = ("--format", "{{.Names}} ({{.Status}})")
    words = ("docker", "ps", "--all", "--no-trunc", "--filter", f"volume={volume}", *form)
    done = system.require(words, f"docker does not tell which containers use volume {volume}", _NEXT, timeout=_SECONDS)
    return tuple(sorted(done.stdout.splitlines()))


def _folder_users(system: System) -> tuple[str, ...]:
    """Return the containers, running or stopped, that mount a folder of the plugin's by its path."""
    # Of `--volume`, and of `--mount type=bind`.
    rows = _inspected(system, ("--all",), "{{json .HostConfig.Binds}} {{json .HostConfig.Mounts}} {{.Name}}")
    return tuple(sorted(row.rpartition(" ")[2].lstrip("/") for row in rows if f'"{FOLDER}' in row))


def _running(system: System) -> tuple[str, ...]:
    """Return the names of the running containers whose runtime is NVIDIA's own program."""
    rows = _inspected(system, (), "{{.HostConfig.Runtime}} {{.Name}}")
    pairs = (row.split(" ", 1) for row in rows)
    return tuple(sorted(pair[1].lstrip("/") for pair in pairs if len(pair) == 2 and pair[0].startswith("nvidia")))


def _inspected(system: System, which: tuple[str, ...], form: str) -> list[str]:
    """Return a line of each container. Raises GpuprovError if docker does not tell: nobody is no answer to that."""
    what = "docker does not tell which containers use what nvidia-docker has left"
    words = ("docker", "ps", *which, "--quiet", "--no-trunc")
    ids = system.require(words, what, _NEXT, timeout=_SECONDS).stdout.split()
    if not ids:
        return []
    done = system.run(("docker", "inspect", "--format", form, *ids), timeout=_SECONDS)
    # A container may have gone since it was listed; docker tells of the others then.
    if not done.ok and "no such" not in done.stderr.lower():
        raise GpuprovError(what, done.evidence(4), _NEXT)
    return done.stdout.splitlines()
