"""Runs PTX on the processor: the instructions that gpuprov's kernels use, one thread after the other.

Source: NVIDIA, PTX ISA 6.0, "Instruction Set".
"""

import re
import struct
from collections.abc import Sequence

_ENTRY = re.compile(r"\.entry (\w+)\(([^)]*)\)\s*\{(.*?)\n\}", re.DOTALL)
_ALL_BITS = 2**64 - 1


def _float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0])


def _bits(value: float) -> int:
    # Both factors of fma have 12 bits at most, so a product in double precision is exact, and rounds once.
    return int.from_bytes(struct.pack("<f", value), "little")


class Memory:
    """The GPU's memory: blocks by their address."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytearray] = {}
        self.stuck: dict[int, int] = {}  # address -> bits of that byte that are always set

    def view(self, address: int, size: int) -> memoryview:
        """Return bytes that must lie in one block."""
        for start, block in self.blocks.items():
            if start <= address and address + size <= start + len(block):
                return memoryview(block)[address - start : address - start + size]
        raise AssertionError(f"no memory at {address:#x}")

    def load(self, address: int, size: int) -> int:
        assert address % size == 0, "misaligned"
        return int.from_bytes(self.view(address, size), "little")

    def store(self, address: int, value: int, size: int) -> None:
        assert address % size == 0, "misaligned"
        self.view(address, size)[:] = value.to_bytes(size, "little")
        for place, bits in self.stuck.items():
            if address <= place < address + size:
                self.view(place, 1)[0] |= bits


class Kernel:
    """An entry of a PTX text."""

    def __init__(self, text: str, name: str) -> None:
        body = re.sub(r"//[^\n]*", "", text)
        found = {entry: (parameters, code) for entry, parameters, code in _ENTRY.findall(body)}
        parameters, code = found[name]
        self.sizes = [(word.split()[-1], 8 if ".u64" in word else 4) for word in parameters.split(",")]
        self.lines: list[tuple[str, str, list[str]]] = []
        self.labels: dict[str, int] = {}
        for line in code.split("\n"):
            line = line.strip().removesuffix(";")
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.lines)
            elif line and not line.startswith((".reg", "{")):
                guard, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
                operation, _, words = rest.partition(" ")
                self.lines.append((guard[1:], operation, [word.strip() for word in words.split(",")]))

    def run(self, memory: Memory, blocks: int, threads: int, values: Sequence[int]) -> None:
        """Run all threads."""
        parameters = {name: value for (name, _), value in zip(self.sizes, values, strict=True)}
        for block in range(blocks):
            for thread in range(threads):
                _Thread(self, memory, parameters, (block, thread, blocks, threads)).run()


class _Thread:
    def __init__(
        self, kernel: Kernel, memory: Memory, parameters: dict[str, int], place: tuple[int, int, int, int]
    ) -> None:
        self.kernel, self.memory, self.parameters = kernel, memory, parameters
        names = ("%ctaid.x", "%tid.x", "%nctaid.x", "%ntid.x")
        self.registers: dict[str, int] = dict(zip(names, place, strict=True))

    def value(self, word: str) -> int:
        if word.startswith("%"):
            return self.registers[word]
        return int(word[2:], 16) if word.startswith("0f") else int(word.removesuffix("U"), 0)

    def run(self) -> None:
        at = 0
        while True:
            guard, operation, words = self.kernel.lines[at]
            at += 1
            if guard and not self.registers[guard]:
                continue
            if operation == "ret":
                return
            if operation == "bra":
                at = self.kernel.labels[words[0]]
            else:
                self.step(operation, words)

    def step(self, operation: str, words: list[str]) -> None:
        size = 8 if operation.endswith("64") else 4
        place = words[0].strip("[]") if words[0].startswith("[") else words[-1].strip("[]")
        if operation.startswith("ld.param"):
            self.registers[words[0]] = self.parameters[place]
        elif operation.startswith("ld.global"):
            self.registers[words[0]] = self.memory.load(self.value(place), size)
        elif operation.startswith("st.global"):
            self.memory.store(self.value(place), self.value(words[1]), size)
        elif operation.startswith("red.global.add"):
            address = self.value(place)
            self.memory.store(address, self.memory.load(address, size) + self.value(words[1]), size)
        else:
            wide = size == 8 or ".wide" in operation or operation.startswith("cvt")
            found = self.calculated(operation, [self.value(word) for word in words[1:]])
            self.registers[words[0]] = found & (_ALL_BITS if wide else 0xFFFFFFFF)

    @staticmethod
    def calculated(operation: str, a: list[int]) -> int:
        """Return what an instruction gives; one that is not known is an error of the test."""
        name = operation.rpartition(".")[0] if not operation.endswith("f32") else operation
        return {
            "mov": lambda: a[0],
            "cvta.to.global": lambda: a[0],
            "cvt.u64": lambda: a[0],
            "mad.lo": lambda: a[0] * a[1] + a[2],
            "mul.lo": lambda: a[0] * a[1],
            "mul.wide": lambda: a[0] * a[1],
            "and": lambda: a[0] & a[1],
            "or": lambda: a[0] | a[1],
            "xor": lambda: a[0] ^ a[1],
            "shr": lambda: a[0] >> a[1],
            "shl": lambda: a[0] << a[1],
            "add": lambda: a[0] + a[1],
            "sub": lambda: a[0] - a[1],
            "sub.rn.f32": lambda: _bits(_float(a[0]) - _float(a[1])),
            "fma.rn.f32": lambda: _bits(_float(a[0]) * _float(a[1]) + _float(a[2])),
            "setp.ne": lambda: int(a[0] != a[1]),
            "setp.eq": lambda: int(a[0] == a[1]),
            "setp.ge": lambda: int(a[0] >= a[1]),
        }[name]()
