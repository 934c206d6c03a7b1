"""Which libcuda programs load on a host, in a container or an image, and whether it fits the driver. Reads only.

docker and podman locate containers and images. A running container is read through /proc/PID/root, with all its mounts;
for an image or a stopped container, the engine writes an archive. Nothing in it is executed.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

from gpuprov.cdi.discover import parse_kernel_version
from gpuprov.checks.cuda.compatibility import Incompatibility, Runtime, find_runtimes, incompatibilities
from gpuprov.checks.cuda.files import add_driver, read, unpack, unpacked
from gpuprov.checks.cuda.search import LIBCUDA, LIBNVIDIA_ML, Candidate, Libraries, Loader, Program, find_loader, search
from gpuprov.core.system import System
from gpuprov.protocol.codec import json_at
from gpuprov.protocol.dataclass import asdict, dataclass, replace
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, UsageError
from gpuprov.protocol.events import CheckDone, CudaSurveyed, Finished, Note, Sink
from gpuprov.runtime_hook.driver_files import CONTAINER, MODULE
from gpuprov.runtime_hook.rootfs import Root

ENGINES = ("docker", "podman")
_SECONDS = 60
_LARGEST_MARK = 64
_EXPORT_SECONDS = 900
# How mountinfo shows a bind mount whose file was removed from its folder since (proc_pid_mountinfo(5)).
_REMOVED = "//deleted"
_NOT_SEARCHED = "the loader does not look there"


@dataclass(frozen=True)
class Subject:
    """What is looked at: its kind (host, container or image), name, files, and how these were read.

    `removed`: mounts in a running container whose files the host has no more; `restart`: the command that renews them.
    """

    kind: str
    name: str
    root: Root
    program: Program
    read: str
    has_driver: bool = True
    removed: frozenset[str] = frozenset()
    restart: str = ""


@contextlib.contextmanager
def opened(system: System, name: str, call: Program) -> Iterator[Subject]:
    """Yield the host (no name), a container or an image; `call` overrides its environment.

    Raises GpuprovError if neither container nor image exists, or if it can't be read.
    """
    if not name:
        with _root(str(system.path("/")), name, of_process=False) as root:
            yield Subject("host", "", root, call, "the host's own files")
        return
    engine, kind, found = _inspected(system, name)
    config = found.get("Config") or {}
    environment, folder = _variables(config.get("Env")), config.get("WorkingDir") or "/"
    pid = _pid(found)
    if kind == "container" and pid:
        with _root(f"/proc/{pid}/root", name, of_process=True) as root:
            # The process may have ended meanwhile, and its id may have been reused.
            if _pid(_inspected(system, name)[2]) != pid:
                raise GpuprovError(f"container {name} stopped while it was read", f"its first process was {pid}",
                                   "run the same command again")  # fmt: skip
            # What the process has may be less than what the engine gave: an entry point may unset variables.
            environment = _variables((system.read_text(f"/proc/{pid}/environ") or "").split("\0")) or environment
            program = Program({**environment, **call.environment}, folder)
            mounts = (line.split() for line in (system.read_text(f"/proc/{pid}/mountinfo") or "").splitlines())
            removed = frozenset(words[4] for words in mounts if len(words) > 4 and words[3].endswith(_REMOVED))
            read = f"running in {engine}: /proc/{pid}/root"
            yield Subject(kind, name, root, program, read, removed=removed, restart=renew_command(engine, name))
        return
    with system.temporary_directory() as place:
        _export(system, engine, kind, name, str(system.path(place)))
        with contextlib.closing(unpacked(str(system.path(place)))) as root:
            added = add_driver(root)
            read = f"{engine} export{' of a container that was never started' if kind == 'image' else ''}, {added}"
            program = Program({**environment, **call.environment}, folder)
            yield Subject(kind, name, root, program, read, added.startswith("with "))


def renew_command(engine: str, *names: str) -> str:
    """Return the command that gives containers the files of the host's present driver."""
    return shlex.join((engine, "restart", *names))


@contextlib.contextmanager
def _root(path: str, name: str, *, of_process: bool) -> Iterator[Root]:
    try:
        root = Root(path, of_process=of_process)
    except OSError as error:
        what = f"the root file system of {name or 'this host'} can't be read"
        raise GpuprovError(what, str(error), "put sudo before the command") from None
    with contextlib.closing(root):
        yield root


def _variables(entries: Any) -> dict[str, str]:
    pairs = (str(one).partition("=") for one in entries or ())
    return {variable: value for variable, separator, value in pairs if separator}


