"""The page of a run in a real browser: nothing scrolls sideways and nothing overlaps, on a wall and on a phone."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuprov.fleet.history import Run
from gpuprov.fleet.page import render
from tests.unit.fleet import fleets

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
]  # fmt: skip
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update")  # fmt: skip
# The page itself has no script, and forbids any: it is shown in a frame of another page, which may be narrower than
# chromium's narrowest window (500 pixels).
FRAME = """<!doctype html><title>none</title>
<iframe style="border:0" width="WIDTH" height="2000" srcdoc="PAGE"></iframe>
<script>
const frame = document.querySelector('iframe');
frame.onload = () => {
  const page = frame.contentDocument;
  const box = one => one.getBoundingClientRect();
  const boxes = [...page.querySelectorAll('section')].map(box);
  const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
  document.title = JSON.stringify({
    inner: frame.contentWindow.innerWidth, scroll: page.documentElement.scrollWidth, sections: boxes.length,
    cut: [...page.querySelectorAll('section *')].filter(one => box(one).right > frame.contentWindow.innerWidth).length,
    overlaps: boxes.flatMap((a, n) => boxes.slice(n + 1).filter(b => !apart(a, b))).length,
  });
};
</script>"""


def measured(page: str, width: int, folder: Path) -> dict[str, int]:
    (folder / "page.html").write_text(FRAME.replace("WIDTH", str(width)).replace("PAGE", html.escape(page)))
    assert CHROMIUM
    done = subprocess.run(
        (CHROMIUM, *QUIET, f"--user-data-dir={folder}/profile", f"--window-size={width + 50},2100",
         "--virtual-time-budget=5000", "--dump-dom",
         f"file://{folder}/page.html"),
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title, done.stdout[:500]
    found: dict[str, int] = json.loads(html.unescape(title[1]))
    return found


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(
    ("make", "hosts"), [(fleets.verified, 2), (fleets.verified, 50), (fleets.verified, 1000), (fleets.planned, 50)]
)
def test_nothing_overflows_or_overlaps(make: Callable[[int], Run], hosts: int, width: int, tmp_path: Path) -> None:
    run = make(hosts)
    found = measured(render(run, fleets.the_day_before(run)), width, tmp_path)
    assert found["inner"] == width
    assert found["scroll"] <= width
    assert (found["cut"], found["overlaps"]) == (0, 0)
    assert found["sections"] >= 5


def test_a_page_that_is_too_wide_is_seen(tmp_path: Path) -> None:
    wide = render(fleets.verified(2)).replace("<section>", '<section style="min-width:1500px">')
    assert measured(wide, 390, tmp_path)["scroll"] > 390
