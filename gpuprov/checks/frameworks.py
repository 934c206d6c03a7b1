"""PyTorch's and TensorFlow's own view of the GPUs, in images of the user's, and why they see none."""

from __future__ import annotations

import re

from gpuprov.checks.cuda.compatibility import result_of
from gpuprov.checks.cuda_checks import DIVIDED, explain_image, source_of
from gpuprov.checks.engines import ALL, EngineTest
from gpuprov.checks.outcome import Failed, Values
from gpuprov.core.commands import NOT_FOUND, Completed
from gpuprov.protocol.codec import Name, Text, WrongDataError, json_at, load
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.tables import packaged
from gpuprov.protocol.words import counted, one_line

TORCH, TENSORFLOW = "torch", "tensorflow"
_SECONDS = 600
_LONGEST = 300
# Other programs use the GPU: no fault of the host's.
_BUSY = ("out of memory", "busy or unavailable")
# What TensorFlow logs (stream_executor, cuda_driver and dso_loader), before 2.18 and since.
_TENSORFLOW_RESULT = re.compile(r"failed call to cuInit:.*?(CUDA_ERROR_\w+|UNKNOWN ERROR \(\d+\))")
_TENSORFLOW_LIBRARY = re.compile(r"Could not load dynamic library '([^']+)'")
_TENSORFLOW_VERSIONS = re.compile(r"kernel version (\S+) does not match DSO version (\S+)")
_TENSORFLOW_LIBRARIES = "Cannot dlopen some GPU libraries"


def torch(test: EngineTest) -> Values:
    """PyTorch must see each of the GPUs, and compute on it."""
    found, _ = _asked(test, TORCH)
    name = f"torch {found.version or '?'}"
    cuda = found.cuda
    if not cuda:
        other = f"for ROCm {found.hip}" if found.hip else "without CUDA"
        raise Failed(f"{name} in {test.image} is built {other}; use an image with a CUDA build of PyTorch")
    said = next(iter(found.warnings), "")
    if not found.available:
        raise Failed(_reason(test, f"{name} for CUDA {cuda} sees no GPU", said, _torch_result(said)))
    _require_all(test, found, f"torch.cuda.device_count() of {name}")
    error = found.error
    if error and not any(text in error for text in _BUSY):
        reason = _reason(test, f"{name} for CUDA {cuda} sees the GPUs and can't compute", error, _torch_result(error))
        raise Failed(reason)
    return _shown(test, found, name, cuda)


def tensorflow(test: EngineTest) -> Values:
    """TensorFlow must see each of the GPUs."""
    found, done = _asked(test, TENSORFLOW)
    name = f"tensorflow {found.version or '?'}"
    if not found.built_with_cuda:
        raise Failed(f"{name} in {test.image} is built without CUDA; use an image such as tensorflow:latest-gpu")
    if not found.count:
        raise Failed(_reason(test, f"{name} sees no GPU", *_tensorflow_cause(done.stderr)))
    _require_all(test, found, f"{name}: the number of GPUs")
    return _shown(test, found, name, found.cuda)


def _asked(test: EngineTest, framework: str) -> tuple[_Answer, Completed]:
    """Return what a framework's program printed, and how it ended. Raises Failed if it printed nothing."""
    source = source_of(f"{framework}_program.py")
    done = _run(test, "python3", source)
    if done.returncode == NOT_FOUND:
        older = _run(test, "python", source)
        done = done if older.returncode == NOT_FOUND else older
    for line in reversed(done.stdout.splitlines()):
        found = json_at(line)
        if isinstance(found, dict):
            try:
                return load(_Answer, found), done
            except WrongDataError as error:
                what = f"Python in {test.image} gives an answer that is not the framework's"
                raise Failed(f"{what}: {error}") from None
    lines = done.stderr.strip().splitlines() or ["(silent)"]
    last = next((line for line in reversed(lines) if "rror" in line), lines[-1])
    raise Failed(f"Python in {test.image} exited {done.returncode}: {one_line(last)[:_LONGEST]}")


@dataclass(frozen=True)
class _Answer:
    """What a framework's program prints; an image may print anything."""

    version: Name = ""
    cuda: Name = ""
    hip: Name = ""
    available: bool = False
    built_with_cuda: bool = False
    count: int = 0
    warnings: tuple[Text, ...] = ()
    error: Text = ""


def _run(test: EngineTest, python: str, source: str) -> Completed:
    image = test.engine.image(test.system, test.image)
    return test.engine.run(test.system, image, (python, "-c", source), ALL, seconds=_SECONDS)


def _require_all(test: EngineTest, found: _Answer, what: str) -> None:
    if found.count != len(test.host.gpus) and not any(gpu.mig == DIVIDED for gpu in test.host.gpus):
        raise Failed(f"{what} is {found.count} in {test.image}, the host has {len(test.host.gpus)}")


def _shown(test: EngineTest, found: _Answer, name: str, cuda: str) -> Values:
    return counted(len(test.host.gpus), "GPU"), f"{counted(found.count, 'GPU')}, {name}{cuda and f' for CUDA {cuda}'}"


def _torch_result(said: str) -> str:
    """Return the number of CUDA's result that a warning of PyTorch's tells, nothing if it tells none."""
    known = packaged("cuda_results")["torch"]
    number = re.search(r"\bError (\d+):", said)
    return number[1] if number else next((str(known[text]) for text in known if text in said), "")


def _tensorflow_cause(log: str) -> tuple[str, str]:
    """Return the line of TensorFlow's log that tells why there is no GPU, and the result of CUDA in it."""
    for line in log.splitlines():
        if result := _TENSORFLOW_RESULT.search(line):
            return result[0], result[1]
        if versions := _TENSORFLOW_VERSIONS.search(line):
            return versions[0], "803"
        if library := _TENSORFLOW_LIBRARY.search(line):
            return library[0], ""
        if _TENSORFLOW_LIBRARIES in line:
            return f"{_TENSORFLOW_LIBRARIES}: the image lacks CUDA's libraries", ""
    return "", ""


def _reason(test: EngineTest, what: str, said: str, result: str) -> str:
    """Return what failed, with the framework's own words, and the cause: the image's libcuda, else CUDA's result."""
    seen = f"{what} in {test.image}" + (f": {one_line(said)[:_LONGEST]}" if said else "")
    cause = explain_image(replace(test, image=test.engine.image(test.system, test.image)))
    known = result_of(result) if result else None
    if not cause and known is not None:
        cause = f"{known.cause}; {known.remedy}"
    return f"{seen}; {cause}" if cause else seen
