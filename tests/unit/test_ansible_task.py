"""A playbook's task as a request, and the agent's answer as the task's result; the roles against the plan's steps."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuprov.agent.agent import job_from_line
from gpuprov.agent.playbook_task import (
    BOOTSTRAP_VARIABLE,
    BUNDLE_KEY_VARIABLE,
    BUNDLE_VARIABLE,
    TASK_COMMANDS,
    failure,
    for_a_job,
    job_result,
    one_line,
    skipped_in_check_mode,
    split_output,
    task_request,
    task_result,
)
from gpuprov.plan.steps import STEPS
from gpuprov.protocol.codec import dump
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, UsageError
from gpuprov.protocol.events import (
    ChangeDone,
    ChangeStarted,
    CheckDone,
    Event,
    FactsGathered,
    Finished,
    Note,
    Planned,
    PlannedChange,
    Started,
    Upgrade,
    to_line,
)
from gpuprov.protocol.request import Request, request_from_line
from gpuprov.protocol.spec import PLAY_VARIABLES, parse_spec

PLAYBOOKS = Path(__file__).parents[2] / "playbooks"
VARIABLES = {"gpuprov_driver_version": "550.163.01", "ansible_user": "ops", "gpuprov_play_serial": 4}


BUNDLE = {"bundle": "/b.tar", "bundle_digest": "d"}


# -- the request ----------------------------------------------------------------------------------------------------


def test_a_request_holds_the_spec_of_the_variables_and_survives_the_wire() -> None:
    request = task_request("install", VARIABLES, steps=["driver", "cdi"], diff=True, run_id="one play")
    assert parse_spec(request.spec).driver_version == "550.163.01"
    assert (request.check, request.diff, request.steps, request.run_id) == (False, True, ("driver", "cdi"), "one play")
    assert request_from_line(dump(request)) == request
    assert request.caller_returns, "the play comes back after a reboot"


def test_no_task_begins_outside_of_its_window() -> None:
    window, saturday = "Sat 02:00-06:00 UTC", 1795831200.0
    assert task_request("plan", VARIABLES, window=window, now=saturday).check
    assert task_request("plan", VARIABLES, window=window, now=0.0, check=True).check
    with pytest.raises(GpuprovError, match="outside of the window Sat 02:00-06:00 UTC") as caught:
        task_request("plan", VARIABLES, window=window, now=saturday - 60)
    assert caught.value.problems[0].next_step == "it opens Sat 2026-11-28 02:00 UTC; then: run the same playbook again"
    with pytest.raises(GpuprovError, match="takes days, times"):
        task_request("plan", VARIABLES, window="always")


@pytest.mark.parametrize(
    ("options", "fields", "commands", "others"),
    [
        (BUNDLE, BUNDLE, "plan install", "verify facts"),
        ({"upgrade": True}, {"upgrade": True}, "plan install", "verify doctor"),
        ({"remember": True}, {"remember": True}, "verify", "doctor install"),
        ({"fix": True, "allow": ["reset", "reboot"]}, {"allow": ("reset", "reboot")}, "doctor", "install"),
        ({"this_run": True}, {"arguments": {"this_run": True}}, "rollback", "install"),
    ],
)
def test_an_option_goes_to_its_commands(options: Any, fields: dict[str, Any], commands: str, others: str) -> None:
    usual = {name: getattr(Request("facts"), name) for name in fields}
    for command in (*commands.split(), *others.split()):
        request = task_request(command, VARIABLES, **options)
        found = {name: getattr(request, name) for name in fields}
        assert found == (fields if command in commands.split() else usual)
        assert request_from_line(dump(request)) == request


_REBOOTS = {"gpuprov_reboot": "if-needed"}


@pytest.mark.parametrize(
    ("command", "variables", "options", "refused"),
    [
        ("install", _REBOOTS, {}, True), ("install", {}, {}, False), ("install", _REBOOTS, {"check": True}, False),
        ("verify", _REBOOTS, {}, False), ("facts", _REBOOTS, {}, False), ("doctor", {}, {"allow": ["reboot"]}, False),
        ("doctor", {}, {"allow": ["reboot"], "fix": True}, True),
    ],
)  # fmt: skip
def test_only_a_job_that_may_reboot_its_host_is_refused(
    command: str, variables: dict[str, Any], options: dict[str, Any], *, refused: bool
) -> None:
    request = task_request(command, variables, **options)
    if refused:
        with pytest.raises(UsageError, match="can't wait for a reboot"):
            for_a_job(request)
    else:
        assert not for_a_job(request).caller_returns


def test_requests_of_earlier_versions_are_read() -> None:
    assert request_from_line('{"command": "install"}') == Request("install")
    stored = '{"command": "install", "undisturbed": true}'
    assert request_from_line(stored) == Request("install", require_drained=True)


@pytest.mark.parametrize(
    "line",
    ["", "[]", '{"command": "boom"}', '{"command": "facts", "spec": [1]}', '{"x": 1}',
     '{"command": "install", "checks": true}', '{"command": "install", "check": "false"}'],
)  # fmt: skip
def test_what_is_no_request_is_told_with_one_that_is(line: str) -> None:
    with pytest.raises(UsageError) as caught:
        request_from_line(line)
    assert """'{"command": "facts"}'""" in caught.value.problems[0].next_step


def nested(depth: int) -> list[Any]:
    """Return a list in a list and so on."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def cyclic() -> list[Any]:
    """Return what YAML's `&a [*a]` is."""
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("value", [nested(100_000), cyclic(), {"a": cyclic()}], ids=["deep", "cyclic", "in a mapping"])
def test_a_variable_without_an_end_is_named(value: object) -> None:
    with pytest.raises(GpuprovError, match="gpuprov_packages is nested too deep, or holds itself"):
        task_request("install", {"gpuprov_packages": value})


