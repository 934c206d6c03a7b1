"""The implementation of `gpuprov runtime configure`: an engine's files now and as desired, and writing them."""

from __future__ import annotations

from gpuprov.core.changes import parent_of
from gpuprov.core.system import System
from gpuprov.engines import containerd_files, crio, docker_file, podman, toml_text
from gpuprov.engines.runtime_entry import NVIDIA_RUNTIME, Configuration, ConfigureRequest, FileEdit, Reader
from gpuprov.engines.toml_files import edited, emptied, matching, merged, read, read_text
from gpuprov.protocol.errors import ExitCode, GpuprovError, from_os_error
from gpuprov.runtime_hook import deploy
from gpuprov.runtime_hook.driver_files import HOOK_PATH


def configuration(system: Reader, request: ConfigureRequest) -> Configuration:
    """Return what a call would do. Raises GpuprovError if a file can't be read or edited safely."""
    parts = {"docker": docker_file.configuration, "crio": _crio, "podman": _podman}
    return parts.get(request.engine, containerd_files.configuration)(system, request)


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
    path = path or podman.HOOK_FILE
    reload_command = "systemctl restart crio" if engine == "crio" else ""
    before = system.read_bytes(path)
    after = podman.hook_json(program)
    if not unset:
        notes = ("NVIDIA calls OCI hooks deprecated; CDI needs none: podman run --device nvidia.com/gpu=all",)
        return Configuration((FileEdit(path, before, after),), notes, reload_command)
    if before is None or not podman.is_hook_for(before, program):
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


def _crio(system: Reader, request: ConfigureRequest) -> Configuration:
    main = request.config or crio.MAIN
    target = crio.DROP_IN if request.drop_in is None else request.drop_in or main
    reload_command = "systemctl restart crio"
    if request.unset:
        return Configuration(_taken_out(system, main, target), (), reload_command)
    folder = f"{parent_of(main)}/crio.conf.d"
    others = [read(system, path) for path in matching(system, f"{folder}/*") if path != target]
    found = toml_text.read_toml(toml_text.without_ours(read_text(system, target) or ""), target)
    source = _crio_status(system, request) if request.from_command else merged((read(system, main), *others))
    notes: tuple[str, ...] = (
        ("CRI-O reads CDI specifications by itself: --cdi.enabled changes nothing",) if request.runtime.cdi else ()
    )
    if system.exists(crio.OTHERS_DROP_IN) and target != crio.OTHERS_DROP_IN:
        notes += (f"{crio.OTHERS_DROP_IN} is there too; CRI-O reads it after {target}",)
    return Configuration(
        (edited(system, target, crio.runtime_tables(found, request.runtime, source)),), notes, reload_command
    )


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
    return toml_text.read_toml(done.stdout, " ".join(command))


def _podman(system: Reader, request: ConfigureRequest) -> Configuration:
    main = request.config or podman.MAIN
    target = podman.DROP_IN if request.drop_in is None else request.drop_in or main
    if request.unset:
        return Configuration(_taken_out(system, main, target))
    notes = ("podman reads CDI specifications by itself: --cdi.enabled changes nothing",) if request.runtime.cdi else ()
    return Configuration((edited(system, target, podman.runtime_tables(request.runtime)),), notes)


def _taken_out(system: Reader, *paths: str) -> tuple[FileEdit, ...]:
    found = (emptied(system, path) for path in dict.fromkeys(paths))
    return tuple(edit for edit in found if edit is not None)
