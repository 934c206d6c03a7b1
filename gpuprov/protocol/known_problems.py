"""Combinations of driver, kernel, machine, toolkit and engine that are known to break: known_problems.json. Pure."""

import operator
import re
from collections.abc import Mapping
from typing import Any, Callable

from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.tables import DATE, KNOWN_PROBLEMS, Tables, checked_rows
from gpuprov.protocol.versions import version_numbers

# A version that only the repository knows.
NEWEST = "newest"
_COMPARISONS = {"==": operator.eq, ">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt}
_BOUND = re.compile(r"(==|>=|<=|<|>)(\d{1,9}(?:\.\d{1,9}){0,3})")
_RANGE = re.compile(rf"{_BOUND.pattern}(,{_BOUND.pattern})*")
_VERSIONS = ("driver", "kernel", "toolkit", "docker", "podman")
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
_SETTING = re.compile(r"[a-z_]{1,40}=[A-Za-z0-9.+:~_-]{1,40}")


def _is_within(version: str, wanted: str) -> bool:
    if version == NEWEST:
        return not re.search("<|==", wanted)
    numbers = version_numbers(version)
    bounds = ((_COMPARISONS[sign], version_numbers(bound)) for sign, bound in _BOUND.findall(wanted))
    return bool(numbers) and all(compare(numbers, bound) for compare, bound in bounds)


# Condition → whether what a host has fulfils it, and the type of the condition.
_CONDITIONS: Mapping[str, tuple[Callable[[Any, Any], bool], type]] = {
    **dict.fromkeys(_VERSIONS, (_is_within, str)),
    "machine": (str.startswith, str),
    "page_size": (operator.eq, int),
    "modules": (lambda there, wanted: {*wanted} <= {*there}, list),
    "gpus": (lambda there, wanted: bool({*wanted} & {*there}), list),
    "mig": (operator.eq, bool),
    "builds": (operator.eq, bool),
}


@dataclass(frozen=True)
class KnownProblem:
    """A row: it counts on a host with everything in `when`.

    `driver`, `kernel`, `toolkit` (NVIDIA's), `docker`, `podman`: ranges such as `>=580.142,<580.159.04`; `machine`: how
    the DMI product name begins; `page_size`: in bytes; `modules`: loaded kernel modules; `gpus`: PCI device ids, one of
    them is there; `mig`: a GPU is divided; `builds`: kernel modules are compiled for this kernel.
    `reported`: the day. `fixed_in`: the release, "" if none is known. `use`: options and values without the problem.
    `command`: what helps on a host that has it.
    """

    name: str
    reported: str
    what: str
    sources: tuple[str, ...]
    when: Mapping[str, Any]
    fixed_in: str = ""
    use: Mapping[str, str] = field(default_factory=dict)
    command: str = ""

    @property
    def combination(self) -> str:
        """The conditions as text, such as `driver >=595; machine p6e-; modules efa`."""
        texts = {name: " ".join(one) if isinstance(one, list) else str(one) for name, one in self.when.items()}
        return "; ".join(f"{name.replace('_', ' ')} {text}".removesuffix(" True") for name, text in texts.items())

    def matches(self, there: Mapping[str, Any]) -> bool:
        """Say whether a host has this combination. `there`: the same names; a version is "" without the part."""
        return all(_CONDITIONS[name][0](there[name], wanted) for name, wanted in self.when.items())


def matching(there: Mapping[str, Any], tables: Tables) -> tuple[KnownProblem, ...]:
    """Return the known problems of a combination."""
    return tuple(one for one in problems_of(tables.table(KNOWN_PROBLEMS)) if one.matches(there))


def problems_of(data: Any, origin: str = "") -> tuple[KnownProblem, ...]:
    """Return the rows of a table, the newest first. Raises GpuprovError that names what is wrong in it."""
    hint = "its form is that of gpuprov/protocol/known_problems.json"
    rows = checked_rows(data, "problems", KnownProblem, _fits, ("known problems", origin, hint))
    return tuple(sorted(rows, key=lambda one: (one.reported, one.name), reverse=True))


def _fits(one: KnownProblem) -> object:
    return (
        _NAME.fullmatch(one.name) and DATE.fullmatch(one.reported)
        and "".join((one.what, one.fixed_in, one.command, *one.sources)).isprintable()
        and one.when and all(type(value) is _CONDITIONS[name][1] for name, value in one.when.items())
        and all(_RANGE.fullmatch(one.when[name]) for name in _VERSIONS if name in one.when)
        and one.combination.isprintable()
        and one.sources and all(re.fullmatch(r"https?://\S{1,300}", source) for source in one.sources)
        and all(_SETTING.fullmatch(f"{option}={value}") for option, value in one.use.items())
    )  # fmt: skip
