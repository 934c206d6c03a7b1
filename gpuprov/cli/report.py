"""`gpuprov report`: show the results of earlier runs again."""

from __future__ import annotations

import click

from gpuprov.fleet.options import FILE, text_option


@click.command()
@click.option("--list", "as_list", is_flag=True, help="One line for each run that is kept; the last 50 are.")
@text_option("--run", "identifier", metavar="ID", help="This run, by its name in the list or the "
              "beginning of it. Default: the last.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@text_option("--html", type=FILE, help="Write it as one HTML page instead.")
@click.option("--verbose", "-v", is_flag=True, help="Every host, however many there are.")
def report(as_list: bool, identifier: str, as_json: bool, html: str, verbose: bool) -> None:
    """Show again what came of a run.

    \b
    Examples:
      gpuprov report
      gpuprov report --list
      gpuprov report --run 20261121T0815 --html report.html
    """
    from gpuprov.fleet import report as reports
    from gpuprov.fleet.command import make_console
    from gpuprov.fleet.history import load

    if as_list:
        reports.show_list(make_console(), as_json=as_json)
    elif html:
        reports.write_page(load(identifier), html)
    else:
        reports.show_run(make_console(), load(identifier), as_json=as_json, verbose=verbose)
