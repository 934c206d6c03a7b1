"""Tests every GPU by CUDA's driver API, and prints one JSON object a line, as it goes. For hosts and containers.

It runs as `python3 -c SOURCE SECONDS` with Python 3.6 or later; cuda_checks.command joins SOURCE: calls_program.py,
the kernels as KERNELS, this file. SECONDS is for all steps: the last one takes what is left, at least a quarter.
`error` is null or {"call", "result", "name"}. Lines:
- found: `simulated`, `driver`, `gpus`: [{"uuid", "name", "memory"}]; or failed, with an error's keys, and no more
- arithmetic, for each GPU: `gpu` (UUID), `ok`, `seconds`, `wrong` (results), `error`
- memory: the same, and `bytes` (tested) and `memory` (bytes per second of the GPU's own time); `wrong` counts words
  of 8 bytes
- copy: `gpu`, `to_device`, `from_device`, `within`, `peers` {UUID: rate}, in bytes per second, `error`; a failed copy
  to a peer is an error of call "NAME to UUID", is missing in `peers`, and ends nothing
- all, while all GPUs run at once: as arithmetic, and `bytes`, `rounds`, `rate` (rounds per second of the same time)
- end
A GPU that fails is left out of later steps. Each GPU has a process; one that does not answer in time is killed, and
the error has call "" and result null. On simulated GPUs times are simulated too, and `ok` proves nothing.
Source: NVIDIA, CUDA Driver API (the functions in calls; unified addressing; events); PTX ISA 6.0.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from gpuprov.checks.calls_program import LIBRARIES, SIMULATED, THREADS, CallError, call, failure, uuid_of

    KERNELS = b""

PATIENCE = 75  # seconds for a step: a context on a large GPU that was asleep takes 30; accept's own grace is longer
STEPS, BLOCKS = 1024, 1024  # of each thread; for each multiprocessor
COPIED, COPIES, ROUNDS = 256 << 20, 4, 3  # 8 GPUs have 56 pairs, which may copy by slow links through the host
SPARE = 256 << 20  # bytes that the driver needs while the kernels run
ATTRIBUTE_MULTIPROCESSORS, ATTRIBUTE_INTEGRATED, OUT_OF_MEMORY = 16, 18, 2
Long, Pointer = ctypes.c_uint64, ctypes.c_void_p


def expected() -> "ctypes.Array[ctypes.c_uint32]":
    """Return what each thread's hash must be; a float of 2^23 plus a product below 2^23 ends in the product's bits."""
    values = (ctypes.c_uint32 * THREADS)()
    for thread in range(THREADS):
        value = thread
        for _ in range(STEPS):
            value = (value * 1664525 + 1013904223) & 0xFFFFFFFF
            value ^= 0x4B000000 + (value & 2047) * (value >> 20)
        values[thread] = value
    return values


class Gpu:
    """A GPU with its context, the kernels, a counter of wrong results, and two events that measure the GPU's time."""

    def __init__(self, cuda: ctypes.CDLL, ordinal: int) -> None:
        self.cuda = cuda
        self.call("cuInit", 0)
        self.device = self.new(ctypes.c_int, "cuDeviceGet", ordinal)
        self.context = self.new(Pointer, "cuDevicePrimaryCtxRetain", self.device)
        self.call("cuCtxSetCurrent", self.context)
        module = self.new(Pointer, "cuModuleLoadData", KERNELS)
        self.hash = self.new(Pointer, "cuModuleGetFunction", module, b"gpuprov_hash")
        self.pattern = self.new(Pointer, "cuModuleGetFunction", module, b"gpuprov_memory")
        self.events = [self.new(Pointer, "cuEventCreate", 0) for _ in range(2)]
        processors = self.new(ctypes.c_int, "cuDeviceGetAttribute", ATTRIBUTE_MULTIPROCESSORS, self.device)
        self.blocks = processors.value * BLOCKS
        self.counter, self.expected, table = self.allocate(8), self.allocate(4 * THREADS), expected()
        self.call("cuMemcpyHtoD_v2", self.expected, table, Long(4 * THREADS))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of libcuda. Raises CallError."""
        call(self.cuda, name, *arguments)

    def new(self, kind: Any, name: str, *arguments: Any) -> Any:
        """Return the value that a function stores where its first argument points. Raises CallError."""
        value = kind()
        self.call(name, ctypes.byref(value), *arguments)
        return value

    def allocate(self, size: int) -> Any:
        """Return the address of memory of the current context. Raises CallError."""
        return self.new(Long, "cuMemAlloc_v2", Long(size))

    def launch(self, kernel: Any, *values: Any) -> None:
        """Start a kernel on all multiprocessors."""
        arguments = (Pointer * len(values))(*(ctypes.cast(ctypes.byref(value), Pointer) for value in values))
        self.call("cuLaunchKernel", kernel, self.blocks, 1, 1, THREADS, 1, 1, 0, None, arguments, None)

    def timed(self, start: "Callable[[], None]") -> float:
        """Return how many seconds the GPU takes for what is started."""
        self.call("cuEventRecord", self.events[0], None)
        start()
        self.call("cuEventRecord", self.events[1], None)
        self.call("cuEventSynchronize", self.events[1])
        elapsed: float = self.new(ctypes.c_float, "cuEventElapsedTime", *self.events).value
        return elapsed / 1000

    def check(self, found: Any, start: "Callable[[], None]") -> float:
        """Add how many results of what is started are wrong; return the GPU's seconds."""
        wrong = Long(0)
        self.call("cuMemcpyHtoD_v2", self.counter, ctypes.byref(wrong), Long(8))
        seconds = self.timed(start)
        self.call("cuMemcpyDtoH_v2", ctypes.byref(wrong), self.counter, Long(8))
        found["wrong"] += wrong.value
        return seconds

    def compute(self) -> None:
        """Start the hash."""
        self.launch(self.hash, self.expected, self.counter, ctypes.c_uint32(STEPS))

    def fill(self, place: Any, size: int, mask: int) -> None:
        """Start to write memory, and to read it back."""
        for counter in (Long(0), self.counter):
            self.launch(self.pattern, place, Long(size // 8), Long(mask), counter)

    def take(self, found: Any) -> Any:
        """Allocate nearly all free memory: less if the driver has no such piece, half if it is the host's memory."""
        free = self.new(ctypes.c_size_t, "cuMemGetInfo_v2", ctypes.byref(ctypes.c_size_t())).value
        integrated = self.new(ctypes.c_int, "cuDeviceGetAttribute", ATTRIBUTE_INTEGRATED, self.device).value
        for part in range(8 if integrated else 16, 1, -1):
            found["bytes"] = max(free - SPARE, free // 2) * part // 128 * 8
            try:
                return self.allocate(found["bytes"])
            except CallError as error:
                if error.result != OUT_OF_MEMORY:
                    raise
        raise CallError("cuMemAlloc_v2", OUT_OF_MEMORY)

    def rate(self, target: Any, source: Any) -> int:
        """Return the median of some copies' bytes per second."""

        def copy() -> None:
            for _ in range(COPIES):
                self.call("cuMemcpyAsync", target, source, Long(COPIED), None)

        copy()  # wakes a link that saves power
        return int(COPIED * COPIES / sorted(self.timed(copy) for _ in range(ROUNDS))[ROUNDS // 2])


def find(cuda: ctypes.CDLL, found: Any) -> None:
    """Find the driver's CUDA version and the GPUs. Raises CallError."""
    number, name, memory = ctypes.c_int(), ctypes.create_string_buffer(96), ctypes.c_size_t()
    call(cuda, "cuDriverGetVersion", ctypes.byref(number))
    found.update(simulated=hasattr(cuda, SIMULATED), driver=number.value, gpus=[])
    call(cuda, "cuInit", 0)
    call(cuda, "cuDeviceGetCount", ctypes.byref(number))
    for ordinal in range(number.value):
        call(cuda, "cuDeviceGet", ctypes.byref(number), ordinal)
        call(cuda, "cuDeviceGetName", name, 96, number)
        call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), number)
        text = name.value.decode("ascii", "replace")
        found["gpus"].append({"uuid": uuid_of(cuda, ordinal), "name": text, "memory": memory.value})


def arithmetic(gpu: Gpu, found: Any, _: Any) -> None:
    """Hash on all multiprocessors."""
    gpu.check(found, gpu.compute)


def memory(gpu: Gpu, found: Any, _: Any) -> None:
    """Write and check the memory, by a pattern and its inverse."""
    place = gpu.take(found)
    used = gpu.check(found, lambda: gpu.fill(place, found["bytes"], 0))
    used += gpu.check(found, lambda: gpu.fill(place, found["bytes"], ~0))
    found["memory"] = int(4 * found["bytes"] / used)
    gpu.call("cuMemFree_v2", place)


def copies(gpu: Gpu, found: Any, _: Any) -> None:
    """Measure the copies from and to pinned memory next to the GPU, and within the GPU."""
    bus = ctypes.create_string_buffer(32)
    gpu.call("cuDeviceGetPCIBusId", bus, 32, gpu.device)
    place = f"/sys/bus/pci/devices/{bus.value.decode().lower()}/local_cpulist"
    with contextlib.suppress(OSError, ValueError), open(place) as file:
        ends = [part.split("-") for part in file.read().split(",")]
        os.sched_setaffinity(0, {one for part in ends for one in range(int(part[0]), int(part[-1]) + 1)})
    here, there, host = gpu.allocate(COPIED), gpu.allocate(COPIED), gpu.new(Long, "cuMemAllocHost_v2", Long(COPIED))
    for name, target, source in (("to_device", here, host), ("from_device", host, here), ("within", there, here)):
        found[name] = gpu.rate(target, source)
    gpu.call("cuMemFree_v2", here)
    gpu.call("cuMemFree_v2", there)
    gpu.call("cuMemFreeHost", host)


def copies_to(gpu: Gpu, found: Any, other: Gpu) -> None:
    """Measure copies to another GPU: direct ones if the driver can, else through the host."""
    gpu.call("cuCtxSetCurrent", other.context)
    target = gpu.allocate(COPIED)
    gpu.call("cuCtxSetCurrent", gpu.context)
    source = gpu.allocate(COPIED)
    direct = gpu.new(ctypes.c_int, "cuDeviceCanAccessPeer", gpu.device, other.device).value
    if direct:
        gpu.call("cuCtxEnablePeerAccess", other.context, 0)
    found["rate"] = gpu.rate(target, source)
    if direct:  # without NVSwitches, a GPU has no more than 8 peers at once
        gpu.call("cuCtxDisablePeerAccess", other.context)
    gpu.call("cuMemFree_v2", source)
    gpu.call("cuCtxSetCurrent", other.context)
    gpu.call("cuMemFree_v2", target)


def everything(gpu: Gpu, found: Any, limit: float) -> None:
    """Hash, and write and check the memory, until the time is over by the GPU's clock or by the host's."""
    place, begun, used = gpu.take(found), time.monotonic(), 0.0

    def start() -> None:
        gpu.compute()
        gpu.fill(place, found["bytes"], -(found["rounds"] % 2))

    while not found["rounds"] or (used < limit and time.monotonic() - begun < limit):
        used += gpu.check(found, start)
        found["rounds"] += 1
        found["rate"] = found["rounds"] / used


STEP: "dict[str, Callable[[Gpu, Any, Any], None]]" = {
    "arithmetic": arithmetic, "memory": memory, "copy": copies, "peer": copies_to, "all": everything,
}  # fmt: skip


def answer(gpus: "dict[int, Gpu]", step: str, ordinals: "list[int]", found: Any, limit: float) -> None:
    """Add what a step gives; a GPU's context is made when it is first named."""
    cuda = None
    try:
        cuda = ctypes.CDLL(LIBRARIES[0])
        if step == "found":
            return find(cuda, found)
        for ordinal in ordinals:
            gpus[ordinal] = gpus.get(ordinal) or Gpu(cuda, ordinal)
        STEP[step](gpus[ordinals[0]], found, gpus[ordinals[1]] if step == "peer" else limit)
    except CallError as error:
        assert cuda is not None
        found["error"] = failure(cuda, error)
    except OSError:
        found["error"] = {"call": "", "result": None, "name": "no libcuda"}


class Worker:
    """A process that makes steps: a crash or a hang ends with it. This one never calls CUDA, which forbids to fork."""

    def __init__(self) -> None:
        requests, ask = os.pipe()
        self.answers, answers = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            try:
                os.close(ask)
                self.serve(os.fdopen(requests), answers)
            finally:
                os._exit(0)
        os.close(requests)
        os.close(answers)
        self.requests = os.fdopen(ask, "w")

    def serve(self, requests: Any, answers: int) -> None:
        """Answer requests, one a line, until there are no more."""
        gpus: "dict[int, Gpu]" = {}
        for line in requests:
            step, ordinals, found, limit = json.loads(line)
            begun = time.monotonic()
            answer(gpus, step, ordinals, found, limit)
            found["seconds"] = round(time.monotonic() - begun, 3)
            os.write(answers, json.dumps(found).encode() + b"\n")

    def ask(self, step: str, ordinals: "list[int]", found: Any, limit: float = 0) -> None:
        """Send a request: a process that has ended is noticed when its answer is missing."""
        self.asked, self.end = found, time.monotonic() + limit + PATIENCE
        with contextlib.suppress(OSError):
            print(json.dumps([step, ordinals, found, limit]), file=self.requests, flush=True)

    def answer(self) -> Any:
        """Return the answer; an error if there is none, and then the process is killed."""
        data = b""
        while not data.endswith(b"\n"):
            ready = select.select([self.answers], [], [], max(0.0, self.end - time.monotonic()))[0]
            part = os.read(self.answers, 65536) if ready else b""
            if not part:
                os.kill(self.process, signal.SIGKILL)
                name = "the process ended" if ready else "no answer in time"
                return dict(self.asked, error={"call": "", "result": None, "name": name})
            data += part
        return json.loads(data.decode())

    def stop(self) -> None:
        """End the process: a GPU in compute mode Exclusive_Process has contexts of one process at a time."""
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


def show(step: str, found: "dict[str, Any]") -> None:
    """Print a line."""
    print(json.dumps(dict({"step": step}, **found)), flush=True)


def run(workers: "dict[int, Worker]", uuids: "list[str]", step: str, limit: float, **more: Any) -> None:
    """Make a step on all GPUs at once; the workers of those that fail are left out afterwards."""
    for ordinal, worker in workers.items():
        found = dict({"gpu": uuids[ordinal], "ok": False, "seconds": 0.0, "wrong": 0, "error": None}, **more)
        worker.ask(step, [ordinal], found, limit)
    for ordinal, worker in list(workers.items()):
        found = worker.answer()
        found["ok"] = found["error"] is None and not found["wrong"]
        if not found["ok"]:
            del workers[ordinal]
        show(step, found)


def copy(workers: "dict[int, Worker]", uuids: "list[str]") -> None:
    """Measure copies, one GPU after the other, as they share links; a process of its own copies between GPUs."""
    lines = {}
    for ordinal, worker in list(workers.items()):
        worker.ask("copy", [ordinal], {"gpu": uuids[ordinal], "peers": {}, "error": None})
        lines[ordinal] = worker.answer()
        if lines[ordinal]["error"]:
            del workers[ordinal]
        else:
            worker.stop()
            workers[ordinal] = Worker()
    peers = Worker()
    for ordinal, found in lines.items():
        for other in workers.keys() - {ordinal} if ordinal in workers else ():
            peers.ask("peer", [ordinal, other], {"error": None})
            one = peers.answer()
            if one["error"]:
                found["error"] = dict(one["error"], call=f"{one['error']['call']} to {uuids[other]}")
                if one["error"]["call"]:
                    peers.stop()
                peers = Worker()  # a CUDA error stays with its process
            else:
                found["peers"][uuids[other]] = one["rate"]
        show("copy", found)
    peers.stop()


def main(words: "list[str]") -> None:
    """Make the steps, in their order."""
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    seconds, begun = float(words[0]), time.monotonic()
    finder = Worker()
    finder.ask("found", [], {"error": None})
    found = finder.answer()
    error = found.pop("error")
    show("failed" if error else "found", error or found)
    if error:
        return
    uuids = [one["uuid"] for one in found["gpus"]]
    workers = {ordinal: Worker() for ordinal in range(len(uuids))}
    run(workers, uuids, "arithmetic", 0)
    run(workers, uuids, "memory", 0, bytes=0)
    copy(workers, uuids)
    run(workers, uuids, "all", max(begun + seconds - time.monotonic(), seconds / 4), bytes=0, rounds=0, rate=0.0)
    show("end", {})


if __name__ == "__main__":
    main(sys.argv[1:])
