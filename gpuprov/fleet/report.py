"""What came of a run, for people: tables, problems by cause, and the one line that they want to read; renders only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuprov.errors import ExitCode, Problem
from gpuprov.events import CheckDone
from gpuprov.fleet.result import HostResult, overall_exit_code
from gpuprov.fleet.text import counted, listed, one_line, plain

_WORDS = {
    ExitCode.DONE: ("done", "green"),
    ExitCode.FAILED: ("failed", "red"),
    ExitCode.USAGE: ("refused", "red"),
    ExitCode.REBOOT_NEEDED: ("reboot needed", "yellow"),
    ExitCode.UNREACHABLE: ("unreachable", "red"),
}
_MOST_DETAILED = 3  # hosts side by side with what was measured; more do not fit on a terminal
_CHECK_STYLES = {"ok": "green", "failed": "bold red", "skipped": "yellow"}


def print_report(
    console: Console, command: str, results: Sequence[HostResult], *, check: bool, next_command: str, verbose: bool
) -> None:
    """Print all that came of a run; the last line says it in short."""
    parts: list[RenderableType] = []
    if command == "facts":
        parts += list(_facts(results, verbose=verbose))
    if any(result.checks for result in results):
        parts.append(_checks_table(results))
    if len(results) > 1 and (command != "facts" or overall_exit_code(tuple(results)) != ExitCode.DONE):
        parts.append(_summary_table(results, foreseen=check))
    for part in parts:
        console.print(part)
        console.print()
    console.print(problems_text(results), soft_wrap=True, end="")
    style = _WORDS[overall_exit_code(tuple(results))][1]
    console.print(Text(last_line(command, results, check=check, next_command=next_command), style), soft_wrap=True)


def summary_json(command: str, results: Sequence[HostResult]) -> dict[str, Any]:
    """Return the last object of `--json`: the exit code of the run, and what came of each host."""
    hosts = [
        {
            "host": result.host,
            "exit_code": int(result.exit_code),
            "result": _WORDS[result.exit_code][0],
            "changed": result.changed,
            "seconds": result.seconds,
            "summary": result.summary,
            "problems": [asdict(problem) for problem in result.problems],
            "versions": dict(result.versions),
        }
        for result in results
    ]
    return {"event": "Summary", "command": command, "exit_code": int(overall_exit_code(tuple(results))), "hosts": hosts}


def _summary_table(results: Sequence[HostResult], *, foreseen: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("host", "result", "would change" if foreseen else "changes", "seconds", "reason"):
        table.add_column(name, justify="right" if name in ("changes", "would change", "seconds") else "left")
    for result in results:
        word, style = _WORDS[result.exit_code]
        failed = next((check for check in result.checks if check.status == "failed"), None)
        reason = result.problems[0].what if result.problems else _told(failed) if failed else result.summary
        table.add_row(
            Text(plain(result.host)), Text(word, style), str(result.changed), f"{result.seconds:.1f}",
            Text(one_line(reason)),
        )  # fmt: skip
    return table


def _checks_table(results: Sequence[HostResult]) -> Table:
    """Return hosts across and checks down: there are more checks than hosts, mostly."""
    detailed = len(results) <= _MOST_DETAILED
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check")
    for result in results:
        table.add_column(Text(plain(result.host)))
    for name in dict.fromkeys(check.name for result in results for check in result.checks):
        table.add_row(Text(one_line(name)), *(_check_cell(result, name, detailed=detailed) for result in results))
    return table


def _told(check: CheckDone) -> str:
    return f"{check.name}: {check.reason}" if check.reason else check.name


def _check_cell(result: HostResult, name: str, *, detailed: bool) -> Text:
    found = next((check for check in result.checks if check.name == name), None)
    if found is None:
        return Text("–", "dim")
    cell = Text(plain(found.status), _CHECK_STYLES.get(found.status, ""))
    if detailed and found.status == "failed" and (found.host or found.container):
        cell.append(f" host {one_line(found.host) or '–'}, container {one_line(found.container) or '–'}", "")
    elif detailed and found.status == "ok":
        cell.append(f" {one_line(found.container or found.host)}", "dim")
    return cell


def problems_text(results: Iterable[HostResult]) -> Text:
    """Return the problems and failed checks of all hosts; those with the same cause and cure stand together."""
    groups: dict[tuple[str, str], list[tuple[str, Problem]]] = {}
    for result in results:
        failed = (Problem(_told(check)) for check in result.checks if check.status == "failed")
        for problem in (*failed, *result.problems):
            groups.setdefault((problem.what, problem.next_step), []).append((result.host, problem))
    text = Text()
    for (what, next_step), members in groups.items():
        hosts = dict.fromkeys(plain(host) for host, _ in members)
        text.append(f"{listed(hosts)}: {one_line(what)}\n", "bold red")
        for evidence in list(dict.fromkeys(problem.evidence for _, problem in members if problem.evidence))[:3]:
            text.append(_indented("seen", evidence))
        if next_step:
            text.append(_indented("next", next_step))
        text.append("\n")
    return text


def _indented(label: str, body: str) -> Text:
    lines = plain(body).rstrip("\n").splitlines()
    return Text("".join(f"  {label + ':' if number == 0 else '':5} {line}\n" for number, line in enumerate(lines)))


def _facts(results: Sequence[HostResult], *, verbose: bool) -> Iterable[RenderableType]:
    """Yield a table of what matters; all facts of one host, or with -v of all."""
    gathered = [(result.host, result.facts) for result in results if result.facts is not None]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("host", *_FACTS):
        table.add_column(name)
    for host, facts in gathered:
        table.add_row(Text(plain(host)), *(Text(one_line(_fact(facts, path)) or "–") for path in _FACTS.values()))
    if gathered:
        yield table
    if verbose or len(gathered) == 1:
        for host, facts in gathered:
            yield Group(Text(plain(host), "bold"), Text(plain(json.dumps(facts, indent=2, ensure_ascii=False))))


_FACTS = {
    "system": ("os", "name"),
    "kernel": ("kernel", "release"),
    "GPUs": ("gpus",),
    "driver": ("driver_installed_version",),
    "docker": ("docker", "version"),
}


def _fact(facts: Mapping[str, Any], path: tuple[str, ...]) -> str:
    value: Any = facts
    for key in path:
        value = value.get(key, "") if isinstance(value, Mapping) else ""
    return str(len(value)) if isinstance(value, (list, tuple)) else str(value)


# -- the last line ---------------------------------------------------------------------------------------------------


def last_line(command: str, results: Sequence[HostResult], *, check: bool, next_command: str) -> str:
    """Return what the whole run comes to, and what to type next."""
    failed = [result for result in results if result.exit_code != ExitCode.DONE]
    if failed:
        by_word: dict[str, list[str]] = {}
        for result in failed:
            by_word.setdefault(_WORDS[result.exit_code][0], []).append(plain(result.host))
        reasons = "; ".join(f"{word}: {listed(hosts)}" for word, hosts in by_word.items())
        done = len(results) - len(failed)
        return f"{done} of {counted(len(results), 'host')} {_PARTICIPLES.get(command, 'done')}; {reasons}"
    hosts = counted(len(results), "host")
    changes = " + ".join(str(result.changed) for result in results)
    noun = "change" if changes == "1" else "changes"
    if command == "verify":
        return f"{hosts} ready: {_seen_by_containers(results)}"
    if command == "facts":
        return f"facts of {hosts}"
    if check:
        return f"{hosts}: {changes} {noun} would be made, nothing was touched"
    follow_up = f"; next: {next_command}" if next_command else ""
    return f"{hosts} {_PARTICIPLES[command]}: {changes} {noun}{follow_up}"


_ALL_GPUS = "container, all GPUs"  # the check's name in gpuprov.verify
_PARTICIPLES = {
    "install": "installed", "verify": "ready", "facts": "answered", "rollback": "rolled back",
    "uninstall": "uninstalled",
}  # fmt: skip


def _seen_by_containers(results: Sequence[HostResult]) -> str:
    """Return how many GPUs containers were seen to have; where no check counted them, how many checks went well."""
    counts = [_gpu_count(result.checks) for result in results]
    if counts and None not in counts:
        return f"containers see {' + '.join(map(str, counts))} GPU{'' if counts == [1] else 's'}"
    checks = [check for result in results for check in result.checks]
    good = sum(check.status == "ok" for check in checks)
    skipped = sum(check.status == "skipped" for check in checks)
    return f"{counted(good, 'check')} ok" + (f", {skipped} skipped" if skipped else "")


def _gpu_count(checks: Sequence[CheckDone]) -> int | None:
    """Return the number of GPUs that a container with all of them was seen to have, or None."""
    seen = (check.container for check in checks if check.status == "ok" and check.name == _ALL_GPUS)
    number = re.match(r"(\d+) GPUs?\b", next(seen, ""))
    return int(number.group(1)) if number else None
