"""Which libcuda programs load on a host, in a container, an image or an OCI bundle. Reads only.

docker and podman locate containers and images. A running container is read through /proc/PID/root, with all its mounts;
for an image or a stopped container, the engine writes an archive. Nothing in it is executed.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpuprov.cdi.discover import parse_kernel_version
from gpuprov.checks.cuda.judgement import Finding, Runtime, find_runtimes, judge
from gpuprov.checks.cuda.results import RESULTS, Result
from gpuprov.checks.cuda.search import (
    LIBCUDA,
    LIBNVIDIA_ML,
    Candidate,
    Found,
    Loader,
    Program,
    find_loader,
    processor_levels,
    search,
)
from gpuprov.checks.cuda.trees import AddedTree, ArchiveTree, RootTree, Tree, add_driver, chain, read_archive
from gpuprov.core.system import System
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.events import CheckDone, CudaSurveyed, Finished, Note, Sink
from gpuprov.runtime_hook.config import owner_of, root_of
from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.request import parse_request
from gpuprov.runtime_hook.rootfs import Root
from gpuprov.runtime_hook.settings import Settings
from gpuprov.runtime_hook.volumes import cover, volumes_of

ENGINES = ("docker", "podman")
_SECONDS = 60
_EXPORT_SECONDS = 900
_MOST_BYTES = 2 << 30
# What is looked into; of all other files, an archive's names are enough.
_KEPT = re.compile(
    r".*/(libcuda\.so[^/]*|libnvidia-ml\.so[^/]*|ld-[^/]*\.so[^/]*|torch/version\.py)|/etc/ld\.so\.(cache|preload)"
)
_LIBRARY = re.compile(r"/lib[^/]*\.so(\.[^/]*)?$")


@dataclass(frozen=True)
class Subject:
    """What is looked at: its kind (host, container or image), name, files, and how these were read."""

    kind: str
    name: str
    tree: Tree
    program: Program
    read: str
    has_driver: bool = True


@contextlib.contextmanager
def opened(system: System, name: str, call: Program) -> Iterator[Subject]:
    """Yield the host (no name), a container or an image; `call` overrides its environment.

    Raises GpuprovError if neither container nor image exists, or if it can't be read.
    """
    if not name:
        with _root(str(system.path("/")), name, of_process=False) as tree:
            yield Subject("host", "", tree, call, "the host's own files")
        return
    engine, kind, found = _inspected(system, name)
    config = found.get("Config") or {}
    program = replace(
        call, environment={**_variables(config.get("Env")), **call.environment}, folder=config.get("WorkingDir") or "/"
    )
    pid = (found.get("State") or {}).get("Pid") or 0
    if kind == "container" and pid:
        with _root(f"/proc/{pid}/root", name, of_process=True) as tree:
            # The process may have ended meanwhile, and its id may have been reused.
            if ((_inspected(system, name)[2].get("State") or {}).get("Pid") or 0) != pid:
                raise GpuprovError(f"container {name} stopped while it was read", f"its first process was {pid}",
                                   "run the same command again")  # fmt: skip
            # What the process has may be less than what the engine gave: an entry point may unset variables.
            own = _variables((system.read_text(f"/proc/{pid}/environ") or "").split("\0"))
            environment = {**(own or program.environment), **call.environment}
            path = program.path or _program_of(tree, pid)
            program = replace(program, environment=environment, path=path)
            yield Subject(kind, name, tree, program, f"running in {engine}: /proc/{pid}/root")
        return
    folder = Path(system.temporary_directory())
    try:
        archive = _exported(system, engine, kind, name, folder, call.path)
        said = add_driver(archive, folder)
        read = f"{engine} export{' of a container that was never started' if kind == 'image' else ''}, {said}"
        yield Subject(kind, name, archive, program, read, said.startswith("with "))
    finally:
        system.remove_tree(str(folder))


@contextlib.contextmanager
def _root(path: str, name: str, *, of_process: bool) -> Iterator[Tree]:
    try:
        root = Root(path, of_process=of_process)
    except OSError as error:
        what = f"the root file system of {name or 'this host'} can't be read"
        raise GpuprovError(what, str(error), "put sudo before the command") from None
    try:
        yield RootTree(root)
    finally:
        root.close()


def _program_of(tree: Tree, pid: int) -> str:
    """Return the program that a process runs, as a path in its root file system; "" if unknown."""
    try:
        path = str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return ""
    return path if chain(tree, path) else ""


def _variables(entries: Any) -> dict[str, str]:
    pairs = (str(one).partition("=") for one in entries or ())
    return {variable: value for variable, separator, value in pairs if separator}


def _inspected(system: System, name: str) -> tuple[str, str, Mapping[str, Any]]:
    """Return engine, kind and description of a container or, if there is none of this name, of an image."""
    engines = [engine for engine in ENGINES if system.which(engine)]
    said = []
    for kind in ("container", "image"):
        for engine in engines:
            # No --format: podman 4 writes a list with it, docker an object; without it both write a list.
            done = system.run((engine, "inspect", "--type", kind, "--", name), timeout=_SECONDS)
            if done.ok:
                return engine, kind, _description(done.stdout)
            said.append(done.evidence())
    raise GpuprovError(
        f"there is no container or image {name} on this host",
        "\n".join(said[:2]) or "neither docker nor podman is installed",
        "docker ps, docker images show names; an image must be pulled before: docker pull IMAGE",
        exit_code=ExitCode.USAGE,
    )


def _description(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    one = found[0] if isinstance(found, list) and found else None
    return one if isinstance(one, dict) else {}


def _exported(system: System, engine: str, kind: str, name: str, folder: Path, program: str) -> ArchiveTree:
    if kind == "container":
        return _read_export(system, engine, name, folder, program)
    made = f"gpuprov-cuda-{system.own_pid()}"
    create = (engine, "create", f"--name={made}", "--pull=never", "--network=none", "--entrypoint=/true", name)
    system.require(create, f"{engine} can't make a container of {name}", "the line above says why", timeout=_SECONDS)
    try:
        return _read_export(system, engine, made, folder, program)
    finally:
        system.run((engine, "rm", "--force", made), timeout=_SECONDS)


def _read_export(system: System, engine: str, container: str, folder: Path, program: str) -> ArchiveTree:
    """Return a container's files; the engine is ended if it takes longer than its limit.

    Of a program, the libraries that it is linked with are needed too.
    """
    argv = (engine, "export", container)
    stem = posixpath.basename(program)

    def is_kept(path: str) -> bool:
        # A program may be a link to one with a version: python3 to python3.11.
        named = bool(stem) and posixpath.basename(path).startswith(stem)
        return named or bool(stem and _LIBRARY.search(path)) or bool(_KEPT.fullmatch(path))

    try:
        with system.output(argv, timeout=_EXPORT_SECONDS) as output, tarfile.open(fileobj=output, mode="r|") as archive:
            tree = read_archive(archive, is_kept, folder, _MOST_BYTES)
            while output.read(1 << 20):  # what follows the last file: the engine shall end by itself
                pass
            return tree
    except (tarfile.TarError, OSError) as error:
        command = " ".join(argv)
        raise GpuprovError(f"{command} gave no archive", str(error), f"{command} | tar -t shows why") from None


_MODULE = "/proc/driver/nvidia/version"
_NOT_SEARCHED = "the loader does not look there"


@dataclass(frozen=True)
class Survey:
    """What was found. `kernel` is the loaded kernel module's version, "" if none is loaded."""

    kind: str
    name: str
    read: str
    loader: Loader
    kernel: str
    libraries: tuple[Found, ...]
    runtimes: tuple[Runtime, ...]
    findings: tuple[Finding, ...]

    @property
    def good(self) -> bool:
        """Whether nothing is wrong; notes do not count."""
        return all(one.note for one in self.findings)


