"""Prove that a host may take work: verify, health, a program that loads each GPU.

accept_program.py runs in a container, so nothing is installed. Its lines may be those of a hostile image. `judge` is
pure.
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Callable

from gpuprov.checks import accept_commands, health
from gpuprov.checks.cuda_checks import FailedCall, MaybeFailedCall, Number, Python, command, host_python
from gpuprov.checks.engines import ALL, DockerLike, EngineTest
from gpuprov.checks.outcome import Failed
from gpuprov.checks.smi import SmiReport, per_gpu
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.driver.running_driver import UNITS
from gpuprov.facts.driver import gather_holders
from gpuprov.protocol.codec import Name, WrongDataError, load, parse
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import GpuprovError, Stopped
from gpuprov.protocol.events import CheckDone, Finished, GpuMeasured, HealthFound, Kept, Note, Sink
from gpuprov.protocol.spec import AcceptCommand, HostSpec
from gpuprov.protocol.words import one_line

# The program's steps of each GPU, in its order.
STEPS = {"arithmetic": "arithmetic", "memory": "all memory, written and read", "copy": "copies", "all": "all at once"}
_CHECK = "program"
_RESERVE_SECONDS, _LEAST_SECONDS, GRACE_SECONDS, _WATCH_SECONDS = 15, 20, 90, 10.0
_MOST_LINES, _MOST_TEXT, _MOST_NAME = 5_000, 8 << 20, 200
# NCCL's processes share more than docker's 64 MiB. (A limit of locked memory can't be lifted in a system container.)
_SHARED = ("--shm-size=1g",)
# A driver keeps some memory of each GPU for itself.
_USED_MIB = 1500
_LOOK = "dmesg | grep -i -e nvrm -e xid; gpuprov health"
_BROKEN = (
    "nvidia-smi -q -d ECC,ROW_REMAPPER; nvidia-bug-report.sh  # give it no work; replace the GPU if it comes again"
)
# Figure of a GPU → where nvidia-smi shows it, and its unit; the greatest value under load counts.
_WATCHED = {
    "clock": (r"clocks/sm_clock", "MHz"), "temperature": (r"temperature/gpu_temp", "°C"),
    "power": (r"(?:gpu_)?power_readings/(?:instant_|average_)?power_draw", "W"),
}  # fmt: skip
_FIGURE = re.compile(r"\d{1,18}(?:\.\d+)?")
SPEEDS = ("to_device", "from_device", "within", "memory", "rate")
PEER = "peer "


@dataclass(frozen=True)
class Printed:
    """One line of the program. `found` has `simulated`; `failed` has `call`, `result` and `name`.

    The others are of one GPU: `seconds`, `error` (a call that failed), `wrong` (results), and speeds in bytes a second;
    `rate` is what all at once gave, in a unit of the program's own.
    """

    step: Name
    gpu: Name = ""
    ok: bool = True
    error: MaybeFailedCall = None
    seconds: float = 0.0
    wrong: int = 0
    memory: float = 0.0
    to_device: float = 0.0
    from_device: float = 0.0
    within: float = 0.0
    peers: Mapping[Name, float] = field(default_factory=dict)
    rate: float = 0.0
    simulated: bool = False
    call: Name = ""
    result: Number = None
    name: Name = ""


def plan(minutes: int, commands: Sequence[AcceptCommand] = ()) -> tuple[str, ...]:
    """Return the steps with their times, a line each."""
    rest = f"for {'half of ' if commands else ''}the rest of {minutes} min"
    steps = [
        "verify: containers see the GPUs, about 1 min", "health of each GPU, 2 s",
        f"a program in a container, on each GPU: {', '.join(STEPS.values())}, {rest}",
        *(f"`{accept_commands.shown(one)}` in a container of {one.image}, within {minutes} min" for one in commands),
    ]  # fmt: skip
    return tuple(f"step {number} of {len(steps)}: {step}" for number, step in enumerate(steps, 1))


def accept(
    system: System, spec: HostSpec, sink: Sink, minutes: int, verify: Callable[[list[EngineTest]], bool]
) -> Finished:
    """Take the steps, report each GPU and each finding, and return the final event.

    `verify` makes its checks, gathers the engines that start containers, and says whether all went well. Raises
    GpuprovError if something computes on a GPU: nothing is started then.
    """
    begun = system.now()
    for line in plan(minutes, spec.accept_commands):
        sink(Note(line))
    accept_commands.require_expressions(system, spec.accept_commands)
    _require_idle(system)
    keep = Kept(HealthFound, sink)
    found = keep.events
    tests: list[EngineTest] = []
    if not verify(tests):
        keep(_host("verify", "containers do not see what the host has", "gpuprov verify", "gpuprov doctor"))
    gpus = health.examine(system, keep).versions["gpus"]
    if unfit := [one.rule for one in found if one.verdict == "unfit"]:
        sink(CheckDone(_CHECK, "skipped", reason=f"not on a host that is unfit: {unfit[0]}"))
        return health.concluded(found, gpus)
    if not tests:
        raise GpuprovError("nothing can be accepted", "no engine starts containers with GPUs", "gpuprov verify")
    pulling = system.now()
    try:
        images = [tests[0].engine.image(system, one.image) for one in spec.accept_commands]
    except Failed as error:
        raise GpuprovError("an image of gpuprov_accept_commands is missing", str(error), "docker pull IMAGE") from None
    end = begun + (system.now() - pulling) + minutes * 60 - _RESERVE_SECONDS
    seconds = max((end - system.now()) / (2 if images else 1), _LEAST_SECONDS)
    _load(tests[0], spec, keep, int(seconds), {(one.rule, one.gpu) for one in found})
    if images:
        _load_by_commands(tests[0], spec, keep, images, end, found)
    return health.concluded(found, gpus)


def _load_by_commands(
    test: EngineTest, spec: HostSpec, sink: Sink, images: Sequence[str], end: float, found: Sequence[HealthFound]
) -> None:
    """Run the site's commands one after another, until `end` at the latest, unless the host is unfit by now."""
    figures: dict[str, float] = {}
    flags = _SHARED if isinstance(test.engine, DockerLike) else ()
    for number, (one, image) in enumerate(zip(spec.accept_commands, images), 1):
        name, known = f"command {number}", {(finding.rule, finding.gpu) for finding in found}
        if unfit := [finding.rule for finding in found if finding.verdict == "unfit"]:
            sink(CheckDone(name, "skipped", reason=f"not on a host that is unfit: {unfit[0]}"))
            continue
        seconds = max(end - test.system.now(), _LEAST_SECONDS)
        with _Watch(test.system) as watch:
            done = test.engine.run(test.system, image, one.command, ALL, seconds=seconds, flags=flags)
        fault, seen = accept_commands.read(test.system, one, done)
        figures.update(seen)
        what = f"the command {number} of the site failed: {accept_commands.shown(one)}"
        wrong = [_host("command", what, fault)] if fault else []
        for finding in (*wrong, *(finding for key, finding in watch.found.items() if key not in known)):
            sink(finding)
        shown = ", ".join(f"{key.rpartition(': ')[2]} {speed / 1e9:.1f} GB/s" for key, speed in seen.items())
        sink(CheckDone(name, "failed" if fault else "ok", "", shown, fault))
    if figures:
        # Hosts compare with those that have the same GPUs.
        models = ", ".join(dict.fromkeys(gpu.name for gpu in test.host.gpus))
        sink(GpuMeasured("", "", f"{len(test.host.gpus)} {models}"[:_MOST_NAME], figures))


