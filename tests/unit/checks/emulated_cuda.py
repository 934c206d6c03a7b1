"""A libcuda in Python with one small GPU, which runs the kernels of a PTX text instruction by instruction."""

import ctypes
from typing import Any

from .ptx import Kernel, Memory

MEMORY = 4096


def _set(pointer: Any, value: Any) -> int:
    pointer._obj.value = value
    return 0


class EmulatedCuda:
    """Has the functions that accept_program.py calls for arithmetic and memory. Addresses are those of `memory`."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.next = 0x7F0000000000
        self.kernels: list[Kernel] = []
        self.text = ""
        self.attributes = {16: 1}

    def __getattr__(self, name: str) -> Any:
        accepted = ("cuInit", "cuCtxSetCurrent", "cuEventRecord", "cuEventSynchronize")
        if name in accepted:
            return lambda *words: 0
        raise AttributeError(name)

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        return _set(device, ordinal)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        return _set(context, 1)

    def cuModuleLoadData(self, module: Any, text: bytes) -> int:  # noqa: N802
        self.text = text.decode()
        return _set(module, 1)

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        self.kernels.append(Kernel(self.text, name.decode()))
        return _set(function, len(self.kernels))

    def cuEventCreate(self, event: Any, flags: int) -> int:  # noqa: N802
        return _set(event, 1)

    def cuEventElapsedTime(self, milliseconds: Any, *events: Any) -> int:  # noqa: N802
        return _set(milliseconds, 500.0)

    def cuDeviceGetAttribute(self, number: Any, attribute: int, device: Any) -> int:  # noqa: N802
        return _set(number, self.attributes.get(attribute, 0))

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:  # noqa: N802
        return _set(free, MEMORY) or _set(total, MEMORY)

    def cuMemAlloc_v2(self, place: Any, size: Any) -> int:  # noqa: N802
        if size.value > MEMORY // 4:
            return 2
        self.memory.blocks[self.next] = bytearray(b"\xa5" * size.value)
        self.next += 1 << 16
        return _set(place, self.next - (1 << 16))

    def cuMemFree_v2(self, place: Any) -> int:  # noqa: N802
        return 0 if self.memory.blocks.pop(place.value, None) else 1

    def cuMemcpyHtoD_v2(self, target: Any, source: Any, size: Any) -> int:  # noqa: N802
        self.memory.view(target.value, size.value)[:] = ctypes.string_at(source, size.value)
        return 0

    def cuMemcpyDtoH_v2(self, target: Any, source: Any, size: Any) -> int:  # noqa: N802
        ctypes.memmove(target, bytes(self.memory.view(source.value, size.value)), size.value)
        return 0

    def cuLaunchKernel(self, function: Any, blocks: int, *words: Any) -> int:  # noqa: N802
        kernel, arguments = self.kernels[function.value - 1], words[-2]
        kinds = [ctypes.c_uint64 if size == 8 else ctypes.c_uint32 for _, size in kernel.sizes]
        values = [
            ctypes.cast(arguments[number], ctypes.POINTER(kind)).contents.value for number, kind in enumerate(kinds)
        ]
        kernel.run(self.memory, blocks, words[2], values)
        return 0
