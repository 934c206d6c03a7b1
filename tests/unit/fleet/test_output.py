"""What people and programs read: lines, plans, tables, problems, the last line; nothing from a host is trusted."""

import io
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from rich.console import Console
from rich.live import Live

from gpuprov.agent.result import HostResult, MadeChange
from gpuprov.checks.outcome import all_gpus_check
from gpuprov.fleet import command, progress
from gpuprov.fleet.options import Options
from gpuprov.fleet.progress import JsonLines, LiveTable, PlainLines
from gpuprov.fleet.report import last_line, print_report, problems_text, summary
from gpuprov.fleet.standard_streams import percentage
from gpuprov.protocol.errors import ExitCode, Problem
from gpuprov.protocol.events import (
    CauseFound,
    ChangeDone,
    ChangeProgress,
    ChangeStarted,
    CheckDone,
    ChosenDriver,
    Event,
    FactsGathered,
    Finished,
    Note,
    Planned,
    PlannedChange,
    Started,
    Status,
)
from gpuprov.protocol.words import plain
from tests.unit.fleet.fleets import run_of

EVIL = "\x1b]0;owned\x07\x1b[31m[bold]red[/bold]\u202e\r\x9b2J\x08"


def console(*, terminal: bool = False, width: int = 120) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, highlight=False, markup=False, emoji=False,
        color_system="standard" if terminal else None, legacy_windows=False,
    )  # fmt: skip


def output(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


RUN: Sequence[Event] = (
    Started("1", "install", 7),
    Note("no GPU here", "warning"),
    Planned((PlannedChange("a", "docker", "write /etc/docker/daemon.json", "--- a\n+++ b\n@@ -1 +1 @@\n-{}\n+{}\n"),)),
    ChangeStarted("a", "write /etc/docker/daemon.json", 1, 1),
    ChangeProgress("a", "half", 1, 2),
    ChangeDone("a", 0.5),
    CheckDone("gpus", "failed", "2", "0", "no device nodes"),
    Finished(0, 1, 2.0, (), "1 change made"),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a\x1b[1;31mb", "ab"), ("\x1b]8;;http://x\x1b\\link", "link"), ("a\tb\n", "a\tb\n"), ("a\rb", "ab"),
     ("\x1bcx", "x"), ("\x9b1mx", "x"),
     ("\x9d0;title\x9cx", "x"), ("\x1b(Bx", "x"), ("\u202eabc", "abc"), ("ünï → ok", "ünï → ok")],
    ids=repr,
)  # fmt: skip
def test_control_sequences_go_and_text_stays(text: str, expected: str) -> None:
    assert plain(text) == expected


def plain_lines(*told: tuple[str, Event], terminal: bool = False, **options: bool) -> str:
    """Return what is printed of these hosts' events."""
    to = console(terminal=terminal)
    lines = PlainLines(to, **options)
    for host, event in told:
        lines(host, event)
    return output(to)


A_RUN = [("lab-a", event) for event in RUN]


def test_pipe_gets_prefixed_lines() -> None:
    assert plain_lines(*A_RUN, diff=False).splitlines() == [
        "lab-a: warning: no GPU here",
        "lab-a: 1 change",
        "   1. write /etc/docker/daemon.json",
        "lab-a: [1/1] write /etc/docker/daemon.json",
        "lab-a: failed gpus",
        "lab-a: 1 change made",
    ]


def test_verbose_tells_progress_and_diff_shows_it() -> None:
    text = plain_lines(*A_RUN, verbose=True, diff=True)
    assert "lab-a: half\nlab-a: a: done in 0.5 s\n" in text
    assert "lab-a: failed gpus: no device nodes\n" in text
    assert "      -{}\n      +{}\n" in text
    coloured = plain_lines(("lab-a", RUN[2]), terminal=True, diff=True)
    assert "\x1b[31m-{}" in coloured
    assert "\x1b[32m+{}" in coloured


def test_a_doctor_that_found_causes_has_not_failed_itself() -> None:
    ending = Finished(1, problems=(Problem("no driver", "ls", "install"),), summary="causes found: 1")
    cause = CauseFound(1, "driver-missing", "driver", "no driver", "ls", "install", "certain")
    text = plain_lines(("lab-a", cause), ("lab-a", ending), ("lab-b", ending))
    assert text.splitlines() == ["lab-a: causes found: 1", "lab-b: failed: no driver"]