def survey(system: System, name: str, call: Program) -> Survey:
    """Look at the host (no name), a container or an image. Raises GpuprovError if it can't be read."""
    with opened(system, name, call) as subject:
        return survey_on(system, subject)


def survey_on(system: System, subject: Subject) -> Survey:
    """Return what was found in a root file system that this host has."""
    kernel = parse_kernel_version(system.read_text(_MODULE) or "")
    return survey_of(subject, kernel, processor_levels(system.read_text("/proc/cpuinfo") or ""))


def survey_of(subject: Subject, kernel: str, levels: tuple[str, ...]) -> Survey:
    """Return what was found in a root file system."""
    loader = find_loader(subject.tree, levels)
    libraries = tuple(search(subject.tree, loader, subject.program, name) for name in (LIBCUDA, LIBNVIDIA_ML))
    runtimes = find_runtimes(subject.tree, subject.program.environment)
    findings = judge(loader, libraries, kernel, runtimes, kind=subject.kind, has_driver=subject.has_driver)
    return Survey(subject.kind, subject.name, subject.read, loader, kernel, libraries, runtimes, findings)


def as_json(found: Survey) -> dict[str, Any]:
    """Return a survey as JSON values; docs/json.md describes them."""
    return {
        "kind": found.kind, "name": found.name, "read": found.read,
        "loader": {"path": found.loader.path, "library": found.loader.library, "folders": list(found.loader.folders)},
        "kernel_module": found.kernel,
        "libraries": [
            {"name": one.name, "winner": asdict(one.winner) if one.winner else None,
             "others": [asdict(other) for other in one.others]}
            for one in found.libraries
        ],
        "cuda": [asdict(one) for one in found.runtimes],
        "findings": [asdict(one) for one in found.findings],
    }  # fmt: skip