def _pid(found: Mapping[str, Any]) -> int:
    return (found.get("State") or {}).get("Pid") or 0


def _inspected(system: System, name: str) -> tuple[str, str, Mapping[str, Any]]:
    """Return engine, kind and description of a container or, if there is none of this name, of an image."""
    engines = [engine for engine in ENGINES if system.which(engine)]
    said, silent = [], dict[str, str]()
    for kind, engine in itertools.product(("container", "image"), engines):
        if engine not in silent:
            # No --format: podman 4 writes a list with it, docker an object; without it both write a list.
            done = system.run((engine, "inspect", "--type", kind, "--", name), timeout=_SECONDS)
            if done.ok:
                return engine, kind, _description(done.stdout)
            said.append(done.evidence())
            if done.unanswered or "connect to" in done.stderr:
                silent[engine] = said[-1]
    for engine, seen in silent.items():
        what = f"{engine} does not say whether it has a container or image {name}"
        raise GpuprovError(what, seen, f"{engine} info; then run the same command again")
    seen = "\n".join(said[:2]) or "neither docker nor podman is installed"
    step = "docker ps, docker images show names; an image must be pulled before: docker pull IMAGE"
    raise UsageError(f"there is no container or image {name} on this host", seen, step)


def _description(text: str) -> Mapping[str, Any]:
    found = json_at(text)
    one = found[0] if isinstance(found, list) and found else None
    return one if isinstance(one, dict) else {}


def _export(system: System, engine: str, kind: str, name: str, folder: str) -> None:
    """Unpack a container's files; those of an image by a container that is never started."""
    if kind == "container":
        _unpack_export(system, engine, name, folder)
        return
    made = f"gpuprov-cuda-{system.own_pid()}"
    create = (engine, "create", f"--name={made}", "--pull=never", "--network=none", "--entrypoint=/true", name)
    system.require(create, f"{engine} can't make a container of {name}", "the line above says why", timeout=_SECONDS)
    try:
        _unpack_export(system, engine, made, folder)
    finally:
        system.run((engine, "rm", "--force", "--volumes", made), timeout=_SECONDS)


def _unpack_export(system: System, engine: str, container: str, folder: str) -> None:
    """Unpack what the engine writes; it is ended if it takes longer than its limit."""
    argv = (engine, "export", container)
    try:
        with system.output(argv, timeout=_EXPORT_SECONDS) as output, tarfile.open(fileobj=output, mode="r|") as archive:
            unpack(archive, folder)
            while output.read(1 << 20):  # what follows the last file: the engine shall end by itself
                pass
    except (tarfile.TarError, OSError, ValueError) as error:
        command = " ".join(argv)
        raise GpuprovError(f"{command} gave no archive", str(error), f"{command} | tar -t shows why") from None


@dataclass(frozen=True)
class Survey:
    """What was found. `kernel` is the loaded kernel module's version, "" if none; `unknown` what was not examined."""

    kind: str
    name: str
    read: str
    loader: Loader
    kernel: str
    libraries: tuple[Libraries, ...]
    runtimes: tuple[Runtime, ...]
    findings: tuple[Incompatibility, ...]
    unknown: tuple[str, ...]

    @property
    def faults(self) -> tuple[Incompatibility, ...]:
        """What is wrong: the findings without notes."""
        return tuple(one for one in self.findings if not one.note)

    def winner(self, name: str) -> Candidate | None:
        """Return the library of this name that programs load."""
        return next(one.winner for one in self.libraries if one.name == name)


def survey(system: System, name: str, call: Program) -> Survey:
    """Look at the host (no name), a container or an image. Raises GpuprovError if it can't be read."""
    with opened(system, name, call) as subject:
        return survey_of(subject, parse_kernel_version(system.read_text(MODULE) or ""))


def survey_of(subject: Subject, kernel: str) -> Survey:
    """Return what was found in a root file system; `kernel` is the version of the loaded kernel module."""
    environment = subject.program.environment
    loader = find_loader(subject.root)
    libraries = tuple(search(subject.root, loader, subject.program, name) for name in (LIBCUDA, LIBNVIDIA_ML))
    runtimes = find_runtimes(subject.root, environment)
    findings = incompatibilities(
        loader, libraries, kernel, runtimes, kind=subject.kind, has_driver=subject.has_driver,
        is_container=bool(read(subject.root, CONTAINER, _LARGEST_MARK)),
    )  # fmt: skip
    used = {one.name: one.winner.chain[-1] for one in libraries if one.winner}
    stale = {name for name, path in used.items() if path in subject.removed}
    since = "the host's driver was updated since it started"
    findings = tuple(
        replace(one, evidence=f"{one.evidence}; {since}", next_step=subject.restart) if one.library in stale else one
        for one in findings
    )
    unknown = tuple(_unknown(environment, runtimes, kernel, has_driver=subject.has_driver))
    return Survey(subject.kind, subject.name, subject.read, loader, kernel, libraries, runtimes, findings, unknown)


