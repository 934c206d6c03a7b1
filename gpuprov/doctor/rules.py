"""The rules of the doctor: the words of each are a row of rules.json, its condition is a function of the same name.

The condition of `docker-missing` is `docker_missing` in the module of its area, or stands in the row itself:
`xid` (a number or a range), `kernel_log` (with `refused`: of a refused module), `docker_log` (a pattern), `smi` (the
place of a value in nvidia-smi's report, a pattern), `failed_unit`.
In `meaning` and `next_step`, {NAME} is a value that the condition gives, or a command of suggested_commands; {x} is
the snapshot. A row without them has those of the same rule in protocol/health.json. `follows` names rules of which this
one is a consequence, or a group of them. Rows are in the order in which equals are reported.
"""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Callable, Literal, Union

from gpuprov.checks import health
from gpuprov.checks.smi import per_gpu
from gpuprov.doctor import suggested_commands
from gpuprov.doctor.finding import CERTAIN, GPUS, LIKELY, WARNING, Finding, Remedy
from gpuprov.doctor.snapshot import HostSnapshot, find_in_log, lines_in_log
from gpuprov.protocol import tables
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import Problem

# In `follows`: a symptom, which follows from any other finding in its own area or an earlier one.
ANY_ROOT = ("*",)


@dataclass(frozen=True)
class Rule:
    """A cause that the doctor looks for. `sign`: the evidence for it, for the documentation.

    `follows`: rules of which this one is a consequence if they match.
    """

    name: str
    area: str
    sign: str
    look: Callable[[HostSnapshot], Finding | None]
    follows: tuple[str, ...] = ()


class Seen:
    """What a condition has seen: lines of evidence, and the values for the words of its row.

    `meaning`, `next_step`, `confidence` and `remedies` replace those of the row, as they are.
    """

    def __init__(
        self, *evidence: str, meaning: str = "", next_step: str = "", confidence: str = "",
        remedies: tuple[Remedy, ...] | None = None, **values: object,
    ) -> None:  # fmt: skip
        self.evidence, self.values = "\n".join(evidence), values
        self.meaning, self.next_step, self.confidence, self.remedies = meaning, next_step, confidence, remedies


def seen_of(
    problem: Problem, confidence: str = "", remedies: tuple[Remedy, ...] | None = None, next_step: str = ""
) -> Seen:
    """Return what is seen of a trouble that install or verify names too, in the same words."""
    step = next_step or problem.next_step
    return Seen(problem.evidence, meaning=problem.what, next_step=step, confidence=confidence, remedies=remedies)


# What is false says that the trouble is not on this host; text and lines are the evidence.
Condition = Callable[[HostSnapshot], Union[Seen, Sequence[Any], Literal[False], None]]
_CONDITIONS: dict[str, Condition] = {}


def conditions(by_name: Mapping[str, Condition]) -> None:
    """Add conditions of one line by the names of their rules."""
    _CONDITIONS.update(by_name)


def read_rules(modules: Iterable[ModuleType]) -> Iterator[Rule]:
    """Yield the rules; the modules have the conditions."""
    functions = {name.replace("_", "-"): one for module in modules for name, one in vars(module).items()}
    known: Mapping[str, Condition] = {**functions, **_CONDITIONS}
    table = json.loads(pkgutil.get_data("gpuprov.doctor", "rules.json") or b"")
    for row in table["rules"]:
        for one in rows_of_xids() if row.get("rows") == "xids" else (row,):
            one = {**health.words(one["name"]), **one}
            follows = [name for word in one.get("follows", ()) for name in table["groups"].get(word, (word,))]
            look = partial(_find, one, _condition(one, known))
            yield Rule(one["name"], one["area"], one["sign"], look, tuple(follows))


def rows_of_xids() -> Iterator[dict[str, Any]]:
    """Yield a row of the table of rules for each Xid."""
    table = tables.packaged(tables.XIDS)
    for row in table["xids"]:
        xid = row["xid"]
        yield {
            "name": f"xid-{xid}", "area": GPUS, "sign": f"the kernel's log: Xid {xid}", "confidence": LIKELY,
            "xid": xid, "meaning": f"{row['what']} (Xid {xid}, {{bus}})", "next_step": table["actions"][row["action"]],
        }  # fmt: skip


