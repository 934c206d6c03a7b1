"""`gpuprov health` for those who call it: Slurm, node-problem-detector, systemd, as docs/health.md shows each.

scontrol is recorded. A stand-in has the rules of node-problem-detector, which Debian does not have.
"""

import json
import os
import re
import shlex
import threading
from collections.abc import Callable
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpuprov.checks import health as checks
from gpuprov.cli import health as callers
from gpuprov.cli.main import cli
from gpuprov.core.commands import Completed
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.events import Finished, HealthFound, Sink
from tests.unit.test_health import HealthHost, report_of

_PAGE = (Path(__file__).parents[2] / "docs/health.md").read_text()

# Slurm 22.05's `scontrol show node --oneliner`, shortened; {} stands for the state, and for a reason.
_SHOWN = (
    "NodeName=gpu1 Arch=x86_64 CoresPerSocket=1 NodeAddr=gpu1 Version=22.05.8 State={state} ThreadsPerCore=1 Weight=1 "
    " BootTime=2026-11-23T08:00:00 CurrentWatts=0{reason}"
)
_OURS = " Reason=gpuprov health: GPU 0: it is hot [root@2026-11-23T18:00:00]"
_ADMINS = " Reason=replace the fan, gpuprov health: no [ops@2026-11-23T18:00:00]"
_FIT = Finished(0, summary="ok: 8 GPUs")
_DEGRADED = Finished(6, problems=(Problem("degraded: GPU 1: persistence mode is off"),), summary="degraded: 1 finding")
_UNFIT = Finished(7, problems=(Problem("unfit: GPU 3: broken memory rows could not be replaced"),))
_SMI_HANGS = Finished(7, problems=(Problem("unfit: nvidia-smi hangs: a GPU does not answer"),))
_HANGING = Finished(7, summary="never")
Slurm = Callable[..., tuple[Result, list[str]]]


