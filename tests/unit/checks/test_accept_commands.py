"""The site's own commands of `gpuprov accept`: outputs as public issues and documents show them, and hostile ones."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from gpuprov.checks import accept, health
from gpuprov.checks.accept_commands import read, read_dcgm, read_nccl, read_nvbandwidth
from gpuprov.checks.engines import DOCKER, EngineTest
from gpuprov.checks.smi import SmiGpu, SmiReport
from gpuprov.core.commands import TIMED_OUT, Completed
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import CheckDone, Event, Finished, GpuMeasured, HealthFound, Sink
from gpuprov.protocol.spec import AcceptCommand, parse_spec, spec_to_json
from tests.unit.scripted import Scripted

# NVIDIA/DCGM issue 139 (DCGM 3), shortened.
DCGM_3 = """{
	"DCGM GPU Diagnostic" :
	{
		"test_categories" :
		[
			{"category" : "Deployment", "tests" : [{"name" : "Denylist", "results" : [{"status" : "Pass"}]}]},
			{
				"category" : "Integration",
				"tests" :
				[ { "name" : "PCIe", "results" : [ { "gpu_id" : "0", "status" : "Skip" } ] } ]
			}
		]
	}
}"""
# The keys of DCGM 4 as facebookresearch/gcm's change 38 has them; nv-hostengine's line precedes.
DCGM_4 = """Started host engine version 4.5.2 using port number: 5555
{"DCGM Diagnostic": {"test_categories": [{"category": "Hardware", "tests": [{"name": "memory", "results": [
 {"entity_group": "GPU", "entity_group_id": 1, "entity_id": 0, "status": "Pass"},
 {"entity_group": "GPU", "entity_group_id": 1, "entity_id": 3, "status": "Fail", "warnings": [{"error_id": 1}]}],
 "test_summary": {"status": "Fail"}}]}]}, "metadata": {"DCGM Version": "4.5.2"}}"""
# nvbandwidth 0.10 on seven GPUs, from a public log; the second table is that of Azure's node health check.
NVBANDWIDTH = """nvbandwidth Version: v0.10.0
Built from Git version: v0.10

CUDA Runtime Version: 13.3 (13030)
CUDA Driver Version (API): 13.3 (13030)
Driver Version: 610.57.04

Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0         1         2         3         4         5         6
 0     55.59     55.60     55.60     55.59     55.58     55.60     55.58

SUM host_to_device_memcpy_ce 389.15
COEFFICIENT_OF_VARIATION host_to_device_memcpy_ce 0.00

Running device_to_device_memcpy_read_ce.
memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0       N/A    276.07
 1    276.19       N/A

SUM device_to_device_memcpy_read_ce 552.26

Waived:
"""
# nccl-tests 2.13 and NCCL 2.19 on eight H200, from a public log.
NCCL = """NCCL version 2.19.3+cuda12.2
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
  8589934592    2147483648     float     sum      -1    31517  272.55  476.96      0    31516  272.56  476.98      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 476.967
