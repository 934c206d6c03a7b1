"""Show a run again, as text, JSON or a page (`gpuprov report`), and write its page and its metrics."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuprov.agent.metrics import MADE, PENDING, metrics_text
from gpuprov.core.disk import write_whole
from gpuprov.core.site_tables import advisories_table
from gpuprov.fleet import history
from gpuprov.fleet.history import Run
from gpuprov.fleet.report import print_report, summary_json
from gpuprov.fleet.standard_streams import say_text
from gpuprov.protocol.advisories import rows_of
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.words import counted, plain


def show_run(console: Console, run: Run, *, as_json: bool, verbose: bool) -> None:
    """Print a run as it was reported when it ended."""
    if as_json:
        console.file.write(json.dumps(history.to_json(run), separators=(",", ":")) + "\n")
        return
    console.print(Text(f"run {run.identifier}: {_call(run)}, {run.began}, {run.seconds:.0f} s", "bold"), soft_wrap=True)
    console.print()
    print_report(
        console, run.command, run.results, check=run.check, next_command="", verbose=verbose, ended_by=run.ended_by
    )


def show_list(console: Console, *, as_json: bool) -> None:
    """Print one line for each stored run, the latest first."""
    runs = []
    for identifier in history.identifiers():
        try:
            runs.append(history.load(identifier))
        except GpuprovError as error:
            say_text(error, err=True)
    if as_json:
        summaries = [{"run": run.identifier, "began": run.began, **_counts(run)} for run in runs]
        console.file.write(json.dumps(summaries, separators=(",", ":")) + "\n")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "began", "command", "hosts", "failed", "exit code"):
        table.add_column(name, justify="right" if name in ("hosts", "failed", "exit code") else "left")
    for run in runs:
        counts = _counts(run)
        table.add_row(
            run.identifier, run.began, Text(_call(run)), *(str(counts[key]) for key in ("hosts", "failed", "exit_code"))
        )
    console.print(table)


def _call(run: Run) -> str:
    where = ", ".join(run.inventory) or "this machine"
    return plain(
        f"gpuprov {run.command}{' --check' if run.check else ''} on {counted(len(run.results), 'host')} of {where}"
    )


def _counts(run: Run) -> dict[str, object]:
    failed = sum(result.has_failed for result in run.results)
    return {"command": run.command, "hosts": len(run.results), "failed": failed, "exit_code": int(run.exit_code)}


def write_page(run: Run, path: str) -> None:
    """Write the page, which compares with the last stored run of the same kind.

    Raises GpuprovError (exit code 2) if the file cannot be written.
    """
    from gpuprov.fleet.page import render  # Jinja2 is loaded only for a page

    try:
        Path(path).expanduser().write_text(render(run, history.before(run)), "utf-8", "replace")
    except OSError as error:
        raise GpuprovError(
            f"the report {path} cannot be written", str(error), "gpuprov report --html FILE writes it elsewhere",
            exit_code=ExitCode.USAGE,
        ) from None  # fmt: skip


def write_metrics(run: Run, path: str, ended: float) -> None:
    """Write the run's metrics atomically; `ended` is its end in seconds since the epoch. Raises OSError.

    The collector that reads them has another account.
    """
    text = metrics_text(
        run.command, run.results, rows_of(advisories_table()), ended=ended, seconds=run.seconds,
        changes=PENDING if run.check else MADE,
    )  # fmt: skip
    write_whole(Path(path).expanduser(), text.encode(), 0o644, (os.geteuid(), os.getegid()))


def summary(run: Run) -> dict[str, object]:
    """Return the last object of `--json`, with the identifier of the stored run."""
    return {**summary_json(run.command, run.results, run.ended_by), "run": run.identifier}
