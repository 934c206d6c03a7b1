"""The checks of CUDA in containers: which libraries a program loads, what CUDA's calls give, whether it computes.

One container with all GPUs serves most of them: it waits while its root file system is read from outside, and while
the calls are made in it. Two more show what one GPU, and what none, give.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from gpuprov.checks.containers import EngineTest, ended
from gpuprov.checks.cuda.calls import KERNEL, OWN, Calls, command, parse_calls, parts_of_python
from gpuprov.checks.cuda.judgement import Finding
from gpuprov.checks.cuda.results import result_of
from gpuprov.checks.cuda.search import GLIBC, LIBCUDA, LIBNVIDIA_ML, Candidate, Program
from gpuprov.checks.cuda.survey import Survey, survey
from gpuprov.checks.engines import ALL, DockerLike
from gpuprov.checks.outcome import Checks, Failed, Skipped, Values
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.facts.host import recorded_python
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.versions import version_numbers
from gpuprov.protocol.words import counted

CALLS, COMPUTES = "CUDA", "CUDA kernel"
_PARTS = (LIBCUDA, LIBNVIDIA_ML, CALLS, COMPUTES)
_SECONDS = 120
# They wait for the end of their input: the first program that the image has.
_WAIT = (("sh", "-c", "read line"), ("python3", "-c", "input()"))
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_DIVIDED = "Enabled"  # a GPU with MIG counts otherwise


@dataclass(frozen=True)
class _Python:
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
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with the files; no notes."""
        return tuple(one for one in self.files.findings if not one.note) if self.files is not None else ()

    def winner(self, name: str) -> Candidate | None:
        """Return the library of this name that wins by the loader's rules."""
        return _winner(self.files, name) if self.files is not None else None


def names(engine: str) -> tuple[str, ...]:
    """Return the names of the checks of an engine."""
    return tuple(f"{engine}, {part}" for part in _PARTS)


def cuda_checks(checks: Checks, test: EngineTest, *, own_image: bool) -> None:
    """Make the checks of CUDA. `own_image`: the image is verify's own, made of the host's C library."""
    python = _host_python(test.system) if own_image else _Python("python3")
    cuda, management, calls, computes = names(test.engine.name)
    seen: list[_Seen] = []

    def look() -> _Seen:
        if not seen:
            seen.append(_look(test, python))
        return seen[0]

    checks.check(cuda, lambda: _library(test.system, LIBCUDA, look()))
    if not seen:
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
        seen = _look(test, _Python("python3"))
        found = parse_calls(seen.calls) if seen.calls is not None else ""
    except (Failed, GpuprovError) as error:
        return " ".join(str(error).split())
    for problem in seen.findings:
        return f"{problem.what} ({problem.evidence}); {problem.next_step}"
    failed = isinstance(found, Calls) and (found.failed or LIBCUDA in found.faults)
    return _said(found) if failed and isinstance(found, Calls) else ""


def _host_python(system: System) -> _Python:
    path = recorded_python(system)
    parts = parts_of_python(system, path) if path else "the host has no Python that gpuprov may use; gpuprov doctor"
    return _Python("", missing=parts) if isinstance(parts, str) else _Python(path, parts)


def _look(test: EngineTest, python: _Python) -> _Seen:
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
def _waiting(test: EngineTest, engine: DockerLike, python: _Python) -> Iterator[str]:
    """Give the id of a container with all GPUs that waits; it is removed in the end. Raises Failed."""
    for wait in _WAIT:
        done = engine.start(test.system, test.image, wait, ALL, python.mounts)
        if done.returncode != _NOT_FOUND:
            break
    if not done.ok:
        _explain_start(test, done)
    container = done.stdout.split()[-1]
    try:
        yield container
    finally:
        engine.remove(test.system, container)


def _explain_start(test: EngineTest, done: Completed) -> None:
    """Raise Failed with the reason that the image's files show, else with the engine's."""
    found = survey(test.system, test.image, Program())
    problem = next((one for one in found.findings if not one.note), None)
    if found.loader.library != GLIBC and problem is not None:
        raise Failed(f"{test.image}: {problem.what}; {problem.next_step}")
    raise Failed(ended(test, done))


def _winner(found: Survey, name: str) -> Candidate | None:
    return next(one.winner for one in found.libraries if one.name == name)


