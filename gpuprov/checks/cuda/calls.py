"""Runs calls_program.py on the host or in a container, and reads what it prints. Decides nothing.

In verify's own image, the host's Python runs it: the program, its standard library and what it is linked with are
mounted read-only. In an image of the user's, that image's `python3` runs it, with the image's own C library.
"""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuprov.checks.image import LIBRARIES
from gpuprov.core.commands import Completed
from gpuprov.core.system import System

KERNEL, OWN = "kernel", "own"
ALONE = ("-I", "-S", "-E", "-B")
_MODULE = "calls_program.py"
_SECONDS = 20
_PARTS = "import os, _ctypes; print(os.path.realpath(os.path.dirname(os.__file__))); print(_ctypes.__file__)"
_LONGEST_WORD = 200


@dataclass(frozen=True)
class Failure:
    """A call that failed; `result` is None if the library has no such function, `gpu` a number for the kernel's."""

    call: str
    result: int | None
    name: str

    def __str__(self) -> str:
        if self.result is None:
            return f"libcuda has no function {self.call}"
        return f"{self.call} gives {self.result}" + (f" ({self.name})" if self.name else "")


@dataclass(frozen=True)
class Kernel:
    """What the kernel gave: `left_out` is why it did not run; `wrong` is the first fault, "" for none."""

    left_out: str = ""
    wrong: str = ""
    gpus: int = 0


@dataclass(frozen=True)
class Calls:
    """What the calls gave. `loaded`: library to the file that was loaded; `faults`: library to the loader's message."""

    loaded: Mapping[str, str]
    faults: Mapping[str, str]
    variables: Mapping[str, str]
    version: int
    uuids: tuple[str, ...]
    failed: Failure | None
    kernel: Kernel | None = None

    @property
    def release(self) -> str:
        """Return the CUDA release that libcuda supports, such as 12.4."""
        return f"{self.version // 1000}.{self.version % 1000 // 10}" if self.version else ""


def command(python: str, *words: str) -> tuple[str, ...]:
    """Return the command that makes the calls with a Python."""
    source = pkgutil.get_data(__package__ or "gpuprov.checks.cuda", _MODULE)
    assert source is not None
    return (python, *ALONE, "-c", source.decode(), *words)


def parse_calls(done: Completed) -> Calls | str:
    """Return what the program printed, or why there is nothing to read, as a sentence."""
    lines = [found for line in done.stdout.splitlines() if (found := _object(line)) is not None]
    if not lines:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["(silent)"]
        return f"exited {done.returncode}: {said[-1][:_LONGEST_WORD]}"
    first = lines[0]
    kernel = _kernel(lines[1]) if len(lines) > 1 else None
    if kernel is None and not done.ok:
        kernel = Kernel(wrong=f"the program ended with {done.returncode} while the kernel ran")
    try:
        return Calls(
            _texts(first["loaded"]), _texts(first["faults"]), _texts(first["variables"]), int(first["version"]),
            tuple(map(_word, first["uuids"])), _failure(first["failed"]), kernel,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return "its output is not that of gpuprov's program"


def parts_of_python(system: System, python: str) -> tuple[str, ...] | str:
    """Return the host's paths that a container with its C library needs for its Python, or why there are none."""
    done = system.run((python, *ALONE, "-c", _PARTS), timeout=_SECONDS)
    if not done.ok:
        return f"{python} has no ctypes: {done.evidence(1).rpartition(chr(10))[2]}"
    library, extension = done.stdout.split("\n")[:2]
    listed = system.run(("ldd", python, extension)).stdout
    linked = set(re.findall(r"=> (/\S+)", listed))
    return (python, library, *sorted(path for path in linked if path.rpartition("/")[2] not in LIBRARIES))


def _object(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _kernel(found: Mapping[str, Any]) -> Kernel | None:
    try:
        gpus = [one for one in found["gpus"] if not one["busy"]]
        wrong = next((text for one in gpus if (text := _wrong(one))), "")
        busy = next((f"GPU {int(one['gpu'])} is busy: {_failure(one['failed'])}" for one in found["gpus"]), "")
        left_out = _word(found["left_out"]) or ("" if gpus else busy)
        return Kernel(left_out, wrong, len(gpus))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _wrong(one: Mapping[str, Any]) -> str:
    failed = _failure(one["failed"])
    if failed is not None:
        return f"GPU {int(one['gpu'])}: {failed}"
    return f"GPU {int(one['gpu'])}: {int(one['wrong'])} of {int(one['of'])} results are wrong" if one["wrong"] else ""


def _failure(found: Mapping[str, Any] | None) -> Failure | None:
    if found is None:
        return None
    result = found["result"]
    return Failure(_word(found["call"]), None if result is None else int(result), _word(found["name"]))


def _texts(found: Mapping[str, Any]) -> dict[str, str]:
    return {_word(name): _word(text) for name, text in found.items()}


def _word(text: Any) -> str:
    return str(text)[:_LONGEST_WORD]
