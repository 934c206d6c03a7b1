"""`gpuprov accept`: from the program's lines to findings."""

import fcntl
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.checks import accept as checks
from gpuprov.checks import health
from gpuprov.checks.accept import accept, judge, parse_printed, plan
from gpuprov.checks.engines import ALL, DOCKER, DockerLike, EngineTest
from gpuprov.checks.smi import SmiGpu, SmiReport
from gpuprov.core.commands import TIMED_OUT, Completed
from gpuprov.core.system import System
from gpuprov.facts.driver import GpuHolder
from gpuprov.protocol.errors import Stopped
from gpuprov.protocol.events import Finished
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import AcceptCommand, HostSpec
from tests.unit.ask import ask
from tests.unit.fake_host import FakeHost
from tests.unit.refused import refused
from tests.unit.scripted import Answer, Scripted
from tests.unit.test_health import HealthHost, report_of

_UUIDS = ("GPU-0", "GPU-1")
_HOST = SmiReport("580", "13.0", tuple(SmiGpu(uuid, "H100", "", "", "", "") for uuid in _UUIDS))
_GOOD: list[dict[str, Any]] = [
    {"step": "found", "simulated": False, "driver": 13000, "gpus": [{"uuid": one, "name": "H100"} for one in _UUIDS]},
    *({"step": "arithmetic", "gpu": one, "ok": True, "seconds": 1.0, "wrong": 0, "error": None} for one in _UUIDS),
    *({"step": "memory", "gpu": one, "ok": True, "seconds": 2.0, "memory": 40.0, "wrong": 0} for one in _UUIDS),
    *({"step": "copy", "gpu": one, "to_device": 5e10, "peers": {_UUIDS[0]: 3e11}} for one in _UUIDS),
    *({"step": "all", "gpu": one, "ok": True, "seconds": 60.0, "bytes": 80, "rate": 4.5} for one in _UUIDS),
    {"step": "end"},
]  # fmt: skip


def judged(lines: list[dict[str, Any]], code: int = 0) -> list[tuple[str, str]]:
    done = Completed(("docker", "run"), code, "\n".join(map(json.dumps, lines)), "Killed" if code else "")
    found, _ = judge(parse_printed(done.stdout), done, _HOST)
    assert all(one.verdict == "unfit" and one.evidence and one.next_step for one in found)
    return [(one.rule, one.gpu) for one in found]


def test_a_host_that_is_well_has_figures_and_no_finding() -> None:
    text = "a banner\n" + "\n".join(map(json.dumps, _GOOD))
    found, (first, second) = judge(parse_printed(text), Completed((), 0, text), _HOST)
    assert found == []
    assert (first.gpu, second.uuid) == ("0", "GPU-1")
    assert first.figures == {"memory": 40.0, "to_device": 5e10, "peer GPU-0": 3e11, "rate": 4.5}


def test_a_peer_that_the_host_does_not_have_is_no_figure() -> None:
    lines = parse_printed(json.dumps({"step": "copy", "gpu": "GPU-0", "peers": {f"GPU-{n}": 1.0 for n in range(2000)}}))
    _, (first, _) = judge(lines, Completed((), 0, ""), _HOST)
    assert sorted(first.figures) == ["peer GPU-0", "peer GPU-1"]


def changed(number: int, **values: Any) -> list[dict[str, Any]]:
    return [{**one, **(values if place == number else {})} for place, one in enumerate(_GOOD)]


_DEAD = {"call": "cuStreamSynchronize", "result": 719, "name": "CUDA_ERROR_LAUNCH_FAILED"}


@pytest.mark.parametrize(("lines", "code", "expected"), [
    (changed(2, ok=False, wrong=3), 0, [("accept-wrong", "1")]),
    (changed(7, ok=False, error=_DEAD), 0, [("accept-failed", "0")]),
    # A GPU that dies takes the later steps with it.
    ([one for one in changed(4, ok=False, error=_DEAD) if one["step"] != "all" or one["gpu"] != "GPU-1"], 0,
     [("accept-failed", "1")]),
    ([one for one in _GOOD if one.get("gpu") != "GPU-1"], 0, [("accept-silent", "1")]),
    (_GOOD[:8], 137, [("accept-silent", "1")]),
    (_GOOD[:5], 137, [("accept-program", "")]),
    ([{"step": "failed", **_DEAD}], 1, [("accept-program", "")]),
    ([], 127, [("accept-program", "")]),
])  # fmt: skip
def test_each_trouble_names_its_gpu(lines: list[dict[str, Any]], code: int, expected: list[tuple[str, str]]) -> None:
    assert judged(lines, code) == expected


@pytest.mark.parametrize(("lines", "expected"), [([], ("accept-program", "")), (_GOOD[:1], ("accept-silent", "0"))])
def test_only_gpu_is_not_blamed_for_a_failed_start(lines: list[dict[str, Any]], expected: tuple[str, str]) -> None:
    alone = replace(_HOST, gpus=_HOST.gpus[:1])
    done = Completed(("docker", "run"), 125, "", "docker: Error response from daemon: no space left on device")
    (found,), _ = judge(parse_printed("\n".join(map(json.dumps, lines))), done, alone)
    assert (found.rule, found.gpu) == expected
    assert "no space left" in found.evidence