def _judging(monkeypatch: pytest.MonkeyPatch, finished: Finished | Exception) -> None:
    def examine(system: Any, sink: Sink, seconds: float) -> Finished:
        if isinstance(finished, Exception):
            raise finished
        if finished is _HANGING:
            threading.Event().wait()
        for problem in finished.problems if finished.exit_code == ExitCode.UNFIT else ():
            sink(HealthFound("unfit", "nvidia-smi-hangs" if "hangs" in problem.what else "a-rule", "", "", "", "", ""))
        return finished

    monkeypatch.setattr(checks, "examine", examine)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Return what runs `--for slurm` for a verdict and a node, and returns its result and scontrol's calls."""
    program, said = tmp_path / "scontrol", tmp_path / "said"
    program.write_text(f'#!/bin/sh\necho "$*" >> {said}.calls\n[ "$1" = update ] || cat {said}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu1")

    def run(finished: Finished | Exception, state: str = "IDLE", reason: str = "") -> tuple[Result, list[str]]:
        _judging(monkeypatch, finished)
        said.write_text(_SHOWN.format(state=state, reason=reason) + "\n")
        done = CliRunner().invoke(cli, ["health", "--for", "slurm"])
        calls = Path(f"{said}.calls")
        return done, [one for one in calls.read_text().splitlines() if "update" in one] if calls.exists() else []

    return run


_DRAIN = "update NodeName=gpu1 State=DRAIN Reason=gpuprov health: GPU 3: broken memory rows could not be replaced"
_RESUME = "update NodeName=gpu1 State=RESUME"


@pytest.mark.parametrize(("finished", "state", "reason", "calls"), [
    (_FIT, "IDLE", "", []),
    (_UNFIT, "DOWN", _ADMINS, []),
    (_FIT, "DOWN+DRAIN", _ADMINS, []),
    (_FIT, "DOWN+DRAIN", _OURS, [_RESUME]),
    (_UNFIT, "IDLE+REBOOT_REQUESTED", "", [_DRAIN]),
    (_FIT, "IDLE+DRAIN+REBOOT_ISSUED", _OURS, []),
    (_DEGRADED, "MIXED", "", []),
    (_UNFIT, "IDLE", "", [_DRAIN]),
    (_UNFIT, "ALLOCATED", "", [_DRAIN]),
    (_UNFIT, "DOWN*", " Reason=Not responding [slurm@2026-11-23T18:00:00]", [_DRAIN]),
    (_UNFIT, "IDLE+DRAIN", _OURS, []),
    (_UNFIT, "IDLE+DRAIN", _ADMINS, []),
    (_FIT, "IDLE+DRAIN", _OURS, [_RESUME]),
    (_DEGRADED, "MIXED+DRAIN", _OURS, [_RESUME]),
    (_FIT, "IDLE+DRAIN", _ADMINS, []),
    (_FIT, "IDLE+DRAIN", "", []),
    (_FIT, "IDLE", _OURS, []),
])  # fmt: skip
def test_slurm_drains_unfit_nodes(slurm: Slurm, finished: Finished, state: str, reason: str, calls: list[str]) -> None:
    done, made = slurm(finished, state, reason)
    assert (done.exit_code, made) == (0, calls)
    assert bool(done.output) == bool(calls) or "left as it is" in done.output


@pytest.mark.parametrize("name", ["ALL", "gpu[1-100]", "gpu1,gpu2", "gpu1 State=RESUME"])
def test_slurm_changes_no_other_node(slurm: Slurm, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", name)
    done, calls = slurm(_UNFIT)
    assert calls == []
    assert "Slurm has no node of the name" in str(done.exception)


def test_slurm_drains_a_node_that_hangs(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuprov.cli.health.SLURM_SECONDS", 0.01)
    done, calls = slurm(_HANGING)
    assert (done.exit_code, len(calls)) == (0, 1)
    assert "no answer within 0.01 s" in calls[0]


def test_slurm_leaves_a_node_that_can_not_be_judged(slurm: Slurm) -> None:
    done, calls = slurm(GpuprovError("the machine has no memory left"), "IDLE+DRAIN", _OURS)
    assert (done.exit_code, calls) == (1, [])
    assert "left as it is: the machine has no memory left" in done.output


@pytest.mark.parametrize(
    ("error", "said"), [(RuntimeError("can't start new thread"),) * 2, (MemoryError(), "MemoryError()")]
)
def test_slurm_leaves_a_node_whose_judgement_breaks_off(slurm: Slurm, error: Exception, said: object) -> None:
    done, calls = slurm(error)
    assert (done.exit_code, calls) == (1, [])
    assert f"left as it is: {said}" in done.output


def test_a_scontrol_that_fails_is_named(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text(
        "#!/bin/sh\necho slurm_load_node error: Unable to contact controller >&2; exit 1\n"
    )
    done, _ = slurm(_UNFIT)
    assert isinstance(done.exception, GpuprovError)
    assert "Unable to contact" in str(done.exception)


@pytest.mark.parametrize(("finished", "code", "line"), [
    (_FIT, 0, "ok: 8 GPUs\n"),
    (_DEGRADED, 0, "degraded: GPU 1: persistence mode is off\n"),
    (_UNFIT, 1, "unfit: GPU 3: broken memory rows could not be replaced\n"),
    (Finished(7, problems=(Problem("unfit: " + "GPU\n" * 90),)), 1, ("unfit: " + "GPU " * 90)[:80].rstrip() + "\n"),
    (GpuprovError("no memory"), 2, "unknown: no memory\n"),
    (_SMI_HANGS, 2, "unknown: nvidia-smi hangs: a GPU does not answer\n"),
])  # fmt: skip
def test_npd_gets_code_and_line(monkeypatch: pytest.MonkeyPatch, finished: Finished, code: int, line: str) -> None:
    _judging(monkeypatch, finished)
    done = CliRunner().invoke(cli, ["health", "--for", "npd"])
    assert (done.exit_code, done.output.rstrip()) == (code, line.rstrip())
    assert len(done.output) <= 81


def test_a_caller_takes_no_inventory() -> None:
    done = CliRunner().invoke(cli, ["health", "--for", "npd", "--hosts", "gpu1,"])
    assert done.exit_code == ExitCode.USAGE
    assert "leave out the other options" in done.output


# -- a host that is read ---------------------------------------------------------------------------------------------

_BROKEN = "<compute_mode>Prohibited</compute_mode>"
_XID = "NVRM: Xid (PCI:0000:1b:00): {}"
_RESET_ASKED = _XID.format("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
_RESET_DONE = _XID.format("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
_ECC = _XID.format("48, pid=7, An uncorrectable double bit error (DBE) has been detected")
_GPU = "<pci><pci_bus_id>00000000:1B:00.0</pci_bus_id></pci>"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HealthHost:
    """A healthy host with a GPU, which `gpuprov health` reads in the place of this machine."""
    found = HealthHost(tmp_path / "host")
    found.report, found.journal = report_of(_GPU), Completed((), 1)
    examine = checks.examine
    monkeypatch.setattr(checks, "examine", lambda system, sink, seconds: examine(found, sink, seconds))
    return found


def test_slurm_resumes_a_node_after_a_reset(slurm: Slurm, host: HealthHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}._judging", lambda *words: None)
    host.journal = Completed((), 0, "\n".join((_ECC, _RESET_ASKED)))
    done, (drain,) = slurm(_FIT)
    assert drain.startswith(
        "update NodeName=gpu1 State=DRAIN Reason=gpuprov health: GPU 0: the driver asks for a reset"
    )
    ours = f" Reason={drain.partition('Reason=')[2]} [root@2026-11-23T18:00:00]"
    assert slurm(_FIT, "IDLE+DRAIN", ours)[1] == [drain], "not before the reset"
    host.journal = Completed((), 0, "\n".join((_ECC, _RESET_ASKED, _RESET_DONE)))
    done, calls = slurm(_FIT, "IDLE+DRAIN", ours)
    assert (done.exit_code, calls, done.output) == (0, [drain, _RESUME], "resumed gpu1: ok: 1 GPU\n")


# -- node-problem-detector -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """A node's condition, as the Kubernetes API has it."""

    status: str
    reason: str
    message: str


class NodeProblemDetector:
    """Its rules for a permanent problem: pkg/custompluginmonitor, plugin.go and custom_plugin_monitor.go.

    Exit code 0 is OK, 1 is NonOK, all others are Unknown; standard output is trimmed and cut. The condition changes
    with the status, and keeps its first message as long as the status stays.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        (self.rule,), (self.default,) = config["rules"], config["conditions"]
        self.limits = config["pluginConfig"]
        assert self.rule["type"] == "permanent" and self.rule["condition"] == self.default["type"]
        self.condition = Condition("False", self.default["reason"], self.default["message"])

    def run(self) -> Condition:
        done = CliRunner().invoke(cli, ["health", "--for", "npd"])
        output = done.stdout.strip()
        assert len(output.encode()) <= self.limits["max_output_length"], "it would be cut"
        status = {0: "False", 1: "True"}.get(done.exit_code, "Unknown")
        if status != self.condition.status:
            fine = status == "False"
            reason = self.rule["reason"] if status == "True" else self.default["reason"]
            self.condition = Condition(status, reason, self.default["message"] if fine else output)
        return self.condition


@pytest.fixture
def detector() -> NodeProblemDetector:
    (text,) = re.findall(r"```json\n(.*?)```", _PAGE, re.DOTALL)
    return NodeProblemDetector(json.loads(text))


def test_the_detectors_condition_follows_the_host(detector: NodeProblemDetector, host: HealthHost) -> None:
    fit = Condition("False", "GPUsAreFit", "each GPU is fit for work")
    assert detector.run() == fit
    host.report = report_of(f"{_GPU}<persistence_mode>Disabled</persistence_mode>")
    assert detector.run() == fit, "degraded works"
    host.report = report_of(f"{_GPU}{_BROKEN}")
    assert detector.run() == Condition("True", "GPUIsUnfit", "unfit: GPU 0: its compute mode lets no program use it")
    host.report = report_of(_GPU)
    assert detector.run() == fit


def test_no_answer_is_unknown(detector: NodeProblemDetector, host: HealthHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "NPD_SECONDS", 0.01)
    forever = threading.Event()
    monkeypatch.setattr(host, "run", lambda argv, **more: forever.wait())
    assert detector.run() == Condition("Unknown", "GPUsAreFit", "unknown: no answer within 0.01 s")


def test_a_long_report_of_many_gpus_is_short_for_the_detector(detector: NodeProblemDetector, host: HealthHost) -> None:
    host.report = report_of(*[_BROKEN] * 64)
    found = detector.run()
    assert found.status == "True" and found.message.startswith("unfit: GPU 0, 1, 2, 3")


def test_it_answers_before_the_detector_ends_it(detector: NodeProblemDetector) -> None:
    assert float(detector.limits["timeout"].rstrip("s")) >= callers.NPD_SECONDS + 1
    assert detector.limits["max_output_length"] == callers.NPD_LENGTH


# -- systemd ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "fails"), [
    ("", False), ("<persistence_mode>Disabled</persistence_mode>", False), (_BROKEN, True),
])  # fmt: skip
def test_the_unit_of_the_page_fails_on_a_host_that_is_unfit(host: HealthHost, gpu: str, fails: bool) -> None:
    """By systemd's rule: a service of the type oneshot fails if its code is neither 0 nor in SuccessExitStatus."""
    text = next(one for one in re.findall(r"```ini\n(.*?)```", _PAGE, re.DOTALL) if "gpuprov-health.service" in one)
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert (program, service["Type"]) == ("/usr/local/bin/gpuprov", "oneshot")
    host.report = report_of(f"{_GPU}{gpu}")
    finished = checks.examine(host, lambda event: None, 1)
    assert words == ["health"]
    assert (finished.exit_code not in {0, *map(int, service["SuccessExitStatus"].split())}) is fails
