"""The second process of an agent: does the work and survives the end of the connection."""

from __future__ import annotations

import os
from typing import Callable

from gpuprov.wire.request import Request


def start_worker(request: Request, work: Callable[[Request, int], int]) -> tuple[int, int]:
    """Start a process that works on the request; return its id and the read end of the pipe for its events."""
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(reading)
        os._exit(work(request, writing))
    os.close(writing)
    return worker, reading