def from_json(values: Mapping[str, Any]) -> Survey:
    """Return the survey that `as_json` wrote on another host. Raises GpuprovError for anything else."""
    try:
        loader = values["loader"]
        return Survey(
            str(values["kind"]), str(values["name"]), str(values["read"]),
            Loader(
                path=str(loader["path"]), library=str(loader["library"]), folders=tuple(map(str, loader["folders"]))
            ),
            str(values["kernel_module"]),
            tuple(_found(one) for one in values["libraries"]),
            tuple(Runtime(**one) for one in values["cuda"]),
            tuple(Finding(**{**one, "results": tuple(one["results"])}) for one in values["findings"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        what = "the host's survey of libcuda can't be read"
        raise GpuprovError(what, f"{type(error).__name__}: {error}", "gpuprov cuda CONTAINER on the host") from None


def _found(values: Mapping[str, Any]) -> Found:
    winner = values["winner"]
    return Found(
        str(values["name"]), _candidate(winner) if winner else None, tuple(_candidate(one) for one in values["others"])
    )


def _candidate(values: Mapping[str, Any]) -> Candidate:
    return Candidate(**{**values, "chain": tuple(map(str, values["chain"]))})


def as_lines(found: Survey) -> Iterator[str]:
    """Yield a survey as text."""
    yield f"{found.kind + ' ' + found.name if found.name else found.kind}, read from {found.read}"
    for library in found.libraries:
        yield _row(library.name, _described(library.winner) if library.winner else "none: the loader finds none")
        if library.winner:
            yield _row("  because", library.winner.reason)
        for other in library.others:
            yield _row("  also there", f"{_described(other)}: {other.fault or other.reason or _NOT_SEARCHED}")
    yield _row("kernel module", found.kernel or "none loaded")
    for runtime in found.runtimes:
        yield _row("CUDA", f"{runtime.version}: {runtime.source}")
    yield _row("loader", f"{found.loader.library} {found.loader.path}" if found.loader.path else "none")
    for one in found.findings:
        results = f" (CUDA result {', '.join(map(str, one.results))})" if one.results else ""
        problem = Problem(f"{'note' if one.note else 'wrong'}: {one.what}{results}", one.evidence, one.next_step)
        yield from str(problem).splitlines()


def result_lines(result: Result) -> Iterator[str]:
    """Yield a row of the table of CUDA's results as text."""
    yield f"{', '.join(map(str, result.codes))}  {', '.join(result.names)}: {result.meaning}"
    for label, text in (("cause", result.cause), ("evidence", result.evidence), ("remedy", result.remedy)):
        yield f"  {label:9} {text}"


def results_markdown() -> str:
    """Return the list of CUDA's results for docs/cuda.md."""
    rows = ((", ".join(map(str, one.codes)), ", ".join(f"`{name}`" for name in one.names), one) for one in RESULTS)
    return "\n".join(f"- **{codes}** {names}: {one.meaning}" for codes, names, one in rows)


def _described(one: Candidate) -> str:
    names = [path.rpartition("/")[2] if path.rpartition("/")[0] == one.path.rpartition("/")[0] else path
             for path in one.chain if path != one.path]  # fmt: skip
    kind = "CUDA's stub" if one.stub else f"driver {one.version}" if one.version else "version unknown"
    return f"{' -> '.join((one.path, *names))} ({kind}{', cuda-compat' if one.compat else ''})"


def _row(label: str, text: str) -> str:
    return f"{label:18} {text}"


def survey_bundle(system: System, config: dict[str, Any], bundle: str, settings: Settings) -> Survey:
    """Return what was found in a bundle's root file system. Raises GpuprovError if it can't be read."""
    folder = Path(system.temporary_directory())
    try:
        root = Root(root_of(config, bundle), owner_of(config))
    except (OSError, ValueError) as error:
        system.remove_tree(str(folder))
        what = f"the root file system of {bundle} can't be read"
        raise GpuprovError(what, str(error), "put sudo before the command") from None
    try:
        request = parse_request(config, settings)
        cover(root, volumes_of(config, bundle))
        tree = AddedTree(RootTree(root))
        said = "as it is: the container asks for no GPU"
        if request.devices is not None:
            said = add_driver(tree, folder, settings, request)
        read = f"{root_of(config, bundle)} and the volumes, {said}"
        return survey_on(system, Subject("container", bundle, tree, _program(config, tree), read, said[:5] == "with "))
    except (Refused, OSError) as error:
        next_step = f"look at the container's files: ls -l {bundle}"
        raise GpuprovError(f"the libraries of {bundle} were not looked for", str(error), next_step) from None
    finally:
        root.close()
        system.remove_tree(str(folder))


def _program(config: Mapping[str, Any], tree: AddedTree) -> Program:
    """Return what the bundle starts. Wrong types are as good as nothing: the engine says what is wrong."""
    process = config.get("process")
    found: Mapping[str, Any] = process if isinstance(process, dict) else {}
    entries, words, folder = (found.get(name) for name in ("env", "args", "cwd"))
    pairs = (str(one).partition("=") for one in (entries if isinstance(entries, list) else ()))
    first = str(words[0]) if isinstance(words, list) and words else ""
    path = first if first.startswith("/") and chain(tree, first) else ""
    environment = {name: value for name, separator, value in pairs if separator}
    return Program(environment, folder if isinstance(folder, str) else "/", path)


def examine(system: System, arguments: Mapping[str, Any], sink: Sink) -> Finished:
    """Look at the host, a container or an image, and report each library. Raises GpuprovError if it can't be read."""
    variables = arguments.get("variables")
    call = Program(
        {str(name): str(value) for name, value in (variables if isinstance(variables, Mapping) else {}).items()},
        "/",
        str(arguments.get("program") or ""),
    )
    found = survey(system, str(arguments.get("subject") or ""), call)
    sink(CudaSurveyed(as_json(found)))
    for library in found.libraries:
        sink(_check(found, library))
    for note in found.findings:
        if note.note:
            sink(Note(f"{note.what}; {note.next_step}", "warning"))
    problems = tuple(_problem(found, number) for number, one in enumerate(found.findings) if not one.note)
    where = f"{found.kind} {found.name}" if found.name else "the host"
    if problems:
        summary = f"not all libraries that programs of {where} load fit the driver"
        return Finished(int(ExitCode.FAILED), problems=problems, summary=summary)
    return Finished(int(ExitCode.DONE), summary=f"the libraries that programs of {where} load fit the driver")


def _check(found: Survey, library: Found) -> CheckDone:
    """Return a library as a line of the table."""
    is_wrong = any(one.library == library.name and not one.note for one in found.findings)
    one = library.winner
    shown = f"{one.version or 'of an unknown version'} at {one.path}: {one.reason}" if one is not None else "none"
    host, container = (shown, "") if found.kind == "host" else ("", shown)
    if is_wrong:
        # Why stands in the problems.
        return CheckDone(library.name, "failed", host, container)
    if one is None:
        return CheckDone(library.name, "skipped", reason="the loader finds none")
    return CheckDone(library.name, "ok", host, container)


def _problem(found: Survey, number: int) -> Problem:
    one = found.findings[number]
    results = f" (CUDA result {', '.join(map(str, one.results))})" if one.results else ""
    return Problem(f"{one.what}{results}", one.evidence, one.next_step)