#
"""
WORDS = ("all_reduce_perf", "-b", "8G")
PROGRAM = Completed((), 0, "".join(f'{{"step": "{step}", "gpu": "GPU-0"}}\n' for step in (*accept.STEPS, "end")))


def test_dcgm_passes_where_each_test_passes_and_names_what_did_not() -> None:
    assert read_dcgm(DCGM_4.replace("Fail", "Pass")) == ("", {})
    assert read_dcgm(DCGM_3.replace("Skip", "Pass")) == ("", {})
    assert read_dcgm(DCGM_4)[0] == "memory: Fail, GPU 3"
    assert read_dcgm(DCGM_3)[0] == "PCIe: Skip, GPU 0"


@pytest.mark.parametrize("text", [
    "", "{}", "{" * 100_000, '{"DCGM Diagnostic": 5}', '{"DCGM Diagnostic": {"test_categories": [{"tests": 1}]}}',
    '{"DCGM Diagnostic": {"test_categories": []}}', "[" * 100_000 + "}",
    '{"DCGM Diagnostic": {"test_categories": [{"category": "a", "tests": [{"name": "b"}]}]}}',
])  # fmt: skip
def test_what_dcgm_does_not_print_proves_nothing(text: str) -> None:
    assert read_dcgm(text)[0]


def test_nvbandwidth_has_the_slowest_cell_of_each_test() -> None:
    fault, figures = read_nvbandwidth(NVBANDWIDTH)
    assert fault == ""
    assert figures == pytest.approx({"host_to_device_memcpy_ce": 55.58e9, "device_to_device_memcpy_read_ce": 276.07e9})


@pytest.mark.parametrize("text", [
    "", "Running a.\nlatency (ns)\n 0  512.1\n", "Running \x1b[31m.\nx bandwidth (GB/s)\n 0  5.0\n", "\n" * 100_000,
    "Running a.\nx bandwidth (GB/s)\n 0  nan  inf  1e400  -3.0\n", "Running a.\nx bandwidth (GB/s)\n 0  9999999.0\n",
])  # fmt: skip
def test_nvbandwidth_without_a_figure_failed(text: str) -> None:
    assert read_nvbandwidth(text) == ("no table of bandwidths in its output", {})


def test_nccl_has_its_bus_bandwidth_and_no_wrong_value() -> None:
    assert read_nccl(NCCL) == ("", {"avg_bus_bandwidth": 476.967e9})
    assert read_nccl(NCCL.replace("0 OK", "50 FAILED"))[0] == "50 wrong values"
    for hostile in (
        "",
        NCCL.replace("476.967", "nan"),
        NCCL.replace("476.967", "9" * 400),
        NCCL.replace("476.967", "9999999"),
        NCCL.replace("0 OK", "OK"),
    ):
        assert read_nccl(hostile) == ("no result of nccl-tests in its output", {})


@pytest.mark.parametrize(("expect", "code", "fault"), [
    ("", 0, ""), ("", 3, "exit code 3: it broke"), ("^speed: [0-9]+$", 0, ""), ("^speed: [0-9]+$", 1, "exit code 1: "),
    ("slow", 0, "nothing in its output is slow"), ("(open", 0, "nothing in its output is (open"),
    ("nccl", 0, "no result of nccl-tests in its output"),
    # Python's own expressions would work at it for years.
    ("^(p+)+$", 0, "nothing in its output is ^(p+)+$"),
])  # fmt: skip
def test_other_commands_have_an_expression_and_an_exit_code(expect: str, code: int, fault: str) -> None:
    done = Completed(WORDS, code, f"speed: 51\n{'p' * 5000}!\n", "it broke" if code else "")
    found, figures = read(System(), AcceptCommand("image", WORDS, expect), done)
    assert (found, figures) == (fault, {}) or (fault.endswith(": ") and found.startswith(fault))


def test_a_grep_that_comes_to_no_end_does_not_tell_that_nothing_matches() -> None:
    host = Scripted(answers={"grep": (TIMED_OUT, "", "stopped after 20 s, its time limit")})
    found, _ = read(host, AcceptCommand("image", WORDS, "[0-9]"), Completed(WORDS, 0, "5"))
    assert found == "`grep -aqE -e [0-9]` exited 124: stopped after 20 s, its time limit"


@pytest.mark.parametrize("wrong", [
    {"image": "-v/:/host", "command": ["a"]}, {"image": "a", "command": []}, {"image": "a", "command": ["a\x1b[2J"]},
    {"image": "a", "command": "a"}, {"image": "a", "command": ["a"], "expect": "a\nb"}, {"image": "a"},
    {"image": "a", "command": ["a"], "volumes": ["/:/host"]},
])  # fmt: skip
def test_a_wrong_command_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(GpuprovError, match="gpuprov_accept_commands"):
        parse_spec({"accept_commands": [wrong]})


class Host(System):
    """A host with docker, whose containers print what a test says, after the program that loads the GPUs."""

    def __init__(self, *outputs: Completed) -> None:
        super().__init__()
        self.outputs = [PROGRAM, *outputs]
        self.ran: list[tuple[str, ...]] = []
        self.limits: list[float] = []

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        if argv[:2] != ("docker", "run"):
            gpus = '<gpu id="0"></gpu>' * 8 if argv[0] == "nvidia-smi" else ""
            return Completed(tuple(argv), 0, f"<nvidia_smi_log>{gpus}</nvidia_smi_log>" if gpus else "")
        self.ran.append(tuple(argv))
        self.limits.append(more["timeout"])
        return self.outputs.pop(0)


def carried_out(monkeypatch: pytest.MonkeyPatch, host: Host, *commands: dict[str, Any]) -> list[Event]:
    """Return the events of 10 minutes with these commands, from the end of the program on."""
    spec = parse_spec(spec_to_json(parse_spec({"verify_image": "own", "accept_commands": list(commands)})))
    readings = health.Readings(gpus=())
    monkeypatch.setattr(health, "read", lambda system, sink: readings)
    monkeypatch.setattr(health, "judge", lambda read: ())
    monkeypatch.setattr(health, "examine", lambda system, sink: Finished(0, versions={"gpus": "8"}))
    test = EngineTest(host, "own", SmiReport("580", "13.0", (SmiGpu("GPU-0", "H200", "", "", "", ""),) * 8), DOCKER)
    events: list[Event] = []

    def verify(tests: list[EngineTest]) -> bool:
        tests.append(test)
        return True

    accept.accept(host, spec, events.append, 10, verify)
    (end,) = (place for place, one in enumerate(events) if isinstance(one, CheckDone) and one.name == "GPU 7, program")
    return events[end + 1 :]


def test_figures_of_commands_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(Completed(WORDS, 0, NCCL), Completed((), 0, "fine"))
    commands = {"image": "nccl", "command": list(WORDS), "expect": "nccl"}, {"image": "own", "command": ["true"]}
    *checks, measured = carried_out(monkeypatch, host, *commands)
    assert [(one.name, one.status) for one in checks if isinstance(one, CheckDone)] == [
        ("command 1", "ok"), ("command 2", "ok"),
    ]  # fmt: skip
    assert isinstance(measured, GpuMeasured)
    assert (measured.gpu, measured.uuid, measured.model) == ("", "", "8 H200")
    assert measured.figures == {"all_reduce_perf -b 8G: avg_bus_bandwidth": 476.967e9}
    assert host.ran[1][-4:] == ("all_reduce_perf", "nccl", "-b", "8G")
    assert "--network=none" in host.ran[1]


class SlowHost(Host):
    """Looking for an image takes a quarter of an hour, as pulling one may."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        self.seconds += 900 * (argv[1] == "inspect")
        return super().run(argv, **more)


