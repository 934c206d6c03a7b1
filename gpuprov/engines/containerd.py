"""containerd's configuration, versions 1 to 3: which file takes a runtime, and its edit. Reader; writes nothing.

containerd before 2.0 takes a plugin's table from the last file that has one, whole (mergeConfig: "Replace entire
sections instead of merging"): a drop-in with one runtime in it would silently throw away the main file's sandbox image,
CNI folders and cgroup driver. And its built-in runtime runc, the default one, is gone as soon as a file names any other
runtime. containerd 2 merges both key by key. (Seen with 1.6.20, 1.7.24 and 2.1.9.)
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpuprov.core.changes import parent_of
from gpuprov.core.commands import Completed
from gpuprov.engines import toml
from gpuprov.engines.known import ENGINES, Configuration, ConfigureRequest, FileEdit, Reader, RuntimeEntry
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import GpuprovError, UsageError

MAIN, DROP_IN = ENGINES["containerd"].main, ENGINES["containerd"].drop_in
# The CRI plugin's table. 1: docs/man/containerd-config.toml.5.md; 2 and 3: docs/cri/config.md in containerd.
_PLUGIN = {1: "cri", 2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
_RUNTIME_TYPE = "io.containerd.runc.v2"
RUNC_LIKE = ("runc", "crun")
_Edits = tuple[FileEdit, ...]


def version_of(found: Mapping[str, Any], default: int) -> int:
    """Return a file's configuration version: 1 if it has keys but no version, the default if it is empty.

    Raises GpuprovError for a version that is no number: containerd itself does not start with it.
    """
    if not found:
        return default
    version = found.get("version", 1)
    if isinstance(version, bool) or not isinstance(version, int):
        hint = "write it without quotes: version = 2"
        raise GpuprovError("containerd's configuration version must be a whole number", f"version = {version!r}", hint)
    # Versions after 3 are treated as 3: no later table names are known.
    return min(version, 3) if version >= 1 else 1


def asked_version(system: Reader, program: str) -> Completed:
    """Return what `containerd --version` says. Raises GpuprovError if it does not end."""
    said = system.run((program, "--version"), timeout=20)
    if said.unanswered:
        step = f"{program} --version; if it hangs there too, install containerd's package again"
        raise GpuprovError("containerd does not tell its version", said.evidence(2), step)
    return said


def version_from_program(said: str) -> int:
    """Return the configuration version to start with, from the output of `containerd --version`."""
    found = re.search(r"\bv?(\d+)\.\d+\.\d+", said)
    return 3 if found and int(found[1]) >= 2 else 2


def plugin_table(found: Mapping[str, Any], version: int) -> Mapping[str, Any]:
    """Return the content of the CRI plugin's table."""
    return toml.table_at(found, "plugins", _PLUGIN[version])


