"""The migration from nvidia-docker 1 and 2: what a run removes, what stays and why, and its notes. Pure."""

import re
from collections.abc import Iterable
from dataclasses import replace

from gpuprov.core.changes import Change, RemoveFile
from gpuprov.engines.containers import stop_command
from gpuprov.engines.docker_unit import DAEMON_JSON
from gpuprov.engines.nvidia_docker_removal import RemoveFolder, RemoveVolume, StopPlugin
from gpuprov.facts.host import HostFacts
from gpuprov.facts.leftovers import FOLDER, NVIDIA_DOCKER, PLUGIN, UNIT
from gpuprov.packages import retired
from gpuprov.protocol.spec import HostSpec
from gpuprov.runtime_hook.deploy import NVIDIA_HOOK_PATH
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH

VARIABLE = "gpuprov_migrate_nvidia_docker"
# The packages that bring /usr/bin/nvidia-container-runtime-hook.
_WITH_HOOK = ("nvidia-container-toolkit", "nvidia-container-runtime-hook")
# NVIDIA's programs that gpuprov's runtime replaces in an engine; an engine's other runtimes stay as they are.
_USUAL = re.compile(r"(.*/)?nvidia-container-runtime")
_ENGINE_OF = {"/etc/containerd": "containerd", "/etc/crio": "crio", "/etc/containers": "podman"}


def _candidates(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    # With gpuprov_toolkit: nvidia the toolkit is brought up to date, and used.
    candidates = retired.old_packages if spec.toolkit == "bundled" else retired.retired_packages
    return candidates(facts.packages.installed)


def kept(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    """Return what a migration leaves because it is used: the part, its user, and the command that frees it."""
    names, found = _candidates(facts, spec), facts.leftovers
    stays = [f"package {', '.join(names)} stays: {why}" for why in (_package_user(facts, spec),) if names and why]
    for volume in found.volumes or ():
        if volume.containers:
            what = f"volume {volume.name} stays: {', '.join(volume.containers)} refers to it"
            stays.append(f"{what}; if you can do without: docker rm {_names(volume.containers)}")
    if found.has_plugin and PLUGIN not in names and (why := _plugin_user(facts, spec)):
        stays.append(f"nvidia-docker's plugin stays: {why}")
    return tuple(stays)


def _package_user(facts: HostFacts, spec: HostSpec) -> str:
    """Return why the packages stay, all of them, and how to end that; "" if nothing uses them."""
    names, found, remove = _candidates(facts, spec), facts.leftovers, facts.package_manager.commands.remove
    if spec.docker == "none" and facts.docker.installed:
        return f"docker may use it, and gpuprov_docker is none; {remove} {' '.join(names)}"
    for name in names:
        if others := [one for one in found.needed_by.get(name, ()) if one not in names]:
            return f"{', '.join(others)} needs {name}; {remove} {others[0]}"
        if name in facts.packages.held:
            return f"{name} is held; apt-mark unhold {name}"
    if PLUGIN in names and (why := _plugin_user(facts, spec)):
        return why
    if spec.toolkit != "bundled":
        # NVIDIA's current toolkit has programs of the same names, which take over.
        return ""
    if found.running:
        running = ", ".join(found.running)
        return f"{running} runs with it; {stop_command(found.running)}, then run the same command again"
    for path, programs in found.users.items():
        engine = next((one for folder, one in _ENGINE_OF.items() if path.startswith(f"{folder}/")), "")
        if engine not in facts.engines or any(not _USUAL.fullmatch(program) for program in programs):
            return f"{path} names {programs[0]}; {engine and f'gpuprov_engines: [{engine}], or '}edit {path}"
    return ""


def _plugin_user(facts: HostFacts, spec: HostSpec) -> str:
    """Return who needs nvidia-docker 1's plugin, and how to end that; "" if nobody does."""
    if spec.docker == "none" and facts.docker.installed:
        return "docker may use it, and gpuprov_docker is none; run again with another gpuprov_docker"
    found = facts.leftovers
    users = [one for volume in found.volumes or () if volume.driver == PLUGIN for one in volume.containers]
    users += found.folder_users
    return f"its volumes are used by {', '.join(users)}; docker rm {_names(users)}" if users else ""


def _names(containers: Iterable[str]) -> str:
    return " ".join(one.split(" (")[0] for one in containers)


def plan(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the removal of everything unused; the changes to undo first come last."""
    if not spec.migrate_nvidia_docker:
        return ()
    found = facts.leftovers
    volumes = (RemoveVolume(one.name) for one in found.volumes or () if not one.containers)
    stays = _plugin_user(facts, spec) or (PLUGIN in _candidates(facts, spec) and _package_user(facts, spec))
    # Old sources without a network: a bundle leaves all sources, and so their keys, as they are.
    sources = retired.plan(facts.files, facts.packages.trusted_keys, spec) if facts.bundle is None else ()
    return (
        *volumes,
        *((StopPlugin(UNIT),) if found.unit and not stays else ()),
        *(removed_packages(facts, spec) if spec.toolkit != "nvidia" else ()),
        *((RemoveFile(path, "left by nvidia-docker") for path in found.files) if not stays else ()),
        *((RemoveFolder(FOLDER),) if found.folder and not stays else ()),
        *sources,
    )


def removed_packages(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the change that removes unused packages of nvidia-docker."""
    names = _removed(facts, spec)
    # Configuration files of these packages, which docker and gpuprov's runtime read.
    keep = (DAEMON_JSON,) * ("nvidia-docker2" in names) + (NVIDIA_SETTINGS_PATH,) * facts.leftovers.has_settings
    return (facts.package_manager.removal(names, keep),) if names else ()


def _removed(facts: HostFacts, spec: HostSpec) -> tuple[str, ...]:
    return _candidates(facts, spec) if spec.migrate_nvidia_docker and not _package_user(facts, spec) else ()


def without_removed(facts: HostFacts, spec: HostSpec, changes: tuple[Change, ...]) -> HostFacts:
    """Return the facts after these changes of a migration: without old programs that gpuprov's replace in the same run.

    These are the hook of `docker run --gpus` and the command nvidia-docker.
    """
    packages = set(_removed(facts, spec))
    gone = {change.path for change in changes if isinstance(change, RemoveFile)}
    gone |= {NVIDIA_HOOK_PATH} if packages.intersection(_WITH_HOOK) else set()
    gone |= {NVIDIA_DOCKER} if packages.intersection(retired.WRAPPERS) else set()
    return replace(facts, files={path: file for path, file in facts.files.items() if path not in gone})


def note(facts: HostFacts, spec: HostSpec) -> str:
    """Return one line about the remains and how to remove them; "" if there are none, or if removal is requested."""
    there = facts.leftovers
    found = (
        *_candidates(facts, spec),
        *(volume.name for volume in there.volumes or ()),
        *there.files,
        *((FOLDER,) if there.folder else ()),
        # With NVIDIA's toolkit, apt's are removed in any case.
        *(one for one in retired.retired_sources(facts.files) if spec.toolkit != "nvidia" or one.endswith(".repo")),
        *retired.key_files(facts.files, spec.toolkit_key_fingerprint),
        *(f"runtime {name} without a program" for name in there.dead_runtimes if spec.docker != "none"),
    )
    if spec.migrate_nvidia_docker or not found:
        return ""
    how = f"gpuprov install -e {VARIABLE}=true --check --diff"
    return f"nvidia-docker has left {', '.join(found)}. To see what can be removed: {how}"