def _require_idle(system: System, gpus: int = 0) -> None:
    """Raise GpuprovError with the names of what computes on a GPU, or with a GPU that CUDA does not see as a whole.

    `gpus`: so many nvidia-smi must tell of; where health has not judged it yet, its silence is health's to name.
    """
    users = [str(one) for one in gather_holders(system, computing=True) if one.unit not in UNITS]
    # In a system container the processes of others do not show.
    smi = system.run(("nvidia-smi", "-q", "-x"), timeout=health.SECONDS)
    if not users and len(per_gpu(smi.stdout)) < gpus:
        what = "nvidia-smi does not tell whether the GPUs are idle: no load was started"
        raise GpuprovError(what, smi.evidence(3), "gpuprov health")
    for gpu in () if users else per_gpu(smi.stdout):
        used = _FIGURE.match(gpu.get("fb_memory_usage/used", ""))
        if used and float(used[0]) > _USED_MIB:
            users.append(f"{gpu.get('uuid', '')}: {used[0]} MiB of its memory are in use")
        if gpu.get("mig_mode/current_mig") == "Enabled":
            users.append(f"{gpu.get('uuid', '')}: MIG is enabled, and a CUDA program sees no more than one instance")
    if users:
        what = "the GPUs are in use, or divided by MIG: nothing was started"
        step = "drain the host, end these programs, turn off MIG (nvidia-smi -mig 0), then again"
        raise GpuprovError(what, "\n".join(users), step)


