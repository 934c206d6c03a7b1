"""The program that calls CUDA: with a libcuda that computes, with the simulated one, and with none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprov.checks.cuda_checks import KERNEL, OWN, Calls, FailedCall, Kernel, command, parse_calls
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from tests.simgpu import build_libraries

SOURCE = Path(__file__).with_name("computing_libcuda.c")
# Without links: pyenv's shims are shell scripts.
PYTHON = os.path.realpath(sys.executable)


@pytest.fixture(scope="module")
def computing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda that computes."""
    folder = tmp_path_factory.mktemp("libcuda")
    library = folder / "libcuda.so.550.163.01"
    argv = ("gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(SOURCE))
    subprocess.run(argv, check=True)
    (folder / "libcuda.so.1").symlink_to(library.name)
    return folder


def called(folder: Path | str, *words: str, **environment: str) -> Calls:
    done = System().run(command(PYTHON, *words), env={"LD_LIBRARY_PATH": str(folder), **environment})
    found = parse_calls(done)
    assert isinstance(found, Calls), found
    return found


def test_the_kernel_computes_on_each_gpu(computing: Path) -> None:
    found = called(computing, KERNEL)
    assert (found.version, found.release, found.failed) == (12040, "12.4", None)
    assert found.uuids == ("GPU-0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a", "GPU-0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b")
    assert found.kernel == Kernel(gpus=2)
    assert found.loaded["libcuda.so.1"] == str(computing / "libcuda.so.550.163.01")
    assert called(computing).kernel is None


@pytest.mark.parametrize(
    ("fault", "kernel"),
    [
        ("result:3", Kernel(wrong="GPU 0: 3 of 100003 results are wrong", gpus=2)),
        ("cuLaunchKernel:700", Kernel(wrong="GPU 0: cuLaunchKernel gives 700 (CUDA_ERROR_ILLEGAL_ADDRESS)", gpus=2)),
        ("cuCtxSynchronize:719", Kernel(wrong="GPU 0: cuCtxSynchronize gives 719", gpus=2)),
        ("cuModuleLoadData:222", Kernel(wrong="GPU 0: cuModuleLoadData gives 222", gpus=2)),
        # Other programs use the GPU: no fault of the host's.
        ("cuMemAlloc_v2:2", Kernel(left_out="GPU 0 is busy: cuMemAlloc_v2 gives 2")),
    ],
)
def test_a_kernel_that_fails_is_told_with_its_call(computing: Path, fault: str, kernel: Kernel) -> None:
    assert called(computing, KERNEL, FAULT=fault).kernel == kernel


@pytest.mark.parametrize(("mode", "is_busy"), [("0", False), ("1", True), ("2", False), ("3", True)])
def test_only_exclusive_modes_keep_other_programs_out(computing: Path, mode: str, is_busy: bool) -> None:
    """In the default mode programs share a GPU, and a broken one is unavailable too; mode 2 prohibits all."""
    seen = "cuDevicePrimaryCtxRetain gives 46"
    kernel = Kernel(left_out=f"GPU 0 is busy: {seen}") if is_busy else Kernel(wrong=f"GPU 0: {seen}", gpus=2)
    assert called(computing, KERNEL, FAULT="cuDevicePrimaryCtxRetain:46", MODE=mode).kernel == kernel


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceGetUuid_v2"])
def test_a_call_that_fails_ends_the_calls(computing: Path, call: str) -> None:
    found = called(computing, KERNEL, FAULT=f"{call}:999")
    assert (found.failed, found.uuids, found.kernel) == (FailedCall(call, 999, ""), (), None)
    assert (found.version, str(found.failed)) == (12040, f"{call} gives 999")


def test_a_host_ignores_the_callers_own_choice_of_gpus(computing: Path) -> None:
    assert called(computing, CUDA_VISIBLE_DEVICES="1").variables["CUDA_VISIBLE_DEVICES"] == "1"
    assert called(computing, OWN, CUDA_VISIBLE_DEVICES="1").variables["CUDA_VISIBLE_DEVICES"] == ""


def test_the_simulated_library_has_the_mark_that_leaves_the_kernel_out() -> None:
    """Through the program itself: its cuInit needs nodes that this machine need not have."""
    check = (
        "import ctypes, runpy, sys; program = runpy.run_path(sys.argv[1]);"
        "print(program['computed'](ctypes.CDLL('libcuda.so.1'), 2))"
    )
    program = str(Path(SOURCE).parents[3] / "gpuprov/checks/calls_program.py")
    environment = {"LD_LIBRARY_PATH": str(build_libraries())}
    done = System().run((PYTHON, "-c", check, program), env=environment)
    assert done.stdout == "{'left_out': 'the GPUs are simulated and compute nothing', 'gpus': []}\n", done.evidence()


def test_without_a_library_the_loaders_message_is_told(tmp_path: Path) -> None:
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (tmp_path / name).touch()
    found = called(tmp_path, KERNEL)
    assert [found.faults[name].endswith("file too short") for name in ("libcuda.so.1", "libnvidia-ml.so.1")] == [
        True
    ] * 2
    assert (found.loaded, found.version, found.failed, found.kernel) == ({}, 0, None, None)


@pytest.mark.parametrize(
    ("done", "why"),
    [
        (Completed((), 127, "", "exec: python3: not found"), "exited 127: exec: python3: not found"),
        (Completed((), 1, "", "Traceback\nModuleNotFoundError: No module named '_ctypes'"),
         "No module named '_ctypes'"),
        (Completed((), 0, "banner\n", ""), "exited 0: banner"),
        (Completed((), 0, "{}", ""), "its output is not that of gpuprov's program"),
        (Completed((), 0, '{"loaded": {}, "faults": {}, "variables": {}, "version": Infinity}', ""),
         "its output is not that of gpuprov's program"),
        (Completed((), 0, '{"loaded": 1}', ""), "its output is not that of gpuprov's program"),
        (Completed((), 0, "{" * 100_000, ""), "exited 0: {{"),
    ],
)  # fmt: skip
def test_output_that_is_none_is_a_sentence(done: Completed, why: str) -> None:
    found = parse_calls(done)
    assert isinstance(found, str)
    assert why in found


def test_a_banner_before_the_output_does_no_harm_and_a_crash_in_the_kernel_is_told(computing: Path) -> None:
    done = System().run(command(PYTHON), env={"LD_LIBRARY_PATH": str(computing)})
    found = parse_calls(Completed((), 139, f"== banner ==\n{done.stdout}", ""))
    assert isinstance(found, Calls)
    assert found.kernel == Kernel(wrong="the program ended with 139 while the kernel ran")