def _library(system: System, name: str, seen: _Seen) -> Values:
    """Check that a program in the container loads the host driver's library, or a newer cuda-compat."""
    ours, theirs = _winner(survey(system, "", Program()), name), seen.winner(name)
    loaded = _loaded(seen, name)
    if ours is None:
        raise Failed(f"the loader finds no {name} on the host; sudo gpuprov install")
    if theirs is None and not loaded:
        raise Failed(f"the loader finds no {name} in the container; gpuprov install", _driver_of(ours))
    if theirs is None:
        return _measured(name, ours, loaded)
    shown = _driver_of(ours), f"{_driver_of(theirs)} in {theirs.chain[-1].rpartition('/')[0]}"
    for problem in seen.findings:
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
    """Return a library's driver version."""
    version = one.version or "of an unknown version"
    return f"{version} (cuda-compat)" if one.compat else version


def _loaded(seen: _Seen, name: str) -> str:
    calls = parse_calls(seen.calls) if seen.calls is not None else None
    return calls.loaded.get(name, "") if isinstance(calls, Calls) else ""


def _calls(test: EngineTest, python: _Python, seen: _Seen) -> Values:
    """Check that CUDA gives the same in a container as on the host: with all GPUs, with one, and with none."""
    if python.missing:
        raise Skipped(python.missing)
    host = _on_host(test.system)
    everything = _readable(seen.calls, test.image)
    told = f"CUDA {host.release}, {counted(len(host.uuids), 'GPU')}"
    _require_same(host, everything, seen, told)
    last = test.host.gpus[-1]
    asked = last.uuid if len(test.host.gpus) > 1 else "0"
    one = _readable(_run(test, python, asked), test.image)
    if one.failed or (one.uuids != (last.uuid,) and last.mig != _DIVIDED):
        raise Failed(f"with GPU {asked} alone: {_said(one)}", told, _said(one))
    none = _readable(_run(test, python, test.engine.nothing[-1]), test.image)
    if none.uuids:
        raise Failed(f"a container that asked for no GPU computes on {', '.join(none.uuids)}", told, _said(none))
    return told, f"CUDA {everything.release}, {counted(len(everything.uuids), 'GPU')}; one alone; none"


def _require_same(host: Calls, everything: Calls, seen: _Seen, told: str) -> None:
    """Raise Failed unless all GPUs give the same in the container as on the host."""
    if everything.failed or LIBCUDA in everything.faults:
        raise Failed(_said(everything), told, _said(everything))
    if sorted(everything.uuids) != sorted(host.uuids):
        hidden = everything.variables.get("CUDA_VISIBLE_DEVICES", "")
        why = f": the image sets CUDA_VISIBLE_DEVICES={hidden}" if hidden else ""
        raise Failed(f"CUDA has {_listed(everything)} in the container, {_listed(host)} on the host{why}", told)
    winner = seen.winner(LIBCUDA)
    newer = version_numbers(everything.release) > version_numbers(host.release)
    if everything.version != host.version and not (newer and winner is not None and winner.compat):
        raise Failed(f"CUDA is {everything.release} in the container; gpuprov cuda IMAGE", told, everything.release)


def _on_host(system: System) -> Calls:
    """Make the calls on the host. Raises Failed if CUDA can't be used there."""
    found = _readable(system.run(command(recorded_python(system), OWN), timeout=_SECONDS), "the host")
    if found.failed or LIBCUDA in found.faults:
        raise Failed(f"on the host: {_said(found)}", _said(found))
    return found


def _run(test: EngineTest, python: _Python, devices: str) -> Completed:
    """Make the calls in a container of their own."""
    return test.engine.run(test.system, test.image, command(python.path), devices, mounts=python.mounts)


def _readable(done: Completed | None, where: str) -> Calls:
    """Return what the calls gave. Raises LeftOut if no Python with ctypes ran there."""
    assert done is not None
    found = parse_calls(done)
    if isinstance(found, str):
        # docker exec ends with 126 for it, docker run with 127.
        missing = done.returncode in (_NOT_EXECUTABLE, _NOT_FOUND)
        raise Skipped(f"{where} has no python3 with ctypes" + ("" if missing else f": it {found}"))
    return found


def _said(found: Calls) -> str:
    """Return what the calls gave as one sentence, with the remedy if they failed."""
    if LIBCUDA in found.faults:
        return found.faults[LIBCUDA]
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