def test_same_plan_is_shown_once() -> None:
    text = plain_lines(("lab-a", RUN[2]), ("lab-b", RUN[2]), ("lab-c", Planned(())))
    assert text.splitlines()[2:] == ["lab-b: the same 1 change as lab-a", "lab-c: nothing to change"]


def test_json_lines_bear_the_host() -> None:
    to = console()
    JsonLines(to)("lab-a", RUN[3])
    assert json.loads(output(to)) == {
        "schema": 1, "host": "lab-a", "event": "ChangeStarted", "key": "a",
        "summary": "write /etc/docker/daemon.json", "index": 1,
        "total": 1,
    }  # fmt: skip


def test_live_table_shows_host_step_count_and_message() -> None:
    to = console(terminal=True)
    with LiveTable(to, ["lab-a", "lab-b"]) as table:
        for event in RUN[:5]:
            table("lab-a", event)
        to.print(table)
    shown = output(to)
    for words in ("lab-a", "lab-b", "1/1", "write /etc/docker/daemon.json", "50 % half", "waiting", "no GPU here"):
        assert words in shown


@pytest.mark.parametrize("width", [120, 80, 40])
def test_narrow_screens_keep_host_count_and_seconds_and_cut_the_step(width: int) -> None:
    to = console(terminal=False, width=width)
    table = LiveTable(to, ["rack12-gpu07", "lab-b"])
    table("rack12-gpu07", ChangeStarted("a", "write /etc/docker/daemon.json and restart docker, " * 3, 12, 14))
    table("rack12-gpu07", ChangeProgress("a", "a message that is as long as the step, or so", 1, 2))
    to.print(table)
    row = next(line for line in output(to).splitlines() if line.startswith("rack12-gpu07 "))
    assert re.match(r"rack12-gpu07 +12/14 +0 +write /etc", row)
    assert "…" in row
    assert max(map(len, output(to).splitlines())) <= width


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Tty(), "\rwork: 0 %\rwork: 50 %\r          \r"), (io.StringIO(), "")])
def test_percentage_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, shown: str) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    show = percentage("work:")
    for done in (1, 2, 500, 501, 1000):
        show(done, 1000)
    assert stream.getvalue() == shown


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": "xterm"}], ids=str)
def test_terminals_that_want_plain_lines_get_them(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    written = Tty()
    monkeypatch.setattr("sys.stdout", written)
    for name, value in {"TERM": "xterm", "COLUMNS": "80", **variables}.items():
        monkeypatch.setenv(name, value)
    to = command.make_console()
    with command.progress_display(Options("install"), to, ["lab-a"]) as display:
        assert isinstance(display, LiveTable if variables == {"TERM": "xterm"} else PlainLines)
    print_report(to, run_of("install", [HostResult("lab-a", ExitCode.FAILED, problems=(Problem("full"),))]))
    assert ("\x1b" in written.getvalue()) is (variables == {"TERM": "xterm"})


def test_colours_that_a_job_forces_make_no_terminal_of_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """FORCE_COLOR is set in many CI jobs, where a live table would fill the log with eight frames a second."""
    written = io.StringIO()
    monkeypatch.setattr("sys.stdout", written)
    for name, value in {"TERM": "xterm", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    to = command.make_console()
    with command.progress_display(Options("install"), to, ["lab-a"]) as progress:
        progress("lab-a", Finished(0, summary="x" * 100))
    assert plain(written.getvalue()) == f"lab-a: {'x' * 100}\n"
    assert to.color_system and to.width == 160


def shown_hosts(table: LiveTable, to: Console) -> list[str]:
    to.print(table)
    return re.findall(r"^lab-\d+", output(to), re.MULTILINE)


def test_more_hosts_than_lines_show_those_at_work_the_failed_and_counts() -> None:
    to = console()
    table = LiveTable(to, [f"lab-{number}" for number in range(1000)])
    for number in range(400):
        table(f"lab-{number}", Finished(0))
    for number in range(400, 450):
        table(f"lab-{number}", Finished(1, problems=(Problem("full"),)))
    for number in range(450, 490):
        table(f"lab-{number}", Started("1", "install", 1))
    visible = shown_hosts(table, to)
    assert len(visible) == to.height - 3
    assert visible[0] == "lab-450"
    assert visible[-1] == "lab-443"  # the failed: seven of 22 lines, the latest first
    for words in ("400 done", "50 failed", "40 at work", "510 waiting"):
        assert words in output(to)


def test_screen_without_many_at_work_has_room_for_the_failed() -> None:
    to = console()
    table = LiveTable(to, [f"lab-{number}" for number in range(100)])
    for number in range(60):
        table(f"lab-{number}", Finished(1))
    table("lab-99", Started("1", "install", 1))
    visible = shown_hosts(table, to)
    assert visible[0] == "lab-99"
    assert len(visible) == to.height - 3


@pytest.mark.timeout(60, method="thread")
def test_live_table_is_drawn_while_many_hosts_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "Live", lambda **more: Live(**{**more, "refresh_per_second": 1000}))
    to = console(terminal=True)
    with LiveTable(to, [f"lab-{number}" for number in range(20)]) as table, ThreadPoolExecutor(20) as pool:
        for number in range(80):
            pool.submit(table, f"lab-{number % 20}", Note("slow", "warning"))
    assert output(to).count("slow") >= 80


def test_live_table_keeps_hosts_from_writing_to_the_terminal() -> None:
    to = console(terminal=True)
    with LiveTable(to, ["lab-a"]) as table:
        for event in (Note(EVIL, "warning"), Planned((PlannedChange("k", "s", EVIL, EVIL),)),
                      ChangeStarted("k", EVIL, 1, 1), ChangeProgress("k", EVIL), CheckDone(EVIL, "ok"),
                      Finished(1, problems=(Problem(EVIL),))):  # fmt: skip
            table("lab-a", event)
            to.print(table)
    assert "owned" not in output(to)
    assert "\x9b" not in output(to)
    assert "[bold]red[/bold]" in output(to)


# -- reports ---------------------------------------------------------------------------------------------------------

DONE = HostResult("lab-a", ExitCode.DONE, changed=9, seconds=41.0, summary="9 changes made")
SAME = HostResult("lab-b", ExitCode.DONE, seconds=2.0, summary="0 changes")
FAULT = Problem("no disk space", "df says 100 %", "free some")
FAILED = HostResult("lab-c", ExitCode.FAILED, problems=(FAULT,))
ILL = HostResult("lab-e", ExitCode.FAILED, problems=(FAULT,), summary="causes found: 1")
GONE = HostResult("lab-d", ExitCode.UNREACHABLE, problems=(Problem("no answer"),))


def seen(host: str, count: str, status: Status = "ok", engine: str = "docker") -> HostResult:
    ended = (ExitCode.DONE, count, "") if status == "ok" else (ExitCode.FAILED, "0 GPUs", "no nodes")
    code, in_container, reason = ended
    check = CheckDone(all_gpus_check(engine), status, count, in_container, reason, engine)
    return HostResult(host, code, checks=(CheckDone("nvidia-smi", "ok", "550", "550"), check))


LAST_LINES = [
    ("install", (DONE, SAME), False, "2 hosts installed: 9 changes; next: gpuprov verify"),
    ("install", (DONE,), True, "1 host: 9 changes would be made, nothing was touched"),
    ("install", (DONE, FAILED, GONE), False, "1 of 3 hosts installed; failed: lab-c; unreachable: lab-d"),
    ("verify", (seen("a", "2 GPUs"), seen("b", "4 GPUs")), False, "2 hosts ready: containers see 2 + 4 GPUs (docker)"),
    ("verify", (seen("a", "2 GPUs"), seen("b", "4 GPUs", engine="podman")), False,
     "2 hosts ready: containers see 2 + 4 GPUs (docker, podman)"),
    ("verify", (seen("a", "1 GPU, every field the same"),), False, "1 host ready: containers see 1 GPU (docker)"),
    ("verify", (seen("a", "2 GPUs"), seen("b", "4 GPUs", "failed")), False,
     "1 of 2 hosts ready; failed: b; next: gpuprov doctor"),
    ("verify", (seen("a", "2 GPUs"), GONE), False, "1 of 2 hosts ready; unreachable: lab-d"),
    ("doctor", (SAME, SAME), False, "2 hosts: nothing found wrong in all that was looked at"),
    ("doctor", (DONE, SAME), False, "2 hosts: 9 changes made; nothing found wrong in all that was looked at"),
    ("doctor", (DONE,), True, "1 host: 9 changes would be made; nothing found wrong in all that was looked at"),
    ("doctor", (DONE, FAILED), False, "1 of 2 hosts healthy; failed: lab-c"),
    ("doctor", (DONE, ILL, FAILED), False, "1 of 3 hosts healthy; causes found on: lab-e; failed: lab-c"),
    ("verify", (HostResult("a", ExitCode.DONE, checks=(CheckDone("x", "ok"), CheckDone("y", "skipped"))),), False,
     "1 host ready: 1 check ok, 1 skipped"),
    ("rollback", (DONE,), False, "1 host rolled back: 9 changes"),
    ("uninstall", (DONE,), False, "1 host uninstalled: 9 changes"),
    ("facts", (DONE, SAME), False, "facts of 2 hosts"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "results", "check", "line"), LAST_LINES, ids=[line for *_, line in LAST_LINES])
def test_last_line(command: str, results: Sequence[HostResult], check: bool, line: str) -> None:
    follow_up = {"install": "gpuprov verify", "verify": "gpuprov doctor"}.get(command, "")
    assert last_line(command, results, check=check, next_command=follow_up) == line


def report(command: str, results: Sequence[HostResult], *, terminal: bool = False) -> str:
    to = console(terminal=terminal)
    print_report(to, run_of(command, results))
    return output(to)


def test_report_has_a_row_for_each_host_and_ends_with_the_last_line() -> None:
    text = report("install", (DONE, FAILED, GONE))
    assert "lab-a  done               9     41.0  9 changes made" in text
    assert "lab-c  failed             0      0.0  no disk space" in text
    assert text.splitlines()[-1] == "1 of 3 hosts installed; failed: lab-c; unreachable: lab-d"


CHOICE = ChosenDriver("H100", "runfile", "580.1", "long-term branch")
INSTALLED = HostResult(
    "localhost", ExitCode.DONE, 3, 9.0, (), "3 changes made; driver 580.1: long-term branch",
    {"docker": "26.1.5", "gpus": "2"}, choice=CHOICE,
    made=tuple(MadeChange(str(s), step, "x", s) for step, s in (("driver", 1.5), ("driver", 2.0), ("docker", 0.5))),
)  # fmt: skip


def test_an_installation_of_this_machine_ends_with_what_works_now() -> None:
    lines = report("install", (INSTALLED,)).splitlines()
    assert "driver 3.5 s · docker 0.5 s" in lines
    assert [one for one in lines if one.startswith("docker run")] == lines[-2:]
    assert max(map(len, lines[-2:])) <= 80
    for other in (
        replace(INSTALLED, host="gpu1"), replace(INSTALLED, exit_code=ExitCode.FAILED),
        replace(INSTALLED, made=INSTALLED.made[:2]),  # gpuprov_docker: none
        replace(INSTALLED, versions={"docker": "1", "gpus": "0"}),
    ):  # fmt: skip
        assert "docker run" not in report("install", (other,))


def test_a_fleets_choice_is_said_once() -> None:
    hosts = [replace(INSTALLED, host=f"gpu{number}") for number in (1, 2, 3)]
    text = report("install", hosts)
    assert text.count("long-term branch") == 1 and "driver 580.1 on gpu[1:3]: long-term branch" in text


def test_one_hosts_reasons_stay_above_the_live_table() -> None:
    for hosts, is_shown in ((["a"], True), (["a", "b"], False)):
        to = console(terminal=True)
        with LiveTable(to, hosts) as table:
            table("a", Note("upgrade: driver 1 → 2"))
            table("a", Planned((PlannedChange("k", "docker", "write x"),)))
            table("a", Note("later"))
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output(to))
        assert ("a: upgrade: driver 1 → 2" in text) is is_shown


