"""Show results: tables, problems by cause, a last line; write page and metrics; print a stored run again."""

import json
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gpuprov.agent.result import MADE, PENDING, HostResult, fact, hosts_by_vulnerability, machines, metrics_text
from gpuprov.agent.site_tables import user_table
from gpuprov.core.files import expanded, own_target, write_whole
from gpuprov.fleet import history
from gpuprov.fleet.grouping import DRAIN_STATES, causes, command_of, drained, listed, shortened, spreads, still_drained
from gpuprov.fleet.history import Run
from gpuprov.fleet.standard_streams import say_text
from gpuprov.protocol.advisories import Vulnerabilities, rows_of
from gpuprov.protocol.codec import as_json
from gpuprov.protocol.errors import ExitCode, GpuprovError, UsageError
from gpuprov.protocol.events import SCHEMA
from gpuprov.protocol.tables import ADVISORIES
from gpuprov.protocol.versions import count_in
from gpuprov.protocol.words import counted, one_line, plain

_YELLOW = (ExitCode.REBOOT_NEEDED, ExitCode.DEGRADED)
_STYLES = {"done": "green", "failed": "red", "refused": "red", "reboot needed": "yellow", "unreachable": "red",
           "not run": "yellow", "stopped": "yellow", "degraded": "yellow", "unfit": "red"}  # fmt: skip
# What ended the run, at the end of its last line.
_SIGNALS = {
    None: "", ExitCode.INTERRUPTED: "; ended by Ctrl-C", ExitCode.TERMINATED: "; ended by SIGTERM",
    ExitCode.HUNG_UP: "; ended by SIGHUP",
}  # fmt: skip
_MOST_COMPARED = 20
_MOST_DETAILED = 3  # hosts side by side with what was measured; more do not fit on a terminal
_MOST_SIDE_BY_SIDE = 8
_MOST_ROWS = 50  # of one host each; beyond that only -v shows them all
_MOST_NAMED = 5
_CHECK_STYLES = {"ok": "green", "failed": "bold red", "skipped": "yellow"}
# After the installation of this machine.
_TO_TRY = """
docker run --rm --gpus all ubuntu nvidia-smi
docker run --rm --runtime=nvidia -e NVIDIA_VISIBLE_DEVICES=all ubuntu nvidia-smi"""
# What `--json` says of a host, and the columns of the table of facts.
_SUMMARISED = (
    "host", "exit_code", "changed", "seconds", "summary", "problems", "versions", "same_as", "drain", "rolled_back",
    "choice",
)  # fmt: skip
_FACTS = {
    "system": ("os", "name"), "kernel": ("kernel", "release"), "GPUs": ("gpus",),
    "driver": ("driver", "library_version"), "docker": ("docker", "version"),
}  # fmt: skip
_ALL_GPUS = ", all GPUs"  # what the names of these checks end with in gpuprov.checks, after the engine's
_CHANGED = {False: "made", True: "would be made"}
_FAILED_ON = {"doctor": "causes found on", "cuda": "wrong on"}
_PARTICIPLES = {
    "install": "installed", "verify": "ready", "facts": "answered", "doctor": "healthy", "health": "healthy",
    "accept": "accepted", "cuda": "right", "rollback": "rolled back", "uninstall": "uninstalled",
}  # fmt: skip