def _load(test: EngineTest, spec: HostSpec, sink: Sink, seconds: int, known: set[tuple[str, str]]) -> None:
    """Run the program, watch the GPUs meanwhile; report figures, a check for each GPU, and what is wrong."""
    # Verify takes a while; after a boot, services still start.
    _require_idle(test.system, len(test.host.gpus))
    python = Python("python3") if spec.verify_image else host_python(test.system)
    if python.missing:
        raise GpuprovError("the program that loads the GPUs can't run", python.missing, "-e gpuprov_verify_image=IMAGE")
    begun: set[str] = set()

    def follow(line: str) -> None:
        for one in parse_printed(line):
            if one.step in STEPS and one.step not in begun:
                begun.add(one.step)
                sink(Note(f"{STEPS[one.step]}: first result"))

    argv = command(python.path, str(seconds), accept=True)
    with _Watch(test.system) as watch:
        most = seconds + GRACE_SECONDS
        done = test.engine.run(test.system, test.image, argv, ALL, seconds=most, mounts=python.mounts, on_line=follow)
    lines = parse_printed(done.stdout)
    found, measured = judge(lines, done, test.host)
    found += [one for key, one in watch.found.items() if key not in known]
    simulated = any(one.simulated for one in lines)
    if simulated:
        sink(Note("these GPUs are simulated: they compute nothing, and no memory or speed is proved", "warning"))
    for one in found:
        sink(one)
    for gpu in measured:
        figures = {**gpu.figures, **watch.figures.get(gpu.uuid, {})}
        sink(replace(gpu, figures=figures))
        name, bad = f"GPU {gpu.gpu}, {_CHECK}", [one.rule for one in found if one.gpu == gpu.gpu]
        shown = f"{'simulated; ' if simulated else ''}{shown_figures(figures)}"
        sink(CheckDone(name, "failed", reason=", ".join(bad)) if bad else CheckDone(name, "ok", "", shown))


class _Watch(contextlib.AbstractContextManager["_Watch"]):
    """Reads the GPUs as `gpuprov health` does while the program runs, and once more at the end.

    `found`: rule and GPU → what health finds; `figures`: UUID → the greatest clock, temperature and power.
    """

    def __init__(self, system: System) -> None:
        self.found: dict[tuple[str, str], HealthFound] = {}
        self.figures: dict[str, dict[str, float]] = {}
        self._system, self._done = system, threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if kind is None:
            self._look(self._system)

    def _follow(self) -> None:
        # Its own: a stop that is asked for is the program's to notice.
        system = copy.copy(self._system)
        with contextlib.suppress(Stopped, OSError, GpuprovError), system.interruptible(self._done.is_set):
            while not self._done.wait(_WATCH_SECONDS):
                self._look(system)

    def _look(self, system: System) -> None:
        read = health.read(system, lambda event: None)
        # The program's own memory: its process is in a container.
        found = (one for one in health.judge(read) if one.rule != "memory-leaked")
        self.found.update({(one.rule, one.gpu): one for one in found})
        for gpu in read.gpus:
            figures = self.figures.setdefault(gpu.get("uuid", ""), {})
            for name, (place, _) in _WATCHED.items():
                texts = (text for path, text in gpu.items() if re.fullmatch(place, path))
                numbers = [float(number[0]) for text in texts if (number := _FIGURE.match(text))]
                figures.update({name: max(figures.get(name, 0.0), *numbers)} if numbers else {})


def parse_printed(text: str) -> tuple[Printed, ...]:
    """Return what the program printed; other lines are left out, for an image may print what it likes."""
    found = []
    for line in text[:_MOST_TEXT].splitlines()[:_MOST_LINES]:
        with contextlib.suppress(WrongDataError):
            found += [load(Printed, parse(line))] if line.startswith("{") else []
    return tuple(found)


