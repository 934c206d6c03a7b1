"""Show a run in progress: a live table on a terminal, prefixed lines in a pipe, JSON lines for programs.

Decides nothing.
"""

from __future__ import annotations

import collections
import json
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpuprov.protocol import events
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.words import counted, one_line, plain


def words_for(event: events.Event, *, verbose: bool) -> str:
    """Return the line for an event; empty if there is nothing to show."""
    if isinstance(event, events.Note):
        if event.level == "debug" and not verbose:
            return ""
        return event.message if event.level in ("info", "debug") else f"{event.level}: {event.message}"
    if isinstance(event, events.ChangeStarted):
        return f"[{event.index}/{event.total}] {event.summary}"
    if isinstance(event, events.CheckDone):
        # The report at the end has the reason, with evidence and next step.
        return f"{event.status} {event.name}" + (f": {event.reason}" if event.reason and verbose else "")
    if isinstance(event, events.ChangeProgress) and verbose:
        return event.message
    if isinstance(event, events.ChangeDone) and verbose:
        return f"{event.key}: done in {event.seconds:.1f} s"
    return ""


def _ending(event: events.Finished, *, examined: bool = False) -> str:
    """Return how a run ended. `examined`: doctor or health found something, which is not a failure of the run."""
    if event.problems and not (examined and event.summary):
        return f"failed: {event.problems[0].what}"
    return event.summary or ("done" if event.exit_code == ExitCode.DONE else f"ended with exit code {event.exit_code}")


@dataclass
class JsonLines:
    """Every event as one line of JSON, after the schema's version and the host (docs/json.md)."""

    console: Console
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __call__(self, host: str, event: events.Event) -> None:
        line = f'{{"schema":{events.SCHEMA},"host":{json.dumps(host)},{events.to_line(event)[1:]}'
        with self._lock:
            self.console.file.write(line + "\n")
            self.console.file.flush()


class PlainLines:
    """Every event as a line that begins with the host's name."""

    def __init__(self, console: Console, *, verbose: bool = False, diff: bool = False) -> None:
        self._console = console
        self._verbose = verbose
        self._lock = threading.Lock()
        self._plans = Plans(diff=diff, whole=verbose)
        self._examined: set[str] = set()

    def __call__(self, host: str, event: events.Event) -> None:
        words = words_for(event, verbose=self._verbose)
        with self._lock:
            if isinstance(event, (events.CauseFound, events.HealthFound)):
                self._examined.add(host)
            elif isinstance(event, events.Finished):
                words = _ending(event, examined=host in self._examined)
            if isinstance(event, events.Planned):
                self._console.print(self._plans.text(host, event.changes), soft_wrap=True)
            elif words:
                self._console.print(Text(f"{plain(host)}: {one_line(words)}"), soft_wrap=True)


@dataclass
class Plans:
    """Plans as text; a plan that another host has already shown is only referenced."""

    diff: bool
    whole: bool = False
    _shown: dict[tuple[events.PlannedChange, ...], str] = field(default_factory=dict, init=False)

    def text(self, host: str, changes: tuple[events.PlannedChange, ...]) -> Text:
        """Return the plan of one host."""
        if not changes:
            return Text(f"{plain(host)}: nothing to change")
        twin = self._shown.setdefault(changes, host)
        if twin != host:
            return Text(f"{plain(host)}: the same {counted(len(changes), 'change')} as {plain(twin)}")
        lines = [Text(f"{plain(host)}: {counted(len(changes), 'change')}", "bold")]
        for number, change in enumerate(changes, 1):
            lines.append(Text(f"  {number:2}. {one_line(change.summary)}"))
            if self.diff and change.diff_in_short and not self.whole:
                lines += [Text(f"      {line}", "dim") for line in plain(change.diff_in_short).splitlines()]
                length = counted(change.diff.count("\n") + 1, "line")
                lines.append(Text(f"      {length} of diff: add -v to see them", "dim"))
            elif self.diff and change.diff:
                styled = ((line, _DIFF_STYLES.get(line[:1], "dim")) for line in plain(change.diff).splitlines())
                lines += [Text.assemble("      ", line) for line in styled]
        return Text("\n").join(lines)


_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


@dataclass
class _Row:
    """What the live table shows of one host."""

    begun: float = 0.0
    ended: float = 0.0
    index: int = 0
    total: int = 0
    step: str = "waiting"
    message: str = ""
    style: str = "dim"
    # Within a change that takes long: done and total, in bytes for instance.
    part: tuple[int, int] = field(default=(0, 0))
    failed: bool = False
    examined: bool = False

    @property
    def state(self) -> str:
        if not self.ended:
            return "at work" if self.begun else "waiting"
        return "failed" if self.failed else "done"


