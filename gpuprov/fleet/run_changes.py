"""What changed from one run to the next: outcomes, checks, versions and hosts; the same change of many is one. Pure."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass

from gpuprov.fleet.history import Run
from gpuprov.fleet.result import HostResult

_GONE, _NEW = "not in this run", "new in this run"


@dataclass(frozen=True)
class Difference:
    """One change and the hosts that it happened to; `kind`: good, bad or nothing, as it got better or worse."""

    sentence: str
    kind: str
    hosts: tuple[str, ...]


def differences(before: Run, now: Run) -> tuple[Difference, ...]:
    """Return what changed, what got worse first."""
    hosts: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    earlier = {result.host: result for result in before.results}
    for result in now.results:
        old = earlier.pop(result.host, None)
        for sentence, kind in _of_host(old, result) if old else [(_NEW, "")]:
            hosts[sentence, kind].append(result.host)
    if earlier:
        hosts[_GONE, ""] = list(earlier)
    made = (Difference(sentence, kind, tuple(names)) for (sentence, kind), names in hosts.items())
    return tuple(sorted(made, key=lambda one: (one.kind != "bad", one.kind == "", -len(one.hosts))))


def _of_host(old: HostResult, new: HostResult) -> Iterator[tuple[str, str]]:
    if old.word != new.word:
        worse = new.has_failed and not old.has_failed
        yield f"{old.word} → {new.word}", "bad" if worse else "good" if old.has_failed and not new.has_failed else ""
    was = {check.name: check.status for check in old.checks}
    for check in new.checks:
        status = was.get(check.name, check.status)
        if status != check.status:
            kind = "bad" if check.status == "failed" else "good" if check.status == "ok" else ""
            yield f"{check.name}: {status} → {check.status}", kind
    for name, version in new.versions.items():
        if old.versions and old.versions.get(name, "") != version:
            yield f"{name} {old.versions.get(name) or 'none'} → {version or 'none'}", ""
