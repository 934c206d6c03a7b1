"""Choose containerd's files for a runtime and compute their edits. Reader; writes nothing.

The main file and its imports are read as containerd reads them; `containerd.py` explains why a drop-in is not always
right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpuprov.core.changes import parent_of
from gpuprov.engines import containerd, toml_text
from gpuprov.engines.containerd import DISTRIBUTIONS
from gpuprov.engines.runtime_entry import Configuration, ConfigureRequest, FileEdit, Reader, RuntimeEntry
from gpuprov.engines.toml_files import edited, emptied, matching, merged, read, read_text
from gpuprov.engines.toml_tables import Tables, joined
from gpuprov.protocol.errors import ExitCode, GpuprovError

_RELOAD_COMMAND = "systemctl restart containerd"
_Edits = tuple[FileEdit, ...]


@dataclass(frozen=True)
class Files:
    """The files that containerd reads, without gpuprov's: its main file, its imports, and their combined result.

    `dumped` is `containerd config dump`, None if it was not run. `merges`: plugins' tables are merged over files.
    """

    main: str
    found: Mapping[str, Any]
    imported: tuple[tuple[str, Mapping[str, Any]], ...]
    dumped: Mapping[str, Any] | None
    version: int
    merges: bool

    def holders(self) -> tuple[str, ...]:
        """Return the files that contain the CRI plugin's table, in containerd's reading order."""
        everything = ((self.main, self.found), *self.imported)
        return tuple(path for path, found in everything if containerd.plugin_table(found, self.version))

    def written(self) -> Mapping[str, Any]:
        """Return the CRI plugin's table from the files, without built-in values."""
        everything = (self.found, *(found for _, found in self.imported))
        tables = [containerd.plugin_table(found, self.version) for found in everything]
        if self.merges:
            return merged(tables)
        return next((table for table in reversed(tables) if table), {})

    def source(self) -> Mapping[str, Any]:
        """Return the CRI plugin's table from which the runtime's options are copied."""
        if self.dumped is None:
            return self.written()
        return containerd.plugin_table(self.dumped, containerd.version_of(self.dumped, self.version))

    def runtime_tables(self, entry: RuntimeEntry, found: Mapping[str, Any]) -> Tables:
        """Return the tables to write into the file with content `found`."""
        forgets_runc = not self.merges and containerd.relies_on_builtin_runc(self.written())
        return containerd.runtime_tables(found, self.version, entry, self.source(), forgets_runc=forgets_runc)


def configuration(system: Reader, request: ConfigureRequest) -> Configuration:
    """Return the edits that register the runtime in containerd's files, or remove it."""
    distribution = DISTRIBUTIONS.get(request.engine)
    if request.unset:
        return _unset(system, request)
    if distribution is not None and distribution.drop_in:
        from gpuprov.engines import rancher_files

        return rancher_files.configuration(system, request, distribution)
    if distribution is not None:
        request = replace(request, config=request.config or distribution.templates[2], drop_in=request.drop_in or "")
        if not system.exists(request.config):
            raise GpuprovError(
                f"there is no {distribution.name} here", f"no {request.config}", "--config names its file"
            )
    main = request.config or containerd.MAIN
    _require_lasting(main)
    drop_in = containerd.DROP_IN if request.drop_in is None else request.drop_in
    files = read_files(system, request, main, drop_in)
    edits, notes = _edits(system, request, files, drop_in)
    if "cri" in map(str, files.found.get("disabled_plugins", ())):
        notes += (f"{main} has cri in disabled_plugins: Kubernetes can't use this containerd until that is taken out",)
    return Configuration(edits, notes, distribution.reload_command if distribution else _RELOAD_COMMAND)


def _require_lasting(main: str) -> None:
    for one in DISTRIBUTIONS.values():
        if main == one.rendered:
            raise GpuprovError(
                f"{main} is written by {one.name} at every start: a change there would not last",
                "", f"gpuprov runtime configure --runtime {one.name}", exit_code=ExitCode.USAGE,
            )  # fmt: skip


def read_files(system: Reader, request: ConfigureRequest, main: str, drop_in: str) -> Files:
    """Read the main file and its imports, without gpuprov's, and query containerd's version and configuration."""
    text = read_text(system, main) or ""
    toml_text.read_toml(text, main)  # an unreadable file is refused unchanged
    found = toml_text.read_toml(toml_text.without_ours(text), main)
    imported = tuple((path, _others(system, path)) for path in _imported(system, found, main) if path != drop_in)
    # The host's own containerd has no information about microk8s's.
    usual = system.which("containerd") if request.engine == "containerd" else None
    program = request.executable or usual or "containerd"
    said = system.run((program, "--version"), timeout=20) if request.executable or usual else None
    by_program = containerd.version_from_program(said.stdout) if said and said.ok else 2
    dumped = _dump(system, program, main) if request.from_command else None
    version = containerd.version_of(found, containerd.version_of(dumped, by_program) if dumped else by_program)
    if version == 1 and by_program >= 3:
        raise GpuprovError(
            f"{main} is of version 1, of which this containerd no longer reads runtimes",
            said.stdout.strip() if said else "",
            f"{program} --config {main} config migrate prints it in version 3; put that in its place",
        )
    if said and said.ok and by_program < version:
        raise GpuprovError(
            f"{main} is of version 3, which containerd knows from 2.0 on: 1.7 does not start, 1.6 ignores it",
            said.stdout.strip(),
            f"{program} config default prints one of version 2; put what is yours into it",
        )
    return Files(main, found, imported, dumped, version, merges=max(version, by_program) >= 3)