class LiveTable(AbstractContextManager["LiveTable"]):
    """A table with one row for each host, redrawn as events come; plans and warnings scroll by above it.

    If not all hosts fit on the screen, it shows active and failed ones, and counts the others.
    """

    def __init__(self, console: Console, hosts: Sequence[str], *, verbose: bool = False, diff: bool = False) -> None:
        self._console = console
        self._rows = {host: _Row() for host in hosts}
        self._plans = Plans(diff=diff, whole=verbose)
        self._diff = diff
        self._lock = threading.Lock()
        self._live = Live(
            console=console, get_renderable=self.__rich__, refresh_per_second=8, transient=True, redirect_stderr=False
        )

    def __enter__(self) -> LiveTable:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, host: str, event: events.Event) -> None:
        with self._lock:
            row = self._rows.setdefault(host, _Row())
            row.begun = row.begun or time.monotonic()
            _update(row, event)
            above = Text()
            # One host's plan and its reasons are read before its changes; many hosts' would hide the table.
            levels = ("warning", "info") if len(self._rows) == 1 else ("warning",)
            if isinstance(event, events.Planned) and event.changes:
                above = self._plans.text(host, event.changes)
            elif isinstance(event, events.Note) and event.level in levels:
                above = Text(f"{plain(host)}: {one_line(event.message)}", "yellow" if event.level == "warning" else "")
        # Outside of this class's lock: rich holds its own lock when it calls `__rich__`, which takes this one.
        if above:
            self._console.print(above, soft_wrap=self._diff)

    def __rich__(self) -> RenderableType:
        with self._lock:
            visible = self._visible()
            table = _fitted([_cells(host, row) for host, row in visible], self._console.width, many=len(self._rows) > 1)
            states = collections.Counter(row.state for row in self._rows.values())
        if len(self._rows) < 2:
            return table
        styles = {"done": "green", "failed": "red", "at work": "", "waiting": "dim"}
        parts = [Text(f"{states[state]} {state}", style) for state, style in styles.items() if states[state]]
        return Group(table, Text(" · ", no_wrap=True).join(parts))

    def _visible(self) -> Sequence[tuple[str, _Row]]:
        """Return the rows that fit on the screen; where not all do, a third at most to the latest failed."""
        rows = list(self._rows.items())
        room = max(self._console.height - 3, 1)
        if len(rows) <= room:
            return rows
        working = [item for item in rows if item[1].state == "at work"]
        failed = sorted((item for item in rows if item[1].state == "failed"), key=lambda item: -item[1].ended)
        for_failed = min(len(failed), max(room // 3, room - len(working)))
        return [*working[: room - for_failed], *failed[:for_failed]]


_GAP = 2  # columns of blanks between two cells
_LEAST_MESSAGE = 12


def _cells(host: str, row: _Row) -> tuple[Text, Text, Text, Text, Text]:
    seconds = (row.ended or time.monotonic()) - row.begun if row.begun else 0
    done, total = row.part
    percent = f"{100 * done // total:3} % " if total > 0 else ""
    return (
        Text(plain(host)), Text(f"{row.index}/{row.total}" if row.total else ""),
        Text(f"{seconds:.0f}" if row.begun else ""), Text(one_line(row.step), row.style),
        Text(one_line(f"{percent}{row.message}"), "dim"),
    )  # fmt: skip


def _fitted(rows: Sequence[Sequence[Text]], width: int, *, many: bool) -> Table:
    """Return the rows as a table of that width: host, count and seconds stay whole, step and message are cut."""
    names = ("host", "", "s", "step", "message")
    whole = [max([len(name) * many, *(cells[index].cell_len for cells in rows)]) for index, name in enumerate(names)]
    fixed = [min(whole[0], width // 2), whole[1], whole[2]]
    room = max(width - sum(fixed) - 3 * _GAP, 1)
    step = min(whole[3], room) if not whole[4] else min(whole[3], max(room * 6 // 10, room - whole[4] - _GAP))
    message = room - step - _GAP
    if message < min(_LEAST_MESSAGE, whole[4] or 1):
        step, message = room, 0
    widths = [*fixed, step, *([message] if message else [])]
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_header=many, header_style="dim")
    for name, one in zip(names, widths):
        table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=one, max_width=one,
                         justify="right" if name == "s" else "left")  # fmt: skip
    for cells in rows:
        table.add_row(*cells[: len(widths)])
    return table


def _update(row: _Row, event: events.Event) -> None:
    row.style, row.part = "", (0, 0)
    if isinstance(event, events.Started):
        row.step, row.message = event.command, ""
    elif isinstance(event, events.Planned):
        row.total, row.message = len(event.changes), ""
    elif isinstance(event, events.ChangeStarted):
        row.step, row.index, row.total, row.message = event.summary, event.index, event.total, ""
    elif isinstance(event, events.ChangeProgress):
        row.message, row.part = event.message, (event.done, event.total)
    elif isinstance(event, events.CheckDone):
        row.step = event.name
    elif isinstance(event, (events.CauseFound, events.HealthFound)):
        row.examined = True
    elif isinstance(event, events.Note) and event.level == "debug":
        row.step = event.message
    elif isinstance(event, events.Note):
        row.message = event.message
    elif isinstance(event, events.Finished):
        row.ended, row.message = time.monotonic(), ""
        row.step = _ending(event, examined=row.examined)
        row.failed = event.exit_code not in (ExitCode.DONE, ExitCode.DEGRADED, ExitCode.REBOOT_NEEDED)
        row.style = "red" if row.failed else "green"