def test_pulling_an_image_takes_nothing_from_the_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    host = SlowHost(Completed((), 0))
    carried_out(monkeypatch, host, {"image": "own", "command": ["true"]})
    assert host.seconds == 900
    assert host.limits == [(600 - 15) // 2 + accept.GRACE_SECONDS, 600 - 15]


def test_a_degraded_host_without_an_engine_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(system: System, sink: Sink) -> Finished:
        sink(HealthFound("degraded", "slow", "0", "GPU-0", "it is slow", "seen", "look"))
        return Finished(0, versions={"gpus": "1"})

    monkeypatch.setattr(health, "examine", examine)
    with pytest.raises(GpuprovError, match="nothing can be accepted"):
        accept.accept(SlowHost(), parse_spec({}), lambda event: None, 10, lambda tests: True)


def test_a_command_that_fails_makes_the_host_unfit_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(Completed((), 3, "", "\x1b[2Jbroken"))
    events = carried_out(monkeypatch, host, *({"image": "own", "command": ["test"]},) * 2)
    finding, failed, skipped = events
    assert isinstance(finding, HealthFound)
    assert (finding.verdict, finding.rule, finding.evidence) == ("unfit", "accept-command", "exit code 3: broken")
    assert json.dumps(finding.what).count("\\u001b") == 0
    assert [one.status for one in (failed, skipped) if isinstance(one, CheckDone)] == ["failed", "skipped"]
