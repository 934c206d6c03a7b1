"""The implementation of `gpuprov runtime configure`: an engine's files now and as desired, and writing them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpuprov.core.changes import parent_of
from gpuprov.core.system import System
from gpuprov.engines import containerd
from gpuprov.engines.docker_config import BOM, in_place, parse_config, without_member, without_runtimes
from gpuprov.engines.docker_config import edited as edited_json
from gpuprov.engines.docker_unit import dockerd_version, flag_values, gather_unit, runtime_flags_problem, text_of
from gpuprov.engines.known import ENGINES, Configuration, ConfigureRequest, FileEdit, Reader, RuntimeEntry
from gpuprov.engines.toml import edited, emptied, matching, merged, read, read_output, read_without_ours, table_at
from gpuprov.protocol.codec import json_at
from gpuprov.protocol.errors import GpuprovError, UsageError, from_os_error
from gpuprov.runtime_hook import deploy
from gpuprov.runtime_hook.driver_files import HOOK_PATH
from gpuprov.runtime_hook.settings import FOLDERS

# Where NVIDIA's tool writes; CRI-O reads every file of the folder, so both would count.
_OTHERS_CRIO_DROP_IN = "/etc/crio/crio.conf.d/99-nvidia.toml"
HOOK_FILE = "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json"


def configuration(system: Reader, request: ConfigureRequest) -> Configuration:
    """Return what a call would do. Raises GpuprovError if a file can't be read or edited safely."""
    parts = {
        "docker": _docker, "crio": _by_toml, "podman": _by_toml,
        "k3s": containerd.rancher_configuration, "rke2": containerd.rancher_configuration,
    }  # fmt: skip
    return parts.get(request.engine, containerd.configuration)(system, request)


def usual_runtime(system: System) -> str:
    """Return the runtime's program: NVIDIA's if it is installed, else the bundled one, else where NVIDIA's will be."""
    return next(filter(system.exists, (RuntimeEntry().path, deploy.LAUNCHER_PATH)), RuntimeEntry().path)


def usual_hook(system: System) -> str:
    """Return the hook's program, chosen like the runtime's."""
    return next(filter(system.exists, (deploy.NVIDIA_HOOK_PATH, HOOK_PATH)), deploy.NVIDIA_HOOK_PATH)


def hook(system: Reader, engine: str, path: str, program: str, *, unset: bool) -> Configuration:
    """Return what `--config-mode hook` would do: put the OCI hook's file into hooks.d, or remove it.

    Raises GpuprovError for an engine that reads no such folder; podman and CRI-O do.
    """
    if engine not in ("podman", "crio"):
        raise UsageError(f"{engine} reads no OCI hooks from a folder", "", "--config-mode config-file")
    path = path or HOOK_FILE
    reload_command = ENGINES[engine].reload_command
    before = system.read_bytes(path)
    if not unset:
        notes = ("NVIDIA calls OCI hooks deprecated; CDI needs none: podman run --device nvidia.com/gpu=all",)
        return Configuration((FileEdit(path, before, _hook_json(program)),), notes, reload_command)
    if before is None or not is_hook_for(before, program):
        there = () if before is None else (f"{path} runs another program than {program}: left alone",)
        return Configuration((), there)
    return Configuration((FileEdit(path, before, None),), (), reload_command)


def write(system: System, edits: tuple[FileEdit, ...]) -> None:
    """Write the changed files atomically, keeping owner and mode of existing ones."""
    for edit in edits:
        if not edit.changes:
            continue
        try:
            if edit.after is None:
                system.remove(edit.path)
                continue
            system.make_directory(parent_of(edit.path))
            status = system.status(system.real_path(edit.path))
            system.write(edit.path, edit.after, mode=status.mode if status else 0o644)
        except OSError as error:
            hint = "put sudo before it" if isinstance(error, PermissionError) else ""
            raise from_os_error(f"{edit.path} can't be written", error, hint) from None


def _hook_json(program: str) -> bytes:
    """Return the OCI hook for podman's and CRI-O's hooks.d (oci-hooks(5)), as nvidia-ctk writes it."""
    folder, _, name = program.rpartition("/")
    search = FOLDERS if folder in FOLDERS else (*FOLDERS, folder)
    hook = {
        "version": "1.0.0",
        "hook": {"path": program, "args": [name, "prestart"], "env": [f"PATH={':'.join(search)}"]},
        "when": {"always": True, "commands": [".*"]},
        "stages": ["prestart"],
    }
    return (json.dumps(hook, indent=2) + "\n").encode()


def is_hook_for(content: bytes, program: str) -> bool:
    """Say whether a hooks.d file runs that program, so that it may be removed."""
    return bool(json_at(content, "hook", "path") == program)


