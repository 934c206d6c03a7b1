"""gpuprov_watch: what is planned, stored and removed; the metrics have the names of `gpuprov --metrics`."""

import fcntl
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent import watch
from gpuprov.boot import watch as boot_watch
from gpuprov.core.changes import parent_of
from gpuprov.core.lock import LOCK_PATH
from gpuprov.core.system import sha256_of
from gpuprov.engines.docker_proxy import ENVIRONMENT
from gpuprov.facts.host import gather
from gpuprov.facts.watch import LINK, PROGRAM, SERVICE, SERVICE_FILE, STAMP, STORED, TEXTS, TIMER, TIMER_FILE
from gpuprov.plan.context import source_of
from gpuprov.plan.refusals import refusals
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.events import Finished, Planned, PlannedChange
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, spec_to_json
from tests.runs import undo_last
from tests.unit.ask import ask
from tests.unit.doctor.host import SPEC, DoctorHost, healthy

pytestmark = pytest.mark.root
METRICS = "/srv/metrics/gpuprov.prom"
DAILY = replace(SPEC, watch="daily", watch_metrics=METRICS)
SECRET = "http://me:opensesame@proxy.example.org:3128"


@pytest.fixture
def host(tmp_path: Path) -> DoctorHost:
    """A host that is as it should be, with a folder for metrics and the agent's file."""
    made = healthy(tmp_path / "root")
    (made.root / "srv/metrics").mkdir(parents=True)
    (made.root / "srv/agent.pyz").write_bytes(b"the agent")
    return made


def install(host: DoctorHost, spec: HostSpec, command: str = "install", **more: Any) -> Finished:
    return ask(host, Request(command, spec_to_json(spec), agent="/srv/agent.pyz", **more))[0]


def planned(host: DoctorHost, spec: HostSpec) -> tuple[PlannedChange, ...]:
    _, events = ask(host, Request("install", spec_to_json(spec), agent="/srv/agent.pyz", check=True, diff=True))
    return next(event.changes for event in events if isinstance(event, Planned))


def runs(monkeypatch: pytest.MonkeyPatch, **codes: int) -> list[Request]:
    """Let the runs of a watch end at once, with these codes; return what they were asked for."""
    asked: list[Request] = []

    def run(request: Request, sink: Any, *_: Any) -> None:
        asked.append(request)
        sink(Planned(()))
        sink(Finished(codes.get(request.command, 0)))

    monkeypatch.setattr(watch, "run_request", run)
    return asked


def there(host: DoctorHost) -> list[str]:
    return [path for path in (*TEXTS, PROGRAM, LINK, METRICS) if host.status(path) is not None]


def test_the_timer_is_installed_once_and_started(host: DoctorHost) -> None:
    assert install(host, DAILY).changed == 1
    assert there(host) == [*TEXTS, PROGRAM, LINK]
    assert host.read_bytes(PROGRAM) == b"the agent"
    assert ("systemctl", "restart", TIMER) in host.commands
    assert "OnCalendar=daily\nRandomizedDelaySec=2h\n" in (host.read_text(TIMER_FILE) or "")
    service = host.read_text(SERVICE_FILE) or ""
    assert "TimeoutStartSec=30min" in service
    assert f"' {gather(host).interpreter.path} -I {PROGRAM} watch\n" in service
    assert {path: status.mode for path in (*TEXTS, PROGRAM) if (status := host.status(path))} == {
        SERVICE_FILE: 0o644, TIMER_FILE: 0o644, STORED: 0o600, PROGRAM: 0o644,
    }  # fmt: skip
    assert install(host, DAILY).changed == 0


