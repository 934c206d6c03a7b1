"""The checks of CUDA in containers: which libraries a program loads, what CUDA's calls give, whether it computes.

One container with all GPUs serves most of them: it waits while its root file system is read from outside, and while
the calls are made in it. Two more show what one GPU, and what none, give. calls_program.py makes the calls: in verify's
own image the host's Python runs it, whose program, standard library and what it is linked with are mounted read-only;
in an image of the user's, that image's `python3` runs it, with the image's own C library.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Optional

from gpuprov.checks.cuda.compatibility import Incompatibility, result_of
from gpuprov.checks.cuda.search import GLIBC, LIBCUDA, LIBNVIDIA_ML, Candidate, Program
from gpuprov.checks.cuda.survey import Survey, survey
from gpuprov.checks.engines import ALL, LIBRARIES, DockerLike, EngineTest, ended
from gpuprov.checks.outcome import Checks, Failed, Skipped, Values
from gpuprov.core.commands import NOT_EXECUTABLE, NOT_FOUND, Completed
from gpuprov.core.system import System
from gpuprov.facts.host import recorded_python
from gpuprov.facts.interpreter import ALONE
from gpuprov.protocol.codec import Line, Name, WrongDataError, load, parse
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.versions import version_numbers
from gpuprov.protocol.words import counted

_PARTS = (LIBCUDA, LIBNVIDIA_ML, "CUDA", "CUDA kernel")
_SECONDS = 120
# They wait for the end of their input, which never comes: the first program that the image has.
_WAIT, _WAITING = (("sh", "-c", "read line"), ("python3", "-c", "input()")), ("--detach", "--interactive")
_NO_PROGRAM = re.compile("not found|no such file|permission denied", re.IGNORECASE)
DIVIDED = "Enabled"  # a GPU with MIG counts otherwise
KERNEL, OWN = "kernel", "own"
_PARTS_SECONDS = 20
_ASK_PARTS = "import os, _ctypes; print(os.path.realpath(os.path.dirname(os.__file__))); print(_ctypes.__file__)"
_LONGEST_WORD = 200


# The codec reads these annotations, in Python 3.9 too.
Number = Optional[int]


@dataclass(frozen=True)
class FailedCall:
    """A call that failed; `result` is None if the library has no such function, `name` is that of the result."""

    call: Name
    result: Number
    name: Name

    def __str__(self) -> str:
        if self.result is None:
            return f"libcuda has no function {self.call}"
        return f"{self.call} gives {self.result}" + (f" ({self.name})" if self.name else "")


MaybeFailedCall = Optional[FailedCall]


@dataclass(frozen=True)
class _OnGpu:
    """What the kernel gave on a GPU: how many `of` its results are wrong; `busy`: other programs use the GPU."""

    gpu: int
    wrong: int
    of: int
    failed: MaybeFailedCall
    busy: bool

    @property
    def fault(self) -> str:
        wrong = f"{self.wrong} of {self.of} results are wrong" if self.wrong else ""
        return f"GPU {self.gpu}: {self.failed or wrong}" if self.failed or wrong else ""


@dataclass(frozen=True)
class _Run:
    left_out: Name
    gpus: tuple[_OnGpu, ...]


@dataclass(frozen=True)
class Kernel:
    """What the kernel gave: `left_out` is why it did not run; `wrong` is the first fault, "" for none."""

    left_out: str = ""
    wrong: str = ""
    gpus: int = 0


_Kernel = Optional[Kernel]


@dataclass(frozen=True)
class Calls:
    """What the calls gave. `loaded`: library to the file that was loaded; `faults`: library to the loader's message."""

    loaded: Mapping[Name, Name]
    faults: Mapping[Name, Line]
    variables: Mapping[Name, Line]
    version: int
    uuids: tuple[Name, ...]
    failed: MaybeFailedCall
    kernel: _Kernel = None

    @property
    def release(self) -> str:
        """Return the CUDA release that libcuda supports, such as 12.4."""
        return f"{self.version // 1000}.{self.version % 1000 // 10}" if self.version else ""


