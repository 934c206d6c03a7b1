"""Report which hosts a run drained: the table, the text of a state, and who is still drained; pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from gpuprov.agent.result import Drain, HostResult
from gpuprov.fleet.display_text import listed, shortened
from gpuprov.protocol.words import one_line, plain

_STATES = {
    "foreseen": ("would be drained", ""),
    "failed": ("drain failed", "red"),
    "drained": ("still drained", "bold yellow"),
    "undrained": ("undrained", "green"),
}
_MOST_ROWS = 50


def state_of(drain: Drain) -> str:
    """Return the text of a drain's state."""
    return _STATES[drain.state][0]


def command_of(drain: Drain) -> str:
    """Return the command to type, or the one that a run would begin with; "" if nothing is left to do."""
    return drain.before if drain.state == "foreseen" else drain.after if drain.lasts else ""


def drained(results: Sequence[HostResult]) -> tuple[tuple[str, Drain], ...]:
    """Return the hosts that were or would be drained, those still drained first."""
    found = [(result.host, result.drain) for result in results if result.drain is not None]
    return tuple(sorted(found, key=lambda one: not one[1].lasts))


def drains_table(results: Sequence[HostResult], *, verbose: bool = False) -> list[Table]:
    """Return a table of the drains; empty if no host was drained."""
    rows = drained(results)
    if not rows:
        return []
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("host", "drain", "seconds", "since", "command to type"):
        table.add_column(name, justify="right" if name == "seconds" else "left", overflow="fold")
    for host, drain in rows if verbose else rows[:_MOST_ROWS]:
        word, style = _STATES[drain.state]
        seconds = "" if drain.state == "foreseen" else f"{drain.seconds:.1f}"
        command = shortened(one_line(command_of(drain)))
        table.add_row(Text(plain(host)), Text(word, style), seconds, Text(plain(drain.since)), Text(command))
    return [table]


def still_drained(results: Sequence[HostResult]) -> str:
    """Return `; still drained: a, b` for the last line of a report, or nothing."""
    sure = [plain(host) for host, drain in drained(results) if drain.state == "drained"]
    unsure = [plain(host) for host, drain in drained(results) if drain.state == "failed"]
    parts = (f"still drained: {listed(sure)}" if sure else "", f"drain failed: {listed(unsure)}" if unsure else "")
    return "".join(f"; {part}" for part in parts if part)