@pytest.mark.parametrize("spoil", ["owner", "mode", "content", "link"])
def test_what_somebody_changed_is_corrected_and_the_program_stays(host: DoctorHost, spoil: str) -> None:
    install(host, DAILY)
    before = host.tree()
    if spoil == "owner":
        os.chown(host.path(TIMER_FILE), 1000, 0)
    elif spoil == "mode":
        host.change_mode(STORED, 0o644)
    elif spoil == "content":
        host.append(SERVICE_FILE, b"#")
    else:
        host.remove(LINK)
    (change,) = planned(host, DAILY)
    assert PROGRAM not in change.diff and "daily" in change.summary
    assert install(host, DAILY).changed == 1
    assert (host.tree(), planned(host, DAILY)) == (before, ())


def test_the_diff_has_the_texts_and_the_programs_name(host: DoctorHost) -> None:
    host.write(TIMER_FILE, b"old\n")
    change = boot_watch.SetWatch("daily", METRICS, ((TIMER_FILE, b"new\n", 0o644),))
    diff = f"--- {TIMER_FILE}\n+++ {TIMER_FILE}\n@@ -1 +1 @@\n-old\n+new"
    assert change.diff(host) == diff
    # The journal keeps no copy of a program that stays.
    assert [image["path"] for image in change.capture(host)["files"]] == [TIMER_FILE, LINK]
    assert replace(change, agent="/srv/agent.pyz").diff(host) == f"{diff}\n+{PROGRAM}"
    install(host, DAILY)
    (removal,) = planned(host, SPEC)
    heads = [line for line in removal.diff.splitlines() if "---" in line or "+++" in line]
    assert heads == [head for path in TEXTS for head in (f"--- {path}", "+++ /dev/null")]


def test_a_timer_that_does_not_start_is_an_error(host: DoctorHost) -> None:
    host.failing_unit = TIMER
    (problem,) = install(host, DAILY).problems
    assert problem.what.startswith(TIMER)
    assert "Job for" in problem.evidence
    assert problem.next_step == f"systemctl status {TIMER}"


@pytest.mark.parametrize("how", ["off", "rollback", "uninstall"])
def test_everything_goes_again(host: DoctorHost, how: str) -> None:
    host.make_directory(parent_of(STAMP))
    before = host.tree()
    install(host, DAILY)
    (host.root / METRICS[1:]).write_text("# HELP gpuprov_x\n")
    host.write(STAMP, b"")
    host.commands.clear()
    last = install(host, SPEC) if how == "off" else install(host, SPEC, how)
    assert last.exit_code == 0, last.problems
    assert there(host) == []
    assert not host.exists(STAMP)
    stop, forget = ("systemctl", "stop", TIMER, SERVICE), ("systemctl", "reset-failed", SERVICE)
    assert [command for command in host.commands if SERVICE in command] == [stop, forget]
    if how == "rollback":
        assert host.tree() == before
    if how == "off":
        assert install(host, SPEC).changed == 0


def test_a_watch_that_was_removed_comes_back_with_its_removal_undone(host: DoctorHost) -> None:
    install(host, DAILY)
    before = host.tree()
    install(host, SPEC)
    host.commands.clear()
    undo_last(host)
    assert (host.tree(), planned(host, DAILY)) == (before, ())
    assert ("systemctl", "restart", TIMER) in host.commands


@pytest.mark.parametrize("link", [False, True])
def test_somebody_elses_file_under_the_metrics_name_stays(host: DoctorHost, link: bool) -> None:
    install(host, DAILY)
    place = host.root / METRICS[1:]
    if link:
        place.with_suffix(".mine").write_text("# HELP gpuprov_x\n")
        place.symlink_to(place.with_suffix(".mine"))
    else:
        place.write_text("mine\n")
    install(host, SPEC)
    assert there(host) == [METRICS]