@pytest.mark.parametrize("line", [
    '{"step": 5}', '{"step": "all", "gpu": "GPU-0", "rate": NaN}', '{"step": "all", "gpu": ["GPU-0"]}', "{" * 5000,
    json.dumps({"step": "copy", "gpu": "GPU-0", "peers": {"x" * 9999: 1.0}}), '["step"]',
    '{"step": "all", "rate": true}',
])  # fmt: skip
def test_a_hostile_line_is_left_out(line: str) -> None:
    assert parse_printed(line) == ()


def test_the_plan_has_all_steps_with_their_times() -> None:
    lines = plan(7)
    assert lines[0].startswith("step 1 of 3: verify")
    assert "rest of 7 min" in lines[2]


def test_the_plan_names_the_commands_of_the_site() -> None:
    lines = plan(7, (AcceptCommand("nccl:1", ("all_reduce_perf", "-b\x1b[2J", "8 G")),))
    assert "half of the rest of 7 min" in lines[2]
    assert lines[3] == "step 4 of 4: `all_reduce_perf '-b' '8 G'` in a container of nccl:1, within 7 min"


def test_a_second_accept_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    other = subprocess.Popen(("sleep", "60"))
    try:
        lock = (tmp_path / "run/gpuprov.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        json.dump({"pid": other.pid, "command": "accept", "since": "now"}, lock, indent=None)
        lock.flush()
        # The holder has the file open: that shows that it is alive.
        for name, text in (("stat", f"{other.pid} (gpuprov) S 1"), ("comm", "gpuprov")):
            path = tmp_path / f"proc/{other.pid}/{name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / f"proc/{other.pid}/fd").mkdir()
        (tmp_path / f"proc/{other.pid}/fd/3").symlink_to(tmp_path / "run/gpuprov.lock")
        (problem,) = ask(FakeHost(tmp_path), Request("accept", {}))[0].problems
    finally:
        other.kill()
        other.wait()
        lock.close()
    assert problem.what == "another gpuprov run holds this host"
    assert "gpuprov accept, since now" in problem.evidence


def test_an_interrupted_run_removes_its_container() -> None:
    class Interrupted(Scripted):
        def answer(self, argv: tuple[str, ...]) -> Answer:
            if argv[1] == "run":
                raise Stopped
            return ""

    system = Interrupted()
    with pytest.raises(Stopped):
        DOCKER.run(system, "image", ("python3",), ALL)
    (started, removed) = system.asked
    assert removed[:3] == ("docker", "rm", "--force")
    assert f"--name={removed[-1]}" in started


def refusal(system: System) -> str:
    """Return the evidence with which a run ends that must not start."""
    words = (system, HostSpec(), lambda event: None, 1, lambda tests: pytest.fail("it started"))
    return refused(accept, *words).evidence


def test_nothing_starts_while_a_process_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    user = GpuHolder(812, "python3 train.py", "/dev/nvidia-uvm", container="abc")
    monkeypatch.setattr(checks, "gather_holders", lambda system, *, computing: (user,) if computing else ())
    assert "process 812 (python3 train.py)" in refusal(System())


ONE = '<gpu id="0"><uuid>GPU-0</uuid></gpu>'


@pytest.mark.parametrize(
    "answer", [(TIMED_OUT, ""), (0, ""), (137, ONE), (15, "Unable to determine the device handle for GPU1: Lost")]
)
def test_load_needs_known_idle_gpus(tmp_path: Path, answer: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it hangs while verify runs; a process of another container shows nowhere else."""
    host = HealthHost(tmp_path)
    host.report = report_of("", "")

    def verified(tests: list[EngineTest]) -> bool:
        tests.append(EngineTest(host, "image", _HOST))
        return True

    def hang(*_: object, **more: object) -> Finished:
        host.report = Completed(("nvidia-smi",), *answer)
        return Finished(0, versions={"gpus": "2"})

    monkeypatch.setattr(health, "examine", hang)
    monkeypatch.setattr(DockerLike, "run", lambda *_, **more: pytest.fail("it started"))
    problem = refused(accept, host, HostSpec(), lambda event: None, 1, verified)
    assert problem.what == "nvidia-smi does not tell whether the GPUs are idle: no load was started"
    assert f"exited {answer[0]}" in problem.evidence and problem.next_step == "gpuprov health"


@pytest.mark.parametrize("expect", ["passed (", "[0-9"])
def test_nothing_starts_for_an_expression_that_grep_refuses(expect: str) -> None:
    spec = HostSpec(accept_commands=(AcceptCommand("a", ("b",), "dcgm"), AcceptCommand("a", ("b",), expect)))
    words = (System(), spec, lambda event: None, 1, lambda tests: pytest.fail("it started"))
    assert "is no regular expression of grep -E" in refused(accept, *words).what


def test_nothing_starts_on_a_gpu_with_mig(monkeypatch: pytest.MonkeyPatch) -> None:
    # CUDA shows a program one instance of one GPU: each GPU would seem to be silent.
    gpu = "<uuid>GPU-0</uuid><mig_mode><current_mig>Enabled</current_mig></mig_mode>"

    divided = Scripted()
    divided.answer = lambda argv: f"<nvidia_smi_log><gpu id='0'>{gpu}</gpu></nvidia_smi_log>"  # type: ignore[method-assign]
    monkeypatch.setattr(checks, "gather_holders", lambda system, *, computing: ())
    assert "GPU-0: MIG is enabled" in refusal(divided)