def print_report(console: Console, run: Run, next_command: str = "", *, verbose: bool = False) -> None:
    """Print all results of a run; the last line summarises them."""
    command, results, check = run.command, run.results, run.check
    parts: list[RenderableType] = []
    if command == "facts":
        parts += list(_facts(results, verbose=verbose))
    if any(result.checks for result in results):
        table = _checks_table if verbose or len(results) <= _MOST_SIDE_BY_SIDE else _checks_count_table
        parts.append(table(results))
    if len(results) == 1 and results[0].made:
        parts.append(_durations(results[0]))
    if len(results) > 1 and (command != "facts" or any(one.exit_code != ExitCode.DONE for one in results)):
        short = len(results) > _MOST_ROWS and not verbose
        parts.append(_count_table(results) if short else _summary_table(results, foreseen=check))
    parts += _drains_table(results, verbose=verbose)
    parts += _versions_table(results)
    choices = "\n".join(shortened(one_line(one)) for one in history.driver_choices(results, run.inventory))
    # A run of one host has just said it.
    parts += [Text(choices)] if choices and (len(results) > 1 or not next_command) else []
    parts += _vulnerabilities_table(results)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))  # a long line of JSON is copied whole
        console.print()
    console.print(problems_text(results), soft_wrap=True, end="")
    worst = run.exit_code
    style = "green" if worst == ExitCode.DONE else "yellow" if worst in _YELLOW else "red"
    line = last_line(command, results, check=check, next_command=next_command) + still_drained(results)
    console.print(Text(line + _SIGNALS.get(run.ended_by, ""), style), soft_wrap=True)
    if command == "install" and not check and worst == ExitCode.DONE and [one.host for one in results] == ["localhost"]:
        found = results[0]
        if "docker" in [one.step for one in found.made] and found.versions.get("gpus", "0") != "0":
            console.print(_TO_TRY, soft_wrap=True)


def summary(run: Run) -> dict[str, Any]:
    """Return the last object of `--json`: the exit code of the run, and the result of each host."""
    hosts = [{**{name: as_json(getattr(one, name)) for name in _SUMMARISED}, "result": one.word} for one in run.results]
    return {
        "schema": SCHEMA,
        "event": "Summary",
        "command": run.command,
        "exit_code": int(run.exit_code),
        "hosts": hosts,
        "causes": [asdict(cause) for cause in causes(run.results)],
        "holes": [{**asdict(one), "score": one.score, "hosts": hosts} for one, hosts in _vulnerable(run.results)],
        "run": run.identifier,
    }


def _vulnerable(results: Sequence[HostResult]) -> tuple[tuple[Vulnerabilities, tuple[str, ...]], ...]:
    return hosts_by_vulnerability(results, rows_of(user_table(ADVISORIES)))


