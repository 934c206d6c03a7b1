"""Pytest's plugin for --strict-skips: fails the session for each skip that is not expected here.

A test that nobody misses proves nothing: only what is listed here may be left out where all tests are to run.
"""

import re
from collections.abc import Iterator

import pytest

# What moves in Debian's archive under our feet, and what differs between machines.
_EXPECTED = (
    "Debian's \\w+ has driver \\S+ now, not ",
    "driver \\d+ can't be fetched from Debian's experimental: ",
    "this file system knows no immutable files",
    "this machine has a driver loaded: make test-gpu is for it",
    "Debian sid can't be installed: `mmdebstrap ",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --strict-skips."""
    parser.addoption(
        "--strict-skips", action="store_true", help="a skip that tests/skips.py does not expect is an error"
    )


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fail the session for unexpected skips."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput") or not session.config.getoption("strict_skips"):
        return
    for report in reporter.stats.get("skipped", ()):
        if not is_expected(reason(report)):
            text = f"{report.nodeid} was skipped, which tests/skips.py does not expect: {reason(report)}"
            error = pytest.TestReport(f"skipped: {report.nodeid}", report.location, {}, "failed", text, "teardown")
            reporter.stats.setdefault("error", []).append(error)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def reason(report: pytest.TestReport) -> str:
    """Return why a test was skipped; that of an expected failure is not its traceback."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(getattr(report, "wasxfail", ""))


def is_expected(text: str) -> bool:
    """Say whether a test may be skipped for this reason."""
    return any(re.match(pattern, text) for pattern in _EXPECTED)
