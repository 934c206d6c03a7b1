"""When hosts may begin: days, times, midnight, summer time; and what a run says of hosts that may not."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from gpuprov.agent.window import parse_window
from gpuprov.fleet.command import _command_line
from gpuprov.fleet.options import Options
from gpuprov.fleet.rolling import parse_rollout
from gpuprov.protocol.errors import ExitCode, UsageError
from tests.unit.fleet.test_rolling import Site

BERLIN = "Europe/Berlin"


def at(text: str, zone: str = BERLIN, *, fold: int = 0) -> float:
    """Return the seconds of a local time; `fold` 1: the second time that the clock shows it."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


# 2026-11-28 is a Saturday.
@pytest.mark.parametrize(
    ("window", "now", "is_open"),
    [
        ("Sat 02:00-06:00", "2026-11-28 02:00", True),
        ("Sat 02:00-06:00", "2026-11-28 05:59:59", True),
        ("Sat 02:00-06:00", "2026-11-28 06:00", False),
        ("Sat 02:00-06:00", "2026-11-27 03:00", False),
        ("sat,Sun 02:00-06:00", "2026-11-29 03:00", True),
        ("02:00-06:00", "2026-11-25 03:00", True),
        ("Mon-Fri 22:00-04:00", "2026-11-27 23:00", True),
        # Friday's window ends on Saturday; Saturday has none, and Sunday's would end on Monday.
        ("Mon-Fri 22:00-04:00", "2026-11-28 03:59", True),
        ("Mon-Fri 22:00-04:00", "2026-11-28 22:30", False),
        ("Mon-Fri 22:00-04:00", "2026-11-30 03:00", False),
        ("Fri-Mon 22:00-24:00", "2026-11-29 23:59", True),
        ("Fri-Mon 22:00-24:00", "2026-11-30 00:00", False),
        ("Sat 00:00-24:00", "2026-11-28 12:00", True),
        ("Sat 00:00-24:00", "2026-11-29 00:00", False),
    ],
)
def test_a_window_is_open(window: str, now: str, is_open: bool) -> None:
    found = parse_window(f"{window} {BERLIN}")
    assert found is not None and found.is_open(at(now)) is is_open


def test_a_window_follows_the_clock_on_the_wall_where_it_jumps() -> None:
    window = parse_window(f"Sun 02:00-03:00 {BERLIN}")
    assert window is not None
    # 2026-10-25, 03:00 → 02:00: the hour comes twice. 2026-03-29, 02:00 → 03:00: it does not come.
    assert window.is_open(at("2026-10-25 02:30")) and window.is_open(at("2026-10-25 02:30", fold=1))
    assert not window.is_open(at("2026-10-25 03:00"))
    closed = window.closed(at("2026-03-29 01:59:59"), "again")
    assert closed is not None
    assert (closed.evidence, closed.next_step) == (
        "it is Sun 2026-03-29 01:59 CET", "it opens Sun 2026-04-05 02:00 CEST; then: again",
    )  # fmt: skip


def test_the_zone_is_this_machines_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    now = at("2026-11-28 02:30", "Asia/Tokyo")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        here, there = parse_window("Sat 02:00-03:00"), parse_window("Sat 02:00-03:00 UTC")
        assert here is not None and there is not None
        assert (here.is_open(now), there.is_open(now)) == (True, False)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "text", ["Sat", "Sam 02:00-06:00", "Sat 2:00-6:00", "Sat 02:00-25:00", "00:00-24:30", "Sat 02:60-03:00",
             "Sat, 02:00-03:00", "Sat 02:00-06:00 Europe/Berlln", "Sat 02:00-06:00 ../etc/passwd",
             "Sat 02:00-06:00 Europe", "x"],
)  # fmt: skip
def test_what_is_no_window_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(UsageError, match="--window"):
        parse_rollout(window=text)


def clock(*times: str) -> Callable[[], float]:
    """Return a clock that shows these times, one after the other, and stays at the last."""
    left = list(times)
    return lambda: at(left.pop(0) if len(left) > 1 else left[0])


def test_no_host_begins_outside_of_the_window(tmp_path: Path) -> None:
    site = Site(tmp_path)
    results = site.run("ab", rollout=parse_rollout(window=f"Sat 02:00-06:00 {BERLIN}"), clock=clock("2026-11-27 14:05"))
    assert site.order() == []
    assert [(one.begun, one.exit_code) for one in results] == [(False, ExitCode.FAILED)] * 2
    (problem,) = results[0].problems
    assert problem.what == f"not run: outside of the window Sat 02:00-06:00 {BERLIN}"
    assert problem.next_step == "it opens Sat 2026-11-28 02:00 CET; then: gpuprov install"


def test_a_host_that_has_begun_finishes_and_the_next_does_not_begin(tmp_path: Path) -> None:
    site = Site(tmp_path)
    # Each host asks, and so does the name of the run's record.
    times = clock("2026-11-28 05:58", "2026-11-28 05:59", "2026-11-28 06:00")
    results = site.run("abc", rollout=parse_rollout(window=f"Sat 02:00-06:00 {BERLIN}"), clock=times)
    assert [line for line in site.order() if line.endswith("a")][-1] == "undrain a"
    assert [one.begun for one in results] == [True, False, False]


def test_a_check_is_not_bound_to_the_window(tmp_path: Path) -> None:
    site = Site(tmp_path)
    rollout = parse_rollout(window=f"Sat 02:00-06:00 {BERLIN}")
    assert site.run("a", check=True, rollout=rollout, clock=clock("2026-11-27 14:05"))[0].begun


def test_the_command_that_goes_on_is_the_same_without_its_passwords() -> None:
    options = Options(
        "install", hosts=("prod.ini",), limit="gpu:!lab", extra_vars=("gpuprov_docker=none", "ansible_password=secret"),
        serial="1,25%", window="Sat 02:00-06:00", verbose=True, overrides=(("reboot", "if-needed"),),
    )  # fmt: skip
    assert _command_line(options) == (
        "gpuprov install --hosts prod.ini --limit 'gpu:!lab' -e gpuprov_docker=none --serial 1,25% "
        "--window 'Sat 02:00-06:00' --verbose -e gpuprov_reboot=if-needed -e …"
    )