def _unknown(
    environment: Mapping[str, str], runtimes: tuple[Runtime, ...], kernel: str, *, has_driver: bool
) -> Iterator[str]:
    """Yield what the answer leaves open, as sentences."""
    if not runtimes:
        yield "for which CUDA release its programs are: no libcudart, PyTorch or CUDA_VERSION in the usual places"
    if not kernel:
        yield "whether the libraries fit: this host has no driver loaded"
    if not has_driver:
        yield "which libraries a container of it has: this host has no CDI specification"
    for variable in ("LD_LIBRARY_PATH", "LD_PRELOAD"):
        if "$" in environment.get(variable, ""):
            yield f"what $ stands for in {variable}"
    yield "whether a program brings its own path to libcuda (RPATH, RUNPATH)"


def as_json(found: Survey) -> dict[str, Any]:
    """Return a survey as JSON values; docs/json.md describes them."""
    made = asdict(found)
    made["kernel_module"], made["cuda"] = made.pop("kernel"), made.pop("runtimes")
    del made["loader"]["machine"]
    return made


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
    for text in found.unknown:
        yield _row("unknown", text)
    for one in found.findings:
        yield from str(_problem(one, "note: " if one.note else "wrong: ")).splitlines()
    yield verdict(found)


def verdict(found: Survey) -> str:
    """Return in a sentence whether the libraries fit; a host without a loaded driver, or no library, is unknown."""
    libraries = f"the libraries that programs of {found.kind + ' ' + found.name if found.name else 'the host'} load"
    if found.faults:
        return f"not all {libraries.removeprefix('the ')} fit the driver"
    is_known = found.kernel and found.libraries[0].winner is not None
    return f"{libraries} fit the driver" if is_known else f"whether {libraries} fit the driver is unknown"


def _described(one: Candidate) -> str:
    names = [path.rpartition("/")[2] if path.rpartition("/")[0] == one.path.rpartition("/")[0] else path
             for path in one.chain if path != one.path]  # fmt: skip
    kind = "CUDA's stub" if one.stub else f"driver {one.version}" if one.version else "version unknown"
    return f"{' -> '.join((one.path, *names))} ({kind}{', cuda-compat' if one.compat else ''})"


def _row(label: str, text: str) -> str:
    return f"{label:18} {text}"


def _problem(one: Incompatibility, label: str = "") -> Problem:
    results = f" (CUDA result {', '.join(map(str, one.results))})" if one.results else ""
    return Problem(f"{label}{one.what}{results}", one.evidence, one.next_step)


def examine(system: System, arguments: Mapping[str, Any], sink: Sink) -> Finished:
    """Look at the host, a container or an image, and report each library. Raises GpuprovError if it can't be read."""
    variables = arguments.get("variables")
    pairs = variables.items() if isinstance(variables, Mapping) else ()
    environment = {str(name): str(value) for name, value in pairs}
    found = survey(system, str(arguments.get("subject") or ""), Program(environment))
    sink(CudaSurveyed(as_json(found)))
    for library in found.libraries:
        sink(_check(found, library))
    for note in found.findings:
        if note.note:
            sink(Note(f"{note.what}; {note.next_step}", "warning"))
    problems = tuple(map(_problem, found.faults))
    return Finished(int(ExitCode.FAILED if problems else ExitCode.DONE), problems=problems, summary=verdict(found))


def _check(found: Survey, library: Libraries) -> CheckDone:
    one = library.winner
    shown = f"{one.version or 'of an unknown version'} at {one.path}: {one.reason}" if one is not None else "none"
    host, container = (shown, "") if found.kind == "host" else ("", shown)
    if any(fault.library == library.name for fault in found.faults):
        # Why stands in the problems.
        return CheckDone(library.name, "failed", host, container)
    if one is None:
        return CheckDone(library.name, "skipped", reason="the loader finds none")
    return CheckDone(library.name, "ok", host, container)
