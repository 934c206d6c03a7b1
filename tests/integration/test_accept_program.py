"""The program that tests GPUs, on simulated GPUs of which a test says how they are; its kernels by a genuine ptxas."""

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.result import HostResult
from gpuprov.checks.accept import judge, parse_printed
from gpuprov.checks.cuda_checks import command
from gpuprov.checks.health import concluded
from gpuprov.checks.smi import SmiGpu, SmiReport
from gpuprov.core.commands import Completed
from gpuprov.fleet.accepted import compared
from gpuprov.protocol.errors import ExitCode
from tests.genuine.pypi import ptxas
from tests.integration.test_simgpu import on_host
from tests.simgpu.gpus import gpu
from tests.unit.checks.test_cuda_calls import PYTHON

_KERNELS = Path(__file__).parents[2] / "gpuprov/checks/accept_kernels.ptx"
Lines = dict[tuple[str, int], dict[str, Any]]


def _tested(gpus: int, seconds: int = 60, **faults: int) -> Lines:
    """Run the program; `clock_0=50` is a fault of GPU 0. Return each line by its step and its GPU (-1: none)."""
    files = [f"echo {number} > /run/simgpu/{name.replace('_', '-')}" for name, number in faults.items()]
    program = shlex.join(command(PYTHON, str(seconds), accept=True))
    done = on_host(gpus, "\n".join(["mount -t tmpfs none /run; mkdir /run/simgpu", *files, program]))
    assert done.returncode == 0, done.stderr
    minors = {gpu(minor).uuid: minor for minor in range(gpus)}
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [lines[0]["step"], lines[-1]["step"]] == ["found", "end"], done.stdout
    return {(line["step"], minors[line["gpu"]] if "gpu" in line else -1): line for line in lines}


@pytest.mark.root
@pytest.mark.needs("gcc")
def test_gpus_that_are_well() -> None:
    found = _tested(4)
    assert found["found", -1]["simulated"]
    assert [one["uuid"] for one in found["found", -1]["gpus"]] == [gpu(minor).uuid for minor in range(4)]
    for minor in range(4):
        assert all(found[step, minor]["ok"] for step in ("arithmetic", "memory", "all"))
        assert found["memory", minor]["bytes"] > 0.95 * (gpu(minor).memory_mib << 20)
        # Measured by the GPU's time, and in the unit of the copies.
        assert found["memory", minor]["memory"] > 10**12
        copies = found["copy", minor]
        assert sorted(copies["peers"]) == sorted(gpu(other).uuid for other in range(4) if other != minor)
        assert copies["within"] > min(copies["peers"].values()) > copies["to_device"] > 10**10
        assert found["all", minor]["rate"] == pytest.approx(found["all", 0]["rate"], rel=0.01)


@pytest.mark.root
@pytest.mark.needs("gcc")
def test_slow_gpus_and_links_show_in_their_own_figures() -> None:
    found = _tested(4, clock_0=50, host_link_1=30, peer_link_2=60)
    assert found["all", 0]["rate"] == pytest.approx(found["all", 3]["rate"] / 2, rel=0.01)
    assert found["copy", 0]["within"] == pytest.approx(found["copy", 3]["within"] / 2, rel=0.01)
    assert found["copy", 1]["to_device"] == pytest.approx(found["copy", 3]["to_device"] * 0.3, rel=0.01)
    for minor in (0, 1, 3):
        peers = found["copy", minor]["peers"]
        usual = max(peers.values())
        slow = {uuid for uuid, rate in peers.items() if rate < 0.9 * usual}
        assert slow == {gpu(2).uuid}
    assert found["all", 1]["rate"] == pytest.approx(found["all", 3]["rate"], rel=0.01)


@pytest.mark.root
@pytest.mark.needs("gcc")
def test_gpus_that_fail_are_left_out_and_the_others_go_on() -> None:
    found = _tested(4, dies_after_0=20, wrong_sums_1=7, dies_after_2=0)
    died = found["all", 0]
    assert died["error"] == {"call": "cuLaunchKernel", "result": 719, "name": "CUDA_ERROR_LAUNCH_FAILED"}
    assert 15 < died["rounds"] / died["rate"] < 20
    assert (found["arithmetic", 1]["ok"], found["arithmetic", 1]["wrong"]) == (False, 7)
    assert found["arithmetic", 2]["error"]["result"] == 719
    for minor in (1, 2):
        assert not {("memory", minor), ("copy", minor), ("all", minor)} & found.keys()
    assert found["all", 3]["ok"]
    assert list(found["copy", 3]["peers"]) == [gpu(0).uuid]


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_a_genuine_ptxas_accepts_the_kernels(target: str, tmp_path: Path) -> None:
    subprocess.run((ptxas(), "-arch", target, "-o", tmp_path / "kernels", _KERNELS), check=True)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.needs("gcc")
def test_of_a_fleet_of_8_the_slow_gpu_and_the_flaky_links_are_named_and_nobody_else() -> None:
    faults: dict[int, dict[str, int]] = {2: {"clock_1": 50}, 5: {"peer_link_2": 60}, 7: {"dies_after_0": 20}}
    smi = SmiReport("550", "12.4", tuple(SmiGpu(gpu(n).uuid, gpu(n).name, "", "", "", "") for n in range(3)))
    printed = {number: _tested(3, **faults.get(number, {})) for number in (0, *faults)}
    results = []
    for number in range(8):
        text = "\n".join(map(json.dumps, printed.get(number, printed[0]).values()))
        found, measured = judge(parse_printed(text), Completed((), 0, text), smi)
        ended = concluded(found, "3")
        result = HostResult(f"gpu{number}", ExitCode(ended.exit_code), health=tuple(found), measured=measured)
        results.append(replace(result, problems=ended.problems, versions=ended.versions))
    ill = {one.host: one for one in compared(results, {}, ()) if one.health}
    assert {host: {(x.rule, x.gpu) for x in one.health} for host, one in ill.items()} == {
        "gpu2": {("accept-slow", "1")}, "gpu5": {("accept-slow", "2")}, "gpu7": {("accept-failed", "0")},
    }  # fmt: skip
    assert [found.what for found in ill["gpu5"].health] == ["slow link to GPU 0, 1"]
    assert [one.exit_code for one in ill.values()] == [ExitCode.DEGRADED, ExitCode.DEGRADED, ExitCode.UNFIT]
