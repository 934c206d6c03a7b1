"""PyTorch and TensorFlow in images of the user's: what they say, and which cause is named when they see no GPU."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.checks import frameworks
from gpuprov.checks.engines import EngineTest
from gpuprov.checks.outcome import Failed, Values
from gpuprov.checks.smi import SmiGpu, SmiReport
from tests.unit.scripted import Answer, Scripted

REPORT = SmiReport(
    "550.163.01", "12.4", tuple(SmiGpu(f"GPU-{number}", "", "", "", "", "Disabled") for number in (0, 1))
)
DIVIDED = replace(REPORT, gpus=tuple(replace(gpu, mig="Enabled") for gpu in REPORT.gpus))
FOUND = {"version": "2.5.1", "cuda": "12.4", "hip": "", "available": True, "count": 2, "warnings": [], "error": ""}
NONE = {**FOUND, "available": False, "count": 0}
INIT = "CUDA initialization"
UNEXPECTED = (
    f"{INIT}: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
    "NumCudaDevices() that might have already set an error? Error {}"
)
FLOW = {"version": "2.16.1", "count": 2, "built_with_cuda": True, "cuda": "12.3"}
PROGRAMS = Path(frameworks.__file__).parent


class Images(Scripted):
    """A docker that has each image; `answers`: what Python says in it, by the Python's name."""

    def __init__(self, **answers: tuple[int, str, str]) -> None:
        super().__init__()
        self.answers = answers

    def answer(self, argv: tuple[str, ...]) -> Answer:
        if argv[1] == "inspect":
            return ""
        python = argv[argv.index("--entrypoint") + 1]
        return self.answers.get(python, (127, "", f"exec: {python}: not found"))


