"""Forty hosts at once, most of them in some trouble: each is reported as what it is, and no event is lost."""

import collections
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.result import HostResult
from gpuprov.fleet import remote
from gpuprov.fleet.agent_file import Agent
from gpuprov.fleet.inventory import read_inventory
from gpuprov.fleet.options import Options
from gpuprov.fleet.run import Fleet
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import Event
from gpuprov.protocol.request import Request
from tests.integration.fake_hosts import KINDS, playing

GPUPROV = str(Path(sys.executable).parent / "gpuprov")
# Every kind once, and healthy hosts between them.
MIXED = [kind for trouble in KINDS for kind in ("works", trouble)]


def hosts(folder: Path, kinds: Sequence[str], seconds: float = 0.2) -> contextlib.AbstractContextManager[Path]:
    """Play these hosts and give their inventory."""
    return playing(folder, "--kinds", ",".join(kinds), "--seconds", str(seconds))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def gpuprov(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((GPUPROV, *words), capture_output=True, text=True, timeout=200)


# Kind, exit code, what is said, what is seen.
OUTCOMES = [
    ("works", ExitCode.DONE, "", ""),
    ("settled", ExitCode.DONE, "", ""),
    ("old-driver", ExitCode.DONE, "", ""),
    ("rolls", ExitCode.DONE, "", ""),
    ("ill", ExitCode.DONE, "", ""),
    ("calm", ExitCode.DONE, "", ""),
    ("reboot", ExitCode.REBOOT_NEEDED, "", ""),
    ("fails", ExitCode.FAILED, "the disk is full", "df says 100 %"),
    ("hangs", ExitCode.FAILED, "the host fell silent during the run", "not a word for 6 s"),
    ("drops", ExitCode.FAILED, "the connection to the host dropped during the run", ""),
    ("babbles", ExitCode.FAILED, "the host sends what gpuprov's agent never sends", "Finished.exit_code is missing"),
    ("endless", ExitCode.FAILED, "the host sends no events but a flood", "without a line end"),
    ("killed", ExitCode.FAILED, "the agent ended without a result", "killed by a signal"),
    ("no-shell", ExitCode.UNREACHABLE, "the account may not log in: its shell is nologin", "currently not available"),
    ("old-python", ExitCode.FAILED, "the host's Python is older than 3.9", "3.6.8"),
    ("sudo", ExitCode.FAILED, "sudo on the host wants a password", "a password is required"),
    ("full-home", ExitCode.FAILED, "the agent cannot be stored on the host", "No space left on device"),
    ("login", ExitCode.UNREACHABLE, "refuses to log in root", "Authentication failed"),
    ("other-key", ExitCode.UNREACHABLE, "host key changed", "ssh-ed25519"),
    ("frozen", ExitCode.UNREACHABLE, "the host accepts the login, then stops responding", "the connection broke"),
    ("refused", ExitCode.UNREACHABLE, "cannot be reached", "Connection refused"),
    ("silent", ExitCode.UNREACHABLE, "does not answer", "nothing there says a word within 3 s"),
    ("web", ExitCode.UNREACHABLE, "closes the connection before the SSH banner", "HTTP/1.1 400 Bad Request"),
    ("penalty", ExitCode.UNREACHABLE, "accepts no connection from here for a while", "Not allowed at this time"),
]


# Hosts that accept a login, and hold the run up then.
TIMED = ("hangs", "frozen")
ENDING = ("works", "settled", "old-driver", "reboot", "fails", "rolls", "ill", "calm")


def test_every_kind_of_host_has_its_outcome() -> None:
    assert sorted(kind for kind, *_ in OUTCOMES) == sorted(KINDS)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what came of a run over all kinds: results and events by host, what hosts sent, the kind of each."""
    folder = tmp_path_factory.mktemp("mixed")
    seen: dict[str, list[Event]] = collections.defaultdict(list)
    (folder / "hold-silence").touch()
    with hosts(folder, MIXED) as inventory:
        targets = read_inventory((str(inventory),)).hosts
        kind_of = dict(zip((target.name for target in targets), MIXED))
        results = {}
        # Only those that say nothing meet a time limit: each is the first of all that it could meet.
        for kinds, connects, silent, accepts in (
            (TIMED, 60, 6, 8), (("silent",), 3, 300, 300), ({*KINDS} - {*TIMED, "silent"}, 300, 300, 300),
        ):  # fmt: skip
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(remote, "ACCEPTANCE_SECONDS", accepts)
                fleet = Fleet(
                    lambda: AGENT, Options("install", forks=40, connect_timeout=connects, host_timeout=silent)
                )
                some = [target for target in targets if kind_of[target.name] in kinds]
                for result in fleet.run(some, Request("install"), lambda host, event: seen[host].append(event)):
                    results[result.host] = result
    sent = json.loads((folder / "sent.json").read_text())
    return {
        "results": tuple(results[target.name] for target in targets),
        "seen": seen,
        "sent": sent,
        "kinds": dict(zip(sent, MIXED)),
    }


AGENT = Agent(b"never run here", hashlib.sha256(b"never run here").hexdigest())


def test_each_trouble_is_reported_as_what_it_is(mixed: dict[str, Any]) -> None:
    expected = {kind: rest for kind, *rest in OUTCOMES}
    for result in mixed["results"]:
        code, what, evidence = expected[mixed["kinds"][result.host]]
        problem = result.problems[0] if result.problems else None
        said = (result.exit_code, problem.what if problem else "", problem.evidence if problem else "")
        assert said[0] == code, (mixed["kinds"][result.host], said)
        assert str(what) in said[1], (mixed["kinds"][result.host], said)
        assert str(evidence) in said[2], (mixed["kinds"][result.host], said)
        assert problem is None or problem.next_step, (mixed["kinds"][result.host], said)


def test_no_event_of_any_host_is_lost(mixed: dict[str, Any]) -> None:
    ours = {"Note"}
    for host, count in mixed["sent"].items():
        events = [type(event).__name__ for event in mixed["seen"][host]]
        told = sum(name not in ours for name in events)
        # Where the host did not say how it ended, the controller does.
        ended_by_us = bool(mixed["kinds"][host] not in ENDING)
        assert told - ended_by_us == count, (host, mixed["kinds"][host], events)


def test_evidence_from_babbling_hosts_stays_readable(mixed: dict[str, Any]) -> None:
    for result in mixed["results"]:
        assert all(len(line) < 1000 for problem in result.problems for line in problem.evidence.splitlines())


def test_whole_command_reports_keeps_and_draws_what_came_of_it(tmp_path: Path) -> None:
    kinds = ["works"] * 6 + ["old-driver", "fails", "fails", "refused", "refused", "refused"]
    page = tmp_path / "report.html"
    with hosts(tmp_path, kinds) as inventory:
        done = gpuprov("install", "--hosts", str(inventory), "--report", str(page))
    assert done.returncode == ExitCode.FAILED, done.stderr
    assert "gpu08, gpu09: the disk is full" in done.stdout
    assert "gpu[10:12]: HOST cannot be reached\n  seen: Connection refused" in done.stdout
    assert "535.247.01: gpu07" in done.stdout
    assert done.stdout.splitlines()[-1] == "7 of 12 hosts installed; failed: gpu08, gpu09; unreachable: gpu[10:12]"
    assert "the disk is full" in page.read_text()
    assert gpuprov("report").stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    kept = json.loads(gpuprov("report", "--json").stdout)
    assert [len(host["made"]) for host in kept["results"]][:9] == [8] * 7 + [2, 2]


def test_json_ends_with_a_summary_that_names_the_run(tmp_path: Path) -> None:
    with hosts(tmp_path, ["works", "fails"]) as inventory:
        done = gpuprov("install", "--hosts", str(inventory), "--json", "--serial", "1")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all("host" in line for line in lines[:-1])
    assert lines[-1]["event"] == "Summary"
    assert [host["result"] for host in lines[-1]["hosts"]] == ["done", "failed"]
    assert json.loads(gpuprov("report", "--run", lines[-1]["run"], "--json").stdout)["identifier"] == lines[-1]["run"]


def test_canary_that_fails_keeps_all_others_untouched(tmp_path: Path) -> None:
    with hosts(tmp_path, ["works", "fails", "works", "works"]) as inventory:
        done = gpuprov("install", "--hosts", str(inventory), "--canary", "gpu2", "--json")
    sent = json.loads((tmp_path / "sent.json").read_text())
    assert [host for host, count in sent.items() if count] == ["gpu2"]
    results = json.loads(done.stdout.splitlines()[-1])["hosts"]
    assert [host["result"] for host in results] == ["not run", "failed", "not run", "not run"]


def test_serial_stops_after_the_batch_with_too_many_failures(tmp_path: Path) -> None:
    with hosts(tmp_path, ["works", "works", "fails", "refused", "works", "works"]) as inventory:
        done = gpuprov("install", "--hosts", str(inventory), "--serial", "2", "--max-fail", "50%")
    assert "batch 1 of 3: 2 hosts" in done.stdout
    assert "2 of 2 hosts failed, at most 1 may" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        "2 of 6 hosts installed; failed: gpu3; unreachable: gpu4; not run: gpu5, gpu6"
    )


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_first_ctrl_c_lets_running_hosts_finish(tmp_path: Path) -> None:
    (tmp_path / "hold-changes").touch()
    with hosts(tmp_path, ["works"] * 4) as inventory:
        done = _interrupted(inventory, times=1)
    results = json.loads(done.splitlines()[-1])["hosts"]
    assert [host["result"] for host in results] == ["done", "done", "not run", "not run"]


def test_second_ctrl_c_leaves_hosts_that_would_run_for_long(tmp_path: Path) -> None:
    with hosts(tmp_path, ["hangs"] * 4) as inventory:
        done = _interrupted(inventory, times=2)
    results = json.loads(done.splitlines()[-1])["hosts"]
    assert [host["problems"][0]["what"] for host in results] == [
        *["left while it ran, as this run was stopped"] * 2, *["not run: this run was stopped before"] * 2,
    ]  # fmt: skip


def _interrupted(inventory: Path, *, times: int) -> str:
    """Run over the hosts, two at a time; interrupt once both have begun a change, and return the output."""
    command = (GPUPROV, "install", "--hosts", str(inventory), "--json", "--forks", "2")
    # As in many CI systems; what is printed comes at once, as it does without.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        lines: list[str] = []
        begun: set[str] = set()
        try:
            while len(begun) < 2:
                lines.append(process.stdout.readline())
                event = json.loads(lines[-1])
                begun |= {event["host"]} if event["event"] == "ChangeStarted" else set()
            process.send_signal(signal.SIGINT)
            # Two signals at once would be one.
            while "no further host begins" not in process.stderr.readline():
                assert process.poll() is None
            if times > 1:
                process.send_signal(signal.SIGINT)
            (inventory.parent / "hold-changes").unlink(missing_ok=True)
            return "".join(lines) + process.communicate(timeout=300)[0]
        finally:
            process.kill()


def test_slow_hosts_delay_nobody(tmp_path: Path) -> None:
    """Hosts that say nothing at all take their place among the forks and no more."""
    order: list[str] = []
    silence = tmp_path / "hold-silence"
    silence.touch()
    with hosts(tmp_path, ["silent", "silent", *["works"] * 6]) as inventory:
        targets = read_inventory((str(inventory),)).hosts
        fleet = Fleet(lambda: AGENT, Options("install", connect_timeout=300, forks=4))

        def sink(host: str, event: Event) -> None:
            if type(event).__name__ == "Finished":
                order.append(host)
                # The silent ones hang up once all others are through.
                if len(order) == 6:
                    silence.unlink()

        results: Sequence[HostResult] = fleet.run(targets, Request("install"), sink)
    assert [result.exit_code for result in results] == [ExitCode.UNREACHABLE] * 2 + [ExitCode.DONE] * 6
    assert set(order[-2:]) == {"gpu1", "gpu2"}