def written(system: Reader) -> Mapping[str, Any]:
    """Return the CRI plugin's table in the usual files of containerd, without gpuprov's additions."""
    return read_files(system, ConfigureRequest("containerd"), containerd.MAIN, containerd.DROP_IN).written()


def _others(system: Reader, path: str) -> Mapping[str, Any]:
    return toml_text.read_toml(toml_text.without_ours(read_text(system, path) or ""), path)


def imported(system: Reader, main: str) -> list[str]:
    """Return the files that the main file imports; none if it can't be parsed."""
    try:
        return _imported(system, read(system, main), main)
    except GpuprovError:
        return []


def _imported(system: Reader, found: Mapping[str, Any], main: str) -> list[str]:
    patterns = (one if one.startswith("/") else f"{parent_of(main)}/{one}" for one in containerd.imports(found))
    return [path for pattern in patterns for path in matching(system, pattern)]


def _dump(system: Reader, program: str, main: str) -> Mapping[str, Any]:
    command = (program, "--config", main, "config", "dump")
    done = system.require(command, "containerd does not tell its configuration", "--config-source=file reads the file")
    return toml_text.read_toml(done.stdout, " ".join(command))


def _edits(system: Reader, request: ConfigureRequest, files: Files, drop_in: str) -> tuple[_Edits, tuple[str, ...]]:
    """Return the files to edit, and why they differ from the usual ones."""
    holders = files.holders()
    if files.version == 1 and drop_in:
        note = "version 1 of containerd's configuration has no drop-ins: the main file takes the runtime"
        return _in_place(system, request, files, files.main), (note,)
    if not drop_in:
        return _in_place(system, request, files, files.main), ()
    wanted = files.runtime_tables(request.runtime, {})
    if files.merges or not holders:
        edits = _by_drop_in(system, files, drop_in, wanted)
        return edits, _woken(system, edits, drop_in)
    one_file = f"containerd before 2.0 takes the CRI plugin's table from one file alone, and that is {holders[-1]}"
    if request.drop_in is None:
        note = f"{one_file}: the runtime goes there, a drop-in would hide the rest of that table"
        return _in_place(system, request, files, holders[-1]), (note,)
    whole = containerd.whole_table(files.source(), files.version)
    note = f"{one_file}: {drop_in} gets a copy of the whole table; run this again when you change the original"
    edits = _by_drop_in(system, files, drop_in, joined(whole, wanted))
    return edits, (note, *_woken(system, edits, drop_in))


def _in_place(system: Reader, request: ConfigureRequest, files: Files, path: str) -> _Edits:
    found = dict(((files.main, files.found), *files.imported))[path]
    wanted = files.runtime_tables(request.runtime, found)
    return (edited(system, path, wanted if found else containerd.with_version(files.version, wanted)),)


def _by_drop_in(system: Reader, files: Files, drop_in: str, wanted: Tables) -> _Edits:
    edit = edited(system, drop_in, containerd.with_version(files.version, wanted))
    if containerd.is_imported(files.found, files.main, drop_in):
        return (edit,)
    listed = [*containerd.imports(files.found), containerd.import_pattern(drop_in)]
    root: dict[str, Any] = {} if files.found else {"version": files.version}
    return (edit, edited(system, files.main, (((), {**root, "imports": listed}),)))


def _woken(system: Reader, edits: _Edits, drop_in: str) -> tuple[str, ...]:
    """Return a note about files in the drop-in's folder that were not read before, and now will be."""
    if not any(edit.changes for edit in edits[1:]):
        return ()
    others = [path for path in matching(system, containerd.import_pattern(drop_in)) if path != drop_in]
    return (f"containerd will read {', '.join(others)} too, which no file has imported so far",) if others else ()


def _unset(system: Reader, request: ConfigureRequest) -> Configuration:
    """Return the edits that remove gpuprov's additions from the main file, its imports, the drop-in, the templates."""
    distribution = DISTRIBUTIONS.get(request.engine)
    if distribution is not None:
        paths = [request.config] if request.config else list(distribution.templates.values())
        paths += [request.drop_in] if request.drop_in else list(distribution.drop_in.values())
        return Configuration(_emptied(system, paths), (), distribution.reload_command)
    main = request.config or containerd.MAIN
    drop_in = containerd.DROP_IN if request.drop_in is None else request.drop_in
    found = read(system, main)
    imported = [path for path in _imported(system, found, main) if path != drop_in]
    neighbours = [path for path in imported if drop_in and parent_of(path) == parent_of(drop_in)]
    # Files that others have added beside the drop-in since then need the same import.
    edits = _emptied(
        system, [main, *imported, *([drop_in] if drop_in else [])], keep=("imports",) if neighbours else ()
    )
    kept = neighbours and edits and containerd.import_pattern(drop_in) in containerd.imports(found)
    notes = (f"{main} keeps its import of {parent_of(drop_in)}: {', '.join(neighbours)} needs it",) if kept else ()
    return Configuration(edits, notes, _RELOAD_COMMAND)


def _emptied(system: Reader, paths: list[str], *, keep: tuple[str, ...] = ()) -> _Edits:
    found = (emptied(system, path, keep=keep) for path in dict.fromkeys(paths))
    return tuple(edit for edit in found if edit is not None)
