"""The OCI hook in hooks.d, by which podman and CRI-O run a hook with every container. Writes nothing."""

from __future__ import annotations

from gpuprov.core.system import System
from gpuprov.engines import podman
from gpuprov.engines.wish import Configuration, FileEdit
from gpuprov.wire.errors import ExitCode, GpuprovError

_TAKE_UP = {"crio": "systemctl restart crio"}


def configuration(system: System, engine: str, path: str, program: str, *, unset: bool) -> Configuration:
    """Return the hook's file put there or taken away. Only podman and CRI-O read such files."""
    if engine not in ("podman", "crio"):
        raise GpuprovError(
            f"{engine} reads no OCI hooks from a folder", "", "--config-mode config-file", exit_code=ExitCode.USAGE
        )
    path = path or podman.HOOK_FILE
    before = system.read_bytes(path)
    after = podman.hook_json(program)
    if not unset:
        notes = ("NVIDIA calls OCI hooks deprecated; CDI needs none: podman run --device nvidia.com/gpu=all",)
        return Configuration((FileEdit(path, before, after),), notes, _TAKE_UP.get(engine, ""))
    if before is None or not podman.is_hook_for(before, program):
        there = () if before is None else (f"{path} runs another program than {program}: left alone",)
        return Configuration((), there)
    return Configuration((FileEdit(path, before, None),), (), _TAKE_UP.get(engine, ""))
