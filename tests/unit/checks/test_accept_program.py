"""The program that tests GPUs: its kernels on an emulated GPU, its processes without a libcuda."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprov.checks.accept import GRACE_SECONDS
from gpuprov.checks.cuda_checks import command
from gpuprov.core.system import System
from tests.unit.checks.emulated_cuda import MEMORY, EmulatedCuda
from tests.unit.checks.test_cuda_calls import PYTHON

_PTX = Path(__file__).parents[3] / "gpuprov/checks/accept_kernels.ptx"


def _program(**changes: Any) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(command("", accept=True)[-1], "program", "exec"), names)
    names.update({"STEPS": 8, "BLOCKS": 2, "SPARE": 0, "THREADS": 16, **changes})
    return names


def _gpu(program: dict[str, Any]) -> Any:
    return program["Gpu"](EmulatedCuda(), 0)


def _found() -> dict[str, Any]:
    return {"wrong": 0, "rounds": 0, "rate": 0.0, "error": None}


def test_every_thread_computes_what_the_processor_computes() -> None:
    program, found = _program(), _found()
    program["arithmetic"](_gpu(program), found, None)
    assert found["wrong"] == 0
    long = _program(STEPS=1024, BLOCKS=1, THREADS=4)
    long["arithmetic"](_gpu(long), found, None)
    assert found["wrong"] == 0


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("mad.lo.u32 %value, %value, 1664525, 1013904223", "mad.lo.u32 %value, %value, 1664525, 1013904222"),
        ("shr.u32 %high, %value, 20", "shr.u32 %high, %value, 21"),
        ("and.b32 %low, %value, 2047", "and.b32 %low, %value, 1023"),
        ("fma.rn.f32 %low, %low, %high, 0f4B000000", "fma.rn.f32 %low, %low, %high, 0f4B000001"),
        ("sub.rn.f32 %high, %high, 0f4B000000", "sub.rn.f32 %high, %high, 0f4B000001"),
        ("xor.b32 %value, %value, %low", "or.b32 %value, %value, %low"),
        ("sub.u32 %step, %step, 1", "sub.u32 %step, %step, 2"),
    ],
)
def test_a_unit_that_computes_wrong_results_is_found(line: str, other: str) -> None:
    assert _PTX.read_text().count(line) == 1
    program, found = _program(KERNELS=_PTX.read_bytes().replace(line.encode(), other.encode())), _found()
    program["arithmetic"](_gpu(program), found, None)
    assert found["wrong"] == 32


def test_nearly_all_memory_is_written_and_read() -> None:
    program, found = _program(), _found()
    gpu = _gpu(program)
    program["memory"](gpu, found, None)
    # Each of two events' pairs is 0.5 s: twice written, twice read.
    assert (found["wrong"], found["bytes"], found["memory"]) == (0, MEMORY // 4, MEMORY)
    # Only the counter and the table are left.
    assert len(gpu.cuda.memory.blocks) == 2


def test_no_more_than_half_is_taken_of_memory_that_is_the_hosts() -> None:
    program, found = _program(), _found()
    gpu = _gpu(program)
    gpu.cuda.attributes[18] = 1
    gpu.cuda.cuMemAlloc_v2 = lambda place, size: 0
    gpu.take(found)
    assert found["bytes"] == MEMORY // 2


@pytest.mark.parametrize("bit", range(8))
def test_a_bit_that_is_always_set_is_found(bit: int) -> None:
    program, found = _program(), _found()
    gpu = _gpu(program)
    gpu.cuda.memory.stuck[gpu.cuda.next + MEMORY // 4 - 3] = 1 << bit
    program["memory"](gpu, found, None)
    assert found["wrong"] == 1, "one of the pattern and its inverse has a 0 in this place"


def test_two_addresses_of_the_same_memory_are_found() -> None:
    program, found = _program(), _found()
    gpu = _gpu(program)
    view, start = gpu.cuda.memory.view, gpu.cuda.next
    # An address line that is stuck: two halves of the memory are one.
    gpu.cuda.memory.view = lambda at, size: view(at & ~512 if at >= start else at, size)
    program["memory"](gpu, found, None)
    assert found["wrong"] == 2 * 64


def test_rounds_are_counted_by_the_gpus_own_time() -> None:
    program, found = _program(), _found()
    gpu = _gpu(program)
    program["everything"](gpu, found, 0)
    assert (found["rounds"], found["rate"], found["wrong"]) == (1, 2.0, 0)


def test_without_a_libcuda_the_program_says_so(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()
    done = System().run(command(PYTHON, "1", accept=True), env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert json.loads(done.stdout) == {"step": "failed", "call": "", "result": None, "name": "no libcuda"}
    assert done.ok


def test_a_process_that_hangs_or_ends_is_an_error() -> None:
    program = _program(PATIENCE=0, answer=lambda *words: __import__("signal").pause())
    hangs = program["Worker"]()
    hangs.ask("memory", [0], {"gpu": "GPU-1"})
    answer = hangs.answer()
    assert answer == {"gpu": "GPU-1", "error": {"call": "", "result": None, "name": "no answer in time"}}
    ends = _program(answer=lambda *words: __import__("os")._exit(1))["Worker"]()
    ends.ask("memory", [0], {"gpu": "GPU-1"})
    assert ends.answer()["error"]["name"] == "the process ended"
    ends.ask("memory", [0], {})  # nobody reads it
    assert ends.answer()["error"]["name"] == "the process ended"


@pytest.mark.parametrize(("took", "expected"), [(100.0, 300.0), (390.0, 100.0)])
def test_the_last_step_gets_what_the_others_leave(took: float, expected: float) -> None:
    # accept ends the container soon after its time: slow links must not make a good host fail.
    clock, limits = iter([1000.0, 1000.0 + took]), {}

    class Finder:
        def ask(self, *_: Any) -> None: ...

        def answer(self) -> dict[str, Any]:
            return {"gpus": [], "error": None}

    program = _program(Worker=Finder, show=lambda *words: None, time=SimpleNamespace(monotonic=lambda: next(clock)))
    program["run"] = lambda workers, uuids, step, limit, **_: limits.update({step: limit})
    program["copy"] = lambda *words: None
    program["main"](["400"])
    assert limits["all"] == expected


def test_a_gpu_that_hangs_is_named_before_the_container_is_ended() -> None:
    assert _program()["PATIENCE"] < GRACE_SECONDS - 10


def test_peers_are_measured_while_no_other_process_has_a_context() -> None:
    # Else each GPU in compute mode Exclusive_Process would refuse the second process.
    users: dict[object, list[int]] = {}

    class Process:
        def ask(self, step: str, ordinals: list[int], found: dict[str, Any]) -> None:
            users.setdefault(self, []).extend(ordinals)
            others = [one for process, used in users.items() for one in used if process is not self]
            error = {"call": "cuDevicePrimaryCtxRetain", "result": 46, "name": "CUDA_ERROR_DEVICE_UNAVAILABLE"}
            self.found = {**found, "rate": 1, "error": error if {*others} & {*ordinals} else None}

        def answer(self) -> dict[str, Any]:
            return self.found

        def stop(self) -> None:
            users.pop(self, None)

    shown: list[dict[str, Any]] = []
    program = _program(Worker=Process, show=lambda step, found: shown.append(found))
    workers = {0: Process(), 1: Process()}
    workers[0].ask("memory", [0], {})
    workers[1].ask("memory", [1], {})
    program["copy"](workers, ["GPU-0", "GPU-1"])
    assert [(one["error"], list(one["peers"])) for one in shown] == [(None, ["GPU-1"]), (None, ["GPU-0"])]
    assert not users


def test_copies_use_the_memory_next_to_the_gpu() -> None:
    # The driver pins memory of the node on which the process runs.
    used: list[set[int]] = []
    gpu = SimpleNamespace(
        call=lambda name, *words: words[0].__setattr__("value", b"0000:4B:00.0") if "BusId" in name else None,
        device=0, allocate=lambda size: 0, new=lambda *words: 0, rate=lambda target, source: len(used),
    )  # fmt: skip
    found = _found()
    program = _program(
        open=lambda path: io.StringIO("0-1,4\n" if path.endswith("/0000:4b:00.0/local_cpulist") else ""),
        os=SimpleNamespace(sched_setaffinity=lambda process, processors: used.append(processors)),
    )
    program["copies"](gpu, found, None)
    assert used == [{0, 1, 4}]
    assert [found[name] for name in ("to_device", "from_device", "within")] == [1, 1, 1]
