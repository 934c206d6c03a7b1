"""Group the failures of a run by cause: the same fault on forty hosts is one entry. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpuprov.agent.result import HostResult, told
from gpuprov.protocol.errors import Problem

# Text that identifies one host in a sentence: `[name]:port`, `name port 22`, an IPv4 address.
# The bounds prevent quadratic time on long input from a host.
_PLACE = re.compile(
    r"\[[^\]\s]{1,255}\]:\d+|(?<![\w.:-])[\w.:-]{1,255} port \d+|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])"
)
_LONGEST = 4000
_ANY_HOST = "HOST"
_MOST_EVIDENCE = 3


@dataclass(frozen=True)
class Cause:
    """One fault and its hosts. If the texts differ only by the host, they say HOST."""

    what: str
    next_step: str
    hosts: tuple[str, ...]
    evidence: tuple[str, ...]


def causes(results: Iterable[HostResult]) -> tuple[Cause, ...]:
    """Return the problems and failed checks of all hosts by cause and next step, the most frequent first."""
    groups: dict[tuple[str, str], list[tuple[str, Problem]]] = {}
    for host, problem in _problems(results):
        key = (_of_any_host(problem.what, host), _of_any_host(problem.next_step, host))
        groups.setdefault(key, []).append((host, problem))
    made = (_cause(key, members) for key, members in groups.items())
    return tuple(sorted(made, key=lambda cause: -len(cause.hosts)))


def _problems(results: Iterable[HostResult]) -> Iterator[tuple[str, Problem]]:
    for result in results:
        told_already = {problem.what for problem in result.problems}
        for check in result.checks:
            # The doctor's findings are among its causes; a problem has the evidence of its check.
            if check.status == "failed" and check.reason not in told_already and (check.reason or not result.problems):
                yield result.host, Problem(told(check))
        for problem in result.problems:
            yield result.host, problem


def _cause(key: tuple[str, str], members: Sequence[tuple[str, Problem]]) -> Cause:
    evidence: dict[str, str] = {}
    for host, problem in members:
        if problem.evidence:
            evidence.setdefault(_of_any_host(problem.evidence, host), problem.evidence)
    return Cause(
        what=_the_one({problem.what for _, problem in members}, key[0]),
        next_step=_the_one({problem.next_step for _, problem in members}, key[1]),
        hosts=tuple(dict.fromkeys(host for host, _ in members)),
        evidence=tuple(evidence.values())[:_MOST_EVIDENCE],
    )


def _the_one(texts: set[str], otherwise: str) -> str:
    return next(iter(texts)) if len(texts) == 1 else otherwise


def _of_any_host(text: str, host: str) -> str:
    """Return the text without the parts that identify one host."""
    named = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", _ANY_HOST, text[:_LONGEST])
    return _PLACE.sub(_ANY_HOST, named)
