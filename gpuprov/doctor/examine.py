"""Examine a host once and report it as events: what was examined, and each cause, the first to fix first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

from gpuprov.core.system import System
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import AREAS, ASIDE, unknown_areas
from gpuprov.doctor.gather import gather
from gpuprov.doctor.rules import Cause, diagnose
from gpuprov.protocol.errors import ExitCode, Problem
from gpuprov.protocol.events import CauseFound, CheckDone, Finished, Note, Sink
from gpuprov.protocol.spec import HostSpec

_UNKNOWN = "unknown: this copy of an image has no GPU, or does not run"


def examine(system: System, spec: HostSpec, sink: Sink) -> Finished:
    """Examine the host, report the findings, and return the final event."""
    x = gather(system, spec)
    return tell(x, diagnose(x), sink)


def tell(x: Examined, causes: Sequence[Cause], sink: Sink) -> Finished:
    """Report a whole examination, and return the final event."""
    troubles = tuple(cause for cause in causes if cause.finding.confidence != ASIDE)
    for area in AREAS:
        if x.lacks_gpus_yet and area in unknown_areas(x):
            sink(CheckDone(area, "skipped", reason=_UNKNOWN))
            continue
        ill = any(cause.rule.area == area for cause in troubles)
        sink(CheckDone(area, "failed") if ill else CheckDone(area, "ok", _SUMMARIES[area](x)))
    for rank, cause in enumerate(causes, 1):
        sink(_event(rank, cause))
        if cause.finding.confidence == ASIDE:
            sink(Note(f"{cause.finding.what}; {cause.finding.next_step}", "warning"))
    if x.kernel_log_error:
        sink(Note(f"the kernel's log was not read: {x.kernel_log_error}", "warning"))
    if troubles:
        return Finished(int(ExitCode.FAILED), problems=_problems(troubles), summary=f"causes found: {len(troubles)}")
    rest = "; there is no GPU here, so the rest is unknown" if x.lacks_gpus_yet else ""
    return Finished(int(ExitCode.DONE), summary=f"nothing found wrong{rest}")


def tell_causes(causes: Sequence[Cause], sink: Sink) -> None:
    """Report only the causes, before they are fixed."""
    for rank, cause in enumerate(causes, 1):
        sink(_event(rank, cause))


def _event(rank: int, cause: Cause) -> CauseFound:
    finding = cause.finding
    return CauseFound(
        rank, cause.rule.name, cause.rule.area, finding.what, finding.evidence, finding.next_step, finding.confidence,
        cause.follows, "; ".join(map(str, finding.remedies)),
    )  # fmt: skip


def _problems(causes: Sequence[Cause]) -> tuple[Problem, ...]:
    return tuple(Problem(_told(cause), cause.finding.evidence, _next_step(cause, causes)) for cause in causes)


def _next_step(cause: Cause, causes: Sequence[Cause]) -> str:
    """Return what to type now: nothing helps against a consequence before its first cause is gone."""
    first = cause
    for _ in causes:  # No chain is longer, even one that would end in itself.
        first = next((one for one in causes if one.rule.name == first.follows), first)
    wanted, own = first.finding.next_step, cause.finding.next_step
    return own if wanted == own else f"first: {wanted}"


def _told(cause: Cause) -> str:
    """Return the cause with its confidence; a consequence is marked as one."""
    sure = (
        f"{cause.finding.confidence}; a consequence of {cause.follows}" if cause.follows else cause.finding.confidence
    )
    return f"{cause.finding.what} ({sure})"


def _gpus(x: Examined) -> str:
    return f"{len(x.host.gpus)} on the PCI bus"


def _module(x: Examined) -> str:
    return f"{x.driver.kernel_version or 'none'} loaded"


def _libraries(x: Examined) -> str:
    asked = f"; {x.smi.reason}" if x.smi.reason else ", nvidia-smi answers"
    return f"{x.driver.library_version or 'none'}{asked}"


def _nodes(x: Examined) -> str:
    return f"{len(x.driver.present)} present"


def _toolkit(x: Examined) -> str:
    return (x.host.docker.runtimes or {}).get("nvidia") or "none for docker"


def _specification(x: Examined) -> str:
    names = [name for name in x.texts if name.startswith(("/etc/cdi/", "/var/run/cdi/"))]
    return ", ".join(names) or "none"


def _docker(x: Examined) -> str:
    return x.host.docker.version or "none"


def _engines(x: Examined) -> str:
    return ", ".join(sorted(x.host.engines)) or "none asked for"


def _containers(x: Examined) -> str:
    return f"{len(x.containers.examined)} running with GPUs"


# Summary of an area without findings, in a few words.
_SUMMARIES: dict[str, Callable[[Examined], str]] = dict(
    zip(AREAS, (_gpus, _module, _libraries, _nodes, _toolkit, _specification, _docker, _engines, _containers))
)