def command(python: str, *words: str, accept: bool = False) -> tuple[str, ...]:
    """Return the command that makes the calls with a Python, or that tests the GPUs (accept_program.py)."""
    source = f"KERNEL = {source_of('calls_kernel.ptx').encode()!r}\n{source_of('calls_program.py')}"
    if accept:
        calls = source.partition("\nif __name__")[0]
        source = f"{calls}\nKERNELS = {source_of('accept_kernels.ptx').encode()!r}\n{source_of('accept_program.py')}"
    return (python, *ALONE, "-c", source, *words)


def source_of(name: str) -> str:
    """Return a program of this folder, for the Python in a container."""
    return resources.files("gpuprov.checks").joinpath(name).read_text(encoding="utf-8")


def parse_calls(done: Completed) -> Calls | str:
    """Return what the program printed, or why there is nothing to read, as a sentence."""
    lines = []
    for line in done.stdout.splitlines():
        with contextlib.suppress(WrongDataError):
            lines += [parse(line)] if line.startswith("{") else []
    if not lines:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["(silent)"]
        return f"exited {done.returncode}: {said[-1][:_LONGEST_WORD]}"
    kernel = _kernel(lines[1]) if len(lines) > 1 else None
    if kernel is None and not done.ok:
        kernel = Kernel(wrong=f"the program ended with {done.returncode} while the kernel ran")
    try:
        return replace(load(Calls, lines[0]), kernel=kernel)
    except WrongDataError:
        return "its output is not that of gpuprov's program"


def _kernel(data: Any) -> Kernel | None:
    try:
        run = load(_Run, data)
    except WrongDataError:
        return None
    idle = [one for one in run.gpus if not one.busy]
    busy = next((f"GPU {one.gpu} is busy: {one.failed}" for one in run.gpus if not idle), "")
    return Kernel(run.left_out or busy, next((one.fault for one in idle if one.fault), ""), len(idle))


