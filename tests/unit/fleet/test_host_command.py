"""The commands of --before-host and --after-host: what is refused, how they are run, what is kept of what they say."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from gpuprov.fleet.host_command import (
    for_host,
    parse_host_commands,
    require_safe_hosts,
    run_host_command,
)
from gpuprov.fleet.target import HostTarget
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.spec import HostSpec
from tests.clock import clock_of, has_ended

# More than any command here takes, on any machine.
SECONDS = 300
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
    ended = run_host_command((*python("import sys; print(sys.argv[1:]); sys.exit(3)"), "$(id)", "a;b", "*"), SECONDS)
    assert (ended.trouble, ended.output) == ("exit code 3", "['$(id)', 'a;b', '*']")


def test_command_has_the_users_environment_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.chdir(tmp_path)
    ended = run_host_command(("sh", "-c", 'echo "$LC_ALL" "$LANG" "$PWD"'), SECONDS)
    assert ended.output == f" de_DE.UTF-8 {tmp_path}"


def test_end_of_stderr_is_kept_without_control_sequences() -> None:
    script = "import sys\nprint('out')\nfor n in range(9): print('\\x1b[31mline', n, file=sys.stderr)\nsys.exit(1)"
    assert run_host_command(python(script), SECONDS).output.splitlines() == [f"line {number}" for number in range(4, 9)]


def test_flood_is_cut() -> None:
    script = "import sys\nfor _ in range(200): sys.stderr.write('x' * 65536)\nsys.exit(1)"
    assert len(run_host_command(python(script), SECONDS).output) <= 300


# A child that ends at SIGTERM, and one that does not; each tells its number once it is so far.
@pytest.mark.parametrize("trap", ["", "trap '' TERM; "], ids=["", "ignores-SIGTERM"])
def test_timeout_ends_the_command_and_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str) -> None:
    monkeypatch.setattr("gpuprov.core.commands._PATIENCE_SECONDS", 0.5)
    clock = clock_of(monkeypatch, "gpuprov.core.commands")
    told = tmp_path / "child"
    child = f"{trap}echo $$ > {told}.new; mv {told}.new {told}; exec sleep 3600"

    def pass_time_once_the_child_runs() -> bool:
        clock.ahead = 7200 if told.exists() else 0
        return False

    words = ("sh", "-c", f"sh -c {shlex.quote(child)} & wait")
    assert run_host_command(words, 3000, pass_time_once_the_child_runs).trouble == "it took longer than 3000 s"
    assert has_ended(int(told.read_text()))


def test_stop_ends_the_command() -> None:
    assert run_host_command(("sleep", "3600"), 3600, lambda: True).trouble == "it was stopped by Ctrl-C"


def test_grandchild_that_keeps_the_pipes_open_is_not_waited_for() -> None:
    script = "import subprocess; print(subprocess.Popen(('sleep', '3600')).pid)"
    ended = run_host_command(python(script), SECONDS)
    assert ended.trouble == ""
    os.kill(int(ended.output), signal.SIGKILL)


def test_last_line_is_kept_of_a_command_that_has_ended_before_it_was_read() -> None:
    script = "import os\nos.write(2, b'x\\n' * 30000 + b'the reason')"
    assert run_host_command(python(script), SECONDS).output.endswith("the reason")


def test_program_that_can_not_run_is_trouble(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    assert "exec format error" in run_host_command((str(broken),), SECONDS).output
    assert run_host_command(("sh", "-c", "kill -9 $$"), SECONDS).trouble == "killed by signal 9"
    assert run_host_command(("sh", "-c", "exit 255"), SECONDS).trouble == "exit code 255"
