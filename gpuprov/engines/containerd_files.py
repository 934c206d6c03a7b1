"""Which of containerd's files a runtime goes into, and what becomes of them. Reads; writes nothing.

The main file and its imports are read as containerd reads them; `containerd.py` says why a drop-in is not always right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpuprov.changes import parent_of
from gpuprov.engines import containerd, toml_text
from gpuprov.engines.containerd import DISTRIBUTIONS
from gpuprov.engines.toml_files import edited, emptied, matching, merged, read, read_text
from gpuprov.engines.toml_text import Wants
from gpuprov.engines.wish import Configuration, FileEdit, Request
from gpuprov.errors import ExitCode, GpuprovError
from gpuprov.system import System

_TAKE_UP = "systemctl restart containerd"


@dataclass(frozen=True)
class Files:
    """What containerd reads: its main file, the files that it imports, and all of them as `containerd config dump`."""

    main: str
    found: Mapping[str, Any]
    imported: tuple[tuple[str, Mapping[str, Any]], ...]
    dumped: Mapping[str, Any] | None
    version: int
    merges: bool

    def holders(self) -> tuple[str, ...]:
        """Return the files in which the CRI plugin's table stands, in the order in which containerd reads them."""
        everything = ((self.main, self.found), *self.imported)
        return tuple(path for path, found in everything if containerd.plugin_table(found, self.version))

    def source(self) -> Mapping[str, Any]:
        """Return the CRI plugin's table as containerd sees it without our runtime."""
        if self.dumped is not None:
            return containerd.plugin_table(self.dumped, containerd.version_of(self.dumped, self.version))
        tables = [
            containerd.plugin_table(one, self.version) for one in (self.found, *(one for _, one in self.imported))
        ]
        if self.merges:
            return merged(tables)
        return next((table for table in reversed(tables) if table), {})


def configuration(system: System, request: Request) -> Configuration:
    """Return what brings the runtime into containerd's files, or takes it out."""
    distribution = DISTRIBUTIONS.get(request.engine)
    if request.unset:
        return _unset(system, request)
    if distribution is not None and distribution.name != "microk8s":
        from gpuprov.engines import rancher_files

        return rancher_files.configuration(system, request, distribution)
    if distribution is not None:
        request = replace(request, config=request.config or distribution.templates[2], drop_in=request.drop_in or "")
    main = request.config or containerd.MAIN
    for one in DISTRIBUTIONS.values():
        if main == one.rendered:
            raise GpuprovError(
                f"{main} is written by {one.name} at every start: a change there would not last",
                "", f"gpuprov runtime configure --runtime {one.name}", exit_code=ExitCode.USAGE,
            )  # fmt: skip
    drop_in = containerd.DROP_IN if request.drop_in is None else request.drop_in
    files = read_files(system, request, main, drop_in)
    edits, notes = _edits(system, request, files, drop_in)
    if "cri" in map(str, files.found.get("disabled_plugins", ())):
        notes += (f"{main} has cri in disabled_plugins: Kubernetes can't use this containerd until that is taken out",)
    return Configuration(edits, notes, distribution.take_up if distribution else _TAKE_UP)


def read_files(system: System, request: Request, main: str, drop_in: str) -> Files:
    """Read the main file and its imports, without what is ours, and ask containerd what it is."""
    text = read_text(system, main) or ""
    toml_text.read_toml(text, main)  # a file that can't be read is refused as it stands
    found = toml_text.read_toml(toml_text.without_ours(text), main)
    names = [path for pattern in _absolute(found, main) for path in matching(system, pattern) if path != drop_in]
    program = request.executable or system.which("containerd") or "containerd"
    said = system.run((program, "--version"), timeout=20)
    by_program = containerd.version_from_program(said.stdout) if said.ok else 2
    dumped = _dump(system, program, main) if request.from_command else None
    version = containerd.version_of(found, containerd.version_of(dumped, by_program) if dumped else by_program)
    return Files(
        main, found, tuple((path, read(system, path)) for path in names), dumped, version,
        containerd.merges_plugin_tables(max(version, by_program)),
    )  # fmt: skip


def _absolute(found: Mapping[str, Any], main: str) -> list[str]:
    return [one if one.startswith("/") else f"{parent_of(main)}/{one}" for one in containerd.imports(found)]