@pytest.mark.parametrize(
    ("place", "schedule", "delay"), [(METRICS, "weekly", "12h"), ("/srv/other.prom", "hourly", "10min")]
)
def test_another_schedule_and_its_rollback_keep_the_metrics_of_the_same_file(
    host: DoctorHost, place: str, schedule: str, delay: str
) -> None:
    install(host, DAILY)
    before = host.tree()
    (host.root / METRICS[1:]).write_text("# HELP gpuprov_x\n")
    assert install(host, replace(DAILY, watch=schedule, watch_metrics=place)).changed == 1
    assert (METRICS in there(host)) is (place == METRICS)
    assert f"OnCalendar={schedule}\nRandomizedDelaySec={delay}\n" in (host.read_text(TIMER_FILE) or "")
    (host.root / place[1:]).write_text("# HELP gpuprov_x\n")
    undo_last(host)
    assert host.exists(place) is (place == METRICS)
    host.remove(place)
    assert host.tree() == before


def test_the_folder_of_the_stored_specification_is_roots_alone(tmp_path: Path) -> None:
    host = DoctorHost(tmp_path / "root")
    boot_watch.SetWatch("daily", METRICS, ()).apply(host, lambda *_: None)
    status = host.status(parent_of(STORED))
    assert status is not None and status.mode == 0o700


@pytest.mark.parametrize(
    ("value", "has_one"),
    [
        ("https://me:secret@mirror.example/x", True), ("see http://token@mirror.example", True),
        ("https://mirror.example/x@y", False), ("me@mirror.example", False), (7, False), (None, False),
        (["x", "http://token@mirror.example"], True), (("http://token@mirror.example", "x"), True), (["x"], False),
        ({"a": 1, "b": {"c": ["http://token@mirror.example"]}}, True), ({"a": {}, "b": ()}, False),
    ],
)  # fmt: skip
def test_a_login_is_found_in_any_url_of_a_value(value: object, has_one: bool) -> None:
    assert boot_watch.has_login(value) is has_one


def test_an_agent_that_changed_since_the_plan_is_not_installed(host: DoctorHost) -> None:
    change = boot_watch.SetWatch("daily", METRICS, (), "/srv/agent.pyz", sha256_of(b"another agent"))
    with pytest.raises(GpuprovError, match="has changed since the plan was made") as raised:
        change.apply(host, lambda *_: None)
    assert raised.value.problems[0].evidence and raised.value.problems[0].next_step
    assert not host.exists(PROGRAM)


def test_another_agent_replaces_the_program(host: DoctorHost) -> None:
    install(host, DAILY)
    (host.root / "srv/agent.pyz").write_bytes(b"a newer agent")
    assert install(host, DAILY).changed == 1
    assert host.read_bytes(PROGRAM) == b"a newer agent"


def test_what_is_stored_has_no_secret(host: DoctorHost, monkeypatch: pytest.MonkeyPatch) -> None:
    install(host, replace(DAILY, proxy=SECRET))
    text = host.read_text(STORED) or ""
    assert "opensesame" not in text
    assert json.loads(text)["spec"]["proxy"] == "http://proxy.example.org:3128"
    # A stable order: the same specification is the same file.
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"
    # The login comes from docker's own file, so the check compares with what the host shall have.
    asked = runs(monkeypatch)
    watch.watch(host)
    (host.root / ENVIRONMENT[1:]).unlink()
    watch.watch(host)
    assert [one.spec["proxy"] for one in asked] == [SECRET] * 3 + ["http://proxy.example.org:3128"] * 3


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (replace(DAILY, watch_metrics="/nowhere/gpuprov.prom"), "there is no folder /nowhere"),
        (replace(DAILY, toolkit_repository="https://me:opensesame@mirror.example.org/x"), "gpuprov_toolkit_repository"),
        (replace(DAILY, watch_metrics="/var/tmp/gpuprov.prom"), "can't write metrics into /var/tmp"),
    ],
    ids=["folder", "login", "tmp"],
)
def test_what_can_not_be_is_refused_before_any_change(host: DoctorHost, spec: HostSpec, said: str) -> None:
    before = host.tree()
    last = install(host, spec)
    assert last.exit_code == ExitCode.FAILED
    assert said in "\n".join(map(str, last.problems))
    assert "opensesame" not in str(last)
    assert host.tree() == before