def test_problems_with_the_same_cause_stand_together() -> None:
    twin = HostResult("lab-e", ExitCode.FAILED, problems=(Problem("no disk space", "df says 99 %", "free some"),))
    assert problems_text((FAILED, GONE, twin)).plain == (
        "lab-c, lab-e: no disk space\n  seen: df says 100 %\n  seen: df says 99 %\n  next: free some\n\n"
        "lab-d: no answer\n\n"
    )


def test_verify_shows_hosts_against_checks() -> None:
    text = report("verify", (seen("lab-a", "2 GPUs"), seen("lab-b", "4 GPUs", "failed"), GONE))
    assert text.splitlines()[0].split() == ["check", "lab-a", "lab-b", "lab-d"]
    assert "docker, all GPUs  ok 2 GPUs  failed host 4 GPUs, container 0 GPUs  –" in text
    assert "lab-b: docker, all GPUs: no nodes\n" in text


def test_a_degraded_gpu_is_not_called_ok() -> None:
    checks = (CheckDone("GPU 0", "ok", "degraded: xid-95"),)
    lines = report("health", [HostResult("a", ExitCode.DEGRADED, checks=checks)]).splitlines()
    assert "GPU 0  degraded: xid-95" in [line.strip() for line in lines]


def test_many_hosts_show_the_bare_words() -> None:
    text = report("verify", [seen(f"lab-{letter}", "2 GPUs") for letter in "abcd"])
    assert "docker, all GPUs  ok     ok     ok     ok" in text


