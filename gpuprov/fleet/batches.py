"""Group hosts into batches: canaries first; limit how many failures are allowed before the run stops. Pure.

The terms are Ansible's: `serial` as in a play, `--max-fail` as its max_fail_percentage, which also accepts a number.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpuprov.fleet.grouping import listed
from gpuprov.fleet.target import HostTarget
from gpuprov.protocol.errors import UsageError
from gpuprov.protocol.words import counted

_SHARE = re.compile(r"(\d{1,6})(%?)")


@dataclass(frozen=True)
class Share:
    """A number of hosts, or with `percent` a part of them."""

    number: int
    percent: bool = False

    def of(self, hosts: int) -> int:
        """Return this share of a number of hosts, rounded down as Ansible does."""
        return hosts * self.number // 100 if self.percent else self.number


@dataclass(frozen=True)
class Rollout:
    """The order given on the command line; empty means all at once. `canary`: a number, or host names."""

    serial: tuple[Share, ...] = ()
    max_fail: Share | None = None
    canary: str = ""


@dataclass(frozen=True)
class Batch:
    """Hosts that run together. If more than `most_failed` of them fail, no further host starts; None: no limit."""

    name: str
    targets: tuple[HostTarget, ...]
    most_failed: int | None = None


def parse_rollout(serial: str = "", max_fail: str = "", canary: str = "") -> Rollout:
    """Return the meaning of `--serial 1,5,20%`, `--max-fail 10%` and `--canary`. Raises GpuprovError (exit code 2)."""
    sizes = tuple(_share("--serial", word, least=1) for word in serial.split(",")) if serial else ()
    if canary.isdecimal() and int(canary) == 0:
        raise UsageError("--canary 0 names no host", "", "leave it out, or name at least one")
    return Rollout(sizes, _share("--max-fail", max_fail, least=0) if max_fail else None, canary)


def _share(option: str, word: str, *, least: int) -> Share:
    found = _SHARE.fullmatch(word.strip())
    share = Share(int(found.group(1)), bool(found.group(2))) if found else None
    if share is None or share.number < least or (share.percent and share.number > 100):
        example = "--serial 1,5,20%" if option == "--serial" else "--max-fail 10%"
        raise UsageError(
            f"{option} takes a number of hosts or a percentage, not {word!r}", "", f"for example {example}"
        )
    return share


def make_batches(targets: Sequence[HostTarget], rollout: Rollout) -> tuple[Batch, ...]:
    """Return the batches in order. Raises GpuprovError (exit code 2) if a canary is not among the hosts.

    A failed canary ends the run. So does, as in Ansible, a batch in which every host fails.
    """
    canaries = _canaries(targets, rollout.canary)
    others = [target for target in targets if target not in canaries]
    sizes = _sizes(len(others), rollout.serial)
    batches = [Batch("canary", canaries, most_failed=0)] if canaries else []
    for number, size in enumerate(sizes, 1):
        name = f"batch {number} of {len(sizes)}" if rollout.serial else "all others" if canaries else ""
        batches.append(Batch(name, tuple(others[:size]), _most_failed(size, rollout)))
        others = others[size:]
    return tuple(batches)


def _sizes(hosts: int, serial: Sequence[Share]) -> list[int]:
    """Return the batches' sizes; the last of `serial` applies to all remaining hosts, percentages are of all hosts."""
    sizes: list[int] = []
    left = hosts
    while left:
        share = serial[min(len(sizes), len(serial) - 1)] if serial else Share(left)
        sizes.append(min(left, max(1, share.of(hosts))))
        left -= sizes[-1]
    return sizes


def _most_failed(size: int, rollout: Rollout) -> int | None:
    all_but_one = [size - 1] if rollout.serial else []
    named = [rollout.max_fail.of(size)] if rollout.max_fail else []
    return min(named + all_but_one, default=None)


def _canaries(targets: Sequence[HostTarget], canary: str) -> tuple[HostTarget, ...]:
    if canary.isdecimal():
        return tuple(targets[: int(canary)])
    names = [target.name for target in targets]
    wanted = [word.strip() for word in canary.split(",") if word.strip()]
    for word in wanted:
        if not fnmatch.filter(names, word):
            near = difflib.get_close_matches(word, names, 1)
            hint = f"did you mean {near[0]}?" if near else "name one of them, or a number: --canary 2"
            raise UsageError(
                f"--canary {word} is no host of this run", f"{counted(len(names), 'host')}: {listed(names)}", hint
            )
    return tuple(target for target in targets if any(fnmatch.fnmatchcase(target.name, word) for word in wanted))
