"""`--rollback-on-failure`: which hosts go back, what is run in which order, and what is told of them."""

import json

import pytest

from gpuprov.agent.result import Recorder
from gpuprov.fleet.report import summary
from gpuprov.fleet.rolling import parse_rollout
from gpuprov.protocol.events import CheckDone, Finished, Sink, Started
from gpuprov.protocol.request import Request
from tests.unit.fleet.fleets import run_of
from tests.unit.fleet.test_rolling import Site, of, site, states

__all__ = ["site"]

BACK = parse_rollout(rollback=True)


def test_host_that_is_not_green_goes_back_and_gets_work_again(site: Site) -> None:
    site.ill = "b"
    results = site.run("ab", rollout=BACK)
    assert of(site, "a") == ["look", "drain", "install", "verify", "undrain"]
    assert of(site, "b") == ["look", "drain", "install", "verify", "rollback", "verify", "undrain"]
    assert [(one.exit_code, one.rolled_back) for one in results] == [(0, ""), (1, "verified")]
    (problem,) = results[1].problems
    assert problem.what == "verify failed after the changes; the host was rolled back, and verify is green"
    assert problem.evidence == "docker is broken\nno GPU"
    assert states(results) == ["undrained", "undrained"]


@pytest.mark.parametrize(("trouble", "outcome"), [("stuck", "failed"), ("incurable", "not-verified")])
def test_host_that_can_not_go_back_stays_drained_and_says_why(site: Site, trouble: str, outcome: str) -> None:
    site.ill = "a"
    setattr(site, trouble, "a")
    (result,) = site.run("a", rollout=BACK)
    assert (result.exit_code, result.rolled_back, states((result,))) == (1, outcome, ["drained"])
    expected = "the host could not be rolled back" if trouble == "stuck" else "but verify fails after it too"
    assert expected in result.problems[0].what
    assert ("the disk is full" in result.problems[0].evidence) is (trouble == "stuck")


def test_a_canary_that_goes_back_ends_the_run(site: Site) -> None:
    site.ill = "a"
    results = site.run("abc", rollout=parse_rollout(canary="1", rollback=True))
    assert [one.begun for one in results] == [True, False, False]
    assert results[0].rolled_back == "verified"


def test_changes_that_fail_go_back_too(site: Site) -> None:
    site.unwell = "a"
    (result,) = site.run("a", rollout=BACK)
    assert of(site, "a") == ["look", "drain", "install", "rollback", "verify", "undrain"]
    assert result.problems[0].what == "the changes failed; the host was rolled back, and verify is green"
    assert "docker did not come up" in result.problems[0].evidence


@pytest.mark.parametrize("trouble", ["failing", "settled", "reboots"])
def test_nothing_is_rolled_back_that_this_run_did_not_change(site: Site, trouble: str) -> None:
    """The last run of such a host would be an earlier one; a host that waits for a reboot has not failed."""
    setattr(site, trouble, "a")
    site.ill = "a"
    site.run("a", rollout=BACK, drain=False)
    assert of(site, "a") == ["install"]


def test_without_commands_hosts_are_verified_and_go_back(site: Site) -> None:
    site.ill = "b"
    results = site.run("ab", rollout=BACK, drain=False)
    assert (of(site, "a"), of(site, "b")) == (["install", "verify"], ["install", "verify", "rollback", "verify"])
    assert [one.rolled_back for one in results] == ["", "verified"]
    assert json.loads(json.dumps(summary(run_of("install", results))))["hosts"][1]["rolled_back"] == "verified"


def test_host_that_was_not_drained_is_drained_before_it_goes_back(site: Site) -> None:
    """What an undo disturbs, the change may not have disturbed."""
    site.ill, site.disturbing = "a", ""
    site.run("a", rollout=BACK)
    assert of(site, "a") == ["look", "calm", "verify", "drain", "rollback", "verify", "undrain"]


@pytest.mark.parametrize(
    ("drain", "calls"), [(False, ["install", "verify"]), (True, ["look", "drain", "install", "verify"])]
)
def test_a_host_that_is_left_during_verify_is_not_said_to_fail(site: Site, drain: bool, calls: list[str]) -> None:
    real, site.lost = site.answer, "a"

    def answer(name: str, request: Request, sink: Sink) -> Finished:
        site.fleet.interruptions = 2 * (request.command == "verify")
        return real(name, request, sink)

    site.answer = answer  # type: ignore[method-assign]
    (result,) = site.run("a", rollout=BACK, drain=drain)
    assert (of(site, "a"), result.rolled_back) == (calls, "")
    assert [one.what for one in result.problems] == ["left while it ran, as this run was stopped"]


def test_checks_of_a_host_that_went_back_are_those_after_it() -> None:
    recorder = Recorder("a")
    for status in ("failed", "ok"):
        recorder(Started("1", "verify", 1))
        recorder(CheckDone("docker, all GPUs", status))
    assert [one.status for one in recorder.result().checks] == ["ok"]
