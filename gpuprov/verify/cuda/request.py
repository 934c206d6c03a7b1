"""`gpuprov cuda` on a host of a fleet: a survey as events. Reads only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuprov.core.system import System
from gpuprov.verify.cuda.search import Found, Program
from gpuprov.verify.cuda.survey import Survey, as_json, survey
from gpuprov.wire.errors import ExitCode, Problem
from gpuprov.wire.events import CheckDone, CudaSurveyed, Finished, Note, Sink


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
