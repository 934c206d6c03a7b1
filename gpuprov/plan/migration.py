"""The migration from nvidia-docker 1 and 2: what a run removes, what stays and why, and its messages. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpuprov.core.changes import Change, RemoveFile
from gpuprov.engines.docker_config import DAEMON_JSON
from gpuprov.engines.nvidia_docker import RemoveAccount, RemoveFolder, RemoveVolume, StopPlugin
from gpuprov.facts.host import HostFacts
from gpuprov.facts.leftovers import FOLDER, NVIDIA_DOCKER, PLUGIN, UNIT
from gpuprov.packages import retired
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.words import counted
from gpuprov.runtime_hook.deploy import NVIDIA_HOOK_PATH
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH

VARIABLE = "gpuprov_migrate_nvidia_docker"
_REASON = "left by nvidia-docker"
# The packages that bring /usr/bin/nvidia-container-runtime-hook.
_WITH_HOOK = ("nvidia-container-toolkit", "nvidia-container-runtime-hook")
# NVIDIA's programs that gpuprov's runtime replaces in an engine; an engine's other runtimes stay as they are.
_USUAL = re.compile(r"(.*/)?nvidia-container-runtime")
_ENGINE_OF = {"/etc/containerd": "containerd", "/etc/crio": "crio", "/etc/containers": "podman"}


@dataclass(frozen=True)
class Kept:
    """A part of nvidia-docker that stays, why, and the command after which it can be removed."""

    what: str
    why: str
    step: str

    def __str__(self) -> str:
        return f"{self.what} stays: {self.why}; {self.step}"


def removed_packages(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the unused packages, which a migration removes."""
    kept = {name for name, _ in _kept_packages(facts, spec)}
    return tuple(name for name in _candidates(facts, spec) if name not in kept)


def kept(facts: HostFacts, spec: HostSpec) -> tuple[Kept, ...]:
    """Return what a migration leaves because it is used."""
    found = facts.leftovers
    packages: dict[tuple[str, str], list[str]] = {}
    for name, (why, step) in _kept_packages(facts, spec):
        packages.setdefault((why, step), []).append(name)
    result = [Kept(f"package {', '.join(names)}", why, step) for (why, step), names in packages.items()]
    for volume in found.volumes or ():
        if volume.containers:
            names = " ".join(one.split(" (")[0] for one in volume.containers)
            why = f"{', '.join(volume.containers)} refers to it"
            result.append(Kept(f"volume {volume.name}", why, f"if you can do without: docker rm {names}"))
    plugin = _plugin_user(facts, spec)
    if plugin and found.has_plugin and PLUGIN not in facts.packages.installed:
        result.append(Kept("nvidia-docker's plugin", *plugin))
    if NVIDIA_SETTINGS_PATH in found.settings and found.settings_count and spec.toolkit == "bundled":
        why = "gpuprov's runtime heeds what it says"
        result.append(Kept(NVIDIA_SETTINGS_PATH, why, f"if it need not: rm {NVIDIA_SETTINGS_PATH}"))
    return tuple(result)


