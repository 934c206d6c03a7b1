"""The commands of --before-host and --after-host: what is refused, how they are run, what is kept of what they say."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpuprov.fleet.host_command import (
    _Tail,
    _watch,
    for_host,
    parse_host_commands,
    require_safe_hosts,
    run_host_command,
)
from gpuprov.fleet.target import HostTarget
from gpuprov.wire.errors import ExitCode, GpuprovError
from gpuprov.wire.spec import HostSpec

HOST = HostTarget("gpu07", HostSpec(), address="10.0.0.7")


def python(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("", "true {host}", "--after-host needs --before-host"),
        ("true 'x", "", "--before-host can't be split into arguments"),
        ("''", "", "there is no program"),
        ("true {hots}", "", "has an unknown place {hots}"),
        ("no-such-program-anywhere {host}", "", "there is no program no-such-program-anywhere"),
    ],
)
def test_wrong_commands_are_refused_before_any_host(before: str, after: str, said: str) -> None:
    with pytest.raises(GpuprovError) as caught:
        parse_host_commands(before, after, 1)
    assert caught.value.exit_code == ExitCode.USAGE
    assert said in str(caught.value)
    assert caught.value.problems[0].next_step


@pytest.mark.parametrize("name", ["-rf", "--kubeconfig=/tmp/x", "a b", "a\nb", "$(reboot)", "", "a;b", "\x1b[2J"])
def test_name_that_could_be_more_than_an_argument_is_refused(name: str) -> None:
    commands = parse_host_commands("true {host}", "", 1)
    with pytest.raises(GpuprovError) as caught:
        require_safe_hosts(commands, (HostTarget(name, HostSpec()),))
    assert caught.value.exit_code == ExitCode.USAGE


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
    ended = run_host_command((*python("import sys; print(sys.argv[1:]); sys.exit(3)"), "$(id)", "a;b", "*"), 20)
    assert (ended.trouble, ended.said) == ("exit code 3", "['$(id)', 'a;b', '*']")


def test_end_of_stderr_is_kept_without_control_sequences() -> None:
    script = "import sys\nprint('out')\nfor n in range(9): print('\\x1b[31mline', n, file=sys.stderr)\nsys.exit(1)"
    assert run_host_command(python(script), 20).said.splitlines() == [f"line {number}" for number in range(4, 9)]


def test_flood_is_cut() -> None:
    script = "import sys\nfor _ in range(200): sys.stderr.write('x' * 65536)\nsys.exit(1)"
    assert len(run_host_command(python(script), 60).said) <= 300


def test_timeout_ends_the_command_and_its_children(tmp_path: Path) -> None:
    done = tmp_path / "done"
    words = ("sh", "-c", f"(sleep 1; touch {done}) & wait")
    assert run_host_command(words, 0.3).trouble == "it took longer than 0.3 s"
    time.sleep(1)
    assert not done.exists()


def test_stop_ends_the_command() -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    assert run_host_command(("sleep", "60"), 60, stop.is_set).trouble == "it was stopped by Ctrl-C"


def test_grandchild_that_keeps_the_pipes_open_is_not_waited_for() -> None:
    script = "import subprocess; print(subprocess.Popen(('sleep', '5')).pid)"
    begun = time.monotonic()
    ended = run_host_command(python(script), 60)
    assert ended.trouble == ""
    assert time.monotonic() - begun < 4


def test_timeout_ends_a_child_that_ignores_sigterm_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuprov.core.commands._PATIENCE_SECONDS", 0.5)
    pid = tmp_path / "pid"
    # The shell ends at SIGTERM, its child does not.
    words = ("sh", "-c", f"(trap '' TERM; echo $$ > {tmp_path}/x; exec sleep 30) & echo $! > {pid}; wait")
    assert run_host_command(words, 0.5).trouble == "it took longer than 0.5 s"
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_last_line_is_kept_of_a_command_that_has_ended_before_it_was_read() -> None:
    script = "import os\nos.write(2, b'x\\n' * 30000 + b'the reason')"
    with subprocess.Popen(python(script), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.wait()
        out, err = _Tail(), _Tail()
        assert _watch(process, out, err, time.monotonic() + 20, lambda: False) is None
    assert err.text().endswith("the reason")
