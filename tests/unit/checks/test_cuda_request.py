"""`gpuprov cuda` on the hosts of an inventory: events, table, the playbook's result."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.playbook_task import task_request, task_result
from gpuprov.agent.run import run_request
from gpuprov.checks.cuda import survey as cuda_survey
from gpuprov.checks.cuda.search import Program
from gpuprov.checks.cuda.survey import Survey, as_json
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.protocol.codec import dump
from gpuprov.protocol.events import CheckDone, CudaSurveyed, Event, Finished, Note
from gpuprov.protocol.request import Request, request_from_line
from tests.unit.ask import ask
from tests.unit.checks.test_cuda_libraries import DRIVER, Image, healthy


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    """An image whose files are what `survey` finds, with the environment of the call."""
    made = healthy(Image(tmp_path))

    def survey(system: System, name: str, call: Program) -> Survey:
        assert name == "app"
        return made.survey_with(call.environment, "550.163.01")

    monkeypatch.setattr(cuda_survey, "survey", survey)
    return made


def asked(**variables: str) -> list[Event]:
    """Return the events of the agent, to which the request came as a line."""
    arguments = {"subject": "app", "variables": variables}
    return ask(None, request_from_line(dump(Request("cuda", arguments=arguments))))[1]


def test_a_healthy_image(image: Image) -> None:
    events = asked()
    assert [type(one) for one in events[1:]] == [CudaSurveyed, CheckDone, CheckDone, Finished]
    surveyed, library, management, finished = events[1:]
    assert isinstance(surveyed, CudaSurveyed) and surveyed.survey == as_json(image.survey())
    assert library == CheckDone(
        "libcuda.so.1", "ok", "", f"550.163.01 at {DRIVER}/libcuda.so.1: a default folder of the loader"
    )
    assert isinstance(management, CheckDone) and management.status == "ok"
    assert isinstance(finished, Finished) and (finished.exit_code, finished.problems) == (0, ())


def test_an_older_library_is_a_problem_with_its_evidence(image: Image) -> None:
    image.library("/opt/own", "535.261.03")
    *_, library, _management, finished = asked(LD_LIBRARY_PATH="/opt/own")
    assert isinstance(library, CheckDone) and isinstance(finished, Finished)
    assert (library.status, library.reason) == ("failed", "")
    assert library.in_container == "535.261.03 at /opt/own/libcuda.so.1: LD_LIBRARY_PATH has /opt/own"
    (problem,) = finished.problems
    assert problem.what.endswith("the loaded kernel module is 550.163.01 (CUDA result 803, 35, 36)")
    assert problem.evidence == "/opt/own/libcuda.so.535.261.03: LD_LIBRARY_PATH has /opt/own"
    assert finished.exit_code == 1


def test_a_limit_is_a_warning(image: Image) -> None:
    *_, note, finished = asked(CUDA_VERSION="12.6")
    assert isinstance(note, Note) and isinstance(finished, Finished)
    assert note.level == "warning" and note.message.startswith("minor version compatibility: CUDA 12.6 runs on driver")
    assert finished.exit_code == 0


def test_an_image_without_a_library_says_so(image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bare").mkdir()
    bare = Image(tmp_path / "bare").survey()
    monkeypatch.setattr(cuda_survey, "survey", lambda *words: bare)
    checks = {one.name: one for one in asked() if isinstance(one, CheckDone)}
    assert (checks["libcuda.so.1"].status, checks["libcuda.so.1"].in_container) == ("failed", "none")
    assert checks["libnvidia-ml.so.1"] == CheckDone("libnvidia-ml.so.1", "skipped", reason="the loader finds none")


def test_an_image_that_nobody_has_is_a_wrong_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(System, "which", lambda system, program: None)
    ended, _ = ask(None, Request("cuda", arguments={"subject": "app"}))
    assert (ended.exit_code, ended.problems[0].what) == (2, "there is no container or image app on this host")


@pytest.mark.parametrize("ends", [(124, "stopped after 60 s"), (1, "Cannot connect to the Docker daemon at unix:///…")])
def test_silent_engine_may_have_the_container(ends: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(system: System, argv: tuple[str, ...], **options: Any) -> Completed:
        asked.extend(argv[:1] if "inspect" in argv else ())
        return Completed(argv, 125, "", "no such") if argv[0] == "podman" else Completed(argv, ends[0], "", ends[1])

    monkeypatch.setattr(System, "which", lambda system, program: program)
    monkeypatch.setattr(System, "run", run)
    ended, _ = ask(None, Request("cuda", arguments={"subject": "app"}))
    (problem,) = ended.problems
    assert (ended.exit_code, problem.what) == (1, "docker does not say whether it has a container or image app")
    assert ends[1] in problem.evidence and problem.next_step.startswith("docker info")
    assert asked == ["docker", "podman", "podman"]  # a daemon that hangs costs a minute each time


@pytest.mark.parametrize("arguments", [{}, {"variables": 7, "program": "/usr/bin/python3"}, {"subject": None}])
def test_other_version_asks_host(arguments: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Program]] = []

    def survey(system: System, name: str, call: Program) -> Survey:
        seen.append((name, call))
        return healthy(Image(tmp_path)).survey()

    monkeypatch.setattr(cuda_survey, "survey", survey)
    assert run_request(Request("cuda", arguments=arguments), lambda event: None) == 0
    assert seen == [("", Program())]


def test_a_playbooks_task_has_the_survey_and_the_checks(image: Image) -> None:
    assert task_request("cuda", {}, container="app").arguments == {"subject": "app"}
    assert task_request("verify", {}, container="app").arguments == {}
    result = task_result("cuda", asked()).answer({})
    assert (result["failed"], result["changed"], result["cuda"]) == (
        False,
        False,
        json.loads(json.dumps(as_json(image.survey()))),
    )
    assert [one["status"] for one in result["checks"]] == ["ok", "ok"]
