"""A function's result from a process of its own, so that this one can do something else meanwhile; knows no inventory.

Threads would not do: both sides are busy importing, and Python runs one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable
from typing import TypeVar

from gpuprov.wire.errors import GpuprovError

_Result = TypeVar("_Result")


def begun_beside(function: Callable[[], _Result]) -> Callable[[], _Result]:
    """Begin to run a function in a child; return what waits for its end and gives its result, or raises its error.

    The result, or the GpuprovError, comes through a pipe, pickled by ourselves. Where nothing comes, because of another
    exception or a child that was killed, the function runs once more, here: so a bug shows its traceback as ever.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(function, writing)
    os.close(writing)

    def result() -> _Result:
        with os.fdopen(reading, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        try:
            value = pickle.loads(answer)
        except (EOFError, pickle.UnpicklingError):
            return function()
        if isinstance(value, GpuprovError):
            raise value
        found: _Result = value
        return found

    return result


def _answer(function: Callable[[], object], writing: int) -> None:
    """Write the result and end this process, which must never return into its parent's code."""
    with contextlib.suppress(BaseException):
        try:
            value = function()
        except GpuprovError as error:
            value = error
        answer = pickle.dumps(value)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(answer)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    os._exit(0)