def runtime_like_default(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the runtime entry to copy: the default one, else runc, else crun, else a standard one.

    `source` is the CRI plugin's table. The cgroup driver (SystemdCgroup) comes with it.
    """
    runtimes = _runtimes(source)
    default = str(toml.table_at(source, "containerd").get("default_runtime_name") or "")
    names = [name for name in (default, *RUNC_LIKE) if name and not name.startswith("nvidia")]
    found = (dict(runtimes[name]) for name in names if isinstance(runtimes.get(name), Mapping))
    return next(found, {"runtime_type": _RUNTIME_TYPE, "privileged_without_host_devices": False})


def runtime_values(
    found: Mapping[str, Any], version: int, entry: RuntimeEntry, source: Mapping[str, Any], *,
    forgets_runc: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the values to write into a file with content `found`: the runtime, based on the default entry in `source`.

    An existing runtime of that name keeps its keys; only its program is set. `forgets_runc`: the default runtime would
    be lost if only gpuprov's were named.
    """
    is_there = isinstance(_runtimes(plugin_table(found, version)).get(entry.name), Mapping)
    copied: dict[str, Any] = {} if is_there else runtime_like_default(source)
    programs = {"BinaryName": entry.path, **({"Runtime": entry.path} if version == 1 else {})}
    runc = {"runc": _runtimes(source).get("runc", {"runtime_type": _RUNTIME_TYPE})} if forgets_runc else {}
    own = {**copied, "options": {**copied.get("options", {}), **programs}}
    default = {"default_runtime_name": entry.name} if entry.set_default else {}
    cdi = {"enable_cdi": True} if entry.cdi else {}
    return plugin_values(version, {**cdi, "containerd": {**default, "runtimes": {**runc, entry.name: own}}})


def plugin_values(version: int, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a file that has this table of the CRI plugin."""
    return {"plugins": {_PLUGIN[version]: table}}


def _runtimes(table: Mapping[str, Any]) -> Mapping[str, Any]:
    return toml.table_at(table, "containerd", "runtimes")


def with_version(version: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the version, which a new file of version 2 or 3 must have."""
    return {"version": version, **wanted} if version > 1 else wanted


def import_pattern(drop_in: str) -> str:
    """Return the pattern by which the main file imports a drop-in: every .toml file of its folder."""
    return f"{parent_of(drop_in)}/*.toml"


def imports(found: Mapping[str, Any]) -> list[str]:
    """Return the main file's imports."""
    listed = found.get("imports", [])
    return [str(one) for one in listed] if isinstance(listed, list) else []


def _import_patterns(found: Mapping[str, Any], main: str) -> Iterator[str]:
    """Return the main file's imports; relative ones start at its folder."""
    return (one if one.startswith("/") else f"{parent_of(main)}/{one}" for one in imports(found))


def is_imported(found: Mapping[str, Any], main: str, drop_in: str) -> bool:
    """Say whether the main file already imports that drop-in."""
    # containerd's patterns (Go's filepath.Glob) cross no slash: /etc/containerd/*.toml is not conf.d.
    patterns = (one for one in _import_patterns(found, main) if one.count("/") == drop_in.count("/"))
    return any(fnmatch.fnmatchcase(drop_in, pattern) for pattern in patterns)


# -- its files -------------------------------------------------------------------------------------------------------


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

    def written(self) -> Mapping[str, Any]:
        """Return the CRI plugin's table from the files, without built-in values."""
        everything = (self.found, *(found for _, found in self.imported))
        tables = [plugin_table(found, self.version) for found in everything]
        if self.merges:
            return toml.merged(*tables)
        return next((table for table in reversed(tables) if table), {})

    def source(self) -> Mapping[str, Any]:
        """Return the CRI plugin's table from which the runtime's options are copied."""
        if self.dumped is None:
            return self.written()
        return plugin_table(self.dumped, version_of(self.dumped, self.version))

    def runtime_values(self, entry: RuntimeEntry, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values to write into the file with content `found`."""
        written = self.written()
        default = toml.table_at(written, "containerd").get("default_runtime_name", "runc")
        # The built-in runc, which no file names.
        forgets_runc = not self.merges and default == "runc" and "runc" not in _runtimes(written)
        return runtime_values(found, self.version, entry, self.source(), forgets_runc=forgets_runc)


def configuration(system: Reader, request: ConfigureRequest) -> Configuration:
    """Return the edits that register the runtime in containerd's files, or remove it."""
    known = ENGINES[request.engine]
    if request.unset:
        return _unset(system, request)
    if known.cluster:
        request = replace(request, config=request.config or known.templates[2], drop_in=request.drop_in or "")
        if not system.exists(request.config):
            raise GpuprovError(f"there is no {known.program} here", f"no {request.config}", "--config names its file")
    main = request.config or MAIN
    if writer := next((name for name, one in ENGINES.items() if main == one.rendered), ""):
        what = f"{main} is written by {writer} at every start: a change there would not last"
        raise UsageError(what, "", f"gpuprov runtime configure --runtime {writer}")
    drop_in = DROP_IN if request.drop_in is None else request.drop_in
    files = read_files(system, request, main, drop_in)
    edits, notes = _edits(system, request, files, drop_in)
    if "cri" in map(str, files.found.get("disabled_plugins", ())):
        notes += (f"{main} has cri in disabled_plugins: Kubernetes can't use this containerd until that is taken out",)
    return Configuration(edits, notes, known.reload_command)


def read_files(system: Reader, request: ConfigureRequest, main: str, drop_in: str) -> Files:
    """Read the main file and its imports, without gpuprov's, and query containerd's version and configuration."""
    text = toml.read_text(system, main) or ""
    toml.read_toml(text, main)  # an unreadable file is refused unchanged
    found = toml.read_toml(toml.without_ours(text), main)
    paths = (path for path in _imported(system, found, main) if path != drop_in)
    imported = tuple((path, toml.read_without_ours(system, path)) for path in paths)
    # The host's own containerd has no information about microk8s's.
    usual = system.which("containerd") if request.engine == "containerd" else None
    program = request.executable or usual or "containerd"
    said = asked_version(system, program) if request.executable or usual else None
    by_program = version_from_program(said.stdout) if said and said.ok else 2
    dump = (program, "--config", main, "config", "dump")
    dumped = toml.read_output(system, "containerd", dump) if request.from_command else None
    version = version_of(found, version_of(dumped, by_program) if dumped else by_program)
    if version == 1 and by_program >= 3:
        seen = said.stdout.strip() if said else ""
        step = f"{program} --config {main} config migrate prints it in version 3; put that in its place"
        raise GpuprovError(f"{main} is of version 1, of which this containerd no longer reads runtimes", seen, step)
    if said and said.ok and by_program < version:
        what = f"{main} is of version 3, which containerd knows from 2.0 on: 1.7 does not start, 1.6 ignores it"
        step = f"{program} config default prints one of version 2; put what is yours into it"
        raise GpuprovError(what, said.stdout.strip(), step)
    return Files(main, found, imported, dumped, version, merges=max(version, by_program) >= 3)


def written(system: Reader) -> Mapping[str, Any]:
    """Return the CRI plugin's table in the usual files of containerd, without gpuprov's additions."""
    return read_files(system, ConfigureRequest("containerd"), MAIN, DROP_IN).written()


def address(system: Reader) -> str:
    """Return where the host's containerd listens by its files; its default if they name no address or can't be read."""
    try:
        found = toml.read(system, MAIN)
        files = (found, *(toml.read(system, path) for path in _imported(system, found, MAIN)))
    except GpuprovError:
        files = ()
    return str(toml.table_at(toml.merged(*files), "grpc").get("address") or ENGINES["containerd"].socket)


def imported(system: Reader, main: str) -> list[str]:
    """Return the files that the main file imports; none if it can't be parsed."""
    try:
        return _imported(system, toml.read(system, main), main)
    except GpuprovError:
        return []


def _imported(system: Reader, found: Mapping[str, Any], main: str) -> list[str]:
    return [path for pattern in _import_patterns(found, main) for path in toml.matching(system, pattern)]


def _edits(system: Reader, request: ConfigureRequest, files: Files, drop_in: str) -> tuple[_Edits, tuple[str, ...]]:
    """Return the files to edit, and why they differ from the usual ones."""
    # In containerd's reading order.
    everything = ((files.main, files.found), *files.imported)
    holders = [path for path, found in everything if plugin_table(found, files.version)]
    if files.version == 1 and drop_in:
        note = "version 1 of containerd's configuration has no drop-ins: the main file takes the runtime"
        return _in_place(system, request, files, files.main), (note,)
    if not drop_in:
        return _in_place(system, request, files, files.main), ()
    wanted = files.runtime_values(request.runtime, {})
    if files.merges or not holders:
        edits = _by_drop_in(system, files, drop_in, wanted)
        return edits, _newly_read_note(system, edits, drop_in)
    one_file = f"containerd before 2.0 takes the CRI plugin's table from one file alone, and that is {holders[-1]}"
    if request.drop_in is None:
        note = f"{one_file}: the runtime goes there, a drop-in would hide the rest of that table"
        # That of an earlier run, when no file had the table, would hide it.
        earlier = toml.emptied(system, drop_in) if holders[-1] != drop_in else ()
        return (*_in_place(system, request, files, holders[-1]), *earlier), (note,)
    note = f"{one_file}: {drop_in} gets a copy of the whole table; run this again when you change the original"
    edits = _by_drop_in(system, files, drop_in, toml.merged(plugin_values(files.version, files.source()), wanted))
    return edits, (note, *_newly_read_note(system, edits, drop_in))


def _in_place(system: Reader, request: ConfigureRequest, files: Files, path: str) -> _Edits:
    found = dict(((files.main, files.found), *files.imported))[path]
    wanted = files.runtime_values(request.runtime, found)
    return (toml.edited(system, path, wanted if found else with_version(files.version, wanted)),)


def _by_drop_in(system: Reader, files: Files, drop_in: str, wanted: dict[str, Any]) -> _Edits:
    edit = toml.edited(system, drop_in, with_version(files.version, wanted))
    if is_imported(files.found, files.main, drop_in):
        return (edit,)
    listed = [*imports(files.found), import_pattern(drop_in)]
    root: dict[str, Any] = {} if files.found else {"version": files.version}
    return (edit, toml.edited(system, files.main, {**root, "imports": listed}))


def _newly_read_note(system: Reader, edits: _Edits, drop_in: str) -> tuple[str, ...]:
    """Return a note about files in the drop-in's folder that were not read before, and now will be."""
    if not any(edit.changes for edit in edits[1:]):
        return ()
    others = [path for path in toml.matching(system, import_pattern(drop_in)) if path != drop_in]
    return (f"containerd will read {', '.join(others)} too, which no file has imported so far",) if others else ()


def _unset(system: Reader, request: ConfigureRequest) -> Configuration:
    """Return the edits that remove gpuprov's additions from the main file, its imports, the drop-in, the templates."""
    known = ENGINES[request.engine]
    if known.cluster:
        paths = [request.config] if request.config else list(known.templates.values())
        paths += [request.drop_in] if request.drop_in else list(known.drop_ins.values())
        return Configuration(toml.emptied(system, *paths), (), known.reload_command)
    main = request.config or MAIN
    drop_in = DROP_IN if request.drop_in is None else request.drop_in
    found = toml.read(system, main)
    imported = [path for path in _imported(system, found, main) if path != drop_in]
    neighbours = [path for path in imported if drop_in and parent_of(path) == parent_of(drop_in)]
    # Files that others have added beside the drop-in since then need the same import.
    files = (main, *imported, *([drop_in] if drop_in else []))
    edits = toml.emptied(system, *files, keep=("imports",) if neighbours else ())
    kept = neighbours and edits and import_pattern(drop_in) in imports(found)
    notes = (f"{main} keeps its import of {parent_of(drop_in)}: {', '.join(neighbours)} needs it",) if kept else ()
    return Configuration(edits, notes, known.reload_command)


# -- k3s and RKE2 ----------------------------------------------------------------------------------------------------
# They write containerd's configuration themselves, from a template (https://docs.k3s.io/advanced#configuring-containerd).
# Their own base adds runtimes that it finds at its start, `nvidia` among them, so a template must not write the same
# table again: containerd could not read it and the node would go down.

_BASE = '{{ template "base" . }}'


def rancher_configuration(system: Reader, request: ConfigureRequest) -> Configuration:
    """Return the edits that register the runtime in the files of a k3s or RKE2, or remove it."""
    if request.unset:
        return configuration(system, request)
    name, known, runtime = request.engine, ENGINES[request.engine], request.runtime
    rendered_text = toml.read_text(system, known.rendered)
    if rendered_text is None and not request.config:
        what = f"{name} has not written its containerd configuration yet, so nobody knows its version"
        seen = f"there is no {known.rendered}"
        raise GpuprovError(what, seen, f"start {name} once, or name the template: --config {known.templates[3]}")
    rendered = toml.read_toml(rendered_text or "", known.rendered)
    version = version_of(rendered, 3 if "v3" in request.config.rpartition("/")[2] else 2)
    source = plugin_table(rendered, version)
    drop_in = known.drop_ins[version] if request.drop_in is None else request.drop_in
    if version >= 3 and drop_in and is_imported(rendered, known.rendered, drop_in):
        wanted = with_version(version, runtime_values({}, version, runtime, source))
        return Configuration((toml.edited(system, drop_in, wanted),), (), known.reload_command)
    template = request.config or known.templates[version]
    text, own = toml.read_text(system, template), toml.read_without_ours(system, template)
    if text is not None and 'template "base"' not in text:
        wanted = runtime_values(own, version, runtime, source)
        return Configuration((toml.edited(system, template, wanted),), (), known.reload_command)
    if runtime.set_default and toml.table_at(source, "containerd").get("default_runtime_name") != runtime.name:
        what = f"the default runtime is {name}'s own setting; its base template writes that table"
        setting = f"put `default-runtime: {runtime.name}` into /etc/rancher/{name}/config.yaml"
        raise GpuprovError(what, "", f"{setting}, then: {known.reload_command}")
    has_ours = runtime.name in _runtimes(plugin_table(toml.read_toml(text or "", template), version))
    path = _adds_itself(system, request, source, has_ours=has_ours)
    if path == runtime.path:
        # An earlier run's entry would be a second table of that name.
        note = f"{name} has runtime {runtime.name} by itself, from its next start on at least: {path}"
        return Configuration(toml.emptied(system, template), (note,), known.reload_command)
    if path:
        what = f"{name} itself adds a runtime {runtime.name}, of another program"
        step = "give another name with --nvidia-runtime-name, or take that program away and restart"
        raise GpuprovError(f"{what}; a second would keep containerd from starting", f"{known.rendered}: {path}", step)
    # The base template writes the tables of these two.
    wanted = runtime_values(own, version, replace(runtime, set_default=False, cdi=False), source)
    no_cdi = runtime.cdi and not source.get("enable_cdi", version >= 3)
    notes = (f"CDI is not enabled: the base template of {name} writes that table",) if no_cdi else ()
    return Configuration((toml.edited(system, template, wanted, first=_BASE),), notes, known.reload_command)


def _adds_itself(system: Reader, request: ConfigureRequest, source: Mapping[str, Any], *, has_ours: bool) -> str:
    """Return the program of a runtime of that name that the base adds by itself, "" if it adds none."""
    runtime = request.runtime
    there = _runtimes(source).get(runtime.name)
    if there is not None and not has_ours:
        return str(there.get("options", {}).get("BinaryName") or "another one")
    if runtime.name != RuntimeEntry().name:
        return ""
    # It looks for these at each start. The requested one exists by then, even if it does not yet.
    return next((path for path in ENGINES[request.engine].detects if system.exists(path) or path == runtime.path), "")