def test_checks_are_green_and_red_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    results = (seen("lab-a", "2 GPUs"), seen("lab-b", "4 GPUs", "failed"))
    text = report("verify", results, terminal=True)
    assert "\x1b[32mok" in text
    assert "\x1b[1;31mfailed" in text
    monkeypatch.setenv("NO_COLOR", "1")
    text = report("verify", results, terminal=True)
    assert "\x1b[32m" not in text
    assert "31m" not in text


def test_facts_of_hosts_make_a_table() -> None:
    facts = FactsGathered({"os": {"name": "Debian 12"}, "kernel": {"release": "6.1"}, "gpus": [{}, {}], "docker": None})
    text = report("facts", (HostResult("lab-a", ExitCode.DONE, facts=facts.facts), HostResult("lab-b", ExitCode.DONE)))
    assert text.splitlines()[1].split() == ["lab-a", "Debian", "12", "6.1", "2", "–", "–"]


@pytest.mark.parametrize("verbose", [False, True])
def test_the_whole_of_a_hosts_facts_is_for_those_who_ask(verbose: bool) -> None:
    to = console(terminal=False)
    facts = HostResult("lab-a", ExitCode.DONE, facts={"os": {"name": "Debian 12", "codename": "bookworm"}})
    print_report(to, run_of("facts", (facts,)), verbose=verbose)
    assert ('"codename": "bookworm"' in output(to)) == verbose


def test_report_trusts_no_host() -> None:
    evil = HostResult(
        EVIL, ExitCode.FAILED, problems=(Problem(EVIL, EVIL, EVIL),), summary=EVIL, facts={"os": {"name": EVIL}},
        checks=(CheckDone(EVIL, "failed", EVIL, EVIL, EVIL),),
    )  # fmt: skip
    text = report("facts", (evil, evil))
    assert "owned" not in text
    assert "[bold]red[/bold]" in text
    assert not set(text) & {"\x1b", "\x9b", "\r", "\x08", "\u202e"}


def test_summary_for_programs() -> None:
    found = summary(run_of("install", (DONE, GONE)))
    assert (found["event"], found["command"], found["exit_code"]) == ("Summary", "install", 4)
    assert found["hosts"][1] == {
        "host": "lab-d", "exit_code": 4, "result": "unreachable", "changed": 0, "seconds": 0.0, "summary": "",
        "problems": [{"what": "no answer", "evidence": "", "next_step": ""}], "versions": {},
        "same_as": "", "drain": None, "rolled_back": "", "choice": None,
    }  # fmt: skip
