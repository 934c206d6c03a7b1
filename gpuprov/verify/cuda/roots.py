"""Open the root file system and environment of a container or an image; docker and podman locate it.

A running container is read through /proc/PID/root, with all its mounts. For an image or a stopped container, the engine
writes an archive. Nothing in it is executed.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuprov.core.system import System
from gpuprov.runtime_hook.rootfs import Root
from gpuprov.verify.cuda.added import add_driver
from gpuprov.verify.cuda.search import Program
from gpuprov.verify.cuda.trees import ArchiveTree, RootTree, Tree, chain, read_archive
from gpuprov.wire.errors import ExitCode, GpuprovError

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
    except ValueError:
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