def _dump(system: System, program: str, main: str) -> Mapping[str, Any]:
    command = (program, "--config", main, "config", "dump")
    done = system.require(command, "containerd does not tell its configuration", "--config-source=file reads the file")
    return toml_text.read_toml(done.stdout, " ".join(command))


def _edits(
    system: System, request: Request, files: Files, drop_in: str
) -> tuple[tuple[FileEdit, ...], tuple[str, ...]]:
    """Return the files to edit, and why they are others than one might expect."""
    holders = files.holders()
    source = files.source()
    if files.version == 1:
        note = (
            "version 1 of containerd's configuration has no drop-ins: the main file takes the runtime"
            if drop_in
            else ""
        )
        return (_in_place(system, request, files, files.main, files.found, source),), (note,) if note else ()
    if not drop_in:
        return (_in_place(system, request, files, files.main, files.found, source),), ()
    if files.merges or not holders:
        return _by_drop_in(
            system, request, files, drop_in, containerd.wants({}, files.version, request.wish, source)
        ), ()
    if request.drop_in is None:
        found = dict(((files.main, files.found), *files.imported))[holders[-1]]
        note = (
            f"containerd before 2.0 takes the CRI plugin's table from one file alone, and that is {holders[-1]}: "
            "the runtime stands there, a drop-in would hide the rest of that table"
        )
        return (_in_place(system, request, files, holders[-1], found, source),), (note,)
    whole = containerd.whole_table(source, files.version)
    wanted = containerd.wants({}, files.version, request.wish, source)
    note = (
        f"containerd before 2.0 takes the CRI plugin's table from one file alone: {drop_in} holds a copy of "
        f"{holders[-1]}'s; run this again when you change that"
    )
    return _by_drop_in(system, request, files, drop_in, toml_text.joined(whole, wanted)), (note,)


def _in_place(
    system: System, request: Request, files: Files, path: str, found: Mapping[str, Any], source: Mapping[str, Any]
) -> FileEdit:
    wanted = containerd.wants(found, files.version, request.wish, source)
    if not found:
        wanted = containerd.with_version(files.version, wanted)
    return edited(system, path, wanted)


def _by_drop_in(system: System, request: Request, files: Files, drop_in: str, wanted: Wants) -> tuple[FileEdit, ...]:
    edit = edited(system, drop_in, containerd.with_version(files.version, wanted))
    if containerd.is_imported(files.found, files.main, drop_in):
        return (edit,)
    listed = [*containerd.imports(files.found), containerd.import_pattern(drop_in)]
    root: dict[str, Any] = {} if files.found else {"version": files.version}
    return (edit, edited(system, files.main, (((), {**root, "imports": listed}),)))


def _unset(system: System, request: Request) -> Configuration:
    """Return what takes out all that is ours: of the main file, its imports, the drop-in, the templates."""
    distribution = DISTRIBUTIONS.get(request.engine)
    if distribution is not None:
        paths = [request.config] if request.config else list(distribution.templates.values())
        paths += [request.drop_in] if request.drop_in else list(distribution.drop_in.values())
        return Configuration(_emptied(system, paths), (), distribution.take_up)
    main = request.config or containerd.MAIN
    drop_in = containerd.DROP_IN if request.drop_in is None else request.drop_in
    found = read(system, main)
    imported = [path for pattern in _absolute(found, main) for path in matching(system, pattern) if path != drop_in]
    folder = parent_of(drop_in) if drop_in else ""
    neighbours = [path for path in imported if parent_of(path) == folder]
    # Files that others have put beside the drop-in since then live by the same import.
    keep = ("imports",) if neighbours else ()
    edits = _emptied(system, [main, *imported, *([drop_in] if drop_in else [])], keep=keep)
    pattern = containerd.import_pattern(drop_in) if drop_in else ""
    kept = keep and pattern in containerd.imports(found)
    notes = (f"{main} keeps its import of {pattern}: {', '.join(neighbours)} needs it",) if kept and edits else ()
    return Configuration(edits, notes, _TAKE_UP)


def _emptied(system: System, paths: list[str], *, keep: tuple[str, ...] = ()) -> tuple[FileEdit, ...]:
    found = (emptied(system, path, keep=keep) for path in dict.fromkeys(paths))
    return tuple(edit for edit in found if edit is not None)
