"""The implementation of `gpuprov runtime configure`: an engine's files now and as desired, and writing them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpuprov.core.changes import parent_of
from gpuprov.core.system import System
from gpuprov.engines import containerd, rancher
from gpuprov.engines.docker_config import parse_config, without_runtimes
from gpuprov.engines.docker_unit import UNIT, DockerUnit, dockerd_version, flag_values, gather_unit
from gpuprov.engines.json_text import BOM, in_place, with_member, without_member
from gpuprov.engines.known import ENGINES
from gpuprov.engines.runtime_entry import (
    NVIDIA_RUNTIME,
    Configuration,
    ConfigureRequest,
    FileEdit,
    Reader,
    RuntimeEntry,
)
from gpuprov.engines.toml import edited, emptied, matching, merged, read, read_toml, read_without_ours, table_at
from gpuprov.protocol.errors import ExitCode, GpuprovError, from_os_error
from gpuprov.runtime_hook import deploy
from gpuprov.runtime_hook.driver_files import HOOK_PATH

# Where NVIDIA's tool writes; CRI-O reads every file of the folder, so both would count.
_OTHERS_CRIO_DROP_IN = "/etc/crio/crio.conf.d/99-nvidia.toml"
_RUNC_LIKE = ("runc", "crun")
HOOK_FILE = "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json"
_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


def configuration(system: Reader, request: ConfigureRequest) -> Configuration:
    """Return what a call would do. Raises GpuprovError if a file can't be read or edited safely."""
    parts = {
        "docker": _docker, "crio": _crio, "podman": _podman,
        "k3s": rancher.configuration, "rke2": rancher.configuration,
    }  # fmt: skip
    return parts.get(request.engine, containerd.configuration)(system, request)


def usual_runtime(system: System) -> str:
    """Return the runtime's program: NVIDIA's if it is installed, else the bundled one, else where NVIDIA's will be."""
    there = (path for path in (NVIDIA_RUNTIME, deploy.LAUNCHER_PATH) if system.exists(path))
    return next(there, NVIDIA_RUNTIME)


def usual_hook(system: System) -> str:
    """Return the hook's program, chosen like the runtime's."""
    there = (path for path in (deploy.NVIDIA_HOOK_PATH, HOOK_PATH) if system.exists(path))
    return next(there, deploy.NVIDIA_HOOK_PATH)


def hook(system: Reader, engine: str, path: str, program: str, *, unset: bool) -> Configuration:
    """Return what `--config-mode hook` would do: put the OCI hook's file into hooks.d, or remove it.

    Raises GpuprovError for an engine that reads no such folder; podman and CRI-O do.
    """
    if engine not in ("podman", "crio"):
        raise GpuprovError(
            f"{engine} reads no OCI hooks from a folder", "", "--config-mode config-file", exit_code=ExitCode.USAGE
        )
    path = path or HOOK_FILE
    reload_command = "systemctl restart crio" if engine == "crio" else ""
    before = system.read_bytes(path)
    after = _hook_json(program)
    if not unset:
        notes = ("NVIDIA calls OCI hooks deprecated; CDI needs none: podman run --device nvidia.com/gpu=all",)
        return Configuration((FileEdit(path, before, after),), notes, reload_command)
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
            _write(system, edit)
        except OSError as error:
            hint = "put sudo before it" if isinstance(error, PermissionError) else ""
            raise from_os_error(f"{edit.path} can't be written", error, hint) from None


def _write(system: System, edit: FileEdit) -> None:
    if edit.after is None:
        system.remove(edit.path)
        return
    system.make_directory(parent_of(edit.path))
    status = system.status(system.real_path(edit.path))
    system.write(edit.path, edit.after, mode=status.mode if status else 0o644)


def _hook_json(program: str) -> bytes:
    """Return the OCI hook for podman's and CRI-O's hooks.d (oci-hooks(5)), as nvidia-ctk writes it."""
    folder, _, name = program.rpartition("/")
    search = _PATH if folder in _PATH else (*_PATH, folder)
    hook = {
        "version": "1.0.0",
        "hook": {"path": program, "args": [name, "prestart"], "env": [f"PATH={':'.join(search)}"]},
        "when": {"always": True, "commands": [".*"]},
        "stages": ["prestart"],
    }
    return (json.dumps(hook, indent=2) + "\n").encode()


def is_hook_for(content: bytes, program: str) -> bool:
    """Say whether a hooks.d file runs that program, so that it may be removed."""
    try:
        return bool(json.loads(content)["hook"]["path"] == program)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _docker(system: Reader, request: ConfigureRequest) -> Configuration:
    """docker has no drop-ins. JSON has no comments: the runtime's name and program identify gpuprov's addition."""
    if request.drop_in:
        raise GpuprovError("docker has no drop-ins", request.drop_in, "--config FILE", exit_code=ExitCode.USAGE)
    unit, entry = gather_unit(system), request.runtime
    path = request.config or unit.config_path
    content = system.read_bytes(path)
    text = None if content is None else content.decode("utf-8", "surrogateescape")
    found, wrong = parse_config(text, path, dockerd_version(system) if (text or "").startswith(BOM) else "")
    if wrong:
        raise GpuprovError.several(wrong)
    after, notes = _without_docker_runtime(text, found, entry) if request.unset else (docker_runtime(text, entry), ())
    if not request.unset and path == unit.config_path:
        _require_no_flags(unit, entry, path)
    # docker sets up devices by CDI when it starts.
    restart = "systemctl restart docker (this stops containers, unless live-restore is on)"
    edit = FileEdit(path, content, None if after is None else after.encode("utf-8", "surrogateescape"))
    return Configuration((edit,), notes, restart if entry.cdi else "systemctl reload docker")


