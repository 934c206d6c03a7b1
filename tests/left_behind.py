"""Pytest's plugin that looks, at the end of a session, for processes that its tests have left: each is an error.

A test that starts a process ends it: daemons that a program starts by itself, as gpg does, are easily forgotten.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_MARK = "GPUPROV_TEST_SESSION"
# How long a process that is about to end may take.
_SECONDS = 10


def pytest_configure(config: pytest.Config) -> None:
    """Mark all that this session starts: processes inherit the environment, also those that leave their parent."""
    os.environ.setdefault(_MARK, f"{os.getpid()}-{time.time_ns()}")


# Last of the wrappers: after the workers have ended, before the summary is printed.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fail the session if processes are left."""
    yield
    if hasattr(session.config, "workerinput"):
        return
    deadline = time.monotonic() + _SECONDS
    while (left := left_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if left and reporter is not None:
        reporter.stats.setdefault("error", []).append(_report(left))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def left_processes() -> list[str]:
    """Return a line for each process that carries this session's mark, with the test in which it began."""
    mark = f"{_MARK}={os.environ[_MARK]}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            environment = (place / "environ").read_bytes().split(b"\0")
            words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # ended, or another user's
            continue
        if mark in environment and int(place.name) != os.getpid():
            tests = [word[20:].decode() for word in environment if word.startswith(b"PYTEST_CURRENT_TEST=")]
            found.append(f"{place.name} {words.strip()} (from {', '.join(tests) or 'no test'})")
    return found


def _report(left: list[str]) -> pytest.TestReport:
    text = "\n".join(["processes of this session are left; the test that started them must end them:", *left])
    place = ("tests", 0, "processes left behind")
    return pytest.TestReport("processes left behind", place, {}, "failed", text, "teardown")
