"""Find running GPU containers that load a wrong driver library, examined from outside. Reads only.

The same examination as `gpuprov cuda CONTAINER`: through /proc/PID/root, without following links out of it, and without
running anything in a container. Number and time are limited: a host may have hundreds of containers, and a file system
may hang.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass

from gpuprov.checks.cuda.judgement import Finding
from gpuprov.checks.cuda.search import Program
from gpuprov.checks.cuda.survey import ENGINES, Survey, survey
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook.rootfs import Root

MOST = 20
_SECONDS = 20
_COMMAND_SECONDS = 10
_NODE = "/dev/nvidiactl"


@dataclass(frozen=True)
class Loaded:
    """A container, and the problem with the driver libraries that its programs load; empty if there is none."""

    engine: str
    name: str
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Containers:
    """The examined GPU containers, the number of others if known, and why they were not examined."""

    examined: tuple[Loaded, ...] = ()
    left: int = 0
    why: str = ""


def gather_containers(system: System) -> Containers:
    """Return the libraries that the running containers of docker and podman load."""
    found: list[Loaded] = []
    waiting: list[tuple[str, str]] = []
    # A file system of a container that does not answer would keep this process, but not a thread's caller.
    why: list[str] = []
    worker = threading.Thread(target=_examine_all, args=(system, found, waiting, why), daemon=True)
    worker.start()
    worker.join(_SECONDS)
    if worker.is_alive():
        return Containers(tuple(found), len(waiting), f"not done after {_SECONDS} s")
    return Containers(tuple(found), len(waiting), (why or [f"{MOST} are looked at" if waiting else ""])[0])


def _examine_all(system: System, found: list[Loaded], waiting: list[tuple[str, str]], why: list[str]) -> None:
    try:
        waiting.extend(_with_gpus(system))
        for engine, name in tuple(waiting[:MOST]):
            # One that has stopped meanwhile can't be read.
            with contextlib.suppress(GpuprovError, OSError):
                found.append(Loaded(engine, name, wrong(survey(system, name, Program()))))
            waiting.remove((engine, name))
    except Exception as error:  # a thread would print it, and doctor say nothing of what was left out
        why.append(f"{type(error).__name__}: {str(error)[:200]}")


def _with_gpus(system: System) -> list[tuple[str, str]]:
    """Return engine and name of each running container that has the driver's device node."""
    found = []
    for engine in ENGINES:
        if system.which(engine) is None:
            continue
        listed = system.run((engine, "ps", "--format", "{{.Names}}"), timeout=_COMMAND_SECONDS)
        names = listed.stdout.split() if listed.ok else []
        if not names:
            continue
        words = (engine, "inspect", "--type", "container", "--format", "{{.State.Pid}} {{.Name}}", "--", *names)
        # One that was removed meanwhile has no line.
        lines = (line.split() for line in system.run(words, timeout=_COMMAND_SECONDS).stdout.splitlines())
        found += [(engine, line[1].lstrip("/")) for line in lines if len(line) == 2 and _has_node(line[0])]
    return found


def _has_node(pid: str) -> bool:
    if not pid.isdigit() or pid == "0":
        return False
    try:
        root = Root(f"/proc/{pid}/root", of_process=True)
    except OSError:
        return False
    try:
        return root.exists(_NODE)
    finally:
        root.close()


def wrong(found: Survey) -> tuple[Finding, ...]:
    """Return what is wrong with the library that wins; a container without one may not have requested it."""
    winners = {one.name for one in found.libraries if one.winner is not None}
    return tuple(one for one in found.findings if not one.note and one.library in winners)