def _table(*names: str, right: Sequence[str] = (), fold: bool = False) -> Table:
    """Return an empty table. `right`: columns of numbers; `fold`: wrap what is too long instead of cutting it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold" if fold else "ellipsis")
    return table


def _summary_table(results: Sequence[HostResult], *, foreseen: bool) -> Table:
    changes = "would change" if foreseen else "changes"
    table = _table("host", "result", changes, "seconds", "reason", right=(changes, "seconds"))
    for result in results:
        # The choice of a driver has a line of its own, for all hosts.
        reason = result.reason.partition("; driver ")[0] if result.choice else result.reason
        table.add_row(
            Text(plain(result.host)), Text(result.word, _STYLES[result.word]), str(result.changed),
            f"{result.seconds:.1f}", Text(shortened(one_line(reason))),
        )  # fmt: skip
    return table


def _durations(result: HostResult) -> Text:
    seconds: dict[str, float] = {}
    for one in result.made:
        seconds[one.step] = seconds.get(one.step, 0.0) + (one.seconds or 0.0)
    return Text(" · ".join(f"{one_line(step) or 'other'} {number:.1f} s" for step, number in seconds.items()), "dim")


def _count_table(results: Sequence[HostResult]) -> Table:
    """Return how many hosts ended in which state, and their durations: the summary for a thousand hosts."""
    table = _table("result", "hosts", "changes", "seconds", "slowest", right=("hosts", "changes", "seconds"))
    for word, style in _STYLES.items():
        if members := [result for result in results if result.word == word]:
            slowest = max(members, key=lambda result: result.seconds)
            middle = statistics.median(result.seconds for result in members)
            table.add_row(
                Text(word, style), str(len(members)), str(sum(result.changed for result in members)), f"{middle:.1f}",
                Text(f"{plain(slowest.host)} {slowest.seconds:.1f}"),
            )  # fmt: skip
    return table


def _versions_table(results: Sequence[HostResult]) -> list[Table]:
    """Return the versions that the hosts run; hosts with other versions are named. Empty if fewer than two told."""
    if sum(bool(result.versions) for result in machines(results)) < 2:
        return []
    table = _table("", "on most hosts", "hosts", "exceptions", right=("hosts",))
    for name, ((usual, first), *rest) in spreads(results):
        others = [f"{_short(version)}: {listed(map(plain, hosts))}" for version, hosts in rest[:_MOST_NAMED]]
        if len(rest) > _MOST_NAMED:
            others.append(counted(len(rest) - _MOST_NAMED, "more version"))
        table.add_row(Text(plain(name)), Text(_short(usual)), str(len(first)), Text("; ".join(others), "yellow"))
    return [table]


def _short(text: str) -> str:
    return shortened(one_line(text), columns=80)


def _vulnerabilities_table(results: Sequence[HostResult]) -> list[Table]:
    found = _vulnerable(results)
    if not found:
        return []
    table = _table("known security holes in", "worst score", "NVIDIA bulletins", "fixed in", "hosts")
    for one, hosts in found:
        what, where = Text(plain(f"{one.product} {one.version}"), "yellow"), Text(listed(map(plain, hosts)))
        table.add_row(what, f"{one.score:g}", one.bulletins, one.fixed_in, where)
    return [table]


def _drains_table(results: Sequence[HostResult], *, verbose: bool) -> list[Table]:
    rows = drained(results)
    if not rows:
        return []
    table = _table("host", "drain", "seconds", "since", "command to type", right=("seconds",), fold=True)
    for host, drain in rows if verbose else rows[:_MOST_ROWS]:
        word, style = DRAIN_STATES[drain.state]
        seconds = "" if drain.state == "foreseen" else f"{drain.seconds:.1f}"
        command = shortened(one_line(command_of(drain)))
        table.add_row(Text(plain(host)), Text(word, style), seconds, Text(plain(drain.since)), Text(command))
    return [table]


def _checks_count_table(results: Sequence[HostResult]) -> Table:
    """Return for each check the number of hosts that passed it, and the hosts that failed it."""
    table = _table("check", "ok", "failed", "skipped", "failed on", right=("ok", "failed", "skipped"))
    for name in dict.fromkeys(check.name for result in results for check in result.checks):
        hosts = {
            status: [r.host for r in results for check in r.checks if (check.name, check.status) == (name, status)]
            for status in _CHECK_STYLES
        }
        counts = (Text(str(len(hosts[status])), style if hosts[status] else "dim")
                  for status, style in _CHECK_STYLES.items())  # fmt: skip
        table.add_row(Text(one_line(name)), *counts, Text(listed(map(plain, hosts["failed"]))))
    return table


def _checks_table(results: Sequence[HostResult]) -> Table:
    """Return hosts across and checks down: there are more checks than hosts, mostly."""
    detailed = len(results) <= _MOST_DETAILED
    table = _table("check")
    for result in results:
        table.add_column(Text(plain(result.host)))
    for name in dict.fromkeys(check.name for result in results for check in result.checks):
        table.add_row(Text(one_line(name)), *(_check_cell(result, name, detailed=detailed) for result in results))
    return table


def _check_cell(result: HostResult, name: str, *, detailed: bool) -> Text:
    found = next((check for check in result.checks if check.name == name), None)
    if found is None:
        return Text("–", "dim")
    # A GPU that health finds degraded counts as ok.
    if found.status == "ok" and found.on_host.startswith("degraded: "):
        return Text(one_line(found.on_host) if detailed else "degraded", _STYLES["degraded"])
    cell = Text(plain(found.status), _CHECK_STYLES.get(found.status, ""))
    if detailed and found.status == "failed" and (found.on_host or found.in_container):
        cell.append(f" host {one_line(found.on_host) or '–'}, container {one_line(found.in_container) or '–'}", "")
    elif detailed and found.status == "ok":
        cell.append(f" {one_line(found.in_container or found.on_host)}", "dim")
    elif detailed and found.status == "skipped" and found.reason:
        cell.append(f": {_short(found.reason)}", "dim")
    return cell


def problems_text(results: Iterable[HostResult]) -> Text:
    """Return the problems and failed checks of all hosts, grouped by cause and next step."""
    text = Text()
    for cause in causes(results):
        names = listed(map(plain, cause.hosts))
        few = len(cause.hosts) <= _MOST_NAMED
        who = names if few else counted(len(cause.hosts), "host")
        text.append(f"{who}: {shortened(one_line(cause.what))}\n", "bold red")
        if not few:
            text.append(_indented("on", names))
        for evidence in cause.evidence:
            text.append(_indented("seen", evidence))
        if cause.next_step:
            text.append(_indented("next", cause.next_step))
        text.append("\n")
    return text


def _indented(label: str, body: str) -> Text:
    lines = shortened(plain(body)).splitlines()
    return Text("".join(f"  {label + ':' if number == 0 else '':5} {line}\n" for number, line in enumerate(lines)))


def _facts(results: Sequence[HostResult], *, verbose: bool) -> Iterable[RenderableType]:
    """Yield a table of the main facts; with -v also all facts of each host."""
    gathered = [(result.host, result.facts) for result in results if result.facts is not None]
    table = _table("host", *_FACTS)
    for host, facts in gathered:
        table.add_row(Text(plain(host)), *(Text(one_line(fact(facts, path)) or "–") for path in _FACTS.values()))
    if gathered:
        yield table
    for host, facts in gathered if verbose else ():
        yield Text.assemble((plain(host), "bold"), "\n", plain(json.dumps(facts, indent=2, ensure_ascii=False)))


# -- the last line ---------------------------------------------------------------------------------------------------


def last_line(command: str, results: Sequence[HostResult], *, check: bool, next_command: str) -> str:
    """Return the overall result, and the next command."""
    if failed := [result for result in results if result.exit_code != ExitCode.DONE]:
        by_word: dict[str, list[str]] = {}
        for result in failed:
            # A finished command has a summary; a lock or a broken host leaves none.
            found = _FAILED_ON.get(command) if result.word == "failed" and result.summary else None
            by_word.setdefault(found or result.word, []).append(plain(result.host))
        reasons = "; ".join(f"{word}: {listed(hosts)}" for word, hosts in by_word.items())
        done = len(results) - len(failed)
        ill = command == "verify" and any(result.exit_code == ExitCode.FAILED for result in failed)
        follow_up = f"; next: {next_command}" if next_command and ill else ""
        return f"{done} of {counted(len(results), 'host')} {_PARTICIPLES.get(command, 'done')}; {reasons}{follow_up}"
    hosts = counted(len(results), "host")
    results = machines(results)
    changes = counted(sum(result.changed for result in results), "change")
    if command == "verify":
        return f"{hosts} ready: {_seen_by_containers(results)}"
    if command == "health":
        return f"{hosts} healthy: {counted(sum(count_in(one.versions.get('gpus', '')) or 0 for one in results), 'GPU')}"
    if command == "accept":
        gpus = sum(gpu.gpu != "" for one in results for gpu in one.measured)
        return f"{hosts} accepted: {counted(gpus, 'GPU')} measured"
    if command == "facts":
        return f"facts of {hosts}"
    if command == "doctor":
        made = "" if not any(result.changed for result in results) else f"{changes} {_CHANGED[check]}; "
        return f"{hosts}: {made}nothing found wrong in all that was looked at"
    if command == "cuda":
        return f"{hosts}: nothing found wrong in the libraries that programs load"
    if check:
        return f"{hosts}: {changes} would be made, nothing was touched"
    follow_up = f"; next: {next_command}" if next_command else ""
    return f"{hosts} {_PARTICIPLES[command]}: {changes}{follow_up}"


def _seen_by_containers(results: Sequence[HostResult]) -> str:
    """Return how many GPUs containers saw; without a count, how many checks passed."""
    counting = [[one for one in result.checks if one.status == "ok" and one.name.endswith(_ALL_GPUS)]
                for result in results]  # fmt: skip
    numbers = [re.match(r"([0-9]{1,6}) GPUs?\b", found[0].in_container) for found in counting if found]
    counts = [int(one[1]) for one in numbers if one]
    if counts and len(counts) == len(results):
        engines = dict.fromkeys(check.engine for found in counting for check in found)
        named = f" ({', '.join(filter(None, engines))})" if any(engines) else ""
        summed = " + ".join(map(str, counts)) if len(counts) <= _MOST_SIDE_BY_SIDE else str(sum(counts))
        return f"containers see {counted(summed, 'GPU')}{named}"
    checks = [check for result in results for check in result.checks]
    good = sum(check.status == "ok" for check in checks)
    skipped = sum(check.status == "skipped" for check in checks)
    return f"{counted(good, 'check')} ok" + (f", {skipped} skipped" if skipped else "")


def show_run(console: Console, run: Run, *, as_json: bool, verbose: bool) -> None:
    """Print a run as it was reported when it ended."""
    if as_json:
        console.file.write(json.dumps(history.to_json(run), separators=(",", ":")) + "\n")
        return
    console.print(Text(f"run {run.identifier}: {_call(run)}, {run.began}, {run.seconds:.0f} s", "bold"), soft_wrap=True)
    console.print()
    print_report(console, run, verbose=verbose)
    if run.command == "accept":
        _compare(console, run, verbose=verbose)


def _compare(console: Console, run: Run, *, verbose: bool) -> None:
    """Print what `accept` has measured, hosts side by side."""
    from gpuprov.fleet.accepted import side_by_side

    for model, columns, rows in side_by_side(run.results):
        names = [escape(plain(name)) for name in columns]
        table = _table(*names, right=names[1:-1])
        shown = rows if verbose else rows[:_MOST_COMPARED]
        for row in shown:
            table.add_row(*(Text(plain(cell)) for cell in row))
        title = f"{model}: the slowest GPU of each host, GB/s; rate: rounds a second"
        console.print(Text(plain(title), "bold"), soft_wrap=True)
        console.print(table)
        if len(shown) < len(rows):
            console.print(f"{counted(len(rows) - len(shown), 'more host')}: gpuprov report -v", soft_wrap=True)


def show_list(console: Console, *, as_json: bool) -> None:
    """Print one line for each stored run, the latest first."""
    runs = []
    for identifier in history.identifiers():
        try:
            runs.append(history.load(identifier))
        except GpuprovError as error:
            say_text(error, err=True)
    rows = [
        {
            "run": run.identifier, "began": run.began, "command": run.command, "hosts": len(run.results),
            "failed": sum(result.has_failed for result in run.results), "exit_code": int(run.exit_code),
        }
        for run in runs
    ]  # fmt: skip
    if as_json:
        console.file.write(json.dumps(rows, separators=(",", ":")) + "\n")
        return
    table = _table("run", "began", "command", "hosts", "failed", "exit code", right=("hosts", "failed", "exit code"))
    for run, row in zip(runs, rows):
        table.add_row(*(Text(str(cell)) for cell in {**row, "command": _call(run)}.values()))
    console.print(table)


def _call(run: Run) -> str:
    where, check = ", ".join(run.inventory) or "this machine", " --check" if run.check else ""
    return plain(f"gpuprov {run.command}{check} on {counted(len(run.results), 'host')} of {where}")


def write_page(run: Run, path: str) -> None:
    """Write the page, which compares with the last stored run of the same kind.

    Raises GpuprovError (exit code 2) if the file cannot be written, or is a FIFO that nobody reads.
    """
    from gpuprov.fleet.page import render  # Jinja2 is loaded only for a page

    page = render(run, history.before(run))
    try:
        handle = os.open(expanded(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            os.set_blocking(handle, True)
            file.write(page)
    except OSError as error:
        step = f"gpuprov report --run {run.identifier} --html FILE writes it elsewhere"
        raise UsageError(f"the report {path} cannot be written", str(error), step) from None


def write_metrics(run: Run, path: str, ended: float) -> None:
    """Write the run's metrics atomically; `ended` is its end in seconds since the epoch. Raises OSError.

    The collector that reads them has another account. A link of the user's stays.
    """
    text = metrics_text(
        run.command, run.results, rows_of(user_table(ADVISORIES)), ended=ended, seconds=run.seconds,
        changes=PENDING if run.check else MADE,
    )  # fmt: skip
    write_whole(own_target(expanded(path)), text.encode(), 0o644, (os.geteuid(), os.getegid()))
