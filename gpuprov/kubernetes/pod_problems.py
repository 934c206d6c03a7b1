"""Explain why a test pod did not print its GPUs: the sentence, the evidence and the next command. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpuprov.kubernetes.cluster import PodState
from gpuprov.wire.errors import Problem
from gpuprov.wire.words import one_line

_LONGEST = 400
_MOST_LINES = 5
_NOT_FOUND = 127
_MISSING = re.compile(r"executable file not found|no such file or directory", re.IGNORECASE)


@dataclass(frozen=True)
class _Cause:
    """A pattern in waiting reasons and events, its meaning, the next step."""

    pattern: str
    what: str
    next_step: str


_CAUSES = (
    _Cause(r"ImagePull|InvalidImageName|ErrImage", "the node can't pull the test pod's image",
           "give an image that the node can pull: --image IMAGE"),
    _Cause(r"RuntimeHandler|no runtime for|runtime handler", "the node's engine does not know the runtime nvidia",
           "gpuprov install -e '{gpuprov_engines: [containerd]}', and restart the engine"),
    _Cause(r"unresolvable CDI|CDI device injection", "the node's engine can't resolve the device plugin's CDI devices",
           "use `--strategy environment` of gpuprov kubernetes manifest, or install NVIDIA's toolkit on the node"),
    _Cause(r"Insufficient nvidia\.com|UnexpectedAdmissionError|OutOfnvidia", "the node's GPUs are in use by other pods",
           "kubectl get pods -A --field-selector spec.nodeName=NODE; run it again later"),
    _Cause(r"Insufficient (cpu|memory|pods)|Too many pods", "the node has no room for the test pod",
           "kubectl describe node NODE"),
    _Cause(r"Evicted|Preempt|NodeLost|NodeShutdown|Terminated", "the node ended the test pod",
           "kubectl describe node NODE"),
)  # fmt: skip


def not_started(state: PodState, events: Iterable[str], seconds: float) -> Problem:
    """Return why a pod did not start; `seconds` is how long it was waited for."""
    lines = tuple(dict.fromkeys(filter(None, (state.waiting, state.reason, *events))))
    evidence = "\n".join(lines) or f"phase {state.phase or 'unknown'}"
    if state.phase == "removed":
        return Problem("the test pod was removed while it ran", "\n".join(lines), "kubectl get events -A")
    if cause := _cause(lines):
        return Problem(cause.what, evidence, cause.next_step)
    if state.waiting not in ("", "ContainerCreating", "PodInitializing"):
        return Problem(f"the test pod can't start: {state.waiting}", evidence, "kubectl describe node NODE")
    what = f"the test pod did not end within {seconds:g} s"
    return Problem(what, evidence, "kubectl describe node NODE; or wait longer: --pod-timeout SECONDS")


def ended(state: PodState, events: Iterable[str], printed: str, *, by_class: bool) -> Problem:
    """Return why a pod that ended printed no list of GPUs. `by_class`: it had the runtime class nvidia."""
    said = [one_line(line)[:_LONGEST] for line in printed.splitlines() if line.strip()][:_MOST_LINES]
    lines = tuple(dict.fromkeys(filter(None, (*said, state.reason, *events))))
    evidence = "\n".join(lines) or "(silent)"
    if state.phase == "Succeeded":
        return Problem("nvidia-smi in the pod lists no GPU", evidence, "gpuprov verify --hosts INVENTORY")
    if state.exit_code == _NOT_FOUND or any(map(_MISSING.search, lines)):
        how = "" if by_class else "the cluster has no runtime class nvidia (gpuprov kubernetes manifest); "
        cure = f"{how}look at the node: gpuprov verify --hosts INVENTORY; give an image with glibc: --image IMAGE"
        return Problem("the pod has no nvidia-smi: the runtime gave it no driver files", evidence, cure)
    if state.exit_code is None and (cause := _cause(lines)):
        return Problem(cause.what, evidence, cause.next_step)
    code = "" if state.exit_code is None else f" with exit code {state.exit_code}"
    return Problem(f"nvidia-smi in the pod failed{code}", evidence, "gpuprov doctor --hosts INVENTORY")


def _cause(lines: Iterable[str]) -> _Cause | None:
    known = "\n".join(lines)
    return next((cause for cause in _CAUSES if re.search(cause.pattern, known)), None)