def _find(row: Mapping[str, Any], condition: Condition, x: HostSnapshot) -> Finding | None:
    """Return what a rule finds on a host, in the words of its row; None if its condition is not met."""
    found = condition(x)
    if not found:
        return None
    seen = found if isinstance(found, Seen) else Seen(*([found] if isinstance(found, str) else found))
    values = _Values(seen.values, x=x, edit="${EDITOR:-vi}")
    fixes = (text.partition(": ") for text in row.get("fix", ()))
    remedies = tuple(Remedy(kind, tuple(names.split(", ")) if names else ()) for kind, _, names in fixes)
    return Finding(
        seen.meaning or row["meaning"].format_map(values), seen.evidence,
        seen.next_step or row.get("next_step", "").format_map(values),
        seen.confidence or row.get("confidence", CERTAIN),
        remedies if seen.remedies is None else seen.remedies,
    )  # fmt: skip


class _Values(dict[str, Any]):
    """The values for a row's words; what the condition did not give is a command of suggested_commands."""

    def __missing__(self, name: str) -> str:
        command: str = getattr(suggested_commands, name)(self["x"])
        return command


def _condition(row: Mapping[str, Any], known: Mapping[str, Condition]) -> Condition:
    """Return the condition of a row: in the row itself, or the known one of its name."""
    if "xid" in row or "kernel_log" in row:
        return lambda x: in_kernel_log(x, row.get("kernel_log", ""), row.get("xid", ""), refused=row.get("refused"))
    if "docker_log" in row:
        pattern = row["docker_log"]
        # A container's start has failed in several layers, each of which has its words before those that decide.
        shorter = partial(re.sub, rf"^.{{100,}}?(?=.{{100}}(?:{pattern}))", "… ", flags=re.IGNORECASE)
        found = partial(lines_in_log, pattern=pattern)
        return lambda x: [f"journalctl -u docker: {shorter(one)[:300]}" for one in found(x.docker_log)[:1]]
    if "smi" in row:
        return lambda x: reported(x, *row["smi"])
    if "failed_unit" in row:
        return lambda x: failed_unit(x, row["failed_unit"])
    return known[row["name"]]


def in_kernel_log(x: HostSnapshot, pattern: str, xids: str = "", *, refused: bool | None = None) -> Seen | None:
    """Return the lines; of a past moment, if nvidia-smi shows every GPU now. The pattern's groups are the values.

    `refused`: they say that the kernel refuses a module, which the driver's is not if it is loaded.
    """
    found = (health.last_xid(x.kernel_log, xids) if xids else None) or (
        find_in_log(x.kernel_log, pattern) if pattern else None
    )
    if found is None:
        return None
    is_past = x.serves_all or (refused and x.driver.kernel_version)
    seen = Seen("dmesg:", *found[1], confidence=WARNING if is_past else "")
    seen.values.update(found[0])
    return seen


def reported(x: HostSnapshot, place: str, value: str) -> Seen | None:
    """Find the GPUs with a value in `nvidia-smi -q -x`: `shown` are their numbers, `gpu` is the first one's."""
    numbers = [number for number, gpu in enumerate(per_gpu(x.smi.text)) if re.search(value, gpu.get(place, ""))]
    shown = ", ".join(map(str, numbers))
    evidence = f"nvidia-smi -q -x: {place.rpartition('/')[2]} of GPU {shown} matches {value}"
    return Seen(evidence, shown=shown, gpu=numbers[0]) if numbers else None


def failed_unit(x: HostSnapshot, name: str) -> str:
    """Return the evidence that a unit has failed, "" if it has not."""
    unit = x.units.get(name)
    return f"systemctl show {name}: {unit.active}, {unit.result}" if unit and unit.active == "failed" else ""


def quoted(places: Iterable[tuple[str, str]]) -> list[str]:
    """Return the evidence that lines of files give: `file:line: the line`."""
    return [f"{place}: {line}" for place, line in places]