def judge(
    lines: Sequence[Printed], done: Completed, host: SmiReport
) -> tuple[list[HealthFound], tuple[GpuMeasured, ...]]:
    """Return what is wrong, and the figures of each GPU of the host. Pure."""
    ours = [[one for one in lines if one.gpu == gpu.uuid and one.step in STEPS] for gpu in host.gpus]
    measured = tuple(
        GpuMeasured(str(number), gpu.uuid, gpu.name, _figures(ours[number], {one.uuid for one in host.gpus}))
        for number, gpu in enumerate(host.gpus)
    )
    found = [one for gpu, printed in zip(measured, ours) for one in _wrong(gpu, printed)]
    if failed := next((one for one in lines if one.step == "failed"), None):
        seen = str(FailedCall(failed.call, failed.result, failed.name))
        found.append(_host("program", "the program that loads the GPUs failed", seen))
    if not found:
        # A program that did not begin, as in a container that does not start, says nothing of an only GPU either.
        found += _lacking(measured, ours, done, whole=any(one.step == "end" for one in lines), begun=bool(lines))
    return found, measured


def _wrong(gpu: GpuMeasured, lines: Iterable[Printed]) -> Iterator[HealthFound]:
    """Yield the first trouble of a GPU; what follows is its consequence."""
    for one in lines:
        if one.wrong or one.error is not None or not one.ok:
            seen = f"{one.step}: {f'{one.wrong} wrong results' if one.wrong else one.error or 'it failed'}"
            rule, what = ("wrong", "it computes wrong results") if one.wrong else ("failed", "it failed under load")
            yield _of_gpu(rule, gpu, what, f"{seen}, after {one.seconds:.1f} s", _BROKEN if one.wrong else _LOOK)
            return


def _lacking(
    gpus: Sequence[GpuMeasured], ours: Sequence[Sequence[Printed]], done: Completed, *, whole: bool, begun: bool
) -> Iterator[HealthFound]:
    """Yield the GPUs without a result, where the program ended before its end or left a GPU out."""
    missing = [[step for step in STEPS if step not in {one.step for one in printed}] for printed in ours]
    last = [number for number, steps in enumerate(missing) if steps and len(steps) == max(map(len, missing))]
    ended = f"exit code {done.returncode}: {one_line(done.evidence(2).partition(chr(10))[2])[-300:] or '(silent)'}"
    if whole or (begun and len(last) == 1):
        for number in last:
            seen = f"no result of {', '.join(missing[number])}; {ended}"
            yield _of_gpu("silent", gpus[number], "it gave no result", seen, _LOOK)
    else:
        yield _host("program", "the program that loads the GPUs ended before its end", ended)


def _of_gpu(rule: str, gpu: GpuMeasured, what: str, seen: str, step: str) -> HealthFound:
    return HealthFound("unfit", f"accept-{rule}", gpu.gpu, gpu.uuid, what, f"{gpu.uuid}: {seen}", step)


def _host(rule: str, what: str, evidence: str, step: str = _LOOK) -> HealthFound:
    return HealthFound("unfit", f"accept-{rule}", "", "", what, evidence, step)


def _figures(lines: Iterable[Printed], uuids: set[str]) -> dict[str, float]:
    """Return the speeds, in bytes a second but for `rate`, of peers that the host has; a line that failed has none."""
    figures: dict[str, float] = {}
    for one in lines:
        if one.ok and one.error is None:
            figures.update({name: getattr(one, name) for name in SPEEDS if getattr(one, name)})
            figures.update({f"{PEER}{uuid}": speed for uuid, speed in one.peers.items() if uuid in uuids})
    return figures


def shown_figures(figures: Mapping[str, float]) -> str:
    """Return the figures of a GPU for a table; of its peers the slowest."""
    peers = [speed for name, speed in figures.items() if name.startswith(PEER)]
    speeds = {**{name: figures.get(name) for name in SPEEDS[:3]}, "peer": min(peers, default=None)}
    shown = [f"{name} {speed / 1e9:.1f} GB/s" for name, speed in speeds.items() if speed]
    return ", ".join((*shown, *(f"{figures[name]:.0f} {one[1]}" for name, one in _WATCHED.items() if name in figures)))
