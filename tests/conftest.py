"""Fixtures for all tests, their tiers, how many examples properties get, and the order of files (docs/testing.md)."""

import gc
import os
import shutil
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import gpg, pythons, world
from tests.lab import command_line, host
from tests.lab.fixtures import apt_lab, rpm_lab, rpm_site, site

# GNU readline, which pytest imports, sets these to the size of the terminal.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
    os.unsetenv(_name)

# Ten thousand tests stay to the end: to look for garbage among them all the time takes a twentieth of a run.
gc.set_threshold(50_000, 20, 20)

__all__ = ["apt_lab", "rpm_lab", "rpm_site", "site"]
pytest_plugins = ["tests.left_behind", "tests.skips"]
# `make test` gives each property few examples, `make test-all` many, and the same in each run, so that a change is
# judged by itself; `make test-long` draws new ones (docs/testing.md). How long one takes says how busy the machine is:
# no test is decided by that.
for _name, _examples in (("quick", 25), ("thorough", 200), ("new", 500)):
    settings.register_profile(
        _name,
        max_examples=_examples,
        derandomize=_name != "new",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("quick")


@pytest.fixture
def python(request: pytest.FixtureRequest) -> str:
    """The path of the Python of Debian's whose version is the parameter: `indirect`."""
    return pythons.interpreter(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Begin again in a world of its own (tests/world.py), before workers start; who calls pytest.main is left alone."""
    called = Path(sys.argv[0])
    if world.OUTSIDE in os.environ or "pytest" not in (called.name, called.parent.name):
        return None
    return world.run([sys.executable, "-m", "pytest", *map(str, config.invocation_params.args)])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put each test into its tier, and keep those of a file together, which share its fixtures.

    What needs hosts is for `make test-all`, but for samples of each kind; an ordinary user can't run all.
    """
    config.hook.pytest_deselected(items=[item for item in items if not _is_possible(item)])
    items[:] = filter(_is_possible, items)
    for item in items:
        if any(map(item.get_closest_marker, ("lab", "vm"))) and not item.get_closest_marker("sample"):
            item.add_marker(pytest.mark.slow)
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.property)
        missing = ["root"] if os.geteuid() != 0 and item.get_closest_marker("root") else []
        missing += [name for mark in item.iter_markers("needs") for name in mark.args if shutil.which(name) is None]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))
        item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(item.config.rootpath))))
    items.sort(key=_order)


def _is_possible(item: pytest.Item) -> bool:
    """Say whether a case has the parameters that its test is `only` for; others are no cases."""
    wanted = {name: one for mark in item.iter_markers("only") for name, one in mark.kwargs.items()}
    return all(
        item.callspec.params[name] in (one if isinstance(one, tuple) else (one,))  # type: ignore[attr-defined]
        for name, one in wanted.items()
    )


def pytest_collection_finish() -> None:
    """Leave what collection has made out of all later garbage collections: a whole one took two seconds."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failure what was done on lab hosts last: a rare one seldom comes again to be looked at."""
    report = yield
    if report.failed and host.SAID:
        report.sections.append(("last commands on lab hosts", "\n".join(host.SAID)))
    if report.when == "teardown":
        host.SAID.clear()
    return report


def pytest_sessionfinish() -> None:
    """End what gpg and the command line have begun, before tests/left_behind.py looks."""
    gpg.end_agents()
    command_line.end()


def _order(item: pytest.Item) -> int:
    """Begin with what takes longest, virtual machines, then hosts: at the end, other workers would wait for it."""
    markers = ("vm", "lab")
    return next((place for place, name in enumerate(markers) if item.get_closest_marker(name)), len(markers))
