"""The site's own commands of `gpuprov accept`: what the output of each must show, and the figures in it.

Images and their output are hostile until checked: only figures and short words of it are kept. The forms of output are
those of DCGM 3 and 4, nvbandwidth 0.5 to 0.10, and nccl-tests 2.13 to 2.17.
"""

import contextlib
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable

from gpuprov.core.commands import Completed, unanswered_evidence
from gpuprov.core.system import System
from gpuprov.protocol.codec import WrongDataError, parse
from gpuprov.protocol.errors import UsageError
from gpuprov.protocol.spec import AcceptCommand
from gpuprov.protocol.words import one_line

_MOST_TEXT, _MOST_FIGURES, _LONGEST, _GREP_SECONDS = 8 << 20, 60, 300, 20.0
_GIGA = 1e9
# What is wrong, "" for nothing; figures in bytes a second.
Read = tuple[str, Mapping[str, float]]


def shown(one: AcceptCommand) -> str:
    """Return a command as a shell would take it, cut to a length for people; its figures are named after it."""
    return one_line(shlex.join(one.command))[:_LONGEST]


def require_expressions(system: System, commands: Iterable[AcceptCommand]) -> None:
    """Raise UsageError if grep does not take an `expect`: it would find nothing, and a host would seem to be unfit."""
    for one in (one for one in commands if one.expect not in _PARSERS):
        done = system.run(("grep", "-aqE", "-e", one.expect), timeout=_GREP_SECONDS)
        if done.returncode > 1 or done.stderr.strip():
            what = f"gpuprov_accept_commands: {one.expect!r} is no regular expression of grep -E"
            raise UsageError(what, done.evidence(), "correct its expect; a digit is [0-9]")


def read(system: System, one: AcceptCommand, done: Completed) -> Read:
    """Return what a command's output shows; the exit code counts where the output shows no fault."""
    text = done.stdout[-_MOST_TEXT:]
    if one.expect in _PARSERS:
        fault, figures = _PARSERS[one.expect](text)
    else:
        # Python's expressions may take for ever: grep's have a time limit.
        argv = ("grep", "-aqE", "-e", one.expect)
        content = text.encode("utf-8", "replace")
        asked = system.run(argv, stdin=content, timeout=_GREP_SECONDS) if one.expect else Completed(argv, 0)
        fault, figures = "" if asked.ok else unanswered_evidence(asked) or f"nothing in its output is {one.expect}", {}
    if not done.ok:
        said = one_line(done.evidence(2).partition("\n")[2])[-_LONGEST:] or "(silent)"
        fault = f"exit code {done.returncode}: {fault if one.expect == _DCGM and fault else said}"
    return fault, {f"{shown(one)}: {name}": value for name, value in figures.items()}


def read_dcgm(text: str) -> Read:
    """Read `dcgmi diag --json`: each test must have the result Pass; one that DCGM has skipped proves nothing."""
    tests: list[Mapping[str, Any]] = []
    # nv-hostengine may have its line before it.
    with contextlib.suppress(WrongDataError, RecursionError):
        tests += _tests(parse(text[text.find("{") : text.rfind("}") + 1]))
    faults = [fault for test in tests for fault in _failed(test)]
    return "; ".join(faults)[:_LONGEST] if tests else "no test of dcgmi diag --json in its output", {}


def _tests(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects that have results: DCGM 3 and 4 differ in what is around them."""
    if isinstance(value, Mapping) and isinstance(value.get("results"), list):
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _tests(part)


def _failed(test: Mapping[str, Any]) -> Iterator[str]:
    for one in test["results"] or [{}]:
        result = one if isinstance(one, Mapping) else {}
        if str(result.get("status")).lower() != "pass":
            gpu = result.get("entity_id", result.get("gpu_id", "?"))
            yield one_line(f"{test.get('name')!s:.80}: {result.get('status')!s:.80}, GPU {gpu!s:.20}")


def read_nvbandwidth(text: str) -> Read:
    """Read nvbandwidth's tables: the slowest cell of each test; latencies are left out, for they are no bandwidths."""
    figures: dict[str, float] = {}
    for part in re.split(r"^[ \t]{0,20}Running ", text, flags=re.MULTILINE)[1:]:
        name, _, table = part.partition("\n")
        header, _, rows = table.partition("bandwidth (GB/s)\n")
        cells = re.findall(r"[ \t](\d{1,6}\.\d{1,9})(?=\s)", rows.partition("\nSUM")[0])
        speeds = [float(one) for one in cells if float(one) > 0]
        if re.fullmatch(r"\w{1,80}\.?", name) and len(header) < _LONGEST and speeds and len(figures) < _MOST_FIGURES:
            figures[name.rstrip(".")] = min(speeds) * _GIGA
    return ("" if figures else "no table of bandwidths in its output"), figures


def read_nccl(text: str) -> Read:
    """Read a program of nccl-tests: no value may be wrong; its figure is the average bus bandwidth."""
    checked = re.search(r"^# Out of bounds values : (\d{1,18}) (OK|FAILED)", text, re.MULTILINE)
    average = re.search(r"^# Avg bus bandwidth\s{0,20}: (\d{1,6}(?:\.\d{1,9})?)\s", f"{text}\n", re.MULTILINE)
    if checked is None or average is None:
        return "no result of nccl-tests in its output", {}
    # With one GPU it is 0.
    speed = float(average[1]) * _GIGA
    figures = {"avg_bus_bandwidth": speed} if speed and math.isfinite(speed) else {}
    return ("" if checked[2] == "OK" else f"{checked[1]} wrong values"), figures


_DCGM = "dcgm"
_PARSERS: dict[str, Callable[[str], Read]] = {
    _DCGM: read_dcgm, "nvbandwidth": read_nvbandwidth, "nccl": read_nccl,
}  # fmt: skip
