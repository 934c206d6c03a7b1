"""Writes the README's two pictures from the last `gpuprov verify` that is kept: the table as SVG, the HTML page as PNG.

python -m tools.pictures docs/pictures
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from gpuprov.fleet import history
from gpuprov.fleet.history import Run
from gpuprov.fleet.page import render
from gpuprov.fleet.report import print_report

_COLUMNS = 136  # the width of the demo's table
_PAGE_SIZE = (1180, 985)  # pixels
# rich loads two fonts from a public server; a picture in a README loads nothing, and every reader has one of these.
_FONT_FACES = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def table_picture(run: Run) -> str:
    """Return the run's report, as a terminal shows it, as one SVG that loads nothing."""
    console = Console(
        record=True, width=_COLUMNS, file=io.StringIO(), highlight=False, markup=False, emoji=False, force_terminal=True
    )
    print_report(console, run)
    title = f"gpuprov {run.command} --hosts {' '.join(run.inventory)}"
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id="gpuprov")
    return _FONT_FACES.sub("", svg).replace("Fira Code", "DejaVu Sans Mono")


def page_picture(run: Run, target: Path) -> None:
    """Write the run's HTML page, as chromium shows it, as a PNG. Raises CalledProcessError if chromium fails."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("pictures: there is no chromium here; next: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(render(run))
        subprocess.run(
            (chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000",
             f"--user-data-dir={folder}/profile", f"--window-size={_PAGE_SIZE[0]},{_PAGE_SIZE[1]}",
             f"--screenshot={target.resolve()}", page.as_uri()),
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


def last_verify() -> Run:
    """Return the newest kept run of `gpuprov verify` over hosts; ends the program if there is none."""
    for identifier in history.identifiers():
        run = history.load(identifier)
        if run.command == "verify" and run.inventory:
            return run
    sys.exit("pictures: no run of verify is kept; next: make demo")


def main() -> None:
    """Write both pictures into the folder that is named."""
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    run = last_verify()
    (folder / "verify.svg").write_text(table_picture(run))
    page_picture(run, folder / "report.png")


if __name__ == "__main__":
    main()
