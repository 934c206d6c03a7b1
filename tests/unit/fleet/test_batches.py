"""Batches as Ansible makes them: numbers, percentages, lists of both, and the canaries before them."""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from gpuprov.agent.window import parse_window
from gpuprov.fleet.command import command_line
from gpuprov.fleet.inventory import HostTarget
from gpuprov.fleet.options import Options
from gpuprov.fleet.rolling import (
    for_host,
    make_batches,
    parse_host_commands,
    parse_rollout,
    require_safe_hosts,
    run_host_command,
)
from gpuprov.protocol.errors import ExitCode, GpuprovError, UsageError
from gpuprov.protocol.spec import HostSpec
from tests.clock import clock_of, has_ended
from tests.unit.fleet.test_rolling import Site, site

__all__ = ["site"]


def hosts(number: int) -> list[HostTarget]:
    return [HostTarget(f"gpu{index:02}", HostSpec()) for index in range(1, number + 1)]


# Hosts, --serial, sizes: the rows with a list are the examples of Ansible's own page on serial.
SIZES = [
    (5, "", [5]),
    (5, "2", [2, 2, 1]),
    (5, "100%", [5]),
    (10, "30%", [3, 3, 3, 1]),
    (3, "10%", [1, 1, 1]),
    (20, "1,5,10", [1, 5, 10, 4]),
    (40, "10%,20%,100%", [4, 8, 28]),
    (30, "1,5,20%", [1, 5, 6, 6, 6, 6]),
    (3, "9", [3]),
    (0, "2", []),
]


@pytest.mark.parametrize(("number", "serial", "sizes"), SIZES, ids=[f"{n}-{s}" for n, s, _ in SIZES])
def test_sizes(number: int, serial: str, sizes: list[int]) -> None:
    batches = make_batches(hosts(number), parse_rollout(serial))
    assert [len(batch.targets) for batch in batches] == sizes
    assert [target for batch in batches for target in batch.targets] == hosts(number)


# --serial, --max-fail: how many of the first batch of ten hosts may fail. Percentages round down.
ALLOWED = [
    ("", "", None), ("", "0", 0), ("", "3", 3), ("", "10%", 1), ("", "28%", 2), ("5", "", 4), ("5", "20%", 1),
    ("5", "100%", 4), ("1", "", 0),
]  # fmt: skip


@pytest.mark.parametrize(("serial", "max_fail", "allowed"), ALLOWED, ids=str)
def test_failures_allowed(serial: str, max_fail: str, allowed: int | None) -> None:
    assert make_batches(hosts(10), parse_rollout(serial, max_fail))[0].most_failed == allowed


CANARIES = [
    ("2", ["gpu01", "gpu02"]), ("gpu03", ["gpu03"]), ("gpu04, gpu02", ["gpu02", "gpu04"]),
    ("gpu0[12]", ["gpu01", "gpu02"]), ("9", ["gpu01", "gpu02", "gpu03", "gpu04"]),
]  # fmt: skip


@pytest.mark.parametrize(("canary", "names"), CANARIES, ids=[canary for canary, _ in CANARIES])
def test_canaries_come_first_and_once(canary: str, names: list[str]) -> None:
    first, *others = make_batches(hosts(4), parse_rollout(canary=canary))
    assert (first.name, first.most_failed, [target.name for target in first.targets]) == ("canary", 0, names)
    rest = [target.name for batch in others for target in batch.targets]
    assert sorted(names + rest) == ["gpu01", "gpu02", "gpu03", "gpu04"]


WRONG = [
    (parse_rollout, ("0",), "--serial takes a number of hosts or a percentage, not '0'"),
    (parse_rollout, ("1,,5",), "not ''"),
    (parse_rollout, ("101%",), "not '101%'"),
    (parse_rollout, ("-1",), "not '-1'"),
    (parse_rollout, ("", "5 %%"), "--max-fail takes"),
    (parse_rollout, ("", "", "0"), "--canary 0 names no host"),
    (parse_host_commands, ("", "true {host}", 1), "--after-host needs --before-host"),
    (parse_host_commands, ("true 'x", "", 1), "--before-host can't be split into arguments"),
    (parse_host_commands, ("''", "", 1), "there is no program"),
    (parse_host_commands, ("true {hots}", "", 1), "has an unknown place {hots}"),
    (parse_host_commands, ("no-such-program-anywhere {host}", "", 1), "there is no program no-such-program-anywhere"),
]