@pytest.mark.parametrize("read", [request_from_line, job_from_line, job_result, split_output])
def test_json_that_is_nested_too_deep_is_one_sentence(read: Callable[[str], object]) -> None:
    with pytest.raises(GpuprovError):
        read(f'{{"event": "Note", "message": {"[" * 100_000}')


@pytest.mark.parametrize("check", [True, False])
def test_a_plan_is_never_more_than_a_check(check: bool) -> None:
    request = task_request("plan", VARIABLES, check=check)
    assert (request.command, request.check) == ("install", True)


@pytest.mark.parametrize(
    ("command", "variables", "said"),
    [
        ("instal", {}, "there is no command 'instal'"),
        ("install", {"gpuprov_driver_verison": "1"}, "there is no variable gpuprov_driver_verison"),
        ("install", {"gpuprov_play_serail": 1}, "there is no variable gpuprov_play_serail"),
        ("plan", {"gpuprov_driver": "nouveau", "gpuprov_packages": "jq"}, "gpuprov_packages must be a list"),
    ],
)
def test_what_is_wrong_is_named(command: str, variables: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        task_request(command, variables)
    assert said in str(caught.value)
    assert failure(caught.value).failed
    assert said in failure(caught.value).msg


@pytest.mark.parametrize("command", TASK_COMMANDS)
def test_check_mode_leaves_out_what_cannot_be_told_without_doing_it(command: str) -> None:
    # The agent itself heeds `check` for these.
    harmless = command in ("plan", "install", "health", "facts", "doctor", "cuda", "rollback", "uninstall")
    assert (skipped_in_check_mode(command) is None) is harmless


# -- the result -----------------------------------------------------------------------------------------------------

PLANNED = Planned((PlannedChange("a", "docker", "write a", "--- a\n+++ a\n+x"), PlannedChange("b", "docker", "do b")))


MADE = (PLANNED, ChangeDone("a", 1), ChangeDone("b", 1), Finished(0, 2, summary="2 changes made"))


def result(command: str, *events: Event) -> dict[str, Any]:
    return task_result(command, (Started("1", command, 1), *events)).answer({})


def test_an_installation_tells_its_changes_and_their_diffs_in_ansibles_form() -> None:
    found = result("install", *MADE)
    assert (found["changed"], found["failed"], found["msg"]) == (True, False, "2 changes made")
    assert found["changes"] == [{"step": "docker", "summary": "write a"}, {"step": "docker", "summary": "do b"}]
    assert found["diff"] == [{"prepared": "--- a\n+++ a\n+x\n"}]
    assert not result("install", Planned(()), Finished(0, 0))["changed"]


@pytest.mark.parametrize(("command", "changed"), [("install", True), ("plan", False)])
def test_only_a_plan_foresees_changes_without_being_one(command: str, changed: bool) -> None:
    found = result(command, PLANNED, Finished(0, 2, summary="2 changes would be made"))
    assert found["changed"] is changed
    assert len(found["changes"]) == 2


def test_a_plan_says_what_it_upgrades() -> None:
    upgrade = Upgrade("driver", "550.163.01", "580.65.06", ("web",), "yes", "driver 550.163.01 from /var/cache/x.run")
    found = result("plan", Planned(PLANNED.changes, upgrades=(upgrade,)), Finished(0, 2))
    assert found["upgrades"][0]["stops"] == ["web"]
    said = "upgrade: driver 550.163.01 → 580.65.06; stops web; reboot: yes; way back: driver 550.163.01 from /var"
    assert said in one_line(found)


@pytest.mark.parametrize("disturbs", [True, False])
def test_a_plan_says_whether_containers_stop(disturbs: bool) -> None:
    """What the roles drain and undrain ask."""
    assert result("plan", Planned(PLANNED.changes, disturbs), Finished(0, 2))["disturbs"] is disturbs


def test_a_failure_tells_what_evidence_next_step_and_that_something_was_changed_before() -> None:
    problem = Problem("docker did not come up", "no-such-driver", "fix it")
    found = result("install", PLANNED, ChangeDone("a", 1), Finished(1, problems=(problem,)))
    assert (found["failed"], found["changed"]) == (True, True)
    assert found["msg"] == "docker did not come up; next: fix it\n  seen: no-such-driver"
    assert one_line(found) == "docker did not come up; next: fix it"
    assert found["problems"] == [{"what": problem.what, "evidence": problem.evidence, "next_step": problem.next_step}]


def test_a_failed_verification_names_the_checks_that_failed() -> None:
    checks = (CheckDone("driver", "ok", "550"), CheckDone("container", "failed", "2", "0", "sees none"))
    found = result("verify", *checks, Finished(1, summary="containers do not see what the host has"))
    assert found["failed"]
    assert found["msg"] == "container: sees none\n  seen: host: 2, container: 0"
    assert [check["status"] for check in found["checks"]] == ["ok", "failed"]


def test_one_line_tells_what_changed_and_what_was_verified() -> None:
    assert one_line(result("install", *MADE)) == "2 changes made (docker: write a, do b)"
    checks = (CheckDone("driver", "ok"), CheckDone("torch", "skipped", reason="no image"))
    verified = result("verify", *checks, Finished(0, summary="containers see this host's GPUs"))
    assert one_line(verified) == "containers see this host's GPUs (1 of 2 checks ok)"
    undone = (ChangeStarted("a", "undo: a", 1, 1), ChangeDone("a", 0.1), Finished(0, 1, summary="1 change undone"))
    assert one_line(result("rollback", *undone)) == "1 change undone"
    assert one_line(result("install", Planned(()), Finished(0, 0))) == ""
    assert one_line(result("facts", FactsGathered({}), Finished(0))) == ""


def test_a_reboot_that_is_needed_and_not_allowed_ends_the_play() -> None:
    """What follows in the play could not work before it."""
    needed = Finished(int(ExitCode.REBOOT_NEEDED), problems=(Problem("nouveau has a GPU", "lspci", "reboot"),))
    found = result("install", PLANNED, needed)
    assert (found["failed"], found["changed"], found["reboot_needed"]) == (True, False, True)
    assert "nouveau has a GPU" in found["msg"]


def test_both_halves_of_a_run_that_a_reboot_cut_are_one() -> None:
    first = (PLANNED, ChangeDone("a", 1.0), Finished(int(ExitCode.REBOOT_NEEDED), 1, left_boot="boot-1"))
    found = result("install", *first, Finished(0, 0))
    assert (found["failed"], found["changed"], found["reboot_needed"]) == (False, True, False)


def test_facts_join_the_other_local_facts_of_the_host() -> None:
    found = task_result("facts", (FactsGathered({"gpus": 2}), Finished(0))).answer({"site": {"rack": 7}})
    assert found["ansible_facts"] == {"ansible_local": {"site": {"rack": 7}, "gpuprov": {"gpus": 2}}}


def test_warnings_of_the_agent_are_ansibles_warnings() -> None:
    found = result("install", Note("a hint"), Note("careful", "warning"), Finished(0))
    assert found["warnings"] == ["careful"]
    assert "warnings" not in result("install", Note("a hint"), Finished(0))


def test_events_are_found_between_what_a_login_prints() -> None:
    text = f"Welcome!\n{to_line(Finished(0))}\nbye\n"
    assert split_output(text) == ((Finished(0),), Finished(0), ["Welcome!", "bye"])


# -- roles and playbooks --------------------------------------------------------------------------------------------


def tasks() -> Iterable[tuple[Path, dict[str, Any]]]:
    for path in sorted([*PLAYBOOKS.glob("*.yml"), *PLAYBOOKS.glob("roles/*/tasks/main.yml")]):
        for item in yaml.safe_load(path.read_text()):
            for task in item.get("tasks", [item]):
                if "gpuprov.host.agent" in task:
                    yield path, task


def test_roles_do_every_step_of_the_plan_once() -> None:
    asked = [step for _, task in tasks() for step in task["gpuprov.host.agent"].get("steps", ())]
    assert sorted(asked) == sorted(step.name for step in STEPS)


def test_the_module_documents_every_step_in_the_plans_order() -> None:
    text = (PLAYBOOKS / "plugins/modules/agent.py").read_text()
    options = yaml.safe_load(re.search(r'DOCUMENTATION = r"""(.*?)"""', text, re.DOTALL)[1])["options"]  # type: ignore[index]
    assert re.findall(r"C\((.+?)\)", options["steps"]["description"][1]) == [step.name for step in STEPS]


def test_commands_of_tasks_are_the_agents() -> None:
    known = set(TASK_COMMANDS)
    asked = {task["gpuprov.host.agent"].get("command", "install") for _, task in tasks()}
    assert asked <= known
    assert {"plan", "install", "verify", "doctor", "facts", "rollback"} <= asked


def test_root_is_asked_for_wherever_it_is_needed() -> None:
    without = {path.name for path, task in tasks() if not task.get("become")}
    assert without == {"facts.yml"}


def test_variables_of_plays_are_known_so_that_both_ways_read_one_inventory() -> None:
    texts = (path.read_text() for path in (*PLAYBOOKS.glob("*.yml"), *PLAYBOOKS.glob("roles/*/tasks/main.yml")))
    plugins = {BOOTSTRAP_VARIABLE, BUNDLE_VARIABLE, BUNDLE_KEY_VARIABLE}
    assert {*re.findall(r"gpuprov_play_\w+", "".join(texts)), *plugins} == PLAY_VARIABLES
