"""An examination from end to end on a host at the System seam: what is told, how it ends, that nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprov.doctor import examine
from gpuprov.doctor.finding import AREAS
from gpuprov.errors import ExitCode
from gpuprov.events import CauseFound, CheckDone, Event, Finished, from_line, to_line
from gpuprov.request import Request
from gpuprov.run import run_request
from gpuprov.spec import spec_to_json
from tests.unit.doctor.host import SPEC, DoctorHost, healthy

pytestmark = pytest.mark.root


@pytest.fixture
def host(tmp_path: Path) -> DoctorHost:
    return healthy(tmp_path)


def events_of(host: DoctorHost) -> list[Event]:
    """Return the events of `gpuprov doctor`, each as it comes over the wire."""
    found: list[Event] = []
    run_request(Request("doctor", spec_to_json(SPEC)), found.append, host)
    assert [from_line(to_line(event)) for event in found] == found
    return found


def causes(events: list[Event]) -> list[CauseFound]:
    return [event for event in events if isinstance(event, CauseFound)]


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def test_a_healthy_host_has_nothing_wrong_and_tells_what_was_looked_at(host: DoctorHost) -> None:
    events = events_of(host)
    assert finished(events).problems == ()
    assert finished(events).exit_code == ExitCode.DONE
    assert finished(events).summary == "nothing found wrong"
    checks = [event for event in events if isinstance(event, CheckDone)]
    assert [check.name for check in checks] == list(AREAS)
    assert {check.status for check in checks} == {"ok"}
    assert all(check.host for check in checks)


def test_a_cause_is_told_with_evidence_confidence_and_what_to_type(host: DoctorHost) -> None:
    (host.root / "usr/bin/gpuprov-container-runtime").unlink()
    events = events_of(host)
    cause = causes(events)[0]
    assert (cause.rank, cause.rule, cause.area, cause.confidence) == (
        1, "runtime-missing", "container toolkit", "certain",
    )  # fmt: skip
    assert "/usr/bin/gpuprov-container-runtime is missing" in cause.what
    assert "docker info: runtime nvidia is /usr/bin/gpuprov-container-runtime" in cause.evidence
    assert cause.next_step == "gpuprov install"
    assert finished(events).exit_code == ExitCode.FAILED
    assert finished(events).problems[0].what == f"{cause.what} (certain)"
    failed = [event.name for event in events if isinstance(event, CheckDone) and event.status == "failed"]
    assert failed == ["container toolkit"]


def test_it_changes_nothing(host: DoctorHost) -> None:
    (host.root / "etc/docker/daemon.json").write_text("{\n")
    (host.root / "usr/bin/gpuprov-container-runtime").unlink()
    before = host.everything()
    assert len(causes(events_of(host))) >= 2
    assert host.everything() == before


def test_it_needs_root(host: DoctorHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "user_id", lambda: 1000)
    assert finished(events_of(host)).exit_code == ExitCode.USAGE


def test_examine_is_what_the_agent_runs(host: DoctorHost) -> None:
    told: list[Event] = []
    assert examine(host, SPEC, told.append).exit_code == ExitCode.DONE
    assert len(told) == len(AREAS)