def test_a_login_in_a_sites_table_is_not_stored(host: DoctorHost) -> None:
    tables = {"driver-releases": {"source": "https://me:opensesame@mirror.example.org/releases.json"}}
    facts = gather(host)
    facts = replace(facts, watch=replace(facts.watch, agent="1", extra={"tables": tables}))
    (problem,) = (one for one in refusals(source_of(facts, DAILY)) if "password" in one.what)
    assert problem.evidence == "in gpuprov_driver_releases"


def test_without_the_agents_file_nothing_is_installed(host: DoctorHost) -> None:
    (host.root / "srv/agent.pyz").unlink()
    assert "is not at hand" in install(host, DAILY).problems[0].what


def test_watch_needs_a_stored_specification(host: DoctorHost) -> None:
    with pytest.raises(GpuprovError, match="no specification to watch by"):
        watch.watch(host)


def test_watch_measures_and_changes_nothing_else(host: DoctorHost) -> None:
    install(host, DAILY)
    before = host.tree()
    said = watch.watch(host)
    after = host.tree()
    assert "0 changes pending" in said
    assert {path for path in {*before, *after} if before.get(path) != after.get(path)} <= {METRICS[1:], METRICS}
    assert "gpuprov_host_changes_pending{" in (host.read_text(METRICS) or "")
    (host.root / "etc/cdi/nvidia.json").unlink()
    assert "1 change pending" in watch.watch(host)


def test_metrics_are_written_through_no_link(host: DoctorHost) -> None:
    install(host, DAILY)
    victim = host.root / "etc/victim"
    victim.write_text("kept")
    (host.root / METRICS[1:]).symlink_to(victim)
    watch.watch(host)
    assert victim.read_text() == "kept"
    assert not (host.root / METRICS[1:]).is_symlink()


def test_watch_skips_while_a_run_holds_the_host(host: DoctorHost) -> None:
    install(host, DAILY)
    with host.open_private(LOCK_PATH) as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        assert watch.watch(host).startswith("skipped: a gpuprov run holds this host")
    assert METRICS not in there(host)


def test_watch_needs_no_file_of_the_bundle(host: DoctorHost, monkeypatch: pytest.MonkeyPatch) -> None:
    install(host, DAILY)
    kept = json.loads(host.read_text(STORED) or "")
    (host.root / STORED[1:]).write_text(json.dumps({**kept, "bundle": True}))
    asked = runs(monkeypatch)
    watch.watch(host)
    assert "watch" in asked[0].steps and not {"packages", "repositories", "images"} & set(asked[0].steps)
    assert [request.command for request in asked] == ["install", "verify", "health"]
    assert asked[0].check


def test_the_metrics_have_the_worst_of_plan_proof_and_health(host: DoctorHost, monkeypatch: pytest.MonkeyPatch) -> None:
    install(host, DAILY)
    runs(monkeypatch, install=3, health=7)
    watch.watch(host)
    assert re.search(r"gpuprov_host_exit_code\{.*\} 7", host.read_text(METRICS) or "")


def test_a_masked_unit_is_named_before_the_first_change(host: DoctorHost) -> None:
    """`systemctl mask` of a unit that is not there yet; written through the link, /dev/null would become that unit."""
    host.make_directory("/dev")
    host.remove("/dev/null")
    host.make_node("/dev/null", 1, 3, 0o666, 0)
    host.make_link("/etc/systemd/system/gpuprov-refresh.path", "/dev/null")
    before = host.tree()
    finished = install(host, DAILY)
    (problem,) = finished.problems
    assert finished.changed == 0 and "gpuprov-refresh.path cannot be written" in problem.what
    assert problem.next_step == "rm /etc/systemd/system/gpuprov-refresh.path"
    assert host.tree() == before