@pytest.fixture(autouse=True)
def explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image itself shows no fault, unless a test says so."""
    monkeypatch.setattr(frameworks, "explain_image", lambda test: "")


def asked(do: Callable[[EngineTest], Values], found: dict[str, Any], log: str = "") -> str:
    """Return what the check shows of the container, or why it failed."""
    try:
        return do(EngineTest(Images(python3=(0, f"== banner ==\n{json.dumps(found)}\n", log)), "app", REPORT))[1]
    except Failed as failed:
        return failed.reason


def test_what_is_well_is_shown_with_the_versions() -> None:
    assert asked(frameworks.torch, FOUND) == "2 GPUs, torch 2.5.1 for CUDA 12.4"
    assert asked(frameworks.tensorflow, FLOW) == "2 GPUs, tensorflow 2.16.1 for CUDA 12.3"
    assert asked(frameworks.tensorflow, {**FLOW, "version": "1.15.5", "cuda": ""}) == "2 GPUs, tensorflow 1.15.5"
    assert asked(frameworks.torch, {**FOUND, "error": "CUDA out of memory. Tried to allocate 2 MiB"}).startswith(
        "2 GPUs"
    )


@pytest.mark.parametrize(
    ("key", "value"), [("count", "9"), ("count", None), ("warnings", 5), ("warnings", [5]), ("version", [[]])]
)
def test_an_image_that_answers_otherwise_fails_the_check(key: str, value: Any) -> None:
    for do, answer in ((frameworks.torch, {**NONE, "available": key == "count"}), (frameworks.tensorflow, FLOW)):
        test = EngineTest(Images(python3=(0, json.dumps({**answer, key: value}), "")), "app", DIVIDED)
        with pytest.raises(Failed, match=f"not the framework's: _Answer.{key}"):
            do(test)


def test_a_gpu_that_is_divided_counts_otherwise() -> None:
    """CUDA has one of its MIG devices."""
    test = EngineTest(Images(python3=(0, json.dumps({**FOUND, "count": 1}), "")), "app", DIVIDED)
    assert frameworks.torch(test) == ("2 GPUs", "1 GPU, torch 2.5.1 for CUDA 12.4")


# The warnings as PyTorch 1.13 to 2.5 write them.
@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({**NONE, "cuda": ""}, "torch 2.5.1 in app is built without CUDA; use an image with a CUDA build of PyTorch"),
        ({**NONE, "cuda": "", "hip": "6.2"}, "torch 2.5.1 in app is built for ROCm 6.2; use"),
        ({**NONE, "warnings": [UNEXPECTED.format("36: API call is not supported in the installed CUDA driver")]},
         "the runtime is newer than the driver, of the same major release"),
        ({**NONE, "warnings": [UNEXPECTED.format("803: system has unsupported display driver")]},
         "libcuda.so.1 is of another version than the loaded kernel module"),
        ({**NONE, "warnings": [UNEXPECTED.format("802: system not yet initialized")]},
         "the GPUs are joined by NVSwitches"),
        ({**NONE, "warnings": [f"{INIT}: The NVIDIA driver on your system is too old (found version 11040)."]},
         "(found version 11040).; libcuda.so.1 is older than the runtime's major release needs"),
        ({**NONE, "warnings": [f"{INIT}: Found no NVIDIA driver on your system. Please check"]},
         "no libcuda.so.1 can be loaded"),
        ({**NONE, "warnings": [f"{INIT}: CUDA unknown error - this may be due to an incorrectly set up"]},
         "often /dev/nvidia-uvm is missing"),
        ({**NONE, "warnings": [f"{INIT}: CUDA driver initialization failed, you might not have a CUDA gpu."]},
         "the program forked after it had used CUDA"),
        (NONE, "torch 2.5.1 for CUDA 12.4 sees no GPU in app"),
        ({**FOUND, "count": 1}, "torch.cuda.device_count() of torch 2.5.1 is 1 in app, the host has 2"),
        ({**FOUND, "error": "CUDA error: no kernel image is available for execution on the device"},
         "the program was built for other GPU generations"),
        ({**FOUND, "error": "GPU 1: wrong result"}, "sees the GPUs and can't compute in app: GPU 1: wrong result"),
    ],
)  # fmt: skip
def test_why_pytorch_has_no_gpu(found: dict[str, Any], reason: str) -> None:
    told = asked(frameworks.torch, found)
    assert reason in told
    # The warning itself is the evidence.
    assert all(" ".join(one.split())[:200] in told for one in found["warnings"])


@pytest.mark.parametrize(
    ("found", "log", "reason"),
    [
        ({**FLOW, "count": 0, "built_with_cuda": False}, "", "tensorflow 2.16.1 in app is built without CUDA"),
        ({**FLOW, "count": 1}, "", "tensorflow 2.16.1: the number of GPUs is 1 in app, the host has 2"),
        ({**FLOW, "count": 0}, "", "tensorflow 2.16.1 sees no GPU in app"),
        ({**FLOW, "count": 0},
         "E cuda_driver.cc:265] failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
         "the container has the libraries and no device nodes"),
        ({**FLOW, "count": 0},
         "E cuda_platform.cc:51] failed call to cuInit: INTERNAL: CUDA error: Failed call to cuInit: "
         "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: system has unsupported display driver",
         "libcuda.so.1 is of another version than the loaded kernel module"),
        ({**FLOW, "count": 0}, "E cuda_driver.cc:266] failed call to cuInit: UNKNOWN ERROR (303)",
         "sees no GPU in app: failed call to cuInit: UNKNOWN ERROR (303)"),
        ({**FLOW, "count": 0},
         "E cuda_diagnostics.cc:313] kernel version 550.163.1 does not match DSO version 535.261.3 -- cannot find",
         "kernel version 550.163.1 does not match DSO version 535.261.3; libcuda.so.1 is of another version"),
        ({**FLOW, "count": 0}, "W dso_loader.cc:64] Could not load dynamic library 'libcudart.so.11.0'; dlerror: x",
         "Could not load dynamic library 'libcudart.so.11.0'"),
        ({**FLOW, "count": 0}, "W gpu_device.cc:2256] Cannot dlopen some GPU libraries. Please make sure",
         "Cannot dlopen some GPU libraries: the image lacks CUDA's libraries"),
    ],
)  # fmt: skip
def test_why_tensorflow_has_no_gpu(found: dict[str, Any], log: str, reason: str) -> None:
    assert reason in asked(frameworks.tensorflow, found, f"I something else\n{log}\n")


def test_the_images_own_libcuda_is_the_cause_before_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "explain_image", lambda test: "/opt/own/libcuda.so.1 is of driver 535")
    said = UNEXPECTED.format("36: API call is not supported")
    told = asked(frameworks.torch, {**NONE, "warnings": [said]})
    assert told == f"torch 2.5.1 for CUDA 12.4 sees no GPU in app: {said}; /opt/own/libcuda.so.1 is of driver 535"


def test_older_images_have_python_alone_and_others_none() -> None:
    old = EngineTest(Images(python=(0, json.dumps(FLOW), "")), "app", REPORT)
    assert frameworks.tensorflow(old)[1] == "2 GPUs, tensorflow 2.16.1 for CUDA 12.3"
    for answers in ({}, {"python3": (1, "", "Traceback\nModuleNotFoundError: No module named 'torch'")}):
        with pytest.raises(Failed, match=r"Python in app exited (127: exec: python3: not found|1: .*No module named)"):
            frameworks.torch(EngineTest(Images(**answers), "app", REPORT))


MODULES = {
    "torch.py": """
import warnings
__version__ = "2.5.1"
class version:
    cuda = "12.4"
class cuda:
    def is_available():
        warnings.warn("CUDA initialization: Found no NVIDIA driver on your system.")
        warnings.warn("something else")
        return False
    def device_count():
        return 0
""",
    "tensorflow/__init__.py": """
__version__ = "{}"
class config:
    def list_physical_devices(kind):
        return [kind, kind]
class sysconfig:
    pass
class test:
    def is_built_with_cuda():
        return True
""",
    "tensorflow/python/__init__.py": "",
    "tensorflow/python/client/__init__.py": "",
    "tensorflow/python/client/device_lib.py": """
class Device:
    def __init__(self, device_type):
        self.device_type = device_type
def list_local_devices():
    return [Device("CPU"), Device("GPU")]
""",
}


def ran(program: str, folder: Path, version: str = "") -> dict[str, Any]:
    for name, content in MODULES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content.replace("{}", version))
    source = (PROGRAMS / f"{program}_program.py").read_text()
    argv = (sys.executable, "-c", source)
    done = subprocess.run(
        argv, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_programs_ask_what_each_version_has(tmp_path: Path) -> None:
    """With modules that have the calls of each version, and nothing else."""
    told = "CUDA initialization: Found no NVIDIA driver on your system."
    assert ran("torch", tmp_path) == {**NONE, "warnings": [told]}
    assert ran("tensorflow", tmp_path, "2.0.0") == {**FLOW, "version": "2.0.0", "cuda": ""}
    assert ran("tensorflow", tmp_path, "1.15.5") == {**FLOW, "version": "1.15.5", "cuda": "", "count": 1}