def docker_runtime(text: str | None, entry: RuntimeEntry) -> str:
    """Return daemon.json with the runtime; of one that is there, only the program changes. None is no file."""

    def edit(plain: str) -> str:
        there = table_at(json.loads(plain), "runtimes").get(entry.name)
        if isinstance(there, Mapping):
            plain = with_member(plain, ("runtimes", entry.name, "path"), entry.path)
        else:
            plain = with_member(plain, ("runtimes", entry.name), {"path": entry.path, "args": []})
        if entry.set_default:
            plain = with_member(plain, ("default-runtime",), entry.name)
        return with_member(plain, ("features", "cdi"), True) if entry.cdi else plain

    return in_place(text if text and text.strip() else "{}\n", edit)


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


def _require_no_flags(unit: DockerUnit, entry: RuntimeEntry, path: str) -> None:
    """Raise GpuprovError for conflicting flags: dockerd does not start with a directive as a flag and in its file."""
    names = ("--add-runtime", *(("--default-runtime",) if entry.set_default else ()))
    words = [f"{name}={value}" for name in names for value in flag_values(unit.arguments, name)]
    if words:
        raise GpuprovError(
            f"docker's unit sets runtimes by a flag; with runtimes in {path} too it would not start",
            f"systemctl show {UNIT}: {' '.join(words)}",
            "move what the flag says into the file: systemctl edit --full docker",
        )


def _crio(system: Reader, request: ConfigureRequest) -> Configuration:
    """CRI-O reads crio.conf, then every file of crio.conf.d by name, key by key (crio.conf.d(5)); CDI by default."""
    main, target = _main_and_target(request)
    reload_command = "systemctl restart crio"
    if request.unset:
        return Configuration(emptied(system, main, target), (), reload_command)
    others = (read(system, path) for path in matching(system, f"{parent_of(main)}/crio.conf.d/*") if path != target)
    source = _crio_status(system, request) if request.from_command else merged(read(system, main), *others)
    wanted = _crio_values(read_without_ours(system, target), request.runtime, source)
    notes: tuple[str, ...] = (
        ("CRI-O reads CDI specifications by itself: --cdi.enabled changes nothing",) if request.runtime.cdi else ()
    )
    if system.exists(_OTHERS_CRIO_DROP_IN) and target != _OTHERS_CRIO_DROP_IN:
        notes += (f"{_OTHERS_CRIO_DROP_IN} is there too; CRI-O reads it after {target}",)
    return Configuration((edited(system, target, wanted),), notes, reload_command)


def _crio_values(found: Mapping[str, Any], entry: RuntimeEntry, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values to write into a file with content `found`; the entry's options are those of the default one."""
    there = table_at(source, "crio", "runtime")
    runtimes = table_at(there, "runtimes")
    names = [one for one in (there.get("default_runtime"), *_RUNC_LIKE) if one and not str(one).startswith("nvidia")]
    others = (runtimes[one] for one in names if one != entry.name and isinstance(runtimes.get(one), Mapping))
    is_there = isinstance(table_at(found, "crio", "runtime", "runtimes").get(entry.name), Mapping)
    copied: Mapping[str, Any] = {} if is_there else next(others, {})
    default = {"default_runtime": entry.name} if entry.set_default else {}
    own = {**copied, "runtime_path": entry.path, "runtime_type": "oci"}
    return {"crio": {"runtime": {**default, "runtimes": {entry.name: own}}}}


def _main_and_target(request: ConfigureRequest) -> tuple[str, str]:
    """Return the engine's main file, and the file that takes the runtime."""
    known = ENGINES[request.engine]
    main = request.config or known.main
    return main, known.drop_in if request.drop_in is None else request.drop_in or main


def _crio_status(system: Reader, request: ConfigureRequest) -> dict[str, object]:
    """Return CRI-O's configuration from the running CRI-O; older releases have a separate program for that."""
    command = (request.executable or "crio", "status", "config")
    done = system.run(command, timeout=20)
    if not done.ok:
        done = system.run(("crio-status", "config"), timeout=20)
    if not done.ok:
        raise GpuprovError(
            "CRI-O does not tell its configuration", done.evidence(4), "--config-source=file reads the files"
        )
    return read_toml(done.stdout, " ".join(command))


def _podman(system: Reader, request: ConfigureRequest) -> Configuration:
    """podman reads /etc/cdi itself (`podman run --device nvidia.com/gpu=all`), and lists a runtime's possible paths."""
    main, target = _main_and_target(request)
    if request.unset:
        return Configuration(emptied(system, main, target))
    entry = request.runtime
    notes = ("podman reads CDI specifications by itself: --cdi.enabled changes nothing",) if entry.cdi else ()
    default = {"runtime": entry.name} if entry.set_default else {}
    wanted = {"engine": {**default, "runtimes": {entry.name: [entry.path]}}}
    return Configuration((edited(system, target, wanted),), notes)