@dataclass(frozen=True)
class Python:
    """What makes the calls in containers: its path there, the host's paths that it needs, or why there is none."""

    path: str
    mounts: tuple[str, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class _Seen:
    """What the container with all GPUs showed: its files from outside, if they can be read, and the calls' output."""

    files: Survey | None
    calls: Completed | None

    @property
    def faults(self) -> tuple[Incompatibility, ...]:
        return self.files.faults if self.files is not None else ()

    def winner(self, name: str) -> Candidate | None:
        """Return the library of this name that wins by the loader's rules."""
        return self.files.winner(name) if self.files is not None else None


def names(engine: str) -> tuple[str, ...]:
    """Return the names of the checks of an engine."""
    return tuple(f"{engine}, {part}" for part in _PARTS)


def cuda_checks(checks: Checks, test: EngineTest, *, own_image: bool) -> None:
    """Make the checks of CUDA. `own_image`: the image is verify's own, made of the host's C library."""
    python = host_python(test.system) if own_image else Python("python3")
    cuda, management, calls, computes = names(test.engine.name)
    look = functools.cache(lambda: _look(test, python))
    checks.check(cuda, lambda: _library(test.system, LIBCUDA, look()))
    if not look.cache_info().currsize:
        checks.skip((management, calls, computes), "requires a container that runs")
        return
    checks.check(management, lambda: _library(test.system, LIBNVIDIA_ML, look()))
    if checks.check(calls, lambda: _calls(test, python, look())):
        checks.check(computes, lambda: _computes(_readable(look().calls, test.image)))
    else:
        checks.skip((computes,), f"requires {calls}")


def explain_image(test: EngineTest) -> str:
    """Return why CUDA fails in a container of an image with all GPUs, with what to do; nothing if it does not fail."""
    try:
        seen = _look(test, Python("python3"))
        found = parse_calls(seen.calls) if seen.calls is not None else ""
    except (Failed, GpuprovError) as error:
        return " ".join(str(error).split())
    for problem in seen.faults:
        return f"{problem.what} ({problem.evidence}); {problem.next_step}"
    failed = isinstance(found, Calls) and (found.failed or LIBCUDA in found.faults)
    return _said(found) if failed and isinstance(found, Calls) else ""


def host_python(system: System) -> Python:
    """Return the host's Python, for containers of verify's own image, with what it needs besides their C library."""
    path = recorded_python(system)
    if not path:
        return Python("", missing="the host has no Python that gpuprov may use; gpuprov doctor")
    done = system.run((path, *ALONE, "-c", _ASK_PARTS), timeout=_PARTS_SECONDS)
    if not done.ok:
        return Python("", missing=f"{path} has no ctypes: {done.evidence(1).rpartition(chr(10))[2]}")
    library, extension = done.stdout.split("\n")[:2]
    linked = set(re.findall(r"=> (/\S+)", system.run(("ldd", path, extension)).stdout))
    others = sorted(one for one in linked if one.rpartition("/")[2] not in LIBRARIES)
    return Python(path, (path, library, *others))


def _look(test: EngineTest, python: Python) -> _Seen:
    """Start a container with all GPUs, read its files, and make the calls in it. Raises Failed.

    A container of containerd's is not read from outside.
    """
    asked = command(python.path, KERNEL)
    engine = test.engine
    if not isinstance(engine, DockerLike):
        if python.missing:
            raise Skipped(python.missing)
        return _Seen(None, engine.run(test.system, test.image, asked, ALL, mounts=python.mounts))
    with _waiting(test, engine, python) as container:
        files = survey(test.system, container, Program())
        return _Seen(files, None if python.missing else engine.execute(test.system, container, asked))


@contextlib.contextmanager
def _waiting(test: EngineTest, engine: DockerLike, python: Python) -> Iterator[str]:
    """Give the id of a container with all GPUs that waits; it is removed in the end. Raises Failed."""
    for wait in _WAIT:
        done = engine.run(test.system, test.image, wait, ALL, mounts=python.mounts, flags=_WAITING)
        if done.returncode != NOT_FOUND:
            break
    if not done.ok:
        found = survey(test.system, test.image, Program())
        if found.loader.library != GLIBC and found.faults:
            raise Failed(f"{test.image}: {found.faults[0].what}; {found.faults[0].next_step}")
        raise Failed(ended(test, done))
    container = done.stdout.split()[-1]
    try:
        yield container
    finally:
        engine.remove(test.system, container)


def _library(system: System, name: str, seen: _Seen) -> Values:
    """Check that a program in the container loads the host driver's library, or a newer cuda-compat."""
    ours, theirs = survey(system, "", Program()).winner(name), seen.winner(name)
    calls = parse_calls(seen.calls) if seen.calls is not None else None
    loaded = calls.loaded.get(name, "") if isinstance(calls, Calls) else ""
    if ours is None:
        raise Failed(f"the loader finds no {name} on the host; sudo ldconfig; then sudo gpuprov install")
    if theirs is None and not loaded:
        raise Failed(f"the loader finds no {name} in the container; gpuprov install", _driver_of(ours))
    if theirs is None:
        return _measured(name, ours, loaded)
    shown = _driver_of(ours), f"{_driver_of(theirs)} in {theirs.chain[-1].rpartition('/')[0]}"
    for problem in seen.faults:
        if problem.library == name:
            raise Failed(f"{problem.what} ({problem.evidence}); {problem.next_step}", *shown)
    if loaded and loaded != theirs.chain[-1]:
        raise Failed(f"a program loads {loaded}, the loader's rules give {theirs.chain[-1]}; gpuprov cuda", *shown)
    return shown


def _measured(name: str, ours: Candidate, loaded: str) -> Values:
    """Compare by the name of the file that a program loaded: it has the driver's version."""
    folder, _, file = loaded.rpartition("/")
    version = file[len(name) - 1 :]
    shown = _driver_of(ours), f"{version} in {folder}"
    if version != ours.version:
        raise Failed(f"a program loads {loaded}, the host's driver is {ours.version}", *shown)
    return shown


def _driver_of(one: Candidate) -> str:
    return (one.version or "of an unknown version") + (" (cuda-compat)" if one.compat else "")


def _calls(test: EngineTest, python: Python, seen: _Seen) -> Values:
    """Check that CUDA gives the same in a container as on the host: with all GPUs, with one, and with none."""
    if python.missing:
        raise Skipped(python.missing)

    def run(devices: str) -> Calls:
        """Make the calls in a container of their own."""
        done = test.engine.run(test.system, test.image, command(python.path), devices, mounts=python.mounts)
        return _readable(done, test.image)

    host = _readable(test.system.run(command(recorded_python(test.system), OWN), timeout=_SECONDS), "the host")
    if host.failed or LIBCUDA in host.faults:
        raise Failed(f"on the host: {_said(host)}", _said(host))
    everything = _readable(seen.calls, test.image)
    told = f"CUDA {host.release}, {counted(len(host.uuids), 'GPU')}"
    _require_same(host, everything, seen, told)
    last, asked = test.host.gpus[-1], test.host.last_alone
    one = run(asked)
    if one.failed or (one.uuids != (last.uuid,) and last.mig != DIVIDED):
        raise Failed(f"with GPU {asked} alone: {_said(one)}", told, _said(one))
    none = run(test.engine.nothing[-1])
    if none.uuids:
        raise Failed(f"a container that asked for no GPU computes on {', '.join(none.uuids)}", told, _said(none))
    return told, f"CUDA {everything.release}, {counted(len(everything.uuids), 'GPU')}; one alone; none"


def _require_same(host: Calls, everything: Calls, seen: _Seen, told: str) -> None:
    """Raise Failed unless all GPUs give the same in the container as on the host."""
    if everything.failed or LIBCUDA in everything.faults:
        raise Failed(_said(everything), told, _said(everything))
    if sorted(everything.uuids) != sorted(host.uuids):
        hidden = everything.variables.get("CUDA_VISIBLE_DEVICES", "")[:_LONGEST_WORD]
        why = f": the image sets CUDA_VISIBLE_DEVICES={hidden}" if hidden else ""
        raise Failed(f"CUDA has {_listed(everything)} in the container, {_listed(host)} on the host{why}", told)
    winner = seen.winner(LIBCUDA)
    newer = version_numbers(everything.release) > version_numbers(host.release)
    if everything.version != host.version and not (newer and winner is not None and winner.compat):
        raise Failed(f"CUDA is {everything.release} in the container; gpuprov cuda IMAGE", told, everything.release)


def _readable(done: Completed | None, where: str) -> Calls:
    """Return what the calls gave. Raises Skipped if no Python with ctypes ran there, Failed if it crashed or hung."""
    assert done is not None
    found = parse_calls(done)
    if isinstance(found, str) and done.unanswered:
        raise Failed(f"CUDA's calls on {where}: the program {found}; dmesg | grep -i -e nvrm -e xid")
    if isinstance(found, str):
        # docker exec ends with 126 for it, docker run with 127; both also if the engine can start no program at all.
        missing = done.returncode in (NOT_EXECUTABLE, NOT_FOUND)
        if missing and (words := done.stderr.strip() or done.stdout.strip()) and not _NO_PROGRAM.search(words):
            look = "; df -h /tmp; df -i /tmp" if "/tmp/" in words else ""
            raise Failed(f"{where}: no program can be started in it: {words[-_LONGEST_WORD:]}{look}")
        raise Skipped(f"{where} has no python3 with ctypes" + ("" if missing else f": it {found}"))
    return found


def _said(found: Calls) -> str:
    """Return what the calls gave as one sentence, with the remedy if they failed."""
    if LIBCUDA in found.faults:
        return found.faults[LIBCUDA][:_LONGEST_WORD]
    if found.failed is None:
        return f"CUDA {found.release} has {_listed(found)}"
    known = result_of(str(found.failed.result))
    return f"{found.failed}: {known.cause}; {known.remedy}" if known is not None else str(found.failed)


def _listed(found: Calls) -> str:
    return ", ".join(found.uuids) or "no GPU"


def _computes(found: Calls) -> Values:
    """Check that a small kernel computes right results on each GPU."""
    kernel = found.kernel
    if kernel is None:
        raise Failed("the program that runs the kernel printed nothing of it; gpuprov doctor")
    if kernel.left_out:
        raise Skipped(kernel.left_out)
    if kernel.wrong:
        raise Failed(f"{kernel.wrong}; dmesg | grep -i -e nvrm -e xid")
    return "", f"right results on {counted(kernel.gpus, 'GPU')}"