@pytest.mark.parametrize(("parse", "words", "what"), WRONG, ids=[str(words) for _, words, _ in WRONG])
def test_wrong_words_are_refused(parse: Callable[..., object], words: tuple[str | int, ...], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*words)
    assert what in str(caught.value)
    assert caught.value.problems[0].next_step


def test_unknown_canary_is_refused_with_the_name_that_was_meant() -> None:
    with pytest.raises(GpuprovError) as caught:
        make_batches(hosts(4), parse_rollout(canary="gpu1"))
    assert "--canary gpu1 is no host of this run" in str(caught.value)
    assert "did you mean gpu01?" in str(caught.value)


# More than any command here takes, on any machine.
SECONDS = 300
HOST = HostTarget("gpu07", HostSpec(), address="10.0.0.7")


def python(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


@pytest.mark.parametrize("name", ["-rf", "--kubeconfig=/tmp/x", "a b", "a\nb", "$(reboot)", "", "a;b", "\x1b[2J"])
def test_name_that_could_be_more_than_an_argument_is_refused(name: str) -> None:
    commands = parse_host_commands("true {host}", "", 1)
    with pytest.raises(UsageError):
        require_safe_hosts(commands, (HostTarget(name, HostSpec()),))


@pytest.mark.parametrize("name", ["gpu07", "gpu-07.rack_2.example.org", "fe80::1%eth0", "10.0.0.7"])
def test_names_as_hosts_have_them_are_taken(name: str) -> None:
    require_safe_hosts(parse_host_commands("true {host}", "true {address}", 1), (HostTarget(name, HostSpec()),))


def test_address_is_checked_where_it_is_used() -> None:
    target = HostTarget("gpu07", HostSpec(), address="-oProxyCommand=x")
    require_safe_hosts(parse_host_commands("true {host}", "", 1), (target,))
    with pytest.raises(GpuprovError):
        require_safe_hosts(parse_host_commands("true {address}", "", 1), (target,))


def test_command_that_names_no_host_is_for_a_single_one() -> None:
    commands = parse_host_commands("true gpu07", "", 1)
    require_safe_hosts(commands, (HOST,))
    with pytest.raises(GpuprovError, match="the same for all 2 hosts"):
        require_safe_hosts(commands, (HOST, HostTarget("gpu08", HostSpec())))


def test_places_are_filled_within_their_argument_and_braces_of_others_stay() -> None:
    words = parse_host_commands("true nodename={host} '{\"spec\": {}}' {address}:{host} {.items}", "", 1).before
    assert for_host(words, HOST) == ("true", "nodename=gpu07", '{"spec": {}}', "10.0.0.7:gpu07", "{.items}")


def test_no_shell_reads_the_command() -> None:
    ended = run_host_command((*python("import sys; print(sys.argv[1:]); sys.exit(3)"), "$(id)", "a;b", "*"), SECONDS)
    assert ended == ("exit code 3", "['$(id)', 'a;b', '*']")


def test_command_has_the_users_environment_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.chdir(tmp_path)
    _, output = run_host_command(("sh", "-c", 'echo "$LC_ALL" "$LANG" "$PWD"'), SECONDS)
    assert output == f" de_DE.UTF-8 {tmp_path}"


def test_end_of_stderr_is_kept_without_control_sequences() -> None:
    script = "import sys\nprint('out')\nfor n in range(9): print('\\x1b[31mline', n, file=sys.stderr)\nsys.exit(1)"
    _, output = run_host_command(python(script), SECONDS)
    assert output.splitlines() == [f"line {number}" for number in range(4, 9)]


def test_flood_is_cut() -> None:
    script = "import sys\nfor _ in range(200): sys.stderr.write('x' * 65536)\nsys.exit(1)"
    _, output = run_host_command(python(script), SECONDS)
    assert len(output) <= 300


# A child that ends at SIGTERM, and one that does not; each tells its number once it is so far.
@pytest.mark.parametrize("trap", ["", "trap '' TERM; "], ids=["", "ignores-SIGTERM"])
def test_timeout_ends_the_command_and_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str) -> None:
    clock = clock_of(monkeypatch, "gpuprov.core.commands")
    clock.haste = 10
    told = tmp_path / "child"
    child = f"{trap}echo $$ > {told}.new; mv {told}.new {told}; exec sleep 3600"

    def pass_time_once_the_child_runs() -> bool:
        clock.ahead = 7200 if told.exists() else 0
        return False

    words = ("sh", "-c", f"sh -c {shlex.quote(child)} & wait")
    trouble, _ = run_host_command(words, 3000, pass_time_once_the_child_runs)
    assert trouble == "it took longer than 3000 s"
    assert has_ended(int(told.read_text()))


