"""Which CUDA driver library a program gets, and what that means: everything together, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpuprov.cdi.discover import parse_kernel_version
from gpuprov.core.system import System
from gpuprov.verify.cuda.judgement import Finding, judge
from gpuprov.verify.cuda.loader import Loader, find_loader, processor_levels
from gpuprov.verify.cuda.results import RESULTS, Result
from gpuprov.verify.cuda.roots import Subject, opened
from gpuprov.verify.cuda.runtimes import Runtime, find_runtimes
from gpuprov.verify.cuda.search import LIBCUDA, LIBNVIDIA_ML, Candidate, Found, Program, search
from gpuprov.wire.errors import GpuprovError, Problem

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
        yield str(Problem(f"{'note' if one.note else 'wrong'}: {one.what}{results}", one.evidence, one.next_step))


def result_lines(result: Result) -> Iterator[str]:
    """Yield a row of the table of CUDA's results as text."""
    yield f"{', '.join(map(str, result.codes))}  {', '.join(result.names)}: {result.meaning}"
    for label, text in (("cause", result.cause), ("evidence", result.evidence), ("remedy", result.remedy)):
        yield f"  {label:9} {text}"


def results_markdown() -> str:
    """Return the table of CUDA's results for docs/cuda.md."""
    lines = ["| result | name | cause | evidence | remedy |", "|---|---|---|---|---|"]
    for one in RESULTS:
        codes = ", ".join(map(str, one.codes))
        names = "<br>".join(f"`{name}`" for name in one.names)
        cells = (one.cause, one.evidence, one.remedy)
        lines.append(
            f"| {codes} | {names} {one.meaning} | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        )
    return "\n".join(lines)


def _described(one: Candidate) -> str:
    names = [path.rpartition("/")[2] if path.rpartition("/")[0] == one.path.rpartition("/")[0] else path
             for path in one.chain if path != one.path]  # fmt: skip
    kind = "CUDA's stub" if one.stub else f"driver {one.version}" if one.version else "version unknown"
    return f"{' -> '.join((one.path, *names))} ({kind}{', cuda-compat' if one.compat else ''})"


def _row(label: str, text: str) -> str:
    return f"{label:18} {text}"
