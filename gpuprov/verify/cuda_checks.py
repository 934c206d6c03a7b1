"""The checks of CUDA in containers: which libraries a program loads, what CUDA's calls give, whether it computes.

One container with all GPUs serves most of them: it waits while its root file system is read from outside, and while
the calls are made in it. Two more show what one GPU, and what none, give.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.facts.host import recorded_python
from gpuprov.verify import containers
from gpuprov.verify.containers import Bench
from gpuprov.verify.cuda.calls import KERNEL, OWN, Calls, command, parse_calls, parts_of_python
from gpuprov.verify.cuda.results import result_of
from gpuprov.verify.cuda.search import LIBCUDA, LIBNVIDIA_ML, Candidate, Program
from gpuprov.verify.cuda.survey import Survey, survey
from gpuprov.verify.outcome import Checks, Failed, LeftOut, Shown, counted
from gpuprov.wire.errors import GpuprovError
from gpuprov.wire.versions import version_numbers

CALLS, COMPUTES = "CUDA", "CUDA kernel"
NAMES = (LIBCUDA, LIBNVIDIA_ML, CALLS, COMPUTES)
_SECONDS = 120
# They wait for the end of their input, which `--interactive` keeps open: the first program that the image has.
_WAIT = (("sh", "-c", "read line"), ("python3", "-c", "input()"))
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_DIVIDED = "Enabled"  # a GPU with MIG counts otherwise


@dataclass(frozen=True)
class _Python:
    """What makes the calls in containers: its path there, the engine's flags for it, or why there is none."""

    path: str
    flags: tuple[str, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class _Seen:
    """What the container with all GPUs showed: its files from outside, and the calls' output."""

    files: Survey
    calls: Completed | None


def cuda_checks(checks: Checks, bench: Bench, *, own_image: bool) -> None:
    """Make the checks of CUDA. `own_image`: the image is verify's own, made of the host's C library."""
    python = _host_python(bench.system) if own_image else _Python("python3")
    seen: list[_Seen] = []

    def look() -> _Seen:
        if not seen:
            seen.append(_look(bench, python))
        return seen[0]

    checks.check(LIBCUDA, lambda: _library(bench.system, LIBCUDA, look()))
    if not seen:
        checks.skip(NAMES[1:], "requires a container that runs")
        return
    checks.check(LIBNVIDIA_ML, lambda: _library(bench.system, LIBNVIDIA_ML, look()))
    if checks.check(CALLS, lambda: _calls(bench, python, look())):
        checks.check(COMPUTES, lambda: _computes(_readable(look().calls, bench.image)))
    else:
        checks.skip((COMPUTES,), f"requires {CALLS}")


def explain_image(bench: Bench) -> str:
    """Return why CUDA fails in a container of an image with all GPUs, with what to do; nothing if it does not fail."""
    try:
        seen = _look(bench, _Python("python3"))
        found = parse_calls(seen.calls) if seen.calls is not None else ""
    except (Failed, GpuprovError) as error:
        return " ".join(str(error).split())
    problem = next((one for one in seen.files.findings if not one.note), None)
    if problem is not None:
        return f"{problem.what} ({problem.evidence}); {problem.next_step}"
    failed = isinstance(found, Calls) and (found.failed or LIBCUDA in found.faults)
    return _said(found) if failed and isinstance(found, Calls) else ""


def _host_python(system: System) -> _Python:
    path = recorded_python(system)
    parts = parts_of_python(system, path) if path else "the host has no Python that gpuprov may use; gpuprov doctor"
    if isinstance(parts, str):
        return _Python("", missing=parts)
    mounts = (("--mount", f"type=bind,source={part},target={part},readonly") for part in parts)
    return _Python(path, tuple(word for words in mounts for word in words))


def _look(bench: Bench, python: _Python) -> _Seen:
    """Start a container with all GPUs, read its files, and make the calls in it. Raises Failed."""
    with _waiting(bench, python) as name:
        files = survey(bench.system, name, Program())
        if python.missing:
            return _Seen(files, None)
        asked = ("docker", "exec", name, *command(python.path, KERNEL))
        return _Seen(files, bench.system.run(asked, timeout=_SECONDS))


@contextlib.contextmanager
def _waiting(bench: Bench, python: _Python) -> Iterator[str]:
    """Give the name of a container with all GPUs that waits; it is removed in the end. Raises Failed."""
    flags = ("--runtime=nvidia", "--detach", "--interactive", *python.flags)
    for wait in _WAIT:
        done = containers.run(bench.system, bench.image, wait, containers.ALL_GPUS, flags=flags)
        if done.returncode != _NOT_FOUND:
            break
    if not done.ok:
        _explain_start(bench, done)
    name = done.stdout.split()[-1]
    try:
        yield name
    finally:
        bench.system.run(("docker", "rm", "--force", name), timeout=_SECONDS)


def _explain_start(bench: Bench, done: Completed) -> None:
    """Raise Failed with the reason that the image's files show, else with the engine's."""
    found = survey(bench.system, bench.image, Program())
    problem = next((one for one in found.findings if not one.note), None)
    if found.loader.library != "glibc" and problem is not None:
        raise Failed(f"{bench.image}: {problem.what}; {problem.next_step}")
    raise Failed(containers.ended(done))


def _library(system: System, name: str, seen: _Seen) -> Shown:
    """The library that a program in the container loads must be that of the host's driver, or a newer cuda-compat."""
    host = survey(system, "", Program())
    ours, theirs = (next(one.winner for one in found.libraries if one.name == name) for found in (host, seen.files))
    if ours is None:
        raise Failed(f"the loader finds no {name} on the host; sudo gpuprov install")
    if theirs is None:
        raise Failed(f"the loader finds no {name} in the container; gpuprov install", _driver_of(ours))
    shown = _driver_of(ours), f"{_driver_of(theirs)} in {theirs.chain[-1].rpartition('/')[0]}"
    problem = next((one for one in seen.files.findings if one.library == name and not one.note), None)
    if problem is not None:
        raise Failed(f"{problem.what} ({problem.evidence}); {problem.next_step}", *shown)
    loaded = _loaded(seen, name)
    if loaded and loaded != theirs.chain[-1]:
        raise Failed(f"a program loads {loaded}, the loader's rules give {theirs.chain[-1]}; gpuprov cuda", *shown)
    return shown


def _driver_of(one: Candidate) -> str:
    """Return a library's driver version."""
    version = one.version or "of an unknown version"
    return f"{version} (cuda-compat)" if one.compat else version


def _loaded(seen: _Seen, name: str) -> str:
    calls = parse_calls(seen.calls) if seen.calls is not None else None
    return calls.loaded.get(name, "") if isinstance(calls, Calls) else ""


def _calls(bench: Bench, python: _Python, seen: _Seen) -> Shown:
    """CUDA must give the same in a container as on the host: with all GPUs, with one, and with none."""
    if python.missing:
        raise LeftOut(python.missing)
    host = _on_host(bench.system)
    everything = _readable(seen.calls, bench.image)
    told = f"CUDA {host.release}, {counted(len(host.uuids))}"
    _require_same(host, everything, seen, told)
    last = bench.host.gpus[-1]
    asked = last.uuid if len(bench.host.gpus) > 1 else "0"
    one = _readable(_run(bench, python, asked), bench.image)
    if one.failed or (one.uuids != (last.uuid,) and last.mig != _DIVIDED):
        raise Failed(f"with GPU {asked} alone: {_said(one)}", told, _said(one))
    none = _readable(_run(bench, python, "void"), bench.image)
    if none.uuids:
        raise Failed(f"a container that asked for no GPU computes on {', '.join(none.uuids)}", told, _said(none))
    return told, f"CUDA {everything.release}, {counted(len(everything.uuids))}; one alone; none"


def _require_same(host: Calls, everything: Calls, seen: _Seen, told: str) -> None:
    """Raise Failed unless all GPUs give the same in the container as on the host."""
    if everything.failed or LIBCUDA in everything.faults:
        raise Failed(_said(everything), told, _said(everything))
    if sorted(everything.uuids) != sorted(host.uuids):
        hidden = everything.variables.get("CUDA_VISIBLE_DEVICES", "")
        why = f": the image sets CUDA_VISIBLE_DEVICES={hidden}" if hidden else ""
        raise Failed(f"CUDA has {_listed(everything)} in the container, {_listed(host)} on the host{why}", told)
    winner = next(one.winner for one in seen.files.libraries if one.name == LIBCUDA)
    newer = version_numbers(everything.release) > version_numbers(host.release)
    if everything.version != host.version and not (newer and winner is not None and winner.compat):
        raise Failed(f"CUDA is {everything.release} in the container; gpuprov cuda IMAGE", told, everything.release)


def _on_host(system: System) -> Calls:
    """Make the calls on the host. Raises Failed if CUDA can't be used there."""
    found = _readable(system.run(command(recorded_python(system), OWN), timeout=_SECONDS), "the host")
    if found.failed or LIBCUDA in found.faults:
        raise Failed(f"on the host: {_said(found)}", _said(found))
    return found


def _run(bench: Bench, python: _Python, devices: str) -> Completed:
    """Make the calls in a container of their own."""
    asked = (f"NVIDIA_VISIBLE_DEVICES={devices}", containers.CAPABILITIES)
    flags = ("--runtime=nvidia", *python.flags)
    return containers.run(bench.system, bench.image, command(python.path), asked, flags=flags)


def _readable(done: Completed | None, where: str) -> Calls:
    """Return what the calls gave. Raises LeftOut if no Python with ctypes ran there."""
    assert done is not None
    found = parse_calls(done)
    if isinstance(found, str):
        # docker exec ends with 126 for it, docker run with 127.
        missing = done.returncode in (_NOT_EXECUTABLE, _NOT_FOUND)
        raise LeftOut(f"{where} has no python3 with ctypes" + ("" if missing else f": it {found}"))
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


def _computes(found: Calls) -> Shown:
    """A small kernel must give right results on each GPU."""
    kernel = found.kernel
    if kernel is None:
        raise Failed("the program that runs the kernel printed nothing of it; gpuprov doctor")
    if kernel.left_out:
        raise LeftOut(kernel.left_out)
    if kernel.wrong:
        raise Failed(f"{kernel.wrong}; dmesg | grep -i -e nvrm -e xid")
    return "", f"right results on {counted(kernel.gpus)}"