def test_stop_ends_the_command() -> None:
    trouble, _ = run_host_command(("sleep", "3600"), 3600, lambda: True)
    assert trouble == "it was stopped with this run"


def test_grandchild_that_keeps_the_pipes_open_is_not_waited_for() -> None:
    script = "import subprocess; print(subprocess.Popen(('sleep', '3600')).pid)"
    trouble, output = run_host_command(python(script), SECONDS)
    assert trouble == ""
    os.kill(int(output), signal.SIGKILL)


def test_last_line_is_kept_of_a_command_that_has_ended_before_it_was_read() -> None:
    script = "import os\nos.write(2, b'x\\n' * 30000 + b'the reason')"
    _, output = run_host_command(python(script), SECONDS)
    assert output.endswith("the reason")


def test_program_that_can_not_run_is_trouble(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    assert "exec format error" in run_host_command((str(broken),), SECONDS)[1]
    assert run_host_command(("sh", "-c", "kill -9 $$"), SECONDS) == ("killed by signal 9", "")
    assert run_host_command(("sh", "-c", "exit 255"), SECONDS) == ("exit code 255", "")


# -- when hosts may begin ----------------------------------------------------------------------------------------------


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


def test_no_host_begins_outside_of_the_window(site: Site) -> None:
    results = site.run("ab", rollout=parse_rollout(window=f"Sat 02:00-06:00 {BERLIN}"), clock=clock("2026-11-27 14:05"))
    assert site.order() == []
    assert [(one.begun, one.exit_code) for one in results] == [(False, ExitCode.FAILED)] * 2
    (problem,) = results[0].problems
    assert problem.what == f"not run: outside of the window Sat 02:00-06:00 {BERLIN}"
    assert problem.next_step == "it opens Sat 2026-11-28 02:00 CET; then: gpuprov install"


def test_a_host_that_has_begun_finishes_and_the_next_does_not_begin(site: Site) -> None:
    # Each host asks, and so does the name of the run's record.
    times = clock("2026-11-28 05:58", "2026-11-28 05:59", "2026-11-28 06:00")
    results = site.run("abc", rollout=parse_rollout(window=f"Sat 02:00-06:00 {BERLIN}"), clock=times)
    assert [line for line in site.order() if line.endswith("a")][-1] == "undrain a"
    assert [one.begun for one in results] == [True, False, False]


def test_a_check_is_not_bound_to_the_window(site: Site) -> None:
    rollout = parse_rollout(window=f"Sat 02:00-06:00 {BERLIN}")
    assert site.run("a", check=True, rollout=rollout, clock=clock("2026-11-27 14:05"))[0].begun


def test_the_command_that_goes_on_is_the_same_without_its_passwords() -> None:
    options = Options(
        "install", hosts=("prod.ini",), limit="gpu:!lab", extra_vars=("gpuprov_docker=none", "ansible_password=secret"),
        serial="1,25%", window="Sat 02:00-06:00", verbose=True, overrides=(("reboot", "if-needed"),),
        become_password="secret",
    )  # fmt: skip
    assert command_line(options) == (
        "gpuprov install --hosts prod.ini --limit 'gpu:!lab' -e gpuprov_docker=none --serial 1,25% "
        "--window 'Sat 02:00-06:00' --verbose -K -e gpuprov_reboot=if-needed -e …"
    )