def _candidates(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    installed = facts.packages.installed
    # With gpuprov_toolkit: nvidia these are brought up to date, and used.
    toolkit = retired.old_toolkit(installed) if spec.toolkit == "bundled" else ()
    return (*retired.retired_packages(installed), *toolkit)


def _kept_packages(facts: HostFacts, spec: HostSpec) -> list[tuple[str, tuple[str, str]]]:
    """Return the candidates that stay: name, reason, next command."""
    names = _candidates(facts, spec)
    if spec.docker == "none" and facts.docker.installed:
        why = "docker may use it, and gpuprov_docker is none"
        return [(name, (why, f"{facts.package_manager.commands.remove} {name}")) for name in names]
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        others = tuple(one for one in facts.leftovers.needed_by.get(name, ()) if one not in names)
        if others:
            found[name] = (f"{', '.join(others)} needs it", f"{facts.package_manager.commands.remove} {others[0]}")
        elif name in facts.packages.held:
            found[name] = ("it is held", f"apt-mark unhold {name}")
    plugin = _plugin_user(facts, spec)
    if plugin and PLUGIN in names:
        found.setdefault(PLUGIN, plugin)
    programs = [name for name in names if name not in retired.WRAPPERS]
    why_program = _program_user(facts, spec) if programs else None
    if why_program is None and (staying := [name for name in found if name != PLUGIN]):
        # They depend on one another.
        why_program = (f"{staying[0]} stays", f"see {staying[0]}")
    if why_program is not None:
        for name in programs:
            found.setdefault(name, why_program)
    return list(found.items())


def _program_user(facts: HostFacts, spec: HostSpec) -> tuple[str, str] | None:
    """Return who uses the programs of the packages, and how to end that; None if nobody does.

    NVIDIA's current toolkit has programs of the same names, which take over.
    """
    if spec.toolkit == "nvidia":
        return None
    found = facts.leftovers
    if found.running:
        names = " ".join(found.running)
        return f"{', '.join(found.running)} runs with it", f"docker stop {names}, then run the same command again"
    for path, programs in found.users.items():
        engine = next((one for folder, one in _ENGINE_OF.items() if path.startswith(f"{folder}/")), "")
        is_ours = engine in facts.engines
        if not is_ours or any(not _USUAL.fullmatch(program) for program in programs):
            return f"{path} names {programs[0]}", f"{engine and f'gpuprov_engines: [{engine}], or '}edit {path}"
    return None


def _plugin_user(facts: HostFacts, spec: HostSpec) -> tuple[str, str] | None:
    """Return who needs nvidia-docker 1's plugin, and how to end that."""
    found = facts.leftovers
    if spec.docker == "none" and facts.docker.installed:
        return "docker may use it, and gpuprov_docker is none", "run again with another gpuprov_docker"
    users = [one for volume in found.volumes or () if volume.driver == PLUGIN for one in volume.containers]
    names = [*(one.split(" (")[0] for one in users), *found.folder_users]
    if not names:
        return None
    return f"its volumes are used by {', '.join((*users, *found.folder_users))}", f"docker rm {' '.join(names)}"


def dead_runtimes(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return the runtimes to take out of docker's configuration."""
    return facts.leftovers.dead_runtimes if spec.migrate_nvidia_docker else ()


def plan_packages(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return what makes room for NVIDIA's current toolkit, which does not install beside the oldest of these."""
    return _packages(facts, spec) if spec.migrate_nvidia_docker and spec.toolkit == "nvidia" else ()


def plan(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the removal of everything unused; the changes to undo first come last."""
    if not spec.migrate_nvidia_docker:
        return ()
    found = facts.leftovers
    volumes = (RemoveVolume(one.name) for one in found.volumes or () if not one.containers)
    stays = _plugin_user(facts, spec) or PLUGIN in dict(_kept_packages(facts, spec))
    # Old sources without a network: a bundle leaves all sources, and so their keys, as they are.
    sources = retired.plan(facts.files, facts.packages.trusted_keys, spec) if facts.bundle is None else ()
    return (
        *volumes,
        *((StopPlugin(UNIT),) if found.unit and not stays else ()),
        *(_packages(facts, spec) if spec.toolkit != "nvidia" else ()),
        *(_files(facts) if not stays else ()),
        *_settings(facts, spec),
        *sources,
    )


def _packages(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    names = removed_packages(facts, spec)
    if not names:
        return ()
    # It is a configuration file of nvidia-docker2 only.
    keep = [DAEMON_JSON] if "nvidia-docker2" in names else []
    keep += [NVIDIA_SETTINGS_PATH] if facts.leftovers.settings_count else []
    return (facts.package_manager.removal(names, tuple(keep), spec.lock_timeout),)


def _files(facts: HostFacts) -> tuple[Change, ...]:
    found = facts.leftovers
    return (
        *(RemoveFile(path, _REASON) for path in found.files),
        *((RemoveFolder(FOLDER),) if found.folder else ()),
        *((RemoveAccount(PLUGIN),) if found.account else ()),
    )


def _settings(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the removal of old copies, and of config.toml if it has no settings and no program reads it."""
    found = facts.leftovers
    left = set(retired.TOOLKIT) & set(facts.packages.installed) - set(removed_packages(facts, spec))
    used = found.settings_count or spec.toolkit == "nvidia" or left
    return tuple(RemoveFile(path, _REASON) for path in found.settings if path != NVIDIA_SETTINGS_PATH or not used)


def without_removed(facts: HostFacts, spec: HostSpec, changes: tuple[Change, ...]) -> HostFacts:
    """Return the facts after these changes of a migration: without old programs that gpuprov's replace in the same run.

    These are the hook of `docker run --gpus` and the command nvidia-docker.
    """
    if not spec.migrate_nvidia_docker:
        return facts
    packages = set(removed_packages(facts, spec))
    gone = {change.path for change in changes if isinstance(change, RemoveFile)}
    gone |= {NVIDIA_HOOK_PATH} if packages.intersection(_WITH_HOOK) else set()
    gone |= {NVIDIA_DOCKER} if packages.intersection(retired.WRAPPERS) else set()
    files = {path: file for path, file in facts.files.items() if path not in gone}
    return replace(facts, files=files)


def problems(facts: HostFacts, spec: HostSpec) -> tuple[Problem, ...]:
    """Return what prevents a migration: only docker knows which containers use a volume."""
    found, docker = facts.leftovers, facts.docker
    is_asked = spec.migrate_nvidia_docker and spec.docker != "none" and docker.installed and not docker.active
    traces = (*found.unseen, *found.files, *((PLUGIN,) if PLUGIN in facts.packages.installed else ()))
    if not is_asked or docker.is_unreachable or not traces:
        return ()
    return (
        Problem(
            "docker does not run, so it is not known which containers use what nvidia-docker has left",
            f"found: {', '.join(traces)}",
            f"systemctl start docker, then run the same command again; or leave out {VARIABLE}",
        ),
    )


def note(facts: HostFacts, spec: HostSpec) -> str:
    """Return one line about the remains and how to remove them; "" if there are none, or if removal is requested."""
    found = () if spec.migrate_nvidia_docker else tuple(_found(facts, spec))
    how = f"gpuprov install -e {VARIABLE}=true --check --diff"
    return f"nvidia-docker has left {'; '.join(found)}. To see what can be removed: {how}" if found else ""


def _found(facts: HostFacts, spec: HostSpec) -> Iterable[str]:
    there = facts.leftovers
    names = _candidates(facts, spec)
    if names:
        yield f"{counted(len(names), 'package')} ({', '.join(names)})"
    if there.volumes:
        yield f"{counted(len(there.volumes), 'volume')} ({', '.join(one.name for one in there.volumes)})"
    if there.has_plugin and PLUGIN not in names:
        yield f"its plugin ({', '.join(there.files) or there.account.partition(':')[0] or FOLDER})"
    # With NVIDIA's toolkit they are removed in any case.
    sources = retired.retired_sources(facts.files) if spec.toolkit != "nvidia" else ()
    if sources:
        yield f"repositories ({', '.join(sources)})"
    if keys := retired.key_files(facts.files, spec.toolkit_key_fingerprint):
        yield f"their key ({', '.join(keys)})"
    if there.dead_runtimes and spec.docker != "none":
        yield f"{facts.docker.config_path}: {', '.join(there.dead_runtimes)} without a program"
    if settings := [path for path in there.settings if path != NVIDIA_SETTINGS_PATH]:
        yield ", ".join(settings)