def _docker(system: Reader, request: ConfigureRequest) -> Configuration:
    """docker has no drop-ins. JSON has no comments: the runtime's name and program identify gpuprov's addition."""
    if request.drop_in:
        raise UsageError("docker has no drop-ins", request.drop_in, "--config FILE")
    unit, entry = gather_unit(system), request.runtime
    if unit.silent and not request.config:
        raise GpuprovError("systemd does not tell how docker is started", unit.silent, "name its file: --config FILE")
    path = request.config or unit.config_path
    text = text_of(system, path)
    found, wrong = parse_config(text, path, dockerd_version(system) if (text or "").startswith(BOM) else "")
    if wrong:
        raise GpuprovError.several(wrong)
    notes: tuple[str, ...] = ()
    if request.unset:
        after, notes = _without_docker_runtime(text, found, entry)
    else:
        names = ("--add-runtime", *(("--default-runtime",) if entry.set_default else ()))
        flags = [f"{name}={value}" for name in names for value in flag_values(unit.arguments, name)]
        if path == unit.config_path and (wrong := runtime_flags_problem(path, flags)):
            raise GpuprovError.several(wrong)
        after = edited_json(text, entry, keep_arguments=True) or text
    # docker sets up devices by CDI when it starts.
    restart = f"systemctl restart {unit.word} (this stops containers, unless live-restore is on)"
    before, content = (None if one is None else one.encode("utf-8", "surrogateescape") for one in (text, after))
    edit = FileEdit(path, before, content)
    return Configuration((edit,), notes, restart if entry.cdi or unit.name != "docker" else "systemctl reload docker")


def _without_docker_runtime(
    text: str | None, found: Mapping[str, Any], entry: RuntimeEntry
) -> tuple[str | None, tuple[str, ...]]:
    there = table_at(found, "runtimes").get(entry.name)
    if text is None or not isinstance(there, Mapping):
        return text, ()
    if there.get("path") != entry.path:
        seen = f"runtime {entry.name} is {there.get('path')}, not {entry.path}"
        return text, (f"{seen}: left alone (--nvidia-runtime-path names it)",)
    notes: tuple[str, ...] = ()
    if found.get("default-runtime") == entry.name:
        notes = ("the default runtime was this one; now it is docker's own, runc",)
    if not entry.cdi and table_at(found, "features").get("cdi") is True:
        notes += ("CDI stays enabled; --unset --cdi.enabled takes that out too",)

    def edit(plain: str) -> str:
        plain = without_runtimes(plain, (entry.name,))
        return without_member(plain, ("features", "cdi")) if entry.cdi else plain

    text = in_place(text, edit)
    return text if parse_config(text.lstrip(BOM))[0] else None, notes


def _by_toml(system: Reader, request: ConfigureRequest) -> Configuration:
    """CRI-O and podman read a main file, then every file of a folder by name, key by key (crio.conf.d(5))."""
    entry, known = request.runtime, ENGINES[request.engine]
    main = request.config or known.main
    target = known.drop_in if request.drop_in is None else request.drop_in or main
    if request.unset:
        return Configuration(emptied(system, main, target), (), known.reload_command)
    notes: tuple[str, ...] = ()
    if entry.cdi:
        name = "CRI-O" if request.engine == "crio" else "podman"
        notes = (f"{name} reads CDI specifications by itself: --cdi.enabled changes nothing",)
    if request.engine == "podman":
        # It lists a runtime's possible paths.
        default = {"runtime": entry.name} if entry.set_default else {}
        wanted: dict[str, Any] = {"engine": {**default, "runtimes": {entry.name: [entry.path]}}}
        return Configuration((edited(system, target, wanted),), notes)
    others = (read(system, path) for path in matching(system, f"{parent_of(main)}/crio.conf.d/*") if path != target)
    if request.from_command:
        # Older releases have a separate program for that.
        status = ((request.executable or "crio", "status", "config"), ("crio-status", "config"))
        source = read_output(system, "CRI-O", *status)
    else:
        source = merged(read(system, main), *others)
    wanted = _crio_values(read_without_ours(system, target), entry, source)
    if system.exists(_OTHERS_CRIO_DROP_IN) and target != _OTHERS_CRIO_DROP_IN:
        notes += (f"{_OTHERS_CRIO_DROP_IN} is there too; CRI-O reads it after {target}",)
    return Configuration((edited(system, target, wanted),), notes, known.reload_command)


def _crio_values(found: Mapping[str, Any], entry: RuntimeEntry, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values to write into a file with content `found`; the entry's options are those of the default one."""
    there = table_at(source, "crio", "runtime")
    runtimes = table_at(there, "runtimes")
    usual = (there.get("default_runtime"), *containerd.RUNC_LIKE)
    names = [one for one in usual if one and not str(one).startswith("nvidia")]
    others = (runtimes[one] for one in names if one != entry.name and isinstance(runtimes.get(one), Mapping))
    is_there = isinstance(table_at(found, "crio", "runtime", "runtimes").get(entry.name), Mapping)
    copied: Mapping[str, Any] = {} if is_there else next(others, {})
    default = {"default_runtime": entry.name} if entry.set_default else {}
    own = {**copied, "runtime_path": entry.path, "runtime_type": "oci"}
    return {"crio": {"runtime": {**default, "runtimes": {entry.name: own}}}}
