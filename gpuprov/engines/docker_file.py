"""daemon.json for `gpuprov runtime configure`: add or remove the runtime without changing another byte.

JSON has no comments, so nothing marks gpuprov's additions: the runtime's name and program identify them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from gpuprov.engines.docker_config import DAEMON_JSON, parse_config
from gpuprov.engines.docker_unit import UNIT, DockerUnit, dockerd_version, flag_values, gather_unit
from gpuprov.engines.json_text import BOM, in_place, with_member, without_member
from gpuprov.engines.runtime_entry import Configuration, ConfigureRequest, FileEdit, Reader, RuntimeEntry
from gpuprov.protocol.errors import ExitCode, GpuprovError

_RELOAD = "systemctl reload docker"
# Devices by CDI are set up when docker starts.
_RESTART = "systemctl restart docker (this stops containers, unless live-restore is on)"


def configuration(system: Reader, request: ConfigureRequest) -> Configuration:
    """Return the edit that registers the runtime in daemon.json, or removes it."""
    if request.drop_in:
        raise GpuprovError("docker has no drop-ins", request.drop_in, "--config FILE", exit_code=ExitCode.USAGE)
    unit = gather_unit(system)
    usual = unit.config_path
    path = request.config or usual
    content = system.read_bytes(path)
    text = None if content is None else content.decode("utf-8", "surrogateescape")
    version = dockerd_version(system) if (text or "").startswith(BOM) else ""
    found = _parsed(text, path, version)
    if request.unset:
        after, notes = _without(text, found, request.runtime)
    else:
        if path == usual:
            _require_no_flags(unit, request.runtime, path)
        after, notes = configured(text, request.runtime), ()
    reload_command = _RESTART if request.runtime.cdi else _RELOAD
    edit = FileEdit(path, content, None if after is None else after.encode("utf-8", "surrogateescape"))
    return Configuration((edit,), notes, reload_command)


def configured(text: str | None, entry: RuntimeEntry) -> str:
    """Return daemon.json with the runtime. `text` has been parsed without problems; None is no file."""
    if text is None or not text.strip():
        text = "{}\n"
    return in_place(text, lambda plain: _with_runtime(plain, entry))


def _with_runtime(text: str, entry: RuntimeEntry) -> str:
    runtimes = _parsed(text, DAEMON_JSON).get("runtimes") or {}
    there = runtimes.get(entry.name)
    if isinstance(there, Mapping):
        text = with_member(text, ("runtimes", entry.name, "path"), entry.path)
    else:
        text = with_member(text, ("runtimes", entry.name), {"path": entry.path, "args": []})
    if entry.set_default:
        text = with_member(text, ("default-runtime",), entry.name)
    return with_member(text, ("features", "cdi"), True) if entry.cdi else text


def _without(text: str | None, found: Mapping[str, Any], entry: RuntimeEntry) -> tuple[str | None, tuple[str, ...]]:
    there = (found.get("runtimes") or {}).get(entry.name)
    if text is None or not isinstance(there, Mapping):
        return text, ()
    if there.get("path") != entry.path:
        seen = f"runtime {entry.name} is {there.get('path')}, not {entry.path}"
        note = f"{seen}: left alone (--nvidia-runtime-path names it)"
        return text, (note,)
    notes: tuple[str, ...] = ()
    members: list[tuple[str, ...]] = [("runtimes", entry.name)]
    if found.get("default-runtime") == entry.name:
        members.append(("default-runtime",))
        notes = ("the default runtime was this one; now it is docker's own, runc",)
    if entry.cdi:
        members.append(("features", "cdi"))
    elif (found.get("features") or {}).get("cdi") is True:
        notes += ("CDI stays enabled; --unset --cdi.enabled takes that out too",)
    text = in_place(text, lambda plain: functools.reduce(without_member, members, plain))
    return (None if not _parsed(text.lstrip(BOM), DAEMON_JSON) else text), notes


def _parsed(text: str | None, path: str, version: str = "") -> Mapping[str, Any]:
    found, wrong = parse_config(text, path, version)
    if not wrong:
        return found
    raise GpuprovError.several(wrong)


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
