"""systemd's units: the commands that are given, and what is said when a unit does not start."""

from pathlib import Path

import pytest

from gpuprov.core.changes import Change, tell_nobody
from gpuprov.core.units import RestartUnit, RunUnits, daemon_reload, is_active, log_of, restart, systemctl
from gpuprov.driver.fabric_manager import RunFabricManager
from gpuprov.driver.imex import StopImex
from tests.unit.refused import refused
from tests.unit.scripted import Scripted

LOG = "journalctl --no-pager --output=cat --lines=4 --unit a.service"


def test_no_unit_is_not_active_and_systemd_is_not_asked(tmp_path: Path) -> None:
    host = Scripted(tmp_path, {"systemctl is-active --quiet b.service": (3, "")})
    assert (is_active(host, ""), host.asked) == (False, [])
    assert (is_active(host, "a.service"), is_active(host, "b.service")) == (True, False)


def test_a_command_that_fails_gives_its_last_lines_and_has_minutes(tmp_path: Path) -> None:
    host = Scripted(tmp_path, {"systemctl stop a b": (1, "one\ntwo\nthree\nfour\n")})
    assert systemctl(host, "stop", "a", "b").splitlines()[1:] == ["two", "three", "four"]
    assert (systemctl(host, "start", "a"), host.timeouts) == ("", [180, 180])


def test_a_restart_is_not_stopped_by_the_limit_of_starts(tmp_path: Path) -> None:
    host = Scripted(tmp_path, {"systemctl restart a": (1, "no")})
    assert "no" in restart(host, "a")
    assert host.asked == [("systemctl", "reset-failed", "a"), ("systemctl", "restart", "a")]


def test_units_are_read_again(tmp_path: Path) -> None:
    host = Scripted(tmp_path)
    daemon_reload(host)
    assert host.asked[-1] == ("systemctl", "daemon-reload")


def test_the_log_has_as_many_lines_as_wanted(tmp_path: Path) -> None:
    host = Scripted(tmp_path, {LOG: "seen\n"})
    assert log_of(host, "a.service") == "seen"
    log_of(host, "a.service", 9)
    assert " ".join(host.asked[-1]) == LOG.replace("=4", "=9")


def test_a_unit_that_does_not_start_is_named_with_error_and_log(tmp_path: Path) -> None:
    host = Scripted(tmp_path, {"systemctl restart a.service": (1, "failed"), LOG: "no such option"})
    change = RestartUnit("a.service")
    assert change.summary() == "restart a.service"
    problem = refused(change.apply, host, tell_nobody)
    assert problem.what == "a.service does not start"
    assert problem.evidence.splitlines()[-1] == "no such option" and "failed" in problem.evidence
    assert problem.next_step == "systemctl status a.service"
    change.apply(Scripted(tmp_path), tell_nobody)


@pytest.mark.parametrize("active", [True, False])
def test_undoing_stops_only_what_did_not_run_before(tmp_path: Path, active: bool) -> None:
    host = Scripted(tmp_path, {"systemctl is-active --quiet a": (0 if active else 3, "")})
    before = RestartUnit("a").capture(host)
    assert before == {"unit": "a", "was_active": active}
    RestartUnit.undo(host, before, None)
    assert (("systemctl", "stop", "a") in host.asked) is not active


NO_ANSWER = (
    (1, "", "Failed to retrieve unit state: Connection timed out"),
    (1, "", "Failed to connect to bus: Connection refused"),
    (1, "", "Failed to get properties: Transport endpoint is not connected"),
    (124, "", "stopped after 60 s, its time limit"),
    (137, "", ""),
)
NO = (
    (3, "", ""),
    (4, "", ""),
    (1, "", "Failed to get unit file state for a: No such file or directory"),
    (1, "", "System has not been booted with systemd as init system (PID 1). Can't operate.\nHost is down"),
)


@pytest.mark.parametrize("change", [RestartUnit("a"), StopImex(), RunUnits(("a",)), RunFabricManager("5")], ids=repr)
@pytest.mark.parametrize("verb", ["is-active", "is-enabled"])
def test_a_unit_does_not_count_as_stopped_if_systemd_does_not_answer(tmp_path: Path, change: Change, verb: str) -> None:
    """Its undo would stop and disable what ran before, as docker."""
    for answer in NO_ANSWER if verb == "is-active" or not isinstance(change, RestartUnit) else ():
        assert refused(change.capture, Scripted(tmp_path, {verb: answer})).next_step == "run the same command again"
    for answer in NO:
        assert change.capture(Scripted(tmp_path, {verb: answer}))
